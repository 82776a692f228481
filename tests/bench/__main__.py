"""Measurements: `make bench`. Ratios of one run, medians over repetitions that take turns; machines are noisy.

`python -m tests.bench --only rounds --json FILE --against EARLIER`: some groups of rows, written to a
file and compared with those of an earlier run.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.bench import report
from tests.bench.report import Row

# A group of rows and its module in this folder, imported when the group is measured. A new one needs a line here.
GROUPS = {
    "training": "training",
    "feeding": "feeding",
    "server-step": "class_models",
    "robust": "robust_rules",
    "simulation": "simulation",
    "secure-aggregation": "secure_aggregation",
    "rounds": "rounds",
    "start": "start",
    "sites": "sites",
    "pages": "pages",
}


def main() -> None:
    """Measure, print the table, write it as JSON."""
    given = _arguments()
    earlier = report.read(given.against) if given.against else None
    console, rows = Console(width=160), list[Row]()
    for name in given.only or GROUPS:
        for row in _rows(name):
            rows.append(row)
            # Of a run of half an hour, each row as it comes; written, so that an interrupted run leaves what it has.
            console.print(f"{row.what}: {row.figure} {row.unit} {row.note}", highlight=False, markup=False)
            report.write(given.json, rows, machine())
    console.print(report.table(rows, f"medians; ratios of one run; load {os.getloadavg()[0]:.1f}", earlier))


def _rows(group: str) -> Iterator[Row]:
    rows: Iterator[Row] = import_module(f"tests.bench.{GROUPS[group]}").rows()
    return rows


def machine() -> dict[str, Any]:
    """Where it is measured, and how busy that is."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": os.getloadavg(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=GROUPS, help="a group of rows; may be repeated")
    parser.add_argument("--json", type=Path, default=Path(".bench/bench.json"), help="written after every row")
    parser.add_argument("--against", type=Path, help="JSON of an earlier run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
