"""Every panel and every rule has data of a real pilot, asked of a real Prometheus."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.support.dashboards import NAMES, NO_DATA_HERE, Query, queries, rules
from tests.support.monitored_pilot import SITES, Pilot, pilot, recipe
from tests.support.promql import named

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (apt: prometheus)"),
]
FIRED = {  # what the story below provokes
    "RoundsDegraded": {"run": "wing", "outcome": "degraded"},
    "UpdateRejected": {"run": "narrow", "verdict": "refused", "reason": "norm"},
    "QuorumAtRisk": {"run": "narrow"},
    "RunFailed": {},
    "ModelWarning": {"run": "narrow", "code": "diverging"},  # all updates are far larger than this run takes
}
NO_SERIES_HERE = {  # no run here has noise, and nobody is notified
    "protofed_client_privacy_epsilon_spent",
    "protofed_client_privacy_epsilon_budget",
    "protofed_notifications_total",
}


@dataclass(frozen=True)
class Story:
    """The pilot after its runs; when they began and ended, in seconds of the epoch."""

    pilot: Pilot
    start: float
    end: float

    @property
    def seconds(self) -> int:
        return int(self.end - self.start) + 1


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A run that loses a site for a while, and one that lets in no update."""
    with pilot(tmp_path_factory.mktemp("pilot")) as here:
        start = time.time()
        here.run(recipe("wing", "fednh", 10))
        here.until_round("wing", 4)
        here.lose("west", 8)
        assert here.until_ended("wing") == "completed", here.processes.logs()
        here.run(recipe("narrow", "fedavg", 3, max_relative_norm=1e-9, max_attempts=5, deadline_s=5))
        assert here.until_ended("narrow") == "failed", here.processes.logs()
        time.sleep(4)
        yield Story(here, start, time.time())


def answers(story: Story, query: Query) -> list[tuple[dict[str, str], float]]:
    """Labels and last number of each series that had one."""
    asked = query.filled(story.seconds, 15)
    found = story.pilot.prometheus.range(asked, story.start, story.end)
    return [(series.labels, series.points[-1][1]) for series in found if series.points]


@pytest.mark.parametrize("name", NAMES)
def test_every_query_of_a_dashboard_has_data(story: Story, name: str) -> None:
    empty = set()
    for query in queries(name):
        found = answers(story, query)
        sample = f"{query.label(found[0][0]) or '–':<28} {found[0][1]:>14.5g}" if found else "nothing"
        sys.stdout.write(f"{name:<10} {query.panel:<48} {query.ref} {len(found):>3}  {sample}\n")
        if not found:
            empty.add((name, query.panel, query.ref))
    assert empty == {key for key in NO_DATA_HERE if key[0] == name}


def test_a_choice_of_run_and_site_leaves_only_those(story: Story) -> None:
    prometheus, chosen = story.pilot.prometheus, {"run": "wing", "site": "west"}
    seen = dict.fromkeys(chosen, 0)
    for name in NAMES:
        for query in queries(name):
            asked = query.filled(story.seconds, 15, **chosen)
            for series in prometheus.range(asked, story.start, story.end):
                assert series.labels.get("run", "wing") == "wing", query
                if "$site" in query.expression:
                    assert series.labels.get("site", "west") == "west", query
                for label in seen:
                    seen[label] += label in series.labels
    assert all(seen.values()), seen


def test_every_recording_rule_records(story: Story) -> None:
    prometheus = story.pilot.prometheus
    for rule in rules("recording"):
        found = prometheus.range(rule["record"], story.start, story.end)
        assert any(series.points for series in found), rule["record"]
    codes = prometheus.range('site:protofed_site_phase:code{site!="evaluator"}', story.start, story.end)
    assert {series.labels["site"] for series in codes} == set(SITES)
    assert {value for series in codes for _, value in series.points} <= set(range(7))


def test_every_rule_is_well_and_alerts_look_at_series_that_exist(story: Story) -> None:
    prometheus = story.pilot.prometheus
    loaded = prometheus.rules()
    assert {rule["name"]: rule.get("lastError") for rule in loaded if rule["health"] != "ok"} == {}
    assert len(loaded) == len(rules("alerts")) + len(rules("recording"))
    metrics = frozenset[str]().union(*(named(rule["expr"]).metrics for rule in rules("alerts")))
    absent = {metric for metric in metrics if not prometheus.range(metric, story.start, story.end)}
    assert absent == NO_SERIES_HERE


def test_what_went_wrong_is_an_alert_that_names_it_and_nothing_else_is(story: Story) -> None:
    prometheus = story.pilot.prometheus
    seen = prometheus.range('ALERTS{alertstate="firing"}', story.start, story.end)
    assert {series.labels["alertname"] for series in seen} == FIRED.keys()
    for alert, labels in FIRED.items():
        own = [series.labels for series in seen if series.labels["alertname"] == alert]
        assert any(labels.items() <= found.items() for found in own), f"{alert}: {own}"
    last = {series.labels["alertname"] for series in prometheus.now('ALERTS{alertstate="firing"}', story.end)}
    assert last == {"RunFailed", "ModelWarning"}, "a run that has ended is still told of"
    (soon,) = prometheus.now('ALERTS{alertname="CertificateExpires30Days"}', story.end)
    assert (soon.labels["role"], soon.labels["name"], soon.labels["alertstate"]) == ("server", "server", "pending")


def test_server_and_daemon_agree_on_what_both_tell(story: Story) -> None:
    prometheus = story.pilot.prometheus
    for name in ("registered", "disk_free_bytes"):
        metric = f"protofed_client_{name} or protofed_site_{name}"
        jobs = prometheus.range(f"count by (site) (count by (site, job) ({metric}))", story.start, story.end)
        assert {series.labels["site"]: max(v for _, v in series.points) for series in jobs} == dict.fromkeys(
            (*SITES, "evaluator"), 2.0
        ), metric
    both = "protofed_client_disk_free_bytes or protofed_site_disk_free_bytes"
    apart = f"max by (site) ({both}) / min by (site) ({both})"
    shares = [value for series in prometheus.range(apart, story.start, story.end) for _, value in series.points]
    assert shares
    assert max(shares) < 1.2  # asked some seconds apart


def test_a_server_that_is_killed_is_told_of(story: Story) -> None:
    """The last test here: the pilot is over."""
    prometheus, processes = story.pilot.prometheus, story.pilot.processes
    processes.kill("server")
    processes.wait_for(lambda: "ServerDown" in {series.labels["alertname"] for series in prometheus.now("ALERTS")})
    (down,) = prometheus.now('ALERTS{alertname="ServerDown"}')
    assert down.labels["severity"] == "critical"
