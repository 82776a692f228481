"""What the PAGE says of metrics is what is exported."""

from __future__ import annotations

from pathlib import Path

from protofed.deploy.metrics_table import BEGIN, END, tables

PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")


def test_every_metric_is_in_the_tables_and_nothing_else() -> None:
    assert PAGE.count(BEGIN) == PAGE.count(END) == 1, "paste: python -m protofed.deploy.metrics_table"
    written = BEGIN + PAGE.partition(BEGIN)[2].partition(END)[0] + END
    assert written == tables(), "print them again: python -m protofed.deploy.metrics_table"
