"""Metrics as data: names, labels and meanings, for the code that counts, for tests and for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

Kind: TypeAlias = Literal["gauge", "counter", "histogram", "summary"]
disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series, of which nothing is made


@dataclass(frozen=True)
class Metric:
    """One metric; its name, labels and meaning are a public contract.

    A point in time is a gauge `…_timestamp_seconds` in Unix time: PromQL computes ages and remaining times by `time()`.

    Attributes:
        labels: their names. No value may be a path, a count of labels, or text that a site chooses.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A counter in this registry, to be incremented at events."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, buckets: Sequence[float]) -> Histogram:
        """A histogram in this registry, to be given observations at events.

        Args:
            buckets: upper edges, in the metric's unit.
        """
        return Histogram(self.name, self.help, self.labels, buckets=buckets, registry=registry)

    def family(self, values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily | CounterMetricFamily:
        """A gauge's or a counter's values by label values, as a collector yields them at a scrape.

        Raises:
            ValueError: values for another number of labels; the same in `summary`.
        """
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family: GaugeMetricFamily | CounterMetricFamily = kind(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            self._check(labels)
            family.add_metric(labels, value)
        return family

    def summary(self, values: Mapping[tuple[str, ...], tuple[int, float]]) -> SummaryMetricFamily:
        """Counts and sums of observations by label values; without quantiles."""
        family = SummaryMetricFamily(self.name, self.help, labels=self.labels)
        for labels, (count, total) in values.items():
            self._check(labels)
            family.add_metric(labels, count, total)
        return family

    def _check(self, labels: Sequence[str]) -> None:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not values {labels}")


def table(metrics: Iterable[Metric]) -> str:
    """A table of metrics in Markdown, for the reference pages."""
    rows = [f"| `{metric.name}{_in_braces(metric.labels)}` | {metric.kind} | {metric.help} |" for metric in metrics]
    return "\n".join(["| metric | kind | what it is |", "|---|---|---|", *rows])


def _in_braces(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""
