"""The compose files confine every container, publish two ports, and have no setting that .env.example lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from protofed.common.version import VERSION

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = ("compose.yaml", "compose.site.yaml")
OF_THE_TOOL = {"COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"}
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")
TRAINERS = [f"site-{number}" for number in range(1, 6)]
ON_GPU = [f"{site}-gpu" for site in TRAINERS]
JOBS, TOOLS = {"certificates", "admission"}, {"operator", "export", "ca", "identity"}
NO_IMAGE_OF_OURS = {"prometheus", "alertmanager", "grafana"}


@cache
def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return found


def services(name: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(name)["services"]
    return found


ALL = [(file, name) for file in FILES for name in services(file)]
each = pytest.mark.parametrize(("file", "name"), ALL, ids=[f"{file}-{name}" for file, name in ALL])


def networks(service: dict[str, Any]) -> set[str]:
    return set(service.get("networks", ()))


def volumes(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """What is mounted where, and whether it can only be read."""
    split = [[*line.removesuffix(":ro").rsplit(":", 1), line.endswith(":ro")] for line in service.get("volumes", ())]
    return {where: (what, read_only) for what, where, read_only in split}


@each
def test_a_container_has_limits_and_no_more_rights_than_it_needs(file: str, name: str) -> None:
    one = services(file)[name]
    uid, _ = one["user"].split(":")
    assert int(uid) > 0
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    assert all("noexec" in line and "size=" in line for line in one["tmpfs"])
    assert not {"cap_add", "privileged", "devices", "pid", "ipc", "userns_mode", "container_name"} & one.keys()
    assert one.get("network_mode", "none") == "none"
    assert not any("docker.sock" in line for line in one.get("volumes", ()))
    assert {"mem_limit", "cpus", "pids_limit"} <= one.keys()
    assert one["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}}


@each
def test_a_daemon_is_started_again_and_asked_whether_it_is_ready_and_a_job_is_not(file: str, name: str) -> None:
    one = services(file)[name]
    if name in JOBS | TOOLS:
        assert (one["restart"], one["healthcheck"]) == ("no", {"disable": True})
        return
    assert one["restart"] == "unless-stopped"
    assert {"interval", "timeout", "retries", "start_period"} == one["healthcheck"].keys() - {"test"}
    asks_itself = name in NO_IMAGE_OF_OURS or (file, name) == ("compose.yaml", "client")
    assert ("test" in one["healthcheck"]) == asks_itself, "ours is the image's own"
    assert "\nHEALTHCHECK " in (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")


@each
def test_images_are_those_of_this_version_and_built_by_one_dockerfile(file: str, name: str) -> None:
    one = services(file)[name]
    if name in NO_IMAGE_OF_OURS:
        assert "build" not in one
        assert re.fullmatch(r"\$\{\w+:-[\w/]+:v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}\}", one["image"]), "one for good"
        return
    target = one["build"]["target"]
    assert one["image"] == f"${{{target.upper()}_IMAGE:-protofed-{target}:{VERSION}}}"
    assert (one["build"]["context"], one["build"]["dockerfile"]) == ("..", "deploy/docker/Dockerfile")
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert f"AS {target}\n" in dockerfile
    assert set(one["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_the_demos_images_are_the_same_and_nothing_but_grpc_and_grafana_is_published() -> None:
    told = (DEPLOY / "docker" / "compose" / "demo.sh").read_text(encoding="utf-8")
    assert set(re.findall(r"protofed-\w+:[\w.]+", told)) == {
        f"protofed-{one}:{VERSION}" for one in ("server", "client")
    }
    published = {name: one["ports"] for name, one in services().items() if "ports" in one}
    assert published == {
        "server": ["${GRPC_ADDRESS:-127.0.0.1}:${GRPC_PORT:-7443}:7443"],
        "grafana": ["${GRAFANA_ADDRESS:-127.0.0.1}:${GRAFANA_PORT:-3000}:3000"],
    }
    assert not any("ports" in one for one in services("compose.site.yaml").values())


@pytest.mark.parametrize("file", FILES)
def test_down_v_removes_no_key_no_ledger_and_no_state(file: str) -> None:
    """A volume that compose makes is removed by `down -v`: only pictures of numbers may lie in one."""
    kept = {name for name, one in read(file)["volumes"].items() if one}
    for name in kept:
        assert read(file)["volumes"][name] == {"external": True, "name": f"${{COMPOSE_PROJECT_NAME:-protofed}}_{name}"}
    assert read(file)["volumes"].keys() - kept == (NO_IMAGE_OF_OURS if file == "compose.yaml" else set())
    for name, one in services(file).items():
        mounted = {what for what, _ in volumes(one).values() if not re.match(r"[./$]", what)}
        assert mounted <= kept or name in NO_IMAGE_OF_OURS, name


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("named", ["", "study"], ids=["by default", "of .env"])
def test_the_script_makes_the_volumes_that_compose_expects(file: str, named: str, tmp_path: Path) -> None:
    place = tmp_path / "docker" / "compose"
    place.mkdir(parents=True)
    shutil.copy(DEPLOY / file, tmp_path)
    shutil.copy(DEPLOY / "docker" / "compose" / "volumes.sh", place)
    if named:
        (tmp_path / ".env").write_text(f"A=b\nCOMPOSE_PROJECT_NAME={named}\n", encoding="ascii")
    (tmp_path / "docker.sh").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n', encoding="ascii")
    (tmp_path / "docker.sh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").symlink_to(tmp_path / "docker.sh")
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(place / "volumes.sh"), file], check=True, env=path, cwd=tmp_path)
    called = (tmp_path / "called").read_text(encoding="ascii").splitlines()
    expected = [f"volume create {named or 'protofed'}_{name}" for name, one in read(file)["volumes"].items() if one]
    assert called == expected


def test_a_site_meets_the_server_and_prometheus_and_nobody_else() -> None:
    inside = {name for name, one in read("compose.yaml")["networks"].items() if (one or {}).get("internal")}
    everybody = services()
    replicas = {other for other, one in everybody.items() if "clients" in networks(one)}
    assert replicas == {"client", "server", "prometheus"}
    for name in (*TRAINERS, *ON_GPU, "evaluator"):
        (own,) = networks(everybody[name])
        assert own == name.removesuffix("-gpu")
        assert own in inside
        others = {other for other, one in everybody.items() if own in networks(one)}
        assert others - {own, f"{own}-gpu"} == {"server", "prometheus"}
    assert {name for name, one in everybody.items() if "outside" in networks(one)} == {
        "server",
        "alertmanager",
        "grafana",
    }
    assert read("compose.yaml")["networks"].keys() - inside == {"outside"}


def test_alerts_reach_people_and_metrics_answer_only_where_they_are_asked() -> None:
    config = yaml.safe_load((DEPLOY / "docker" / "compose" / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["alertmanager-web:9093"]}]}]
    one = services()["alertmanager"]
    assert {"--web.listen-address=alertmanager-web:9093", "--cluster.listen-address="} <= set(one["command"])
    assert one["networks"] == {"monitoring": {"aliases": ["alertmanager-web"]}, "outside": {}}
    mounted = volumes(one)
    assert mounted["/etc/alertmanager/alertmanager.yml"][1]
    assert mounted["/etc/alertmanager/secrets"][1]
    server, prometheus = services()["server"], services()["prometheus"]
    assert server["environment"]["PROTOFED_SERVER_METRICS__LISTEN"] == "server-metrics:9464"
    assert server["networks"]["monitoring"] == {"aliases": ["server-metrics"]}
    assert "--web.listen-address=prometheus-web:9090" in prometheus["command"]
    assert prometheus["networks"]["monitoring"] == {"aliases": ["prometheus-web"]}
    assert all(not one for name, one in server["networks"].items() if name != "monitoring")
    assert all(not one for name, one in prometheus["networks"].items() if name != "monitoring")


def test_prometheus_asks_the_services_by_the_jobs_that_rules_expect() -> None:
    config = yaml.safe_load((DEPLOY / "docker" / "compose" / "prometheus.yml").read_text(encoding="utf-8"))
    plain = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["global"] == plain["global"]
    server, clients = config["scrape_configs"]
    assert [server["job_name"], clients["job_name"]] == [one["job_name"] for one in plain["scrape_configs"]]
    assert clients["metric_relabel_configs"] == plain["scrape_configs"][1]["metric_relabel_configs"]
    assert server["static_configs"] == [{"targets": ["server-metrics:9464"]}]
    asked = {one["labels"]["site"]: one["targets"] for one in clients["static_configs"]}
    assert clients["dns_sd_configs"] == [{"names": ["client"], "type": "A", "port": 9464}]
    (label,) = clients["relabel_configs"]  # of a replica its address, since one name is all of them
    assert label == {"source_labels": ["site", "__address__"], "regex": ";(.+)", "target_label": "site"}
    assert asked == {site: [f"{site}:9464"] for site in (*TRAINERS, "evaluator")}
    mounted = volumes(services()["prometheus"])
    assert mounted["/etc/prometheus/rules"] == ("./prometheus/rules", True)
    assert config["rule_files"] == ["rules/*.yml"]


def test_a_container_sees_its_own_identity_that_the_job_made_and_waits_for_it() -> None:
    for name, one in services().items():
        if name == "certificates":
            continue
        own = {what: ro for what, ro in volumes(one).values() if what.endswith("-identity")}
        whose = {"admission": "operator", "ca": "operator", "export": "operator", "client": "clients"}.get(
            name, name.removesuffix("-gpu")
        )
        assert own == ({} if name in NO_IMAGE_OF_OURS else {f"{whose}-identity": True}), name
    contributors = {name for name, one in services().items() if "ca" in {what for what, _ in volumes(one).values()}}
    assert contributors == {"certificates", "ca"}
    job = services()["certificates"]
    assert job["command"] == f"${{LOCAL_SITES-{' '.join(TRAINERS)}}} evaluator"  # empty: the evaluator alone
    mounted = {where for where in volumes(job) if where.startswith("/identities/")}
    assert mounted == {f"/identities/{one}" for one in ("ca", "server", "operator", *TRAINERS, "clients", "evaluator")}
    assert job["environment"]["CLIENTS"] == "${CLIENTS:-0}"
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "for name in ca server operator evaluator clients $(seq -f 'site-%g' 9)" in dockerfile
    waits = {name: one.get("depends_on", {}) for name, one in services().items()}
    done, healthy = {"condition": "service_completed_successfully"}, {"condition": "service_healthy"}
    assert waits["server"] == {"certificates": done}
    assert waits["admission"] == {"server": healthy}
    for name in (*TRAINERS, *ON_GPU, "evaluator", "client"):
        assert waits[name] == {"admission": done}
    assert waits["grafana"] == {"prometheus": healthy}


@pytest.mark.parametrize("number", range(5))
def test_a_site_has_its_own_share_state_and_folder_on_either_device(number: int) -> None:
    name = TRAINERS[number]
    plain, gpu = services()[name], services()[f"{name}-gpu"]
    assert plain["command"][4:] == ["--site", name, "--partition-index", str(number)]
    assert (plain["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
    assert volumes(plain)["/var/lib/protofed"] == (f"{name}-state", False)
    assert volumes(plain)["/data"] == (f"${{SITES_DATA:-./docker/compose/data}}/{name}", True)
    assert (DEPLOY / "docker" / "compose" / "data" / name).is_dir()
    assert (gpu["command"], gpu["volumes"]) == (plain["command"], plain["volumes"])
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == [f"${{SITE_{number + 1}_GPU:-0}}"]
    changed = {key for key in gpu["environment"] if gpu["environment"][key] != plain["environment"].get(key)}
    assert changed == {"PROTOFED_CLIENT_DEVICE"}


@pytest.mark.parametrize("file", FILES)
def test_what_is_named_is_declared_and_what_is_mounted_is_there(file: str) -> None:
    content = read(file)
    named = {
        what for one in services(file).values() for what, _ in volumes(one).values() if not re.match(r"[./$]", what)
    }
    assert named == content["volumes"].keys()
    assert set().union(*map(networks, services(file).values())) == content["networks"].keys()
    for one in services(file).values():
        for what, _ in volumes(one).values():
            path = VARIABLE.sub(lambda found: found[3] if found[2].endswith("-") else ".", what)
            assert not path.startswith(".") or (DEPLOY / path).exists(), what


def test_every_setting_is_explained_with_its_default_and_none_is_unused() -> None:
    lines = (DEPLOY / ".env.example").read_text(encoding="utf-8").splitlines()
    settings = [found for line in lines if (found := re.fullmatch(r"(?:# )?([A-Z][A-Z0-9_]+)=(.*)", line))]
    told = {found[1]: found[2] for found in settings}
    used: dict[str, set[str]] = {}
    for file in FILES:
        for name, kind, default in VARIABLE.findall((DEPLOY / file).read_text(encoding="utf-8")):
            used.setdefault(name, set()).update({default} if kind.endswith("-") else ())
    assert told.keys() == used.keys() | OF_THE_TOOL
    for name, defaults in used.items():
        assert len(defaults) <= 1, f"{name} has one default: {defaults}"
        assert not defaults or defaults == {told[name]}, name


def test_grafana_needs_a_password_and_finds_its_dashboards() -> None:
    environment = services()["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert "\nGRAFANA_PASSWORD=\n" in (DEPLOY / ".env.example").read_text(encoding="utf-8")
    grafana = services()["grafana"]
    assert volumes(grafana)["/etc/grafana/provisioning"] == ("./grafana/provisioning", True)
    assert volumes(grafana)[grafana["environment"]["PROTOFED_DASHBOARDS"]] == ("./grafana/dashboards", True)
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus-web:9090"
