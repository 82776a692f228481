"""What the Helm chart makes: valid for Kubernetes, one process a state folder, without rights, watched as we watch."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.helm_chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    VALUES,
    containers,
    documents,
    named,
    objects,
    of_kind,
    parsed_arguments,
    pod,
    rendering,
    volume,
)
from tests.support.pki import Authority

from protofed.common.clock import utc_now
from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.common.pki.identity import IdentityError, IdentityProblem, Party, read_identity, read_secret

pytestmark = rendering
CASES = sorted(path.stem for path in VALUES.glob("*.yaml"))
OURS = ("ServiceMonitor", "PrometheusRule")  # kinds of the Prometheus operator, which Kubernetes does not know
cases = pytest.mark.parametrize("case", CASES)


@cases
@pytest.mark.parametrize("version", ["1.27.0", "1.30.0", "1.37.0"])
def test_kubernetes_takes_every_object(case: str, version: str) -> None:
    validate = importlib.import_module("kubernetes_validate").validate
    for one in objects(case):
        if one["kind"] not in OURS:
            validate(one, version, strict=True)


@cases
def test_every_object_says_what_it_belongs_to(case: str) -> None:
    for one in objects(case):
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert labels["app.kubernetes.io/component"] in ("server", "site", "rules")
    names = [(one["kind"], one["metadata"]["name"]) for one in objects(case)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 52 for kind, name in names if kind == "StatefulSet"), (
        "labels of its pods hold 63 characters"
    )


@cases
def test_nothing_has_rights_and_one_process_has_a_state_folder_that_stays(case: str) -> None:
    for stateful in of_kind(case, "StatefulSet"):
        spec = pod(stateful)
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, 10001, 10001)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(stateful):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert all(pod(stateful)["enableServiceLinks"] is False for stateful in of_kind(case, "StatefulSet"))
    for stateful in of_kind(case, "StatefulSet"):
        (claim,) = stateful["spec"]["volumeClaimTemplates"]
        (mount,) = [one for one in pod(stateful)["containers"][0]["volumeMounts"] if one["name"] == "state"]
        assert stateful["spec"]["replicas"] == 1
        assert claim["spec"]["accessModes"] in (["ReadWriteOncePod"], ["ReadWriteOnce"])
        assert mount == {"name": "state", "mountPath": "/var/lib/protofed"}
        assert parsed_arguments(stateful)["state"] == Path(mount["mountPath"])


@cases
def test_a_pod_is_restarted_when_it_is_dead_and_waited_for_until_it_is_ready(case: str) -> None:
    for stateful in of_kind(case, "StatefulSet"):
        (container,) = pod(stateful)["containers"]
        asked = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {name: get["path"] for name, get in asked.items()} == {
            "startup": "/healthz",
            "liveness": "/healthz",
            "readiness": "/readyz",
        }
        assert parsed_arguments(stateful)["metrics"] == f"0.0.0.0:{ports[asked['readiness']['port']]}"


@cases
def test_a_pod_that_watches_another_selects_it_alone_and_metrics_stay_inside(case: str) -> None:
    statefuls = of_kind(case, "StatefulSet")
    for service in of_kind(case, "Service"):
        wanted = service["spec"]["selector"].items()
        labels = [one["spec"]["template"]["metadata"]["labels"] for one in statefuls]
        assert sum(wanted <= own.items() for own in labels) == 1, service["metadata"]["name"]
    for service in of_kind(case, "Service"):
        outside = service["spec"].get("clusterIP") != "None"
        assert [port["name"] for port in service["spec"]["ports"]] == (["grpc"] if outside else ["metrics"])


@cases
def test_settings_make_sense_to_the_daemon(case: str, tmp_path: Path) -> None:
    for stateful in of_kind(case, "StatefulSet"):
        map_ = named(case, "ConfigMap", stateful["metadata"]["name"])
        (file := tmp_path / "settings.toml").write_text(map_["data"]["settings.toml"], encoding="utf-8")
        arguments = parsed_arguments(stateful)
        keys = ("listen", "identity", "state", "metrics", "site", "server", "policy", "role")
        options = {"roles" if key == "role" else key: arguments[key] for key in keys if arguments.get(key)}
        model: type[ClientSettings] | type[ServerSettings] = ClientSettings if "site" in options else ServerSettings
        assert read_settings(model, file, options).model_dump()["identity"] == Path("/etc/protofed/identity")


def test_the_copied_identity_can_be_used_where_a_secret_s_files_cannot(tmp_path: Path) -> None:
    """As the kubelet mounts a Secret with fsGroup: readable by the group."""
    stateful = named("full", "StatefulSet", "study-server")
    assert volume(stateful, "secret")["secret"]["defaultMode"] == 0o400
    secret = Authority.make().issue(tmp_path / "secret", Party.SERVER, "hub")
    (operators := tmp_path / "operators").mkdir()
    (operators / "ada.pem").write_bytes((secret / "cert.pem").read_bytes())
    (secret / "key.pem").chmod(0o440)
    with pytest.raises(IdentityError) as refused:
        read_identity(secret, Party.SERVER, utc_now())
    assert refused.value.problem == IdentityProblem.KEY_OPEN
    (notify := tmp_path / "notify").mkdir()
    (notify / "smtp-password").write_text("pass word", encoding="ascii")
    (notify / "smtp-password").chmod(0o440)
    (copied := tmp_path / "identity").mkdir()
    script = pod(stateful)["initContainers"][0]["command"][2]
    script = re.sub(r"(?<=\s)/(?=secret|operators|notify|identity)", f"{tmp_path}/", script)
    subprocess.run(["sh", "-ec", script], check=True)
    assert read_identity(copied, Party.SERVER, utc_now()).certificate.name == "hub"
    assert [path.name for path in (copied / "operators").iterdir()] == ["ada.pem"]
    assert read_secret(copied / "notify" / "smtp-password", "password") == "pass word"


def test_only_what_copies_an_identity_sees_the_secret() -> None:
    for case in CASES:
        for stateful in of_kind(case, "StatefulSet"):
            (container,) = pod(stateful)["containers"]
            mounts = {one["name"]: one for one in container["volumeMounts"]}
            assert not {"secret", "notify"} & mounts.keys()
            assert mounts["identity"]["readOnly"] is True
            assert volume(stateful, "identity")["emptyDir"]["medium"] == "Memory"


@cases
@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_helm_makes_the_same_of_it(case: str) -> None:
    values = ("--values", str(VALUES / f"{case}.yaml"))
    linted = subprocess.run(
        ["helm", "lint", "--strict", str(CHART), *values], capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr
    made = ["helm", "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *values]
    done = subprocess.run(made, capture_output=True, text=True, check=True)
    assert documents(done.stdout) == objects(case)
