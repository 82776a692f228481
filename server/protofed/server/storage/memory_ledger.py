"""The ledger of a simulation in memory: rows as objects, so that no round waits for SQL that nobody will read."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from protofed.common.codec import Digest
from protofed.common.errors import StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Receipt, Scores, Subject, TaskKind
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation.groups import Group, Groups
from protofed.server.storage.ledger import Chain, Ledger
from protofed.server.storage.memory_certificates import MemoryCertificates
from protofed.server.storage.memory_groups import MemoryGroups
from protofed.server.storage.memory_scores import MemoryScores, contradiction
from protofed.server.storage.memory_trainings import MemoryTrainings
from protofed.server.storage.rows import CertificateRow, InterventionRow, RoundRow, RunRow, TaskRow, UpdateRow
from protofed.server.verdicts import BLOB_KEPT, ROLLED_BACK, RUN_ENDED, RoundOutcome, SetAsideReason


class MemoryLedger(Ledger):
    """Every method of `Ledger` and `LedgerReader`, which describe them, without a database and without a journal.

    Rows are frozen, and replaced when they change: what was read stays as it was.
    """

    def __init__(self) -> None:
        self._roles: dict[SiteId, list[str]] = {}
        self._excluded: dict[SiteId, str] = {}
        self._certificates = MemoryCertificates()
        self._interventions: list[InterventionRow] = []
        self._runs: dict[str, RunRow] = {}
        self._rounds: defaultdict[str, dict[tuple[int, int], RoundRow]] = defaultdict(dict)  # by run; round, attempt
        self._attempts: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)  # by run and round, in order
        self._numbers: defaultdict[str, list[int]] = defaultdict(list)  # of a run's rounds, in order
        self._states: defaultdict[str, dict[tuple[int, int], Digest]] = defaultdict(dict)  # by run and attempt
        self._tasks: dict[str, TaskRow] = {}  # by task_id
        self._invited: defaultdict[str, dict[int, list[str]]] = defaultdict(dict)  # task_ids by run and round
        self._groups = MemoryGroups()
        self._consortia: list[tuple[float, str]] = []  # when it was offered, and what
        self._updates: defaultdict[str, list[UpdateRow]] = defaultdict(list)  # by task_id, in order
        self._trainings = MemoryTrainings()
        self._scores = MemoryScores()

    def consortium(self, at: float | None = None) -> str | None:
        offered = [document for since, document in self._consortia if at is None or since <= at]
        return offered[-1] if offered else None

    def offer_consortium(self, number: int, document: str) -> None:
        self._consortia.append((time.time(), document))

    def close(self) -> None:
        """Nothing is held."""

    def attach(self, journal: Chain) -> NoReturn:
        """A journal outlives its process; what is promised here does not."""
        raise StateError("a ledger in memory keeps no journal; give the simulation a state folder")

    def check(self) -> None:
        """Nobody else has it."""

    def note_audit(self, records: int, newest: str) -> None:
        """Nothing is kept that a log could be compared with."""

    # Sites

    def sites(self) -> dict[SiteId, list[str]]:
        return dict(sorted(self._roles.items()))

    def excluded(self) -> dict[SiteId, str]:
        return dict(self._excluded)

    def enroll(self, site: SiteId, roles: Sequence[str]) -> None:
        self._roles[site] = list(roles)

    def exclude(self, site: SiteId, reason: str | None) -> None:
        self._excluded.pop(site, None)
        if reason is not None and site in self._roles:
            self._excluded[site] = reason

    def forget_site(self, site: SiteId) -> None:
        self._roles.pop(site, None)
        self._excluded.pop(site, None)

    # Certificates and operators

    def certificates(self) -> list[CertificateRow]:
        return self._certificates.rows()

    def revoked(self) -> dict[SiteId, tuple[float, str]]:
        return self._certificates.revoked()

    def register(self, row: CertificateRow) -> None:
        self._certificates.register(row)

    def grant(self, row: CertificateRow) -> None:
        self._certificates.renew(row, roles=row.roles)

    def revoke(self, row: CertificateRow) -> None:
        self._certificates.renew(row, revoked_at=row.revoked_at, reason=row.reason)

    def interventions(self) -> list[InterventionRow]:
        return list(self._interventions)

    def intervene(self, row: InterventionRow) -> None:
        self._interventions.append(row)

    # Runs

    def run(self, run: str) -> RunRow | None:
        return self._runs.get(run)

    def runs(self) -> list[RunRow]:
        return sorted(self._runs.values(), key=lambda row: row.position)

    def begin_run(self, run: str, fingerprint: Digest, recipe: str) -> None:
        if run in self._runs:
            raise contradiction(f"run {run}")
        place, now = self._last() + 1, time.time()
        self._runs[run] = RunRow(run, fingerprint, recipe, place, now, None, None, None, paused=False)

    def pause(self, run: str, *, paused: bool) -> None:
        self._renew_run(run, paused=paused)

    def end_run(self, run: str, reason: str, outcome: RoundOutcome) -> None:
        self._renew_run(run, ended_at=time.time(), outcome=outcome, reason=reason)
        self._settle(self._open(run), "late", RUN_ENDED)

    def roll_back(self, run: str, to: int) -> None:
        for at in self._rounds[run]:
            if at[0] > to:
                self._renew_round(run, at, rolled_back=True)
        self._settle(self._open(run), "late", f"{ROLLED_BACK}round {to}")
        if (row := self._runs.get(run)) is not None and row.ended_at is not None:
            self._renew_run(run, ended_at=None, outcome=None, reason=None, position=self._last() + 1)

    def _last(self) -> int:
        return max((row.position for row in self._runs.values()), default=0)

    def _renew_run(self, run: str, **values: Any) -> None:
        if run in self._runs:
            self._runs[run] = replace(self._runs[run], **values)

    # Rounds

    def rounds(self, run: str, *, rolled_back: bool = False, since: int = 0) -> list[RoundRow]:
        rows = (row for number in self._since(run, since) for row in self._at(run, number))
        return [row for row in rows if rolled_back or not row.rolled_back]

    def newest(self, run: str, *, published: bool = False, scored: bool = False) -> RoundRow | None:
        rows = (row for number in reversed(self._numbers[run]) for row in reversed(self._at(run, number)))
        kept = (row for row in rows if not row.rolled_back and (row.scored or not scored))
        return next((row for row in kept if row.state is not None or not (published or scored)), None)

    def state(self, run: str, round: int) -> Digest | None:
        states = [row.state for row in self._at(run, round) if row.state is not None and not row.rolled_back]
        return states[-1] if states else None

    def states(self, run: str, among: Collection[Digest]) -> set[Digest]:
        return set(among).intersection(self._states[run].values())

    def newest_attempt(self, run: str, round: int) -> int:
        return max(self._attempts[run].get(round, ()), default=0)

    def _at(self, run: str, round: int) -> list[RoundRow]:
        """The attempts at a round, in order."""
        return [self._rounds[run][round, attempt] for attempt in self._attempts[run].get(round, ())]

    def _since(self, run: str, round: int) -> list[int]:
        numbers = self._numbers[run]
        return numbers[bisect_left(numbers, round) :]

    def open_round(self, row: RoundRow, tasks: Sequence[TaskRow]) -> None:
        at = row.round, row.attempt
        if at in self._rounds[row.run]:
            raise contradiction(f"round {row.round} of {row.run}")
        self.invite(tasks)
        self._rounds[row.run][at] = RoundRow(
            row.run, *at, row.size, row.quorum, opened_at=time.time(), enrolled=row.enrolled
        )
        insort(self._attempts[row.run].setdefault(row.round, []), row.attempt)
        self._number(row.run, row.round)

    def count_aggregation(self, run: str, round: int, attempt: int, by: int = 1) -> int:
        at = round, attempt
        self._renew_round(run, at, aggregations=self._rounds[run][at].aggregations + by)
        return self._rounds[run][at].aggregations

    def _advance(
        self, run: str, round: int, attempt: int, task: str, silent: Mapping[SiteId, str], **values: Any
    ) -> None:
        self._renew_round(run, (round, attempt), **values)
        if (state := values.get("state")) is not None and (round, attempt) in self._rounds[run]:
            self._states[run][round, attempt] = state
        for row in self._open(run, round, attempt):
            self._settle([row], task, silent.get(row.site))

    def mark_scored(self, run: str, round: int) -> None:
        for row in self._at(run, round):
            if row.state is not None:
                self._renew_round(run, (round, row.attempt), scored=True)
        scoring = [row for row in self._open(run, round) if row.kind is TaskKind.SCORE or row.subject is Subject.SCORES]
        self._settle(scoring, "late")

    def _renew_round(self, run: str, at: tuple[int, int], **values: Any) -> None:
        if (row := self._rounds[run].get(at)) is not None:
            self._rounds[run][at] = replace(row, **values)

    # Tasks

    def task(self, task_id: str) -> TaskRow | None:
        return self._tasks.get(task_id)

    def tasks(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[TaskRow]:
        rows = [row for row in self._of(run, round) if attempt is None or row.attempt == attempt]
        return sorted(rows, key=lambda row: (row.round, row.attempt, row.site, row.kind))

    def invite(self, tasks: Sequence[TaskRow]) -> None:
        if len({task.task_id for task in tasks} - self._tasks.keys()) < len(tasks):
            raise contradiction("an invitation")
        for task in tasks:
            self._tasks[task.task_id] = task
            self._invited[task.run].setdefault(task.round, []).append(task.task_id)
            self._number(task.run, task.round)

    def groups(self, at: float | None = None) -> Groups:
        return self._groups.at(at)

    def keep_groups(self, groups: Groups) -> None:
        self._groups.keep(groups)

    def dissolve(self, group: Group) -> None:
        self._groups.dissolve(group)

    def go_on(self, tasks: Sequence[TaskRow], status: str, silent: Mapping[SiteId, str], groups: Groups = ()) -> None:
        self.keep_groups(groups)
        rows = self._open((first := tasks[0]).run, first.round, first.attempt)
        self.invite(tasks)
        for row in rows:
            if row.subject is first.subject:
                self._settle([row], status, silent.get(row.site))

    def set_task_status(self, task_id: str, task: str, reason: str = "") -> None:
        if (row := self._tasks.get(task_id)) is not None and row.is_open:
            self._settle([row], task, reason)

    def _number(self, run: str, round: int) -> None:
        numbers = self._numbers[run]
        if (at := bisect_left(numbers, round)) == len(numbers) or numbers[at] != round:
            numbers.insert(at, round)

    def _of(self, run: str, round: int | range | None) -> Iterator[TaskRow]:
        """The invitations of a run (of a round or some), in no order."""
        of_run = self._invited[run]
        numbers = of_run if round is None else (round,) if isinstance(round, int) else round
        return (self._tasks[task_id] for number in numbers for task_id in of_run.get(number, ()))

    def _open(self, run: str, round: int | None = None, attempt: int | None = None) -> list[TaskRow]:
        return [row for row in self._of(run, round) if row.is_open and attempt in (None, row.attempt)]

    def _settle(self, rows: Iterable[TaskRow], status: str, reason: str | None = None) -> None:
        """Give invitations a status, and a reason unless that is None."""
        for row in rows:
            because = row.reason if reason is None else reason
            self._tasks[row.task_id] = replace(row, task_status=status, reason=because)

    # Updates

    def accepted(self, task: TaskRow) -> UpdateRow | None:
        return next((_joined(row, task) for row in self._updates.get(task.task_id, ()) if row.is_accepted), None)

    def judged(self, task: TaskRow, digest: Digest) -> UpdateRow | None:
        rows = reversed(self._updates.get(task.task_id, ()))
        return next((_joined(row, task) for row in rows if row.digest == digest), None)

    def updates(self, run: str, round: int | range | None = None, attempt: int | None = None) -> list[UpdateRow]:
        tasks = self.tasks(run, round, attempt)
        return [_joined(row, task) for task in tasks for row in self._updates.get(task.task_id, ())]

    def refused(self, task_id: str) -> int:
        return sum(not row.is_accepted for row in self._updates.get(task_id, ()))

    def last_weight(self, run: str, site: SiteId) -> float | None:
        return self._trainings.weight(run, site)

    def standing_rounds(self, run: str) -> dict[SiteId, int]:
        return self._trainings.standing(run, self._rounds[run])

    def moved(self, run: str) -> tuple[int, int]:
        tasks = list(self._of(run, None))
        taken = (row.bytes for task in tasks for row in self._updates.get(task.task_id, ()) if row.is_accepted)
        return sum(taken), sum(task.bytes_sent for task in tasks)

    def set_aside(self, update_row: UpdateRow, why: SetAsideReason) -> None:
        task_id = update_row.task.task_id
        rows = self._updates.get(task_id, [])
        self._updates[task_id] = [
            replace(row, set_aside=why.text, code=why.code) if row.is_accepted else row for row in rows
        ]
        if (task := self._tasks.get(task_id)) is not None:
            self._settle([task], "set-aside", why.text)

    def judge_all(self, rows: Sequence[UpdateRow]) -> list[Receipt]:
        known = [self.accepted(row.task) if row.is_accepted else None for row in rows]
        for row, counted in zip(rows, known, strict=True):
            if counted is not None and counted.digest != row.digest:
                raise StateError(f"two updates for one invitation of {row.task.site} in round {row.task.round}")
        for row in (row for row, counted in zip(rows, known, strict=True) if counted is None):
            task = row.task
            if row.is_accepted and task.task_id in self._tasks:
                self._settle([self._tasks[task.task_id]], "reported")
            self._trainings.add(row, self._tasks.get(task.task_id, task))
            self._updates[task.task_id].append(replace(row, task=self._tasks.get(task.task_id, task)))
        return [(counted or row).receipt() for row, counted in zip(rows, known, strict=True)]

    # Scores

    def add_scores(self, task: TaskRow, scores: Scores) -> None:
        self._scores.add(task, scores)
        if (row := self._tasks.get(task.task_id)) is not None:
            self._settle([row], "reported")

    def sum_scores(
        self, run: str, round: int, attempt: int, names: Collection[str], sums: Mapping[str, Spread]
    ) -> None:
        self._scores.sum(run, (round, attempt), names, sums)

    def scored_round(self, run: str) -> int:
        return max((number for number, _ in self._kept_scores(run)), default=0)

    def scored_rounds(self, run: str) -> list[int]:
        return sorted({at[0] for at in self._kept_scores(run) if at in self._rounds[run]})

    def scores(
        self, run: str, round: int | range | None = None, names: Collection[str] | None = None
    ) -> dict[int, dict[SiteId, dict[str, float]]]:
        return self._scores.by_site(run, self._kept_scores(run, round), names)

    def score_sums(
        self, run: str, round: int | range | None = None, names: Collection[str] | None = None
    ) -> dict[int, dict[str, Spread]]:
        return self._scores.sums(run, self._kept_scores(run, round), names)

    def contributors(self, run: str, rounds: range) -> frozenset[SiteId]:
        return frozenset(row.task.site for row in self.updates(run, rounds) if row.is_accepted)

    def _kept_scores(self, run: str, round: int | range | None = None) -> list[tuple[int, int]]:
        """The attempts with scores (of a round, or some) that were not rolled back."""
        rows = self._rounds[run]
        return [at for at in self._scores.attempts(run, round) if not (at in rows and rows[at].rolled_back)]

    # What must be kept

    def sealed(self) -> set[str]:
        accepted = {row.receipt().record_hash for rows in self._updates.values() for row in rows if row.is_accepted}
        revoked = {row.fingerprint for row in self.certificates() if row.revoked_at is not None}
        return {*accepted, *revoked, *(row.state for row in self._all_rounds() if row.state is not None)}

    def named(self, among: Collection[Digest] | None = None) -> set[Digest]:
        digests = (digest for run in {*self._rounds, *self._invited} for digest, _, _ in self._digests(run))
        return {digest for digest in digests if among is None or digest in among}

    def referenced(self, run: str, since: int, former: Collection[int] = ()) -> tuple[set[Digest], set[Digest]]:
        numbers = {*self._since(run, since - 2), *former, *(number - 1 for number in former)}
        before: set[Digest] = set()
        needed: set[Digest] = set()
        for digest, number, is_state in self._digests(run, numbers):
            (needed if number >= since or (is_state and number == since - 1) else before).add(digest)
        return before, needed | self._newest_states(run)

    def made_of(self, run: str, round: int) -> set[Digest]:
        states = {row.state for number in (round - 1, round) for row in self._at(run, number)}
        updates = {row.digest for row in self.updates(run, round) if row.is_accepted}
        return updates | {state for state in states if state is not None}

    def sharing(self, run: str, states: Collection[Digest]) -> list[str]:
        return sorted(other for other in self._states if other != run and self.states(other, states))

    def _newest_states(self, besides: str) -> set[Digest]:
        found: set[Digest] = set()
        for run in self._rounds.keys() - {besides}:
            published = [row for row in self.rounds(run) if row.state is not None]
            found |= {row.state for row in published if row.state and row.round == published[-1].round}
        return found

    def _digests(self, run: str, numbers: Iterable[int] | None = None) -> Iterator[tuple[Digest, int, bool]]:
        """Digests that some rounds (None: all) name, with the round, and whether it is a state."""
        for number in self._numbers[run] if numbers is None else numbers:
            for row in self._at(run, number):
                if row.state is not None:
                    yield row.state, number, True
                if row.aggregate is not None:
                    yield row.aggregate, number, False
            for task in self._of(run, number):
                if task.base_digest is not None:
                    yield task.base_digest, number, False
                kept = (update for update in self._updates.get(task.task_id, ()) if update.verdict in BLOB_KEPT)
                yield from ((update.digest, number, False) for update in kept)

    def _all_rounds(self) -> Iterator[RoundRow]:
        return (row for rows in self._rounds.values() for row in rows.values())


def _joined(row: UpdateRow, task: TaskRow) -> UpdateRow:
    """The update with its invitation as it is now."""
    return row if row.task is task else replace(row, task=task)
