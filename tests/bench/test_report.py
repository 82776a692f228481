"""What `make bench` says of measurements: goals, the table, JSON that a later run is compared with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench import rounds
from tests.bench.report import Row, change, read, table, write


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (Row("of its figure", 0.3, at_most=0.3), True),
        (Row("of its figure", 0.31, at_most=0.3), False),
        (Row("of its ratio, whatever its figure", 9.0, ratio=1.4, at_most=1.5), True),
        (Row("of its ratio, whatever its figure", 0.1, ratio=1.6, at_most=1.5), False),
        (Row("at least", 9.0, ratio=3.9, at_least=4.0), False),
        (Row("no goal", 1.0), None),
        (Row("not measured", None, at_most=1.0), None),
    ],
)
def test_a_goal_is_of_the_ratio_and_else_of_the_figure(row: Row, reached: bool | None) -> None:
    assert row.reached is reached


def test_rows_that_were_written_are_compared_by_name(tmp_path: Path) -> None:
    then = [Row("a", 2.0, "s", ratio=1.5), Row("b", 4.0, "MB"), Row("gone", 1.0), Row("c", None, note="not installed")]
    write(tmp_path / "made" / "kept.json", then, {"load": [1.0]})
    earlier = read(tmp_path / "made" / "kept.json")
    assert list(earlier.values()) == then
    assert change(Row("a", 9.0, "s", ratio=3.0), earlier["a"]) == 2.0, "ratios of one run are compared, not seconds"
    assert change(Row("b", 2.0, "MB"), earlier["b"]) == 0.5
    assert change(Row("c", 1.0), earlier["c"]) is None
    assert change(Row("new", 1.0), earlier.get("new")) is None


def test_a_field_of_another_version_does_not_hinder_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(json.dumps({"rows": [{"what": "a", "figure": 1.0, "colour": "red"}]}))
    assert read(tmp_path / "kept.json") == {"a": Row("a", 1.0)}


def test_the_table_shows_goals_missed_and_rows_not_measured() -> None:
    rows = [
        Row("round", 2.0, "s", 1.0, "floor", 2.0, at_most=1.5),
        Row("peer", None, at_least=4.0, note="not installed: make bench-peers"),
        Row("memory", 1234.0, "MB", at_most=2000.0),
    ]
    shown = io.StringIO()
    Console(file=shown, width=160).print(table(rows, "all", {"round": Row("round", 1.0, ratio=1.0)}))
    missed, absent, reached = (line for line in shown.getvalue().splitlines() if "│" in line and "what" not in line)
    assert "floor 1 s" in missed
    assert "≤ 1.5 MISSED" in missed
    assert missed.rstrip(" │").endswith(" 2")
    assert "not installed: make bench-peers" in absent
    assert "MISSED" not in absent
    assert "1,234 MB" in reached
    assert "≤ 2,000 reached" in reached


def test_the_measurement_is_the_last_line_that_is_printed() -> None:
    assert rounds.parsed('a library greets\n{"seconds": [1.0]}\n') == {"seconds": [1.0]}
    with pytest.raises(json.JSONDecodeError):
        rounds.parsed("Traceback\n")


def test_ours_stands_beside_the_floor_and_a_peer_beside_ours() -> None:
    found: dict[str, list[rounds.Measurement]] = {
        "ours": [{"seconds": [2.0, 4.0, 3.0]}, {"seconds": [5.0]}, {"seconds": [3.0]}],
        "floor": [{"seconds": [1.0]}, {"seconds": [5.0]}, {"seconds": [2.0]}],
        "NVFlare 2.9": [{"seconds": [9.0], "peak_mb": 1.0}, {"seconds": [5.0], "peak_mb": 3.0}, {"problem": "failed"}],
    }
    ours, nvflare, flower = rounds._beside(rounds.LARGE, found, at_most=1.5)
    assert (ours.figure, ours.beside, ours.ratio, ours.reached) == (3.0, 2.0, 1.5, True), "median of the turns' ratios"
    assert nvflare.figure is None
    assert nvflare.note == "failed"
    assert flower.figure is None
    assert flower.note == "not installed: make bench-peers"
    found["NVFlare 2.9"][2] = {"seconds": [12.0], "peak_mb": 2.0}
    _, nvflare, _ = rounds._beside(rounds.LARGE, found)
    assert (nvflare.figure, nvflare.beside, nvflare.ratio, nvflare.reached) == (9.0, 3.0, 3.0, False)


def test_the_kept_rows_can_be_compared_with() -> None:
    kept = read(Path(__file__).with_name("kept.json"))
    assert all(row.what == what and row.figure for what, row in kept.items())
    assert not any(row.details for row in kept.values()), "no comparison reads the single times"
    assert change(kept["round, 45 MB × 8"], kept["round, 45 MB × 8"]) == 1.0
