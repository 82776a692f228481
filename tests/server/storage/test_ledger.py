"""One suite over all ledgers: in memory, and those that outlive their process: a file, PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from protofed.common.codec import digest
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Receipt, SumOf, TaskKind, Verdict
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, TaskRow, UpdateRow
from protofed.server.verdicts import Rejection, RejectionCode, RoundOutcome

BASE, STATE = digest(b"base"), digest(b"state")


@pytest.fixture(params=["memory", "file", "postgresql"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    urls = {"memory": "sqlite://", "file": f"sqlite:///{tmp_path / 'ledger.sqlite'}"}
    ledger = Ledger(urls.get(request.param) or str(request.getfixturevalue("postgres_url")))
    yield ledger
    ledger.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


def invited(site: str, round: int = 1, attempt: int = 1, run: str = "run", kind: TaskKind = TaskKind.FIT) -> TaskRow:
    return TaskRow(f"{run}-{round}-{attempt}-{site}-{kind}", run, round, attempt, site, kind, BASE, 4)


def opened(ledger: Ledger, *sites: str, round: int = 1, attempt: int = 1, run: str = "run") -> list[TaskRow]:
    tasks = [invited(site, round, attempt, run) for site in sites]
    ledger.open_round(RoundRow(run, round, attempt, size=len(sites), quorum=1), tasks)
    return tasks


def update(task: TaskRow, data: bytes = b"u", verdict: Verdict = Verdict.ACCEPTED, reason: str = "") -> UpdateRow:
    return UpdateRow(task, verdict, reason, digest(data), len(data), {"loss": 0.5}, 12.0)


def task_statuses(ledger: Ledger, round: int = 1) -> dict[str, str]:
    return {task.task_id: task.task_status for task in ledger.tasks("run", round)}


# Sites and runs


def test_sites_are_remembered_with_their_newest_roles(ledger: Ledger) -> None:
    ledger.enroll("bob", ["trainer"])
    ledger.enroll("ann", ["trainer", "evaluator"])
    ledger.enroll("bob", ["evaluator"])
    assert ledger.sites() == {"ann": ["trainer", "evaluator"], "bob": ["evaluator"]}
    assert list(ledger.sites()) == ["ann", "bob"]


def test_a_run_is_written_down_once(ledger: Ledger) -> None:
    assert ledger.run("run") is None
    ledger.begin_run("run", STATE, "{}")
    row = ledger.run("run")
    assert row is not None
    assert (row.run, row.fingerprint, row.recipe, row.ended_at, row.outcome) == ("run", STATE, "{}", None, None)
    with pytest.raises(StateError):
        ledger.begin_run("run", BASE, "{}")
    assert ledger.run("run") == row


@pytest.mark.parametrize("failed", [False, True])
def test_a_run_ends_with_its_reason(ledger: Ledger, failed: bool) -> None:
    for run in ("run", "other"):
        ledger.begin_run(run, STATE, "{}")
    ledger.end_run("run", "why", RoundOutcome.FAILED if failed else RoundOutcome.ABORTED)
    row, other = ledger.run("run"), ledger.run("other")
    assert row is not None
    assert other is not None
    assert (row.reason, row.failed) == ("why", failed)
    assert row.ended_at is not None
    assert row.ended_at >= row.began_at
    assert other.ended_at is None


# Rounds


def test_an_opened_round_has_its_invitations_in_site_order(ledger: Ledger) -> None:
    tasks = opened(ledger, "cyd", "ann", "bob")
    assert ledger.tasks("run", 1) == sorted(tasks, key=lambda task: task.site)
    assert ledger.tasks("run", 1, attempt=2) == []
    assert ledger.tasks("other", 1) == []
    (row,) = ledger.rounds("run")
    assert (row.round, row.attempt, row.size, row.quorum) == (1, 1, 3, 1)
    assert (row.state, row.complete, row.abandoned, row.scored, row.closed_at) == (None, None, None, False, None)
    assert row.opened_at > 0


def test_a_round_is_opened_whole_or_not_at_all(ledger: Ledger) -> None:
    twins = [invited("ann"), invited("ann")]
    with pytest.raises(StateError):
        ledger.open_round(RoundRow("run", 1, 1, 2, 1), twins)
    assert ledger.rounds("run") == []
    assert ledger.tasks("run", 1) == []
    opened(ledger, "ann")
    with pytest.raises(StateError):
        opened(ledger, "bob")
    assert [task.site for task in ledger.tasks("run", 1)] == ["ann"]


@pytest.mark.parametrize(("complete", "task_status"), [(True, "not-needed"), (False, "late")])
def test_publishing_closes_an_attempt_and_settles_the_silent_ones(
    ledger: Ledger, complete: bool, task_status: str
) -> None:
    ann, bob, cyd, dan = opened(ledger, "ann", "bob", "cyd", "dan")
    ledger.judge(update(ann))
    ledger.set_task_status(bob.task_id, "started")
    ledger.set_task_status(cyd.task_id, "failed", "disk")
    ledger.publish("run", 1, 1, STATE, complete=complete)
    assert task_statuses(ledger) == {
        ann.task_id: "reported",
        bob.task_id: task_status,
        cyd.task_id: "failed",
        dan.task_id: task_status,
    }
    (row,) = ledger.rounds("run")
    assert (row.state, row.complete, row.abandoned) == (STATE, complete, None)
    assert row.closed_at is not None


def test_abandoning_closes_one_attempt_only(ledger: Ledger) -> None:
    (first,), (second,) = opened(ledger, "ann"), opened(ledger, "ann", attempt=2)
    ledger.abandon("run", 1, 1, "too few")
    assert [(r.attempt, r.abandoned, r.state) for r in ledger.rounds("run")] == [(1, "too few", None), (2, None, None)]
    assert task_statuses(ledger) == {first.task_id: "late", second.task_id: "invited"}


def test_rounds_come_in_order(ledger: Ledger) -> None:
    for number, attempt in ((2, 1), (10, 1), (1, 2), (1, 1)):
        opened(ledger, "ann", round=number, attempt=attempt)
    opened(ledger, "ann", round=5, run="other")
    assert [(row.round, row.attempt) for row in ledger.rounds("run")] == [(1, 1), (1, 2), (2, 1), (10, 1)]


# Tasks


def test_a_fate_is_that_of_one_task(ledger: Ledger) -> None:
    ann, bob = opened(ledger, "ann", "bob")
    ledger.set_task_status(ann.task_id, "failed", "data")
    assert ledger.task(ann.task_id) == replace(ann, task_status="failed", reason="data")
    assert ledger.task(bob.task_id) == bob
    assert ledger.task("unknown") is None
    first = replace(invited("eva", round=0), kind=TaskKind.INITIALISE, base_digest=None, base_bytes=0)
    ledger.invite([first])
    assert ledger.task(first.task_id) == first
    assert [task.is_open for task in ledger.tasks("run", 1)] == [False, True]


@pytest.mark.parametrize("task_status", ["started", "failed"])
def test_an_update_that_stands_is_reported_whatever_is_said_later(ledger: Ledger, task_status: str) -> None:
    (ann,) = opened(ledger, "ann")
    ledger.judge(update(ann))
    ledger.set_task_status(ann.task_id, task_status)  # its promise was not heard: the journal was full
    assert task_statuses(ledger) == {ann.task_id: "reported"}


def test_marking_a_round_scored_settles_its_silent_scorers_and_nobody_else(ledger: Ledger) -> None:
    (fit,) = opened(ledger, "ann")
    (next_fit,) = opened(ledger, "ann", round=2)
    ledger.publish("run", 1, 1, STATE, complete=True)
    scorers = [invited(site, kind=TaskKind.SCORE) for site in ("ann", "bob")]
    ledger.invite(scorers)
    ledger.add_scores(scorers[0], {"accuracy": 0.5})
    ledger.mark_scored("run", 1)
    assert [row.scored for row in ledger.rounds("run")] == [True, False]
    assert task_statuses(ledger) == {
        fit.task_id: "not-needed",
        scorers[0].task_id: "reported",
        scorers[1].task_id: "late",
    }
    assert task_statuses(ledger, 2) == {next_fit.task_id: "invited"}


# Updates


def test_an_accepted_update_reports_its_task_and_its_receipt_is_kept(ledger: Ledger) -> None:
    (task,) = opened(ledger, "ann")
    assert ledger.accepted(task) is None
    receipt = ledger.judge(update(task))
    counted = ledger.accepted(task)
    assert counted is not None
    assert counted.receipt() == receipt == Receipt(Verdict.ACCEPTED, "", digest(b"u"), receipt.record_hash)
    assert (counted.metrics, counted.weight, counted.bytes) == ({"loss": 0.5}, 12.0, 1)
    reported = ledger.task(task.task_id)
    assert reported is not None
    assert reported.task_status == "reported"


@pytest.mark.parametrize("verdict", [Verdict.REFUSED, Verdict.LATE, Verdict.NOT_NEEDED])
def test_a_refused_update_is_kept_with_its_reason_and_counts_for_nothing(ledger: Ledger, verdict: Verdict) -> None:
    (task,) = opened(ledger, "ann")
    ledger.judge(update(task, verdict=verdict, reason="because"))
    ledger.judge(update(task, verdict=verdict, reason="again"))
    assert ledger.accepted(task) is None
    assert task_statuses(ledger) == {task.task_id: "invited"}
    rows = ledger.updates("run", 1)
    assert [(row.verdict, row.reason) for row in rows] == [(verdict, "because"), (verdict, "again")]


@pytest.mark.parametrize("again", [b"u", b"another"])
def test_a_nonce_has_one_accepted_update_whatever_is_inserted(ledger: Ledger, again: bytes) -> None:
    (task,) = opened(ledger, "ann")
    receipt = ledger.judge(update(task))
    if again == b"u":
        assert ledger.judge(update(task, again)) == receipt
    else:
        with pytest.raises(StateError, match="two updates for one invitation"):
            ledger.judge(update(task, again))
    ledger.judge(update(task, again, Verdict.REFUSED))
    counted = ledger.accepted(task)
    assert counted is not None
    assert counted.receipt() == receipt
    assert [row.verdict for row in ledger.updates("run", 1)] == [Verdict.ACCEPTED, Verdict.REFUSED]


def test_an_update_that_was_rejected_stays_so_when_it_comes_again(ledger: Ledger) -> None:
    (ann,) = opened(ledger, "ann")
    receipt = ledger.judge(update(ann))
    (row,) = ledger.updates("run", 1)
    ledger.reject(row, Rejection(RejectionCode.OUTLIER, "too far"))
    assert ledger.judge(update(ann)) == receipt
    assert list(task_statuses(ledger).values()) == ["rejected"]
    (row,) = ledger.updates("run", 1)
    assert row.rejected == "too far"


def test_updates_that_are_judged_together_are_all_recorded_or_none(ledger: Ledger) -> None:
    ann, bob, cyd = tasks = opened(ledger, "ann", "bob", "cyd")
    first = ledger.judge(update(bob))
    with pytest.raises(StateError, match="two updates for one invitation of bob"):
        ledger.judge_all([update(ann), update(bob, b"another")])
    assert ledger.accepted(ann) is None
    rows = [update(ann), update(bob), update(cyd, verdict=Verdict.REFUSED)]
    receipts = ledger.judge_all(rows)
    assert receipts == [row.receipt() for row in rows]
    assert receipts[1] == first
    assert sorted((row.task.site, row.verdict) for row in ledger.updates("run", 1)) == [
        ("ann", Verdict.ACCEPTED),
        ("bob", Verdict.ACCEPTED),
        ("cyd", Verdict.REFUSED),
    ]
    assert task_statuses(ledger) == dict(
        zip([task.task_id for task in tasks], ["reported", "reported", "invited"], strict=True)
    )


def test_of_many_inserts_at_once_one_counts(kept_url: str) -> None:
    ledger = Ledger(kept_url)
    (task,) = opened(ledger, "ann")

    def insert(number: int) -> bool:
        try:
            ledger.judge(update(task, b"%d" % number))
        except StateError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(insert, range(12))) == 1
    assert len(ledger.updates("run", 1)) == 1
    ledger.close()


def test_sizes_of_the_largest_models_are_kept(ledger: Ledger) -> None:
    largest = (1 << 53) - 1  # that an announcement may say
    tasks = [replace(invited(site), base_bytes=4 << 30) for site in ("ann", "bob")]
    ledger.open_round(RoundRow("run", 1, 1, size=2, quorum=1), tasks)
    ledger.judge(replace(update(tasks[0]), bytes=4 << 30))
    ledger.judge(replace(update(tasks[1], verdict=Verdict.REFUSED), bytes=largest))
    assert [row.bytes for row in ledger.updates("run")] == [4 << 30, largest]
    assert ledger.moved("run") == (4 << 30, 8 << 30)


def test_updates_come_in_site_order_whenever_they_came(ledger: Ledger) -> None:
    tasks = opened(ledger, "ann", "bob", "cyd")
    for task in (tasks[2], tasks[0], tasks[1]):
        ledger.judge(update(task))
    later = opened(ledger, "ann", attempt=2)[0]
    ledger.judge(update(later))
    assert [row.task.site for row in ledger.updates("run", 1, 1)] == ["ann", "bob", "cyd"]
    assert [row.task.task_id for row in ledger.updates("run", 1, 2)] == [later.task_id]
    assert len(ledger.updates("run", 1)) == 4
    assert ledger.updates("run", 2) == ledger.updates("other", 1) == []


def test_a_seal_speaks_for_the_whole_row() -> None:
    row = update(invited("ann"))
    changed = [
        replace(row, verdict=Verdict.REFUSED),
        replace(row, reason="x"),
        replace(row, digest=BASE),
        replace(row, task=replace(row.task, run="x")),
        replace(row, task=replace(row.task, site="x")),
        replace(row, task=replace(row.task, task_id="x")),
        replace(row, task=replace(row.task, round=2)),
    ]
    seals = [row.receipt().record_hash, *(other.receipt().record_hash for other in changed)]
    assert len(set(seals)) == len(seals)
    assert update(invited("ann")).receipt().record_hash == seals[0]


# Scores


def test_scores_are_kept_by_round_site_and_name(ledger: Ledger) -> None:
    tasks = [invited(site, number, kind=TaskKind.SCORE) for number in (1, 2) for site in ("bob", "ann")]
    ledger.invite(tasks)
    for number, task in enumerate(tasks):
        ledger.add_scores(task, {"accuracy": number / 4, "loss": 1.0})
    assert ledger.scores("run") == {
        1: {"ann": {"accuracy": 0.25, "loss": 1.0}, "bob": {"accuracy": 0.0, "loss": 1.0}},
        2: {"ann": {"accuracy": 0.75, "loss": 1.0}, "bob": {"accuracy": 0.5, "loss": 1.0}},
    }
    assert ledger.scores("other") == {}
    assert {task.task_status for task in ledger.tasks("run", 1)} == {"reported"}


def test_scores_are_reported_whole_or_not_at_all(ledger: Ledger) -> None:
    task = invited("ann", kind=TaskKind.SCORE)
    ledger.invite([task])
    ledger.add_scores(task, {"a": 1.0})
    with pytest.raises(StateError):
        ledger.add_scores(task, {"b": 2.0, "a": 3.0})
    none = invited("bob", kind=TaskKind.SCORE)
    ledger.invite([none])
    ledger.add_scores(none, {})  # is a report, too
    assert ledger.scores("run") == {1: {"ann": {"a": 1.0}}}
    assert task_statuses(ledger) == {task.task_id: "reported", none.task_id: "reported"}


# What blobs are needed for


def test_digests_are_old_or_needed(ledger: Ledger) -> None:
    states = [digest(b"state %d" % number) for number in range(5)]
    for number, state in enumerate(states):
        base = states[number - 1] if number else None
        task = replace(invited("ann", number), base_digest=base)
        ledger.open_round(RoundRow("run", number, 1, 1, 1), [task])
        ledger.judge(update(task, b"update %d" % number))
        ledger.publish("run", number, 1, state, complete=True)
    old, needed = ledger.referenced("run", since=3)
    assert needed == {states[2], states[3], states[4], digest(b"update 3"), digest(b"update 4")}
    assert old.keys() - needed == {states[0], states[1], digest(b"update 1"), digest(b"update 2")}
    opened(ledger, "ann", run="other")
    ledger.publish("other", 1, 1, states[0], complete=True)  # what another run ended with is needed
    old, needed = ledger.referenced("run", since=3)
    assert states[0] in needed


# Files


def filled(ledger: Ledger) -> None:
    ledger.enroll("ann", ["trainer"])
    ledger.begin_run("run", STATE, "{}")
    tasks = opened(ledger, "ann", "bob")
    ledger.judge(update(tasks[0]))
    ledger.publish("run", 1, 1, STATE, complete=False)
    score = invited("ann", kind=TaskKind.SCORE)
    ledger.invite([score])
    ledger.add_scores(score, {"accuracy": 0.5})
    ledger.mark_scored("run", 1)
    ledger.end_run("run", "completed", RoundOutcome.COMPLETED)


def everything(ledger: LedgerReader) -> tuple[object, ...]:
    run = ledger.run("run"), ledger.rounds("run"), ledger.tasks("run", 1), ledger.updates("run", 1)
    return *run, ledger.sites(), ledger.scores("run"), ledger.referenced("run", 0)


def test_a_reopened_ledger_has_everything(kept_url: str) -> None:
    ledger = Ledger(kept_url)
    filled(ledger)
    before = everything(ledger)
    ledger.close()
    again = Ledger(kept_url)
    assert everything(again) == before
    again.close()


def test_what_was_written_is_there_without_closing(url: str, tmp_path: Path) -> None:
    ledger = Ledger(url)
    with ledger._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert pragmas == ["wal", 2]
    filled(ledger)
    killed = tmp_path / "killed"
    killed.mkdir()
    for path in tmp_path.glob("ledger.sqlite*"):  # what a process leaves that is killed here
        (killed / path.name).write_bytes(path.read_bytes())
    after = Ledger(f"sqlite:///{killed / 'ledger.sqlite'}")
    assert everything(after) == everything(ledger)
    after.close()
    ledger.close()


def test_threads_share_a_ledger_in_memory() -> None:
    ledger, sites = Ledger(), [f"site-{number}" for number in range(8)]
    tasks = dict(zip(sites, opened(ledger, *sites), strict=True))

    def report(site: str) -> None:
        for _ in range(20):  # a thread that reads does not undo what another one writes
            ledger.set_task_status(tasks[site].task_id, "started")
            assert len(ledger.tasks("run", 1)) == len(sites)
        ledger.judge(update(tasks[site]))

    with ThreadPoolExecutor(len(sites)) as pool:
        list(pool.map(report, sites))
    assert set(task_statuses(ledger).values()) == {"reported"}
    assert len(ledger.updates("run", 1)) == len(sites)
    ledger.close()


def overwritten(path: Path) -> None:
    path.write_bytes(b"this is not a database, by any means" * 100)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):  # every page but the first
        data[page * 4096 : page * 4096 + 200] = b"\xab" * 200
    path.write_bytes(data)


def one_page(path: Path) -> None:
    with sqlite3.connect(path) as file:
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'updates'").fetchone()
    file.close()
    data = bytearray(path.read_bytes())
    data[(page - 1) * 4096 : page * 4096] = b"\xab" * 4096
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [overwritten, cut_short, scribbled, one_page])
def test_a_damaged_file_is_refused_at_the_start(url: str, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    ledger = Ledger(url)
    filled(ledger)
    ledger.close()
    damage(tmp_path / "ledger.sqlite")
    with pytest.raises(StateError, match="ledger"):
        Ledger(url).close()


def test_a_file_that_cannot_be_opened_is_a_state_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be used"):
        Ledger(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder'}")
    with pytest.raises(StateError, match="cannot be used"):
        Ledger(f"sqlite:///{tmp_path}")
    onlooker = LedgerReader(f"sqlite:///{tmp_path / 'none.sqlite'}")
    for read in (onlooker.sites, onlooker.interventions):
        with pytest.raises(StateError):
            read()


def test_a_disk_that_is_full_is_a_state_error_and_nothing_is_half_written(url: str) -> None:
    ledger = Ledger(url)
    (task,) = opened(ledger, "ann")
    with ledger._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StateError, match="full"):
        ledger.judge(update(task, reason="x" * 1_000_000))
    assert ledger.accepted(task) is None
    assert ledger.task(task.task_id) == task
    ledger.close()


# Secure aggregation


def test_the_next_step_of_a_sum_closes_the_last_one_in_the_same_transaction(ledger: Ledger) -> None:
    tasks = [replace(invited(site), sum_of=SumOf.UPDATE) for site in ("ann", "bob", "cyd")]
    ledger.open_round(RoundRow("run", 1, 1, size=3, quorum=1), tasks)
    ledger.judge(update(tasks[0]))
    score = invited("cyd", kind=TaskKind.SCORE)
    ledger.invite([score])
    share = replace(invited("ann", kind=TaskKind.SHARE), sum_of=SumOf.UPDATE)
    with pytest.raises(StateError):
        ledger.go_on([tasks[0]], "late", {})
    assert task_statuses(ledger)[tasks[1].task_id] == "invited"
    ledger.go_on([share], "late", {"bob": "silent"})
    found = {task.task_id: (task.task_status, task.reason, task.sum_of) for task in ledger.tasks("run", 1)}
    assert found == {
        tasks[0].task_id: ("reported", "", "update"),
        tasks[1].task_id: ("late", "silent", "update"),
        tasks[2].task_id: ("late", "", "update"),
        score.task_id: ("invited", "", None),
        share.task_id: ("invited", "", "update"),
    }


def test_of_a_secure_aggregation_the_numbers_stand_and_not_the_keys(ledger: Ledger) -> None:
    keys = [replace(invited(site), sum_of=SumOf.UPDATE) for site in ("ann", "bob")]
    numbers = replace(invited("ann", kind=TaskKind.MASK), sum_of=SumOf.UPDATE)
    scores = replace(invited("bob", kind=TaskKind.MASK), sum_of=SumOf.SCORES)
    ledger.begin_run("run", BASE, "{}")
    ledger.open_round(RoundRow("run", 1, 1, size=2, quorum=1), keys)
    ledger.invite([numbers, scores])
    for task in (*keys, numbers, scores):
        ledger.judge(update(task, task.task_id.encode()))
    assert ledger.standing_rounds("run") == {}  # nothing is published
    ledger.publish("run", 1, 1, BASE, complete=True)
    assert ledger.standing_rounds("run") == {"ann": 1}
    ledger.roll_back("run", 0)
    assert ledger.standing_rounds("run") == {}
