"""Commits that are judged together get the answers that they would get one by one; accepted ones share a write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pytest
from tests.server.conftest import daemon

from protofed.common.errors import FencedError, OutOfSpaceError, ProtocolError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Receipt, Verdict
from protofed.server.rounds.intake.intake import Commit
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import UpdateRow
from protofed.server.verdicts import RefusalCode, UpdateProblem

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

DAMAGED = UpdateProblem(RefusalCode.DAMAGED, "not what was announced")


def commit(
    lab: Lab,
    site: SiteId,
    value: float,
    *,
    instance: str = "",
    task_id: str = "",
    weight: float | None = None,
    problem: UpdateProblem | None = None,
) -> Commit:
    """Of a model of that value, sent and examined."""
    task = lab.task(site)
    manifest, data = lab.announce(lab.model(value))
    lab.blobs.put(data)
    found = problem or lab.intake.examine(site, task.task_id, manifest, data, task.base_digest)
    return Commit(site, instance or daemon(site), task_id or task.task_id, manifest, {}, weight, found)


class Full:
    """A journal on a full disk."""

    def append_all(self, _: object) -> None:
        raise OutOfSpaceError("no space left")


class Free:
    """A journal that has room."""

    def __init__(self) -> None:
        self.appended: list[list[str]] = []

    def append_all(self, entries: Iterable[tuple[str, Mapping[str, object]]]) -> None:
        self.appended.append([event for event, _ in entries])


def told(answers: Iterable[Receipt | Exception]) -> list[Verdict | type[Exception]]:
    return [answer.verdict if isinstance(answer, Receipt) else type(answer) for answer in answers]


def writes(monkeypatch: pytest.MonkeyPatch) -> list[list[SiteId]]:
    """The sites of each write of verdicts from now on."""
    found: list[list[SiteId]] = []
    real = Ledger.judge_all

    def judge_all(self: Ledger, rows: list[UpdateRow]) -> list[Receipt]:
        found.append([row.task.site for row in rows])
        return real(self, rows)

    monkeypatch.setattr(Ledger, "judge_all", judge_all)
    return found


def test_accepted_updates_share_a_write_and_close_the_round(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    written = writes(monkeypatch)
    commits = [commit(lab, site, value) for site, value in (("ann", 1.0), ("bob", 2.0), ("cyd", 6.0))]
    answers = lab.intake.commit_all(commits)
    assert told(answers) == [Verdict.ACCEPTED] * 3
    assert [answer.digest for answer in answers if isinstance(answer, Receipt)] == [c.manifest.digest for c in commits]
    assert written == [["ann", "bob", "cyd"]]
    assert lab.value == 3.0


def test_an_update_behind_the_one_that_closes_the_round_is_not_needed(
    make: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make(federation={"participation": 0.6, "over_selection": 1.5}).begin()
    written = writes(monkeypatch)
    commits = [commit(lab, site, value) for site, value in (("ann", 1.0), ("bob", 3.0), ("cyd", 100.0))]
    assert told(lab.intake.commit_all(commits)) == [Verdict.ACCEPTED, Verdict.ACCEPTED, Verdict.NOT_NEEDED]
    assert written == [["ann", "bob"], ["cyd"]]
    assert lab.value == 2.0


REFUSED: Mapping[str, tuple[Mapping[str, object], Verdict | type[Exception]]] = {
    "a problem with its bytes": ({"problem": DAMAGED}, Verdict.REFUSED),
    "a problem with its numbers": ({"weight": -1.0}, Verdict.REFUSED),
    "no task of this site": ({"task_id": "none"}, ProtocolError),
    "an older daemon": ({"instance": "older"}, FencedError),
}


@pytest.mark.parametrize(("fields", "answer"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("place", range(3))
def test_what_is_refused_stops_no_other(
    lab: Lab, fields: Mapping[str, object], answer: Verdict | type[Exception], place: int
) -> None:
    commits = [commit(lab, "ann", 1.0), commit(lab, "bob", 3.0)]
    commits.insert(place, commit(lab, "cyd", 100.0, **fields))  # type: ignore[arg-type]
    expected: list[Verdict | type[Exception]] = [Verdict.ACCEPTED] * 2
    expected.insert(place, answer)
    assert told(lab.intake.commit_all(commits)) == expected
    lab.push("cyd", lab.model(2.0))
    assert lab.value == 2.0


@pytest.mark.parametrize(("value", "answer"), [(1.0, Verdict.DUPLICATE), (2.0, Verdict.REFUSED)])
def test_of_one_task_one_update_counts(lab: Lab, value: float, answer: Verdict) -> None:
    commits = [commit(lab, "ann", 1.0), commit(lab, "bob", 1.0), commit(lab, "ann", value)]
    assert told(lab.intake.commit_all(commits)) == [Verdict.ACCEPTED, Verdict.ACCEPTED, answer]
    lab.push("cyd", lab.model(1.0))
    assert lab.value == 1.0


def test_updates_that_cannot_be_recorded_count_when_they_come_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = [commit(lab, "ann", 1.0), commit(lab, "bob", 3.0)]
    lab.ledger.attach(Full())
    answers = lab.intake.commit_all(commits)
    assert told(answers) == [OutOfSpaceError] * 2
    assert answers[0] is not answers[1]
    lab.ledger.attach(free := Free())
    assert told(lab.intake.commit_all(commits)) == [Verdict.ACCEPTED] * 2
    assert free.appended == [["verdict"] * 2]
    lab.push("cyd", lab.model(2.0))
    assert lab.value == 2.0


def test_an_update_that_contradicts_its_recorded_one_stops_no_other(lab: Lab) -> None:
    lab.ledger.attach(Full())
    assert told(lab.intake.commit_all([commit(lab, "ann", 1.0)])) == [OutOfSpaceError]
    lab.ledger.attach(Free())
    commits = [commit(lab, "bob", 3.0), commit(lab, "ann", 2.0), commit(lab, "cyd", 2.0)]  # ann's daemon died meanwhile
    answers = lab.intake.commit_all(commits)
    assert told(answers) == [Verdict.ACCEPTED, StateError, Verdict.ACCEPTED]
    lab.push("ann", lab.model(1.0))
    assert lab.value == 2.0
