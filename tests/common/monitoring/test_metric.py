"""Metrics as data."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from protofed.common.monitoring.metric import Metric, table

FREE = Metric("protofed_free_bytes", "gauge", ("site",), "How much room is left.")
SEEN = Metric("protofed_seen_total", "counter", (), "How often it was seen.")


def test_values_are_told_by_their_labels() -> None:
    family = FREE.family({("ann",): 1.5, ("bob",): 2.0})
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("protofed_free_bytes", {"site": "ann"}, 1.5),
        ("protofed_free_bytes", {"site": "bob"}, 2.0),
    ]
    assert (family.type, family.documentation) == ("gauge", "How much room is left.")


def test_a_counter_that_is_read_has_its_name_as_it_is_written_here() -> None:
    assert [sample.name for sample in SEEN.family({(): 3}).samples] == ["protofed_seen_total"]


def test_a_counter_that_counts_is_one_series() -> None:
    registry = CollectorRegistry()
    SEEN.counter(registry).inc(2)
    found = [(sample.name, sample.value) for family in registry.collect() for sample in family.samples]
    assert found == [("protofed_seen_total", 2.0)]


def test_a_histogram_has_its_buckets() -> None:
    registry = CollectorRegistry()
    Metric("protofed_s", "histogram", ("phase",), "Time.").histogram(registry, (1, 10)).labels("fit").observe(5)
    counts = {
        limit: registry.get_sample_value("protofed_s_bucket", {"phase": "fit", "le": limit})
        for limit in ("1.0", "10.0")
    }
    assert counts == {"1.0": 0, "10.0": 1}


def test_a_summary_is_counts_and_sums() -> None:
    family = Metric("protofed_step_seconds", "summary", ("site",), "Time.").summary({("ann",): (3, 1.5)})
    assert family.type == "summary"
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("protofed_step_seconds_count", {"site": "ann"}, 3),
        ("protofed_step_seconds_sum", {"site": "ann"}, 1.5),
    ]


def test_the_table_has_a_row_for_each() -> None:
    assert table((FREE, SEEN)).splitlines()[2:] == [
        "| `protofed_free_bytes{site}` | gauge | How much room is left. |",
        "| `protofed_seen_total` | counter | How often it was seen. |",
    ]


@pytest.mark.parametrize("labels", [("ann", "bob"), ()])
def test_labels_that_the_metric_does_not_have_are_told_at_once(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="has the labels"):
        FREE.family({labels: 1.0})
