"""Parts under a deadline, and what the report says of those that were started, failed, or never reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.gpu.plan import Part, Proof, at_most, carry_out, judged, skipped
from tests.gpu.report import JSON, MARKDOWN, Finding, Found, PartResult, Report, Status, Table

GOOD = Finding("it is there", "yes", "yes")


class Clock:
    """Seconds that pass only when a part says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def part(name: str, clock: Clock, *found: Found, takes: float = 1.0, needs: float = 1.0, error: str = "") -> Part:
    """A part that takes so long for each finding."""

    def work(proof: Proof) -> Iterator[Found]:
        for one in found:
            clock.now += takes
            yield one
        if error:
            raise RuntimeError(error)

    return Part(name, needs, work)


def carried_out(
    clock: Clock, *parts: Part, seconds: float = 60.0, written: Callable[[PartResult], None] = lambda _: None
) -> Report:
    """The report of these parts, which have so long."""
    report = Report("GPU", {"device": "none"}, "now", [PartResult(part.name) for part in parts])
    proof = Proof(torch.device("cpu"), Path(), deadline=clock.now + seconds, clock=clock)
    carry_out(parts, proof, report, written)
    return report


def statuses(report: Report) -> list[Status]:
    """Of the parts."""
    return [part.status for part in report.parts]


def test_what_does_not_fit_is_not_started_and_a_shorter_part_still_is() -> None:
    clock = Clock()
    long, longer = part("long", clock, GOOD, takes=50), part("longer", clock, GOOD, needs=20)
    report = carried_out(clock, long, longer, part("short", clock, GOOD, needs=5))
    assert statuses(report) == [Status.PASSED, Status.NOT_REACHED, Status.PASSED]
    assert report.parts[1].findings == {}
    assert report.seconds == 51
    assert not report.failed


def test_an_error_fails_its_part_alone() -> None:
    clock = Clock()
    report = carried_out(clock, part("one", clock, GOOD, error="no\nkernel"), part("two", clock, GOOD))
    assert statuses(report) == [Status.FAILED, Status.PASSED]
    assert report.parts[0].findings[GOOD.what] is GOOD  # what was found before stays
    assert report.parts[0].findings["it runs"].found == "RuntimeError: no kernel"
    assert report.failed


def test_the_report_is_written_whenever_there_is_more_of_it() -> None:
    clock, seen = Clock(), list[tuple[Status, int]]()
    carried_out(
        clock,
        part("one", clock, GOOD, Finding("more", "1")),
        written=lambda result: seen.append((result.status, len(result.findings))),
    )
    assert seen == [(Status.BEGUN, 0), (Status.BEGUN, 1), (Status.BEGUN, 2), (Status.PASSED, 2)]


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([Status.PASSED, Status.SKIPPED], Status.PASSED),
        ([Status.SKIPPED, Status.SKIPPED], Status.SKIPPED),
        ([Status.PASSED, Status.MISSED], Status.MISSED),
        ([Status.MISSED, Status.BEGUN], Status.BEGUN),
        ([Status.BEGUN, Status.FAILED, Status.PASSED], Status.FAILED),
        ([], Status.FAILED),
    ],
)
def test_a_part_is_what_the_worst_of_its_findings_is(findings: list[Status], expected: Status) -> None:
    result = PartResult("part")
    for number, status in enumerate(findings):
        result.add(Finding(str(number), "", "", status))
    result.end()
    assert result.status is expected


def test_findings_are_judged() -> None:
    assert judged("count", 2, 2).status is Status.PASSED
    assert judged("count", 1, 2) == Finding("count", "1", "2", Status.FAILED)
    assert at_most("difference", 0.5, 1.0).status is Status.PASSED
    assert at_most("difference", 1.5, 1.0).status is Status.FAILED
    assert at_most("difference", float("nan"), 1.0).status is Status.FAILED
    assert skipped("NVML", "absent").status is Status.SKIPPED


def report(kind: str = "GPU") -> Report:
    """One of each: done, started, and not reached."""
    done, started = PartResult("memory", Status.PASSED, 3.25), PartResult("learning", Status.BEGUN)
    done.add(Finding("size", "4 | 8", "< 16", numbers={"size": 4.0}))
    started.add(Finding("rounds", "10 of 200", "200", Status.BEGUN))
    started.add(Finding("rounds", "20 of 200", "200", Status.BEGUN))
    started.add(Table("Scores", ("", "GM"), [("ours", "12.3")]))
    return Report(kind, {"device": "H100", "PyTorch": "2.11"}, "2026", [done, started, PartResult("bench")], 61.0)


def test_both_files_say_all_that_there_is(tmp_path: Path) -> None:
    report().write(tmp_path / "out")
    report().write(tmp_path / "out")  # over an earlier one
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [JSON, MARKDOWN]
    said = json.loads((tmp_path / "out" / JSON).read_text(encoding="utf-8"))
    assert (said["kind"], said["machine"]["device"], said["seconds"]) == ("GPU", "H100", 61.0)
    memory, learning, bench = said["parts"]
    assert (memory["status"], memory["seconds"], memory["findings"][0]["numbers"]) == ("passed", 3.2, {"size": 4.0})
    assert [finding["found"] for finding in learning["findings"]] == ["20 of 200"]  # the later one of two
    assert learning["tables"][0]["rows"] == [["ours", "12.3"]]
    assert (bench["status"], bench["findings"]) == ("not reached", [])


def test_the_table_names_the_machine_and_every_part() -> None:
    lines = report().as_markdown().splitlines()
    assert lines[0] == "**GPU**: device H100, PyTorch 2.11. 2026, 61 s."
    assert "| memory | size | 4 \\| 8 | < 16 | passed |" in lines
    assert "| learning | rounds | 20 of 200 | 200 | started, not ended |" in lines
    assert "| bench |  |  |  | not reached |" in lines
    assert lines[-3:] == ["|  | GM |", "| --- | --- |", "| ours | 12.3 |"]
    assert not any("proves nothing" in line for line in lines)


def test_a_rehearsal_says_that_it_proves_nothing() -> None:
    assert "proves nothing about a GPU" in report("CPU rehearsal").as_markdown()
