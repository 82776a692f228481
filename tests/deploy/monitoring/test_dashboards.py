"""Dashboards are what Grafana reads, and they and the rules name only what server, clients and rules export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.support.dashboards import DASHBOARDS, DEPLOY, NAMES, dashboard, of_panel, queries, rule_tests, rules
from tests.support.promql import distribution, named

from protofed.client.agent.metrics import METRICS as OF_CLIENT
from protofed.server.metrics import METRICS as OF_SERVER

CORE = {"stat", "gauge", "bargauge", "table", "timeseries", "state-timeline"}
UNKNOWN_TO_THE_SDK = {"titleFormat", "textFormat"}  # of an annotation; Grafana's Prometheus data source has them
PROCESS = {
    f"process_{name}"
    for name in ("start_time_seconds", "resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
}
OF_PROMETHEUS = {"up", "ALERTS"}
OF_TARGET = {"job", "instance", "le"}
KNOWINGLY_UNUSED = {
    "protofed_denied_calls_total": "who it is stands in the log and in `sites list`; a daemon of this version stops",
    "protofed_client_withheld_updates_total": "dashboards are the coordinator's, who must not learn which site it is",
    "protofed_client_build_info": "read when a site reports a problem; the server refuses what does not fit",
}
RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording")}
DISTRIBUTIONS = {metric.name for metric in (*OF_SERVER, *OF_CLIENT) if metric.kind in ("histogram", "summary")}
LABELS: dict[str, set[str]] = {}
for metric in (*OF_SERVER, *OF_CLIENT):
    LABELS.setdefault(metric.name, set()).update(metric.labels)


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression with the place where it stands."""
    for name in NAMES:
        for query in queries(name):
            yield f"{name}, {query.panel}, {query.ref}", query.filled(3600, 60)
        for one in dashboard(name)["annotations"]["list"]:
            yield f"{name}, annotation {one['name']}", one["expr"]
        for one in dashboard(name)["templating"]["list"]:
            if one["type"] == "query":
                metric, label = one["query"]["query"].removeprefix("label_values(").rstrip(")").split(", ")
                yield f"{name}, variable {one['name']}", f"count by ({label}) ({metric})"
    for rule in (*rules("recording"), *rules("alerts")):
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path, test in rule_tests():
        for one in test["input_series"]:
            yield f"{path.name}, {test['name']}", one["series"]


EXPRESSIONS = list(dict.fromkeys(expressions()))


def labels_of(metric: str) -> set[str]:
    """Labels that a series of this name can have; of a recorded one all that its expression could leave."""
    if metric in RECORDED:
        found = named(RECORDED[metric])
        return set(found.made).union(OF_TARGET, *(labels_of(one) for one in found.metrics))
    own = {"alertname", "alertstate"} if metric == "ALERTS" else LABELS.get(metric, set())
    return own | OF_TARGET | ({"site"} if metric in PROCESS or metric == "up" else set())


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_an_expression_names_only_what_is_exported_or_recorded(where: str, expression: str) -> None:
    found = named(expression)
    metrics = {distribution(name, DISTRIBUTIONS) for name in found.metrics}
    known = LABELS.keys() | RECORDED.keys() | PROCESS | OF_PROMETHEUS
    assert metrics, "it names nothing"
    assert metrics <= known
    for metric, label in found.selectors:
        assert label in labels_of(distribution(metric, DISTRIBUTIONS)), f"{metric} has no label {label}"
    assert found.grouped <= set(found.made).union(*(labels_of(metric) for metric in metrics))


def test_every_exported_metric_is_found_wherever_it_stands() -> None:
    found = named(
        'max by (site, a) (label_replace(label_replace(one{x="y{z}", b!~"c,d"}, "new", "$1", "old", "(.+)"), '
        '"n2", "", "", ""))\n  # not this\n  * on (c) group_left (d) sum(rate(two_total[5m:30s] offset 3h)) > bool 1e9 '
        "and max_over_time(l:three:x[1h])"
    )
    assert found.metrics == {"one", "two_total", "l:three:x"}
    assert found.selectors == {("one", "x"), ("one", "b")}
    assert found.grouped == {"site", "a", "c", "d"}
    assert found.made == {"new", "n2"}
    looked_at = {
        distribution(metric, DISTRIBUTIONS)
        for where, expression in EXPRESSIONS
        if ".yml" not in where
        for metric in named(expression).metrics
    }
    assert LABELS.keys() - looked_at == KNOWINGLY_UNUSED.keys()
    assert RECORDED.keys() <= looked_at


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_own_model_of_a_dashboard_reads_all_of_it(name: str) -> None:
    register_default_plugins()
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard(name))))
    assert {path for path in lost(dashboard(name), read) if path.rpartition(".")[2] not in UNKNOWN_TO_THE_SDK} == set()


def lost(ours: object, read: object, path: str = "") -> Iterator[str]:
    """Paths of what was not understood."""
    if isinstance(ours, dict) and isinstance(read, dict):
        for key, value in ours.items():
            yield from lost(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
    elif isinstance(ours, list) and isinstance(read, list) and len(ours) == len(read):
        for place, (one, other) in enumerate(zip(ours, read, strict=True)):
            yield from lost(one, other, f"{path}[{place}]")
    elif ours != read:
        yield path


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_asks_which_prometheus_and_its_panels_explain_themselves(name: str) -> None:
    made = dashboard(name)
    assert made["uid"] == f"protofed-{name}"
    assert made["schemaVersion"] >= 39
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource", "run", "site"]
    assert '"uid": "protofed-prometheus"' not in json.dumps(made)
    sources = [panel["datasource"] for panel in made["panels"]]
    assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * len(sources)
    text = json.dumps([panel["targets"] for panel in made["panels"]])
    shown = {variable["name"] for variable in made["templating"]["list"][1:] if variable["hide"] == 0}
    assert shown == {name for name in ("run", "site") if f"${name}" in text}, "no choice that changes nothing"
    panels = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another one"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] in CORE, panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert_read_easily(name, panel)


def assert_read_easily(name: str, panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["type"] == "table" or "unit" in defaults or "mappings" in defaults, panel["title"]
    asked = of_panel(name, panel)
    assert len({query.ref for query in asked}) == len(asked)
    for query in asked:
        grouped = named(query.filled(3600, 60)).grouped - OF_TARGET
        assert not query.legend or "{{" in query.legend or len(asked) > 1 or not grouped - {"instance"}, query


def test_provisioning_names_what_is_there() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "protofed.yml").read_text("utf-8"))["providers"]
    assert source["type"] == "prometheus"
    assert provider["options"]["path"] == "${PROTOFED_DASHBOARDS}"
    assert {path.stem for path in DASHBOARDS.glob("*.json")} == set(NAMES)
