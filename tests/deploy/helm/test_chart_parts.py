"""What the Helm chart makes of the sites, the network and the monitoring that its values name."""

from __future__ import annotations

import pytest
from tests.support.helm_chart import (
    CHART,
    ROOT,
    RefusedError,
    case_values,
    containers,
    load,
    named,
    of_kind,
    parsed_arguments,
    pod,
    rendered,
    rendering,
    volume,
)

from protofed.common.protocol.messages import Role

pytestmark = rendering


def test_sites_train_and_evaluators_score_by_images_of_this_version() -> None:
    roles = {
        one["metadata"]["name"]: parsed_arguments(one)["role"]
        for one in of_kind("full", "StatefulSet")
        if "site" in parsed_arguments(one)
    }
    trainer, evaluator = [Role.TRAINER], [Role.EVALUATOR]
    assert roles == {"study-site-north": trainer, "study-site-south": trainer, "study-site-referee": evaluator}
    assert parsed_arguments(named("full", "StatefulSet", "study-site-south"))["server"] == "study-server.ml.svc:443"
    assert (
        parsed_arguments(named("hospital", "StatefulSet", "study1-protofed-site-north"))["server"]
        == "hub.example.org:7443"
    )
    version = load(CHART / "Chart.yaml")["appVersion"]
    (plain,) = of_kind("minimal", "StatefulSet")
    assert {one["image"] for one in containers(plain)} == {f"protofed-server:{version}"}
    named_ = {one["image"] for stateful in of_kind("full", "StatefulSet") for one in containers(stateful)}
    assert named_ == {
        f"registry.example.org/ml/protofed-client:{version}",
        "registry.example.org/ml/protofed-server:9.9.9",
    }


def test_a_site_has_its_gpus_memory_and_data_or_the_defaults() -> None:
    north = named("hospital", "StatefulSet", "study1-protofed-site-north")
    (container,) = pod(north)["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert pod(north)["runtimeClassName"] == "nvidia"
    assert pod(north)["securityContext"]["supplementalGroups"] == [2000]
    assert volume(north, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert volume(north, "data")["hostPath"] == {"path": "/srv/lesions"}
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    claimed = volume(named("full", "StatefulSet", "study-site-north"), "data")["persistentVolumeClaim"]
    assert claimed == {"claimName": "lesions", "readOnly": True}, "else all its files get the pod's group"
    north, south = (named("full", "StatefulSet", f"study-site-{name}") for name in ("north", "south"))
    limits = [pod(one)["containers"][0]["resources"]["limits"] for one in (north, south)]
    assert limits == [{"memory": "32Gi", "nvidia.com/gpu": 1}, {"memory": "8Gi"}]
    assert pod(south)["nodeSelector"] == {"gpu": "yes"}
    assert south["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"] == {"storage": "50Gi"}


def test_a_network_lets_sites_reach_the_server_and_nobody_a_site() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("full", "NetworkPolicy")}
    server, site = policies["study-server"], policies["study-site"]
    component = "app.kubernetes.io/component"
    assert [rule["ports"][0]["port"] for rule in server["ingress"]] == [7443, 9464]
    assert server["ingress"][0]["from"][0]["podSelector"]["matchLabels"][component] == "site"
    assert server["ingress"][0]["from"][1] == {"ipBlock": {"cidr": "203.0.113.0/24"}}
    names = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    assert server["egress"] == [names, {"ports": [{"port": 5432, "protocol": "TCP"}]}]
    assert [rule["ports"][0]["port"] for rule in site["ingress"]] == [9464]
    assert [rule["ports"][0]["port"] for rule in site["egress"]] == [53, 7443]
    (alone,) = of_kind("hospital", "NetworkPolicy")
    assert alone["spec"]["ingress"] == []
    assert alone["spec"]["egress"][1]["to"] == [{"ipBlock": {"cidr": "203.0.113.5/32"}}]


def test_a_server_that_may_call_nobody_asks_no_name_server() -> None:
    values = case_values("full")
    values["networkPolicy"]["serverEgress"] = []
    (server,) = (
        one for one in rendered(values) if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", "study-server")
    )
    assert server["spec"]["egress"] == []
    assert "Egress" in server["spec"]["policyTypes"]


def test_prometheus_finds_the_jobs_and_rules_that_the_alerts_are_written_for() -> None:
    monitors = {one["metadata"]["name"]: one for one in of_kind("full", "ServiceMonitor")}
    jobs = {name: one["spec"]["endpoints"][0]["relabelings"][0] for name, one in monitors.items()}
    rules = named("full", "PrometheusRule", "study")
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    assert jobs == {
        "study-server": {"targetLabel": "job", "replacement": "protofed-server"},
        "study-site": {"targetLabel": "job", "replacement": "protofed-client"},
    }
    assert {one["metadata"]["labels"]["release"] for one in (*monitors.values(), rules)} == {"prometheus"}
    assert rules["spec"]["groups"] == [group for file in files for group in load(file)["groups"]]


def test_other_settings_make_other_pods() -> None:
    """A daemon reads its settings when it starts."""
    changed = case_values("full")
    changed["clients"][0]["policy"] = 'methods = ["solo"]\n'
    sums = [
        {
            one["metadata"]["name"]: one["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for one in made
        }
        for made in (of_kind("full", "StatefulSet"), [one for one in rendered(changed) if one["kind"] == "StatefulSet"])
    ]
    assert {name for name in sums[0] if sums[0][name] != sums[1][name]} == {"study-site-north"}


def test_sites_that_cannot_be_are_refused() -> None:
    twice = case_values("full")
    twice["evaluators"][0]["name"] = "north"
    with pytest.raises(RefusedError, match="site north is named twice among clients and evaluators"):
        rendered(twice)
    shut = case_values("hospital")
    shut["networkPolicy"]["siteEgress"] = []
    with pytest.raises(RefusedError, match="siteEgress: expected a rule to the server or the proxy"):
        rendered(shut)
