"""promtool accepts alerts and recording rules; each alert fires when it should, and not when it nearly should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.dashboards import PROMETHEUS, rule_tests, rules

ALERTS = rules("alerts")
NAMES = [rule["alert"] for rule in ALERTS]
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")


def run_promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_accepts_configuration_and_rules() -> None:
    run_promtool("check", "config", PROMETHEUS / "prometheus.yml")
    run_promtool("check", "rules", *sorted((PROMETHEUS / "rules").glob("*.yml")))


@promtool
@pytest.mark.parametrize("path", sorted((PROMETHEUS / "tests").glob("*.yml")), ids=lambda path: path.stem)
def test_the_rules_tests_pass(path: Path) -> None:
    run_promtool("test", "rules", path)


@pytest.mark.parametrize("alert", NAMES)
def test_every_alert_is_tested_to_fire_and_in_another_scene_not_to(alert: str) -> None:
    fires, stays = set(), set()
    for _, test in rule_tests():
        expected = [bool(case.get("exp_alerts")) for case in test["alert_rule_test"] if case["alertname"] == alert]
        if any(expected):
            fires.add(test["name"])
        elif expected:
            stays.add(test["name"])
    assert fires, f"{alert}: no test in deploy/prometheus/tests in which it fires"
    assert stays, f"{alert}: no test in deploy/prometheus/tests in which it nearly fires"


def test_the_tests_know_no_other_alerts_and_expect_their_sections() -> None:
    tests = [test for _, test in rule_tests()]
    assert {case["alertname"] for test in tests for case in test["alert_rule_test"]} == set(NAMES)
    assert len({test["name"] for test in tests}) == len(tests)
    leads = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in ALERTS}
    cases = [case for _, test in rule_tests() for case in test["alert_rule_test"]]
    expected = [(case["alertname"], alert["exp_annotations"]) for case in cases for alert in case.get("exp_alerts", ())]
    assert [told["runbook_url"] for _, told in expected] == [leads[name] for name, _ in expected]


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_says_how_bad_it_is_what_it_means_and_whom_it_concerns(rule: dict[str, object]) -> None:
    labels, told = rule["labels"], rule["annotations"]
    assert isinstance(labels, dict)
    assert isinstance(told, dict)
    assert labels == {"severity": labels["severity"]}
    assert labels["severity"] in ("critical", "warning")
    assert set(told) == {"summary", "description", "runbook_url"}
    assert re.search(r"\{\{.*\$labels\.(run|site|instance|name)", told["summary"]), "whom it concerns"
    assert len(told["summary"]) < 180
    assert len(told["description"]) > 80
    assert "{{" not in re.sub(r"\{\{[^{}]+\}\}", "", told["summary"] + told["description"])


def test_a_run_that_ended_disturbs_nobody_and_no_door_is_opened() -> None:
    for rule in ALERTS:
        about_a_run = "$labels.run" in rule["annotations"]["summary"]
        assert not about_a_run or "run:protofed_active:bool" in rule["expr"], rule["alert"]
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    assert not re.search(r"honor_labels|insecure_skip_verify|credentials:|0\.0\.0\.0", text)
