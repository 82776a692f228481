"""Trackers know what the ledger says: once each, after restarts, after a rollback, and after they were away."""

from __future__ import annotations

import errno
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.deploy.tracking import follower as tracking
from protofed.deploy.tracking.follower import (
    Follower,
    RoundMetrics,
    TrackedRun,
    complete_rounds,
    round_metrics,
    sync_run,
    trackers,
)
from protofed.deploy.tracking.tensorboard import EventFiles
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import RoundOutcome

RUN = "trial"
RECIPE = {
    "name": RUN,
    "rounds": 9,
    "method": {"name": "fednh", "options": {"prototype_momentum": 0.9}},
    "plan": {"lr": 0.05},
}
SITES = ("ann", "bob", "eve")
Seen = Mapping[str, list[tuple[int, float]]]


class RunLedger:
    """A ledger with a run in it, written by hand."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'ledger.sqlite'}"
        self.ledger = Ledger(self.url)
        self.ledger.begin_run(RUN, Digest("f" * 64), json.dumps(RECIPE))
        self._nonces = 0

    def attempt(self, number: int, kind: TaskKind = TaskKind.FIT) -> tuple[int, list[TaskRow]]:
        """An open attempt at a round, with its invitations."""
        attempt = 1 + self.ledger.newest_attempt(RUN, number)
        self._nonces += 1
        base = Digest("b" * 64)
        tasks = [
            TaskRow(f"{self._nonces}-{site}", RUN, number, attempt, SiteId(site), kind, base, 2_000_000)
            for site in SITES
        ]
        self.ledger.open_round(RoundRow(RUN, number, attempt, 3, 2), tasks)
        return attempt, tasks

    def publish(self, number: int, accuracy: float = 0.5, *, scored: bool = True) -> None:
        """A round in which one site was late; and scores that two sites gave."""
        attempt, tasks = self.attempt(number)
        for task in tasks[:2]:
            self.ledger.judge(UpdateRow(task, Verdict.ACCEPTED, "", Digest("u" * 64), 500_000, {}, None))
        digest = Digest(f"{number:032}{attempt:032}")
        self.ledger.publish(RUN, number, attempt, digest, complete=False, statistics={"prototype_shift": accuracy / 10})
        if scored:
            self.score(number, attempt, accuracy)

    def score(self, number: int, attempt: int, accuracy: float) -> None:
        self._nonces += 1
        for site, by in (("ann", 0.0), ("bob", 0.2)):
            task_id = f"{self._nonces}-{site}-score"
            task = TaskRow(task_id, RUN, number, attempt, SiteId(site), TaskKind.SCORE, Digest("b" * 64), 2_000_000)
            self.ledger.invite([task])
            scores = {"personal.accuracy": accuracy + by, "personal.ece": by, "personal.recall.3": accuracy}
            self.ledger.add_scores(task, scores)
        self.ledger.mark_scored(RUN, number)

    def row(self) -> RunRow:
        row = self.ledger.run(RUN)
        assert row is not None
        return row


@pytest.fixture
def run_ledger(tmp_path: Path) -> Iterator[RunLedger]:
    here = RunLedger(tmp_path)
    yield here
    here.ledger.close()


def test_a_page_is_what_the_ledger_says(run_ledger: RunLedger) -> None:
    run_ledger.publish(0)
    attempt, _ = run_ledger.attempt(1)
    run_ledger.ledger.abandon(RUN, 1, attempt, "no quorum")
    run_ledger.publish(1, 0.5)
    rows = run_ledger.ledger.rounds(RUN)
    last = rows[-1]
    found = round_metrics(run_ledger.ledger, last, rows)
    assert last.closed_at is not None
    assert (found.round, found.attempt, found.at) == (1, 2, last.closed_at)
    assert found.numbers == pytest.approx(
        {
            "round/seconds": last.closed_at - last.opened_at,
            "round/attempts": 2.0,
            "round/degraded": 1.0,
            "sites/invited": 3.0,
            "sites/reported": 2.0,
            "sites/rejected": 0.0,
            "sites/late": 1.0,
            "sites/failed": 0.0,
            "transfer/received_mb": 1.0,
            "transfer/sent_mb": 12.0,
            "statistics/prototype_shift": 0.05,
            "scores/personal.accuracy/mean": 0.6,
            "scores/personal.accuracy/std": 0.1,
            "scores/personal.accuracy/worst": 0.5,
            "scores/personal.ece/mean": 0.1,
            "scores/personal.ece/std": 0.1,
            "scores/personal.ece/worst": 0.2,
            "classes/personal.recall.3/mean": 0.5,
            "classes/personal.recall.3/std": 0.0,
            "classes/personal.recall.3/worst": 0.5,
        }
    )


def test_a_round_is_told_when_nothing_more_will_be_known_of_it(run_ledger: RunLedger) -> None:
    def told() -> list[int]:
        return [
            row.round for row in complete_rounds(run_ledger.ledger.rounds(RUN), run_ledger.row().ended_at is not None)
        ]

    assert told() == []
    run_ledger.attempt(0)
    assert told() == []
    run_ledger.publish(0, scored=False)
    assert told() == []  # perhaps it is being scored
    run_ledger.attempt(1)
    assert told() == [0]
    run_ledger.publish(1, scored=True)
    assert told() == [0, 1]
    run_ledger.publish(2, scored=False)
    assert told() == [0, 1]
    run_ledger.ledger.end_run(RUN, "enough", RoundOutcome.ABORTED)
    assert told() == [0, 1, 2]


@pytest.mark.parametrize("told", [TrackedRun(), TrackedRun((1, 1, 3, 1)), TrackedRun((2,), "failed: disk")])
def test_what_was_told_is_kept_small_and_whole(told: TrackedRun) -> None:
    assert TrackedRun.unpack(json.loads(json.dumps(told.pack()))) == told
    assert len(json.dumps(TrackedRun((1,) * 100_000).pack())) < 100


def read(folder: Path) -> tuple[Seen, dict[str, list[tuple[int, str]]]]:
    """What TensorBoard shows of a folder: scalars and texts."""
    processing = "tensorboard.backend.event_processing"
    event_accumulator = import_module(f"{processing}.event_accumulator")
    plugin_event_accumulator = import_module(f"{processing}.plugin_event_accumulator")
    make_ndarray = import_module("tensorboard.util.tensor_util").make_ndarray
    reader = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    scalars = {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    found = plugin_event_accumulator.EventAccumulator(str(folder), size_guidance={"tensors": 0})  # takes texts, too
    found.Reload()
    shown: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, list[tuple[int, str]]] = {}
    for tag in found.Tags()["tensors"]:
        if tag.endswith("/text_summary"):
            told = [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)]
            texts[tag.removesuffix("/text_summary")] = told
        elif points := found.Tensors(tag):
            shown[tag] = [(one.step, float(make_ndarray(one.tensor_proto))) for one in points]
    assert shown == {tag: points for tag, points in scalars.items() if points}  # TensorBoard's own pages are made of it
    return scalars, texts


def by_the_ledger(run_ledger: RunLedger) -> Seen:
    rows, shown = run_ledger.ledger.rounds(RUN), dict[str, list[tuple[int, float]]]()
    for row in complete_rounds(rows, run_ledger.row().ended_at is not None):
        for tag, number in round_metrics(run_ledger.ledger, row, rows).numbers.items():
            shown.setdefault(tag, []).append((row.round, number))
    return shown


def expect_same(seen: Seen, wanted: Seen) -> None:
    assert seen.keys() == wanted.keys()
    for tag, points in wanted.items():
        assert [step for step, _ in seen[tag]] == [step for step, _ in points], tag
        assert [value for _, value in seen[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag


def follow(run_ledger: RunLedger, tracker: tracking.Tracker) -> int:
    """As a process that begins now, tells what there is to tell, and ends."""
    with closing(LedgerReader(run_ledger.url)) as records, tracker.open(run_ledger.row()) as book:
        return sync_run(records, run_ledger.row(), book)


def test_event_files_are_the_ledgers_numbers_after_restarts_too(run_ledger: RunLedger, tmp_path: Path) -> None:
    tracker = EventFiles(tmp_path / "tb")
    for number in range(4):
        run_ledger.publish(number, number / 10)
        assert follow(run_ledger, tracker) == 1
        assert follow(run_ledger, tracker) == 0
    run_ledger.ledger.end_run(RUN, "completed", RoundOutcome.COMPLETED)
    follow(run_ledger, tracker)
    scalars, texts = read(tmp_path / "tb" / RUN)
    expect_same(scalars, by_the_ledger(run_ledger))
    ((step, recipe),) = texts["recipe"]
    assert (step, json.loads(recipe)) == (0, RECIPE)
    assert texts["outcome"] == [(3, "completed")]


@pytest.mark.parametrize("lost", ["protofed.json", "events.out.tfevents.0000000002.protofed"])
def test_a_process_killed_between_event_and_note_tells_no_round_twice(
    lost: str, run_ledger: RunLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, folder = EventFiles(tmp_path / "tb"), tmp_path / "tb" / RUN
    run_ledger.publish(0)
    follow(run_ledger, tracker)
    run_ledger.publish(1)
    note = (folder / "protofed.json").read_bytes()
    follow(run_ledger, tracker)
    if lost == "protofed.json":
        (folder / lost).write_bytes(note)  # the page is there, and nobody knows
    else:
        (folder / "protofed.json").write_bytes(note)
        (folder / lost).write_bytes((folder / lost).read_bytes()[:-40])  # half of it is there
    assert follow(run_ledger, tracker) == 1
    scalars, _ = read(folder)
    expect_same(scalars, by_the_ledger(run_ledger))


def test_a_folder_without_its_note_is_told_anew(run_ledger: RunLedger, tmp_path: Path) -> None:
    tracker, folder = EventFiles(tmp_path / "tb"), tmp_path / "tb" / RUN
    run_ledger.publish(0)
    run_ledger.publish(1)
    follow(run_ledger, tracker)
    (folder / "protofed.json").unlink()
    assert follow(run_ledger, tracker) == 2
    scalars, texts = read(folder)
    expect_same(scalars, by_the_ledger(run_ledger))
    assert len(texts["recipe"]) == 1


def test_a_rollback_takes_rounds_back(run_ledger: RunLedger, tmp_path: Path) -> None:
    tracker, folder = EventFiles(tmp_path / "tb"), tmp_path / "tb" / RUN
    for number in range(4):
        run_ledger.publish(number, number / 10)
    run_ledger.ledger.end_run(RUN, "completed", RoundOutcome.COMPLETED)
    follow(run_ledger, tracker)
    run_ledger.ledger.roll_back(RUN, 1)
    assert follow(run_ledger, tracker) == 0
    scalars, texts = read(folder)
    assert [step for step, _ in scalars["round/seconds"]] == [0, 1]
    assert texts["outcome"] == [(1, "goes on after round 1")]
    run_ledger.publish(2, 0.9)
    assert follow(run_ledger, tracker) == 1
    scalars, _ = read(folder)
    expect_same(scalars, by_the_ledger(run_ledger))
    assert dict(scalars["scores/personal.accuracy/worst"])[2] == pytest.approx(0.9)


def test_a_round_that_is_not_scored_yet_is_not_taken_back_by_a_rollback_to_it(
    run_ledger: RunLedger, tmp_path: Path
) -> None:
    tracker = EventFiles(tmp_path / "tb")
    for number in range(3):
        run_ledger.publish(number, scored=False)
    assert follow(run_ledger, tracker) == 2
    run_ledger.ledger.roll_back(RUN, 1)
    assert follow(run_ledger, tracker) == 0
    scalars, _ = read(tmp_path / "tb" / RUN)
    assert [step for step, _ in scalars["round/seconds"]] == [0, 1]


def test_two_do_not_write_in_one_folder_nor_two_runs_of_a_name(run_ledger: RunLedger, tmp_path: Path) -> None:
    tracker = EventFiles(tmp_path / "tb")
    with (
        tracker.open(run_ledger.row()),
        pytest.raises(StateError, match="in use"),
        EventFiles(tmp_path / "tb").open(run_ledger.row()),
    ):
        pass
    run_ledger.publish(0)
    follow(run_ledger, EventFiles(tmp_path / "tb"))
    (tmp_path / "other").mkdir()
    other = RunLedger(tmp_path / "other")
    other.publish(0)
    with pytest.raises(StateError, match="another run of this name; give another folder"):
        follow(other, EventFiles(tmp_path / "tb"))
    other.ledger.close()


class Away:
    """A tracker that is away for some time."""

    name = "away"

    def __init__(self, failures: int) -> None:
        self.failures, self.rounds = failures, list[RoundMetrics]()
        self.tracked, self.ended = TrackedRun(), threading.Event()

    @contextmanager
    def open(self, row: RunRow) -> Iterator[Away]:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        yield self

    def roll_back(self, rounds: int) -> None:
        raise AssertionError

    def write(self, metrics: RoundMetrics) -> None:
        self.rounds.append(metrics)
        self.tracked = TrackedRun((*self.tracked.attempts, metrics.attempt), self.tracked.outcome)

    def end(self, row: RunRow) -> None:
        self.tracked = TrackedRun(self.tracked.attempts, "ended")
        self.ended.set()


def test_a_tracker_that_was_away_is_told_what_it_missed(run_ledger: RunLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "RETRY_S", 0.01)
    tracker = Away(3)
    run_ledger.publish(0)
    run_ledger.publish(1)
    with capture_logs() as logs:
        follower = Follower(run_ledger.url, tracker, 0.01)
        follower.start()
        run_ledger.publish(2)
        run_ledger.ledger.end_run(RUN, "enough", RoundOutcome.FAILED)
        assert tracker.ended.wait(20)
        follower.stop()
    assert not follower.is_alive()
    assert [found.round for found in tracker.rounds] == [0, 1, 2]
    assert [entry["event"] for entry in logs] == [*["a tracker failed; trying again"] * 3, "a tracker has caught up"]
    assert logs[0]["why"] == "ConnectionError: no route to host"


def test_event_files_on_a_disk_that_was_full_are_told_what_they_miss(
    run_ledger: RunLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "RETRY_S", 0.01)
    failed = threading.Event()
    record_writer = import_module("tensorboardX.record_writer")
    base: Any = record_writer.RecordWriter

    class Full(base):  # type: ignore[misc]
        """Flushing and closing fail, as on a full disk."""

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "no space left on device")

        def close(self) -> None:
            super().close()
            failed.set()
            self.flush()

    run_ledger.publish(0)
    with monkeypatch.context() as full:
        full.setattr(record_writer, "RecordWriter", Full)
        follower = Follower(run_ledger.url, EventFiles(tmp_path), 0.01)
        follower.start()
        assert failed.wait(20)
    run_ledger.ledger.end_run(RUN, "enough", RoundOutcome.FAILED)
    follower.stop()
    assert not follower.is_alive()
    seen, texts = read(tmp_path / RUN)
    expect_same(seen, by_the_ledger(run_ledger))
    assert "outcome" in texts


def test_the_end_tells_the_last_rounds_or_says_that_they_are_missing(run_ledger: RunLedger) -> None:
    tracker = Away(0)
    follower = Follower(run_ledger.url, tracker, 3600.0)
    follower.start()
    run_ledger.publish(0)
    follower.stop()
    assert [found.round for found in tracker.rounds] == [0]
    with capture_logs() as logs:
        absent = Follower(run_ledger.url, Away(99), 3600.0)
        absent.start()
        absent.stop()
    assert [entry["event"] for entry in logs] == ["a tracker lacks the newest rounds; `protofed tracking` adds them"]


def test_a_process_that_goes_on_writes_one_file_and_a_run_that_waits_has_none(
    run_ledger: RunLedger, tmp_path: Path
) -> None:
    follower = Follower(run_ledger.url, EventFiles(tmp_path / "tb"), 3600.0)
    follower._poll(last=False)
    assert not (tmp_path / "tb").exists()
    for number in range(3):
        run_ledger.publish(number)
        follower._poll(last=False)
    run_ledger.ledger.end_run(RUN, "enough", RoundOutcome.COMPLETED)
    follower._poll(last=False)
    assert len(list((tmp_path / "tb" / RUN).glob("events*"))) == 1
    scalars, _ = read(tmp_path / "tb" / RUN)
    expect_same(scalars, by_the_ledger(run_ledger))
    with EventFiles(tmp_path / "tb").open(run_ledger.row()):
        pass  # nobody holds it any more


def test_a_run_that_has_ended_is_looked_at_once(run_ledger: RunLedger) -> None:
    tracker = Away(0)
    follower = Follower(run_ledger.url, tracker, 3600.0)
    run_ledger.publish(0)
    run_ledger.ledger.end_run(RUN, "enough", RoundOutcome.FAILED)
    follower._poll(last=False)
    tracker.failures = 1
    follower._poll(last=False)
    assert tracker.failures == 1
    run_ledger.ledger.roll_back(RUN, 0)
    follower._poll(last=False)
    assert tracker.failures == 0


@pytest.mark.parametrize(
    ("asked", "module"), [({"tensorboard": Path("x")}, "tensorboardX"), ({"mlflow": "http://ml"}, "mlflow")]
)
def test_what_is_not_installed_is_named_with_its_remedy(
    asked: dict[str, Any], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(tracking, "find_spec", lambda name: None if name == module else found(name))
    (extra,) = asked
    with pytest.raises(ConfigError, match=rf"{module} is not installed: .*\.whl\[{extra}\]'"):
        trackers(**{"tensorboard": None, "mlflow": None, **asked})


def test_only_what_was_asked_for_is_told() -> None:
    assert trackers(None, None) == []
    assert "tensorboard" in [one.name for one in trackers(Path("x"), None)]
