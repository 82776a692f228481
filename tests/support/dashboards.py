"""The dashboards and rules that come along, as tests and pictures read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS, PROMETHEUS = DEPLOY / "grafana" / "dashboards", DEPLOY / "prometheus"
NAMES = ("rounds", "sites", "learning", "transport")
# Queries without data where sites have no GPU, send no scores that are refused, sum nothing, add no noise, and learn
# classes.
NO_DATA_HERE = {
    ("rounds", "Steps of secure aggregation", "A"),
    ("rounds", "Sites in the newest secure aggregation", "A"),
    ("rounds", "Sites in the newest secure aggregation", "B"),
    ("rounds", "Secure aggregations that came to nothing, in 10 minutes", "A"),
    ("rounds", "How long steps of secure aggregation take", "A"),
    ("sites", "Steps of secure aggregation that sites refused, in 10 minutes", "A"),
    ("sites", "Epsilon spent, over all runs", "A"),
    ("sites", "Share of the privacy budget that is spent", "A"),
    ("sites", "GPU memory", "A"),
    ("sites", "Sites now", "F"),
    ("learning", "Global model of a number", "A"),
    ("learning", "Updates that were not used, in 30 minutes", "C"),
}


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    dashboard: str
    panel: str
    ref: str
    expression: str  # with Grafana's variables
    legend: str
    instant: bool

    def filled(self, range_s: int, rate_s: int, site: str = ".*", run: str = ".*") -> str:
        values = {"__range": f"{range_s}s", "__rate_interval": f"{rate_s}s", "site": site, "run": run}
        return re.sub(r"\$([a-z_]+)", lambda found: values[found[1]], self.expression)

    def label(self, labels: dict[str, str]) -> str:
        """What the legend calls a series."""
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend).strip()


def dashboard(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def queries(name: str) -> list[Query]:
    """All queries of a dashboard's panels, in their order."""
    return [query for panel in dashboard(name)["panels"] for query in of_panel(name, panel)]


def of_panel(name: str, panel: dict[str, Any]) -> list[Query]:
    return [
        Query(name, panel["title"], t["refId"], t["expr"], t.get("legendFormat", ""), t.get("instant", False))
        for t in panel["targets"]
    ]


def rules(file: str) -> list[dict[str, Any]]:
    """All rules of `recording` or `alerts`."""
    loaded = yaml.safe_load((PROMETHEUS / "rules" / f"{file}.yml").read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def rule_tests() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file of promtool tests with each of its tests."""
    for path in sorted((PROMETHEUS / "tests").glob("*.yml")):
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            yield path, test
