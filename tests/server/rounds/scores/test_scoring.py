"""What speaks against a run's models, from a real coordinator's ledger: read at each round, logged once.

What is kept of a run's scores says what all of them say, round by round, and after each roll-back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from protofed.common.codec import digest
from protofed.common.protocol.messages import Scores, TaskKind
from protofed.server.rounds.scores.best_round import best_and_former, judged_rounds
from protofed.server.rounds.scores.model_warnings import RoundScores, RunHistory, model_warnings
from protofed.server.rounds.scores.scoring import ScoreMemory, WarningLog, find_warnings
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import RoundRow, TaskRow

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

TRAINERS = ("ann", "bob", "cyd")
ONE_CLASS = {"global.recall.0": 1.0, "global.recall.1": 0.0, "global.recall.2": 0.0}
SOUND = {"global.recall.0": 0.9, "global.recall.1": 0.8, "global.recall.2": 0.7}


def scored_round(lab: Lab, value: float, scores: Mapping[str, float]) -> None:
    """All sites train; the evaluator reports these scores."""
    lab.train(value)
    lab.intake.report_scores("eva", "daemon-eva", lab.task("eva").task_id, scores)
    for site in TRAINERS:
        lab.score(site)


def logged(events: list[Any]) -> list[tuple[int, str, str | None]]:
    return [(one["round"], one["code"], one.get("site")) for one in events if one["event"] == "model warning"]


def test_each_thing_is_logged_once_in_the_round_in_which_it_was_seen(make: MakeLab) -> None:
    lab = make(rounds=8).begin()
    with capture_logs() as events:
        for number in range(1, 8):
            scored_round(lab, float(number), ONE_CLASS)
    assert logged(events) == [(5, "one-class", None), (5, "unchanged", None)]


def test_a_restarted_server_does_not_log_again_what_was_known(make: MakeLab) -> None:
    lab = make(rounds=8).begin()
    for number in range(1, 6):
        scored_round(lab, float(number), ONE_CLASS)
    with capture_logs() as events:
        lab.restart()
        scored_round(lab, 6.0, ONE_CLASS)
    assert logged(events) == []


def test_a_run_that_is_not_known_has_no_warning(lab: Lab) -> None:
    assert find_warnings(lab.ledger, "other") == []
    WarningLog(lab.ledger, "other", ScoreMemory(lab.ledger, "other")).look()


RUN, SITES = "run", ("ann", "bob")
NAMES = ("global.balanced_accuracy", "global.accuracy", "global.recall.0", "global.auroc")
LOCAL = tuple(name.replace("global.", "global.local.") for name in NAMES)
OWN = ("personal.local.balanced_accuracy", "personal.local.accuracy")
values = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0])


def scores(*names: str) -> st.SearchStrategy[dict[str, Scores]]:
    """Of some sites, by some names."""
    return st.dictionaries(st.sampled_from(SITES), st.dictionaries(st.sampled_from(names), values))


rounds = st.one_of(scores(*NAMES), scores(*LOCAL), scores(*OWN), scores(*NAMES, *LOCAL, *OWN), scores("other"))


class Scored:
    """A ledger that rounds are added to, and that can go back."""

    def __init__(self) -> None:
        self.ledger: Ledger = Ledger()
        self.ledger.begin_run(RUN, digest(b""), "{}")
        self.number = 0

    def add(self, of_round: dict[str, Scores]) -> int:
        """A round that is published and scored."""
        self.number += 1
        attempt = 1 + self.ledger.newest_attempt(RUN, self.number)
        tasks = [
            TaskRow(f"{self.number}-{attempt}-{site}", RUN, self.number, attempt, site, TaskKind.SCORE, None, 0)
            for site in SITES
        ]
        self.ledger.open_round(RoundRow(RUN, self.number, attempt, 1, 1), tasks)
        for task in tasks:
            self.ledger.add_scores(task, of_round.get(task.site, {}))
        return self.number

    def roll_back(self, to: int) -> None:
        """Go on behind an earlier round."""
        self.ledger.roll_back(RUN, to)
        self.number = to


def warned(scored: Sequence[RoundScores], *, ended: bool) -> Any:
    history = RunHistory(classes=4, rounds=12, ended=ended, global_model=True, scored=scored)
    return model_warnings(history)


@settings(max_examples=50, deadline=None)  # the ledger is SQL
@given(st.lists(st.one_of(rounds, rounds, rounds, st.integers(0, 9)), max_size=24))
def test_what_is_kept_gives_the_warnings_and_the_order_of_all_rounds(deeds: list[dict[str, Scores] | int]) -> None:
    run = Scored()
    memory = ScoreMemory(run.ledger, RUN)
    for deed in deeds:
        if isinstance(deed, int):
            run.roll_back(min(deed, run.number))
            memory.forget()
        else:
            memory.closed(run.add(deed))
        table = run.ledger.scores(RUN)
        every = [RoundScores(number, of_sites) for number, of_sites in sorted(table.items())]
        again = ScoreMemory(run.ledger, RUN)
        for ended in (False, True):
            assert warned(memory.told(), ended=ended) == warned(_as_told(every), ended=ended)
            assert warned(again.told(), ended=ended) == warned(_as_told(every), ended=ended)
        for name in (*NAMES, *OWN):
            assert list(memory.ranking(name).ranked()) == list(again.ranking(name).ranked())


def _as_told(every: list[RoundScores]) -> list[RoundScores]:
    """The first and the last rounds whole, of the others the headlines of one model: what was read before."""

    def headlines(model: str) -> dict[int, Any]:
        names = {f"{model}.balanced_accuracy", f"{model}.accuracy"}
        cut = {
            one.round: {site: {n: v for n, v in of.items() if n in names} for site, of in one.scores.items()}
            for one in every
        }
        return {number: of for number, of in cut.items() if any(of.values())}

    chosen = headlines("global") or headlines("global.local")
    whole = [*every[:1], *every[-5:]]
    return [one if one in whole else RoundScores(one.round, chosen.get(one.round, {})) for one in every]


def test_a_long_run_keeps_a_few_rounds() -> None:
    run = Scored()
    memory = ScoreMemory(run.ledger, RUN)
    for number in range(60):
        memory.closed(run.add({"ann": dict.fromkeys((*NAMES, *OWN), (number * 7 % 60) / 60)}))
    assert len(memory.told()) <= 12


def test_scores_that_came_after_a_restart_had_read_the_first_of_them_count() -> None:
    run = Scored()
    number = run.add({"ann": {"global.accuracy": 0.5}})
    memory = ScoreMemory(run.ledger, RUN)
    assert [one.value for one in memory.ranking("global.accuracy").ranked()] == [0.5]
    assert len(memory.told()) == 1
    late = TaskRow("late", RUN, number, 1, "cyd", TaskKind.SCORE, None, 0)
    run.ledger.invite([late])
    run.ledger.add_scores(late, {"global.accuracy": 1.0})
    memory.closed(number)
    assert [one.value for one in memory.ranking("global.accuracy").ranked()] == [0.75]
    assert [set(one.scores) for one in memory.told()] == [{"ann", "cyd"}]


def test_a_round_reads_no_scores_but_its_own(make: MakeLab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = make(rounds=12, keep_rounds=1).begin()
    scored_round(lab, 0.5, {"global.accuracy": 0.5})
    scored_round(lab, 0.75, {"global.accuracy": 0.75})
    asked: list[int | None] = []
    read = lab.ledger.scores

    def spy(run: str, round: int | None = None, names: Sequence[str] | None = None) -> Any:
        asked.append(round)
        return read(run, round, names)

    monkeypatch.setattr(lab.ledger, "scores", spy)
    for number in range(3, 9):
        scored_round(lab, number / 10, {"global.accuracy": number / 10})
    assert asked == [3, 4, 5, 6, 7, 8]
    memory = ScoreMemory(lab.ledger, "test")
    best, _ = best_and_former(lab.ledger, lab.blobs, "test", memory.ranking, None)
    every = judged_rounds(lab.ledger, "test")
    assert every is not None
    assert best == every.ranked[0]
