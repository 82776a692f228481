"""Metrics as data: what a process tells Prometheus, for the code that counts, the tests and the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

Kind: TypeAlias = Literal["gauge", "counter", "histogram", "summary"]
disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter, of when it was made: nobody asks for it


@dataclass(frozen=True)
class Metric:
    """One metric; its name, labels and meaning are a public contract.

    A point in time is a gauge `…_timestamp_seconds` of the Unix epoch: ages and what is left are for PromQL's `time()`.

    Attributes:
        labels: never one whose value would be a path, a count of labels or text that a site has made up.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        """To be counted at events."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, buckets: Sequence[float]) -> Histogram:
        """To be observed at events."""
        return Histogram(self.name, self.help, self.labels, buckets=buckets, registry=registry)

    def family(self, values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily | CounterMetricFamily:
        """A gauge's or a counter's values by labels, read when somebody asks for them: what a collector yields."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        made: GaugeMetricFamily | CounterMetricFamily = kind(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            self._check(labels)
            made.add_metric(labels, value)
        return made

    def summary(self, values: Mapping[tuple[str, ...], tuple[int, float]]) -> SummaryMetricFamily:
        """Counts and sums of what was observed, by labels; without quantiles."""
        made = SummaryMetricFamily(self.name, self.help, labels=self.labels)
        for labels, (count, total) in values.items():
            self._check(labels)
            made.add_metric(labels, count, total)
        return made

    def _check(self, labels: Sequence[str]) -> None:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not values {labels}")


def table(metrics: Iterable[Metric]) -> str:
    """Metrics as a table in Markdown."""
    rows = [f"| `{metric.name}{_braces(metric.labels)}` | {metric.kind} | {metric.help} |" for metric in metrics]
    return "\n".join(["| metric | kind | what it is |", "|---|---|---|", *rows])


def _braces(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""
