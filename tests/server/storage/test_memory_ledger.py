"""The ledger of objects says what the SQL one says, whatever was written: random deeds, then every question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofed.common.codec import digest
from protofed.common.errors import StateError
from protofed.common.protocol.messages import Subject, TaskKind, Verdict
from protofed.common.protocol.scores import Spread
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.memory_ledger import MemoryLedger
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import CertificateRow, InterventionRow, RoundRow, TaskRow, UpdateRow
from protofed.server.verdicts import RoundOutcome, SetAsideCode, SetAsideReason

RUNS, SITES, ROUNDS, ATTEMPTS = ("run", "other"), ("ann", "bob", "cyd"), range(3), (1, 2)
runs, sites = st.sampled_from(RUNS), st.sampled_from(SITES)
rounds, attempts = st.sampled_from(ROUNDS), st.sampled_from(ATTEMPTS)
digests = st.sampled_from([digest(bytes([number])) for number in range(6)])
kinds = st.sampled_from([TaskKind.FIT, TaskKind.REFINE, TaskKind.MASK, TaskKind.SCORE])
text = st.sampled_from(["", "why", "because"])
sums = st.dictionaries(st.sampled_from(["personal.pm_v", "loss"]), st.just(Spread(0.5, None, None, 3)))
scores = st.dictionaries(st.sampled_from(["global.accuracy", "personal.pm_v", "loss"]), st.sampled_from([0.0, 0.5, 1]))
of_none = st.builds(
    lambda *at: TaskRow("-".join(map(str, at[:5])), *at),
    runs,
    rounds,
    attempts,
    sites,
    kinds,
    digests,
    st.integers(0, 9),
)
tasks = st.builds(
    lambda task, subject: replace(task, subject=subject), of_none, st.sampled_from([None, Subject.UPDATE])
)
updates = st.builds(
    UpdateRow,
    tasks,
    st.sampled_from(list(Verdict)),
    text,
    digests,
    st.integers(1, 9),
    st.just({"loss": 0.5}),
    st.sampled_from([None, 1.0, 12.0]),
    norm=st.sampled_from([None, 0.25]),
)
certificates = st.builds(
    CertificateRow,
    st.sampled_from("abcd"),
    st.sampled_from(["site", "operator"]),
    sites,
    *[st.just(1.0)] * 3,
    st.sampled_from([None, 1.0]),
    text,
    st.sampled_from([("trainer",), ()]),
)
at = (runs, rounds, attempts)
DEEDS: dict[str, st.SearchStrategy[Any]] = {
    "enroll": st.tuples(sites, st.sampled_from([["trainer"], ["evaluator", "trainer"]])),
    "exclude": st.tuples(sites, st.sampled_from([None, "noisy"])),
    "forget_site": st.tuples(sites),
    "register": st.tuples(certificates),
    "grant": st.tuples(certificates),
    "revoke": st.tuples(certificates.map(lambda row: replace(row, revoked_at=2.0))),
    "intervene": st.tuples(st.builds(InterventionRow, st.just(1.0), text, text, runs, sites, text)),
    "begin_run": st.tuples(runs, digests, st.just("{}")),
    "pause": st.tuples(runs, st.booleans()),
    "end_run": st.tuples(runs, text, st.sampled_from(list(RoundOutcome))),
    "roll_back": st.tuples(runs, rounds),
    "open_round": st.tuples(st.builds(RoundRow, *at, st.just(3), st.just(2)), st.lists(tasks, min_size=1, max_size=3)),
    "count_aggregation": st.tuples(*at, st.sampled_from([1, -1])),
    "set_aside": st.tuples(updates, st.builds(SetAsideReason, st.sampled_from(SetAsideCode), text)),
    "publish": st.tuples(*at, digests, st.booleans(), st.sampled_from([None, {"ann": "silent"}])),
    "keep_aggregate": st.tuples(*at, digests, st.booleans(), st.sampled_from([{}, {"ann": "silent"}])),
    "abandon": st.tuples(*at, text),
    "mark_scored": st.tuples(runs, rounds),
    "invite": st.tuples(st.lists(tasks, min_size=1, max_size=3)),
    "go_on": st.tuples(
        st.lists(tasks, min_size=1, max_size=3), st.sampled_from(["late", "not-needed"]), st.just({"ann": "silent"})
    ),
    "keep_groups": st.tuples(st.sampled_from([(("ann", "bob"), ("eva",)), (("ann", "eva"),), (("bob", "eva"),)])),
    "dissolve": st.tuples(st.sampled_from([("ann", "bob"), ("ann", "eva"), ("bob", "eva")])),
    "set_task_status": st.tuples(tasks.map(lambda task: task.task_id), st.sampled_from(["started", "failed"]), text),
    "judge": st.tuples(updates),
    "sum_scores": st.tuples(*at, st.just(("personal.pm_v", "loss")), sums),
    "add_scores": st.tuples(tasks, scores),
}
deeds = st.one_of(*(st.tuples(st.just(name), values) for name, values in DEEDS.items()))


def done(ledger: Ledger, name: str, values: tuple[Any, ...]) -> object:
    """What a deed answers, or that it is refused; a coordinator does none about what was never begun or invited."""
    try:
        match name:
            case "judge" | "set_aside" if ledger.task(values[0].task.task_id) is None:
                return None
            case "add_scores" if ledger.task(values[0].task_id) is None:
                return None
            case "dissolve" if values[0] not in ledger.groups():
                return None
            case "count_aggregation" if not known(ledger, *values[:3]):
                return None
            case "roll_back" if ledger.run(values[0]) is None:
                return None
            case "pause":
                ledger.pause(values[0], paused=values[1])
            case "publish":
                *where, complete, silent = values
                ledger.publish(*where, complete=complete, silent=silent, statistics={"a": 1.0})
            case "keep_aggregate":
                *where, complete, silent = values
                facts: dict[str, Any] = {"complete": complete, "silent": silent, "statistics": {"b": 2.0}}
                ledger.keep_aggregate(*where, task_status="late", **facts)
            case _:
                return getattr(ledger, name)(*values)
    except StateError:
        return StateError
    return None


def known(ledger: Ledger, run: str, number: int, attempt: int) -> bool:
    return (number, attempt) in {(row.round, row.attempt) for row in ledger.rounds(run, rolled_back=True)}


BEGUN = [
    ("begin_run", ("run", digest(b"recipe"), "{}")),
    ("begin_run", ("other", digest(b"recipe"), "{}")),
    *(("enroll", (site, ["trainer"])) for site in SITES),
]

# An attempt that is published twice has the state of the second time alone.
TWICE: list[tuple[str, tuple[Any, ...]]] = [
    ("open_round", (RoundRow("run", 0, 1, 3, 2), [TaskRow("fit", "run", 0, 1, "ann", TaskKind.FIT, digest(b"\2"), 0)])),
    *(("publish", ("run", 0, 1, digest(state), False, None)) for state in (b"\1", b"\0")),
]


def answers(ledger: Ledger) -> dict[str, object]:
    """To every question, without times."""
    rows = [task for run in RUNS for task in ledger.tasks(run)]
    said: dict[str, object] = {
        name: getattr(ledger, name)()
        for name in ("groups", "sites", "excluded", "revoked", "interventions", "sealed", "named")
    }
    said["named among some"] = ledger.named([digest(bytes([number])) for number in range(3)])
    said["certificates"] = sorted(ledger.certificates(), key=lambda row: row.fingerprint)
    said["runs"] = [replace(row, began_at=0, ended_at=row.ended_at and 1) for row in ledger.runs()]
    for run in RUNS:
        for name in (
            "scored_round",
            "scored_rounds",
            "standing_rounds",
            "scores",
            "score_sums",
            "moved",
            "tasks",
            "updates",
        ):
            said[f"{name} of {run}"] = getattr(ledger, name)(run)
        said[f"scores of {run} by name"] = ledger.scores(run, 1, ["loss"]), ledger.score_sums(run, 1, ["loss"])
        said[f"scores of some rounds of {run}"] = [
            (ledger.scores(run, rounds), ledger.score_sums(run, rounds)) for rounds in (range(2), range(1, 3))
        ]
        said[f"contributors to {run}"] = ledger.contributors(run, range(1, 3))
        said[f"rounds of {run}"] = [timeless(row) for row in ledger.rounds(run, rolled_back=True)]
        said[f"later rounds of {run}"] = [timeless(row) for row in ledger.rounds(run, since=1)]
        said[f"state of {run}"] = [ledger.state(run, number) for number in ROUNDS]
        said[f"states of {run}"] = ledger.states(run, [digest(b"\0"), digest(b"\1")])
        said[f"newest of {run}"] = [
            (row := ledger.newest(run, published=published, scored=scored)) and timeless(row)
            for published in (False, True)
            for scored in (False, True)
        ]
        said[f"sharing with {run}"] = ledger.sharing(run, [digest(b"\0"), digest(b"\1")])
        for site in SITES:
            said[f"weight of {run} {site}"] = ledger.last_weight(run, site)
        for number in ROUNDS:
            said[f"round {number} of {run}"] = (
                *(ledger.newest_attempt(run, number), ledger.made_of(run, number), ledger.referenced(run, number, [0])),
                *(ledger.tasks(run, number, 1), ledger.tasks(run, range(number, 3)), ledger.updates(run, number, 2)),
            )
    for task in rows:
        judged = [ledger.judged(task, digest(bytes([number]))) for number in range(6)]
        said[task.task_id] = ledger.task(task.task_id), ledger.accepted(task), judged, ledger.refused(task.task_id)
    return said


def timeless(row: RoundRow) -> RoundRow:
    return replace(row, opened_at=0.0, closed_at=None if row.closed_at is None else 1.0)


def test_no_method_that_asks_a_database_is_inherited() -> None:
    public = {name for kind in (LedgerReader, Ledger) for name in vars(kind) if not name.startswith("_")}
    by_others = {
        "publish",
        "keep_aggregate",
        "abandon",
        "judge",
        "settle_promises",
        "is_settled",
    }  # made of what is written again
    assert public - vars(MemoryLedger).keys() == by_others


@settings(deadline=None, max_examples=25)
@given(st.lists(deeds, min_size=20, max_size=60))
@example(TWICE)
def test_both_ledgers_say_the_same(written: list[tuple[str, tuple[Any, ...]]]) -> None:
    objects, sql = MemoryLedger(), Ledger()
    for name, values in [*BEGUN, *written]:
        assert done(objects, name, values) == done(sql, name, values), name
    assert answers(objects) == answers(sql)
    sql.close()
