"""The chart's values: documented, checked without a word too many, and in step with the rest of the repository."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from packaging.version import Version
from tests.support.helm_chart import CHART, ROOT, VALUES, Object, case_values, load, schema, schema_errors
from tests.support.version_names import semantic

from protofed.common.version import VERSION

CASES = sorted(path.stem for path in VALUES.glob("*.yaml"))
NAMED: Object = {"server": {"identity": {"secret": "hub"}}}
SITE: Object = {"name": "north", "identity": {"secret": "north"}, "settings": "[data]\n", "policy": "methods = []\n"}


def site(**changes: Any) -> Object:
    """Values with one site; None leaves a key out."""
    said = {key: value for key, value in (SITE | changes).items() if value is not None}
    return NAMED | {"clients": [said]}


def server(**changes: Any) -> Object:
    return {"server": NAMED["server"] | changes}


WRONG: dict[str, tuple[Object, str]] = {
    "no identity": ({}, "server.identity.secret: "),
    "a key in the values": (server(identity={"secret": "hub", "key": "-----BEGIN"}), "('key' was unexpected)"),
    "two servers": (server(replicas=2), "('replicas' was unexpected)"),
    "a typo": ({**NAMED, "cleints": []}, "('cleints' was unexpected)"),
    "many writers": (server(state={"accessMode": "ReadWriteMany"}), "server.state.accessMode: 'ReadWriteMany'"),
    "no size": (server(state={"size": "20 GB"}), "server.state.size: '20 GB'"),
    "an outside kind": (server(service={"type": "ExternalName"}), "server.service.type: 'ExternalName'"),
    "a path for a certificate": (server(operators={"ada": "ada.pem"}), "server.operators.ada: 'ada.pem'"),
    "no server anywhere": ({"server": {"enabled": False}}, "serverAddress: "),
    "an address without a port": ({**NAMED, "serverAddress": "hub"}, "serverAddress: 'hub'"),
    "a site without a name": (site(name=None), "clients.0: 'name' is a required property"),
    "a site's name in capitals": (site(name="North"), "clients.0.name: 'North'"),
    "a name that is too long for pods": (site(name="n" * 21), "clients.0.name: "),
    "a site without a policy": (site(policy=None), "clients.0: 'policy' is a required property"),
    "a site with two policies": (site(policyConfigMap="p"), "clients.0: "),
    "a site without data": (site(settings="threads = 1"), "clients.0.settings: "),
    "data from two places": (site(data={"claim": "c", "hostPath": "/srv"}), "clients.0.data: "),
    "a relative path": (site(data={"hostPath": "srv"}), "clients.0.data.hostPath: 'srv'"),
    "half a GPU": (site(gpus=0.5), "clients.0.gpus: 0.5"),
    "root's group": (site(supplementalGroups=[0]), "clients.0.supplementalGroups.0: 0"),
    "a privileged site": (site(securityContext={}), "('securityContext' was unexpected)"),
}


@pytest.mark.parametrize("case", CASES)
def test_values_that_are_meant_pass(case: str) -> None:
    assert schema_errors(case_values(case)) == []


def test_values_that_the_readme_shows_and_globals_pass() -> None:
    shown = re.findall(r"```yaml\n(.+?)```", (CHART / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown
    assert [line for text in shown for line in schema_errors(yaml.safe_load(text))] == []
    assert schema_errors(NAMED | {"global": {"anything": 1}}) == []


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_by_name(case: str) -> None:
    values, told = WRONG[case]
    assert any(told in line for line in schema_errors(values)), schema_errors(values)


def _same_keys(values: Any, of: Object, whole: Object, at: str) -> list[str]:
    """Keys of objects that only the values or only the schema has."""
    of = whole["definitions"][of["$ref"].rpartition("/")[2]] if "$ref" in of else of
    if not isinstance(values, dict) or "properties" not in of:
        return []
    differing = sorted(values.keys() ^ of["properties"].keys() - {"global"})
    below = [_same_keys(values[key], of["properties"][key], whole, f"{at}.{key}") for key in values if not differing]
    return [f"{at}.{key}" for key in differing] + [line for lines in below for line in lines]


def test_the_schema_has_the_keys_of_the_values_and_takes_no_others() -> None:
    resources = load(CHART / "values.yaml")["server"]["resources"]
    assert resources["limits"]["memory"]
    assert _same_keys(load(CHART / "values.yaml"), schema(), schema(), "") == []
    assert _strict(schema(), "") == []


def _strict(node: Any, at: str) -> list[str]:
    """Objects that say which keys they have, and take others."""
    if not isinstance(node, dict):
        return []
    open_ = node.get("type") == "object" and "properties" in node and node.get("additionalProperties") is not False
    return [at] * open_ + [line for key, inner in node.items() for line in _strict(inner, f"{at}.{key}")]


def test_the_chart_is_of_this_version_with_prometheus_rules_and_no_registry() -> None:
    chart = load(CHART / "Chart.yaml")
    assert (chart["appVersion"], chart["version"]) == (VERSION, semantic(Version(VERSION)))
    values = load(CHART / "values.yaml")
    assert values["imageRegistry"] == ""
    assert (values["server"]["image"]["repository"], values["server"]["image"]["tag"]) == ("protofed-server", "")
    assert (values["clientImage"]["repository"], values["clientImage"]["tag"]) == ("protofed-client", "")
    assert (CHART / "rules").resolve() == ROOT / "deploy/prometheus/rules"
