"""What the sites of a run ask and send: tasks, heartbeats, scores; and the way of an update, top to bottom.

An update is started, sent, examined, committed. Every verdict is a ledger row.

A commit first asks `verdict_if_closed`: of an update that comes too late nothing is read, and nothing is kept.

Checks run in order of cost: size and base of the announcement, then its names, dtypes and shapes. Next come the bytes:
whether they are those tensors, finite and within the norm. Last come the numbers beside them (PROTOCOL §2). The chunks
arrive between `begin` and `examine`, and `storage.blobs` checks their CRCs and the digest of the whole. Each check is a
pure function, None for an update that passes it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import structlog

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.errors import CodecError, FailureReason, ProtocolError
from protofed.common.payload import NOT_A_MOVE, Part, Payload, SiteId, TensorSpec, distance_norm, relative_bound
from protofed.common.protocol.messages import (
    SUM_STEPS,
    TRAININGS,
    Activity,
    Finished,
    Manifest,
    Progress,
    Receipt,
    Scores,
    Signal,
    Task,
    TaskKind,
    Verdict,
    Wait,
)
from protofed.common.protocol.scores import metrics_problem
from protofed.server.method import NOTHING, ExpectedUpdate, OwnStartMethod
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.machine import phases
from protofed.server.rounds.run import Run
from protofed.server.rounds.secure_aggregation.steps import manifest_problem as sum_manifest_problem
from protofed.server.storage.rows import TaskRow, UpdateRow
from protofed.server.verdicts import RefusalCode, UpdateProblem

MAX_UPDATE_BYTES = 4 << 30
LARGEST_JUMP = 10  # factor between a site's example counts in two rounds: sites grow, but not by that much


def size_problem(manifest: Manifest) -> UpdateProblem | None:
    """Whether the announced total is within the limit, and equals the encoded size of the announced tensors."""
    expected = codec.encoded_size(manifest.tensors)
    if manifest.total_bytes > MAX_UPDATE_BYTES or manifest.total_bytes != expected:
        text = f"{manifest.total_bytes} bytes announced for tensors that are encoded to {expected}"
        return UpdateProblem(RefusalCode.SIZE, text)
    return None


def base_problem(base: Digest | None, named: Digest | None) -> UpdateProblem | None:
    """Whether an update starts from the model that its task names."""
    if base == named:
        return None
    return UpdateProblem(RefusalCode.BASE, "it starts from another model than the task names")


def manifest_problem(manifest: Manifest, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether an upload announces what the method expects: names, dtypes, shapes."""
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return UpdateProblem(RefusalCode.TENSORS, "a tensor is announced twice")
    required = {spec.path: spec for spec in expected.required}
    known = required | {spec.path: spec for spec in expected.optional}
    if missing := sorted(required.keys() - announced.keys()):
        return UpdateProblem(RefusalCode.TENSORS, f"{missing[0]} is missing ({len(missing)} in all)")
    for path, spec in announced.items():
        if path not in known:
            return UpdateProblem(RefusalCode.TENSORS, f"{path} is not part of this method's update")
        if spec != known[path]:
            return UpdateProblem(RefusalCode.TENSORS, f"{path} is {_shape(spec)}, expected {_shape(known[path])}")
    return None


def first_model_problem(manifest: Manifest, classes: int, max_model_mb: float) -> UpdateProblem | None:
    """Whether an upload announces a freshly made model: BODY, and HEAD with a floating-point `weight` [C, D].

    Args:
        max_model_mb: the recipe's, in 10^6 bytes: of a first model nothing else says how large it is.
    """
    if manifest.total_bytes > max_model_mb * 1e6:
        text = f"a first model of {manifest.total_bytes} bytes: this run accepts max_model_mb = {max_model_mb:g}"
        return UpdateProblem(RefusalCode.SIZE, text)
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return UpdateProblem(RefusalCode.TENSORS, "a tensor is announced twice")
    if any(spec.part not in (Part.BODY, Part.HEAD) for spec in manifest.tensors):
        return UpdateProblem(RefusalCode.TENSORS, "a first model has only a body and a head")
    head = announced.get(f"{Part.HEAD}/weight")
    if head is None or len(head.shape) != 2 or head.shape[0] != classes or head.dtype == "int64":
        return UpdateProblem(RefusalCode.TENSORS, f"a first model needs a head with weight [{classes}, D]")
    return None


def contents(data: Buffer, manifest: Manifest) -> UpdateProblem | Payload:
    """The payload of an upload, not copied, if it has the tensors that were announced; else what is wrong."""
    try:
        if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
            return UpdateProblem(RefusalCode.CONTENTS, "the upload holds other tensors than were announced")
        return codec.view(data)
    except CodecError as error:
        return UpdateProblem(RefusalCode.DAMAGED, str(error))


def examined(data: Buffer, manifest: Manifest, base: Payload | None, max_update_norm: float) -> UpdateProblem | float:
    """The problem with the bytes of an update, or else its norm.

    The norm is Euclidean, over all floating-point tensors together. If the base has a tensor of the same path and
    shape, (update - base) counts, otherwise the tensor itself. Integer buffers are left out, and what says who counts,
    which one or how long, and not how far the model moved.

    Args:
        base: the model that the update started from; None: the update is a first model.
        max_update_norm: the largest norm that the run accepts.
    """
    payload = contents(data, manifest)
    if isinstance(payload, UpdateProblem):
        return payload
    moves = {part: tensors for part, tensors in payload.items() if part not in NOT_A_MOVE}
    others = {part: tensors for part, tensors in payload.items() if part in NOT_A_MOVE}
    norm = distance_norm(moves, base or {})  # NaN and infinity carry into the norm: models need no second pass
    if math.isfinite(norm) and norm <= max_update_norm and codec.first_not_finite(others) is None:
        return norm
    if path := codec.first_not_finite(payload):
        return UpdateProblem(RefusalCode.NOT_FINITE, f"{path} has values that are not finite")
    text = f"the update's norm is {norm:.6g}: this run accepts at most {max_update_norm:g}"
    return UpdateProblem(RefusalCode.NORM, text)


def scalars_problem(metrics: Scores, weight: float | None, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether the numbers beside the tensors are those of a training, each in its range."""
    if (text := metrics_problem(metrics)) is not None:
        return UpdateProblem(RefusalCode.SCALARS, text)
    if expected.weight and weight is None:
        text = "the total example count is missing: this run weights by it, and the site's policy withholds it"
        return UpdateProblem(RefusalCode.COUNT, text)
    if weight is not None and not (math.isfinite(weight) and 1 <= weight < 2**53):  # 2**53: floats count exactly below
        return UpdateProblem(RefusalCode.COUNT, f"an example count of {weight}")
    return None


def jump_problem(weight: float, before: float | None) -> UpdateProblem | None:
    """Whether an example count is implausibly far from the site's previous one in this run."""
    if before is None or before / LARGEST_JUMP <= weight <= before * LARGEST_JUMP:
        return None
    text = f"an example count of {weight:g} after {before:g}: expected at most {LARGEST_JUMP} times more or less"
    return UpdateProblem(RefusalCode.COUNT, text)


def _shape(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


log = structlog.get_logger()
UPLOADED = (TaskKind.INITIALISE, *sorted(TRAININGS), TaskKind.SCORE_SUM, *SUM_STEPS)
NOTHING_TO_DO = Wait(retry_after_s=1.0)
NO_ATTEMPT = -1, -1
MAX_REFUSED = 8  # updates for one invitation: each stays in the ledger, and a broken site must not fill the disk


@dataclass(frozen=True)
class Commit:
    """A call that says that an upload is complete, as `Intake.commit`.

    Attributes:
        examined: the update's norm, or the problem with it, as `Intake.examine` gave it.
    """

    site: SiteId
    instance: str
    task_id: str
    manifest: Manifest
    metrics: Scores
    weight: float | None
    examined: UpdateProblem | float


class Intake:
    """Gives tasks, and judges uploads: `begin`, then chunks, then `verdict_if_closed`, `examine`, `refuse` or `commit`.

    All methods but `examine` are called from the coordinator's thread.
    """

    def __init__(self, run: Run, context: ServerContext) -> None:
        self._run, recipe = run, run.recipe
        self._name, self._classes = recipe.name, recipe.classes
        # Under secure aggregation a site scales its update down: a server that saw it could only turn it away.
        rules = recipe.federation
        self._max_norm, self._max_model_mb = rules.max_update_norm, rules.max_model_mb
        self._max_relative_norm = math.inf if rules.secure else rules.max_relative_norm
        self._ledger, self._presence, self._blobs = context.ledger, context.presence, context.blobs
        self._metrics, self._clock = context.metrics, context.clock
        # Most sites of a cohort start from the same model: its digest, itself and its norm.
        self._newest_base: tuple[Digest, Payload, float] | None = None
        self._loading = threading.Lock()  # `examine` runs on several threads; a base is decoded once for all of them
        self._score_names = recipe.score_names()
        # Of the attempt, a round and its number, for which it was asked last: by site the newest round that stands.
        self._counted: tuple[tuple[int, int], Mapping[SiteId, int]] = NO_ATTEMPT, {}
        self._refused: tuple[tuple[int, int], Mapping[str, int]] = NO_ATTEMPT, {}  # likewise, by task id
        self._weights: dict[SiteId, float | None] = {}  # that sites told last, as far as was asked for

    def next_task(self, site: SiteId, instance: str) -> Task | Wait | Finished:
        """The site's open task; Wait if it has none, Finished once the run has ended.

        Asking twice gives the same task: a site that lost the answer, or was restarted, loses nothing.
        """
        self._presence.asks(site, instance)
        if isinstance(self._run.phase, phases.FinishedPhase):
            return Finished(self._run.phase.reason, last=True)
        return self.open_task(site) or NOTHING_TO_DO

    def open_task(self, site: SiteId) -> Task | None:
        """The task that `next_task` would give."""
        if (row := self._run.invitations.of(site)) is None:
            return None
        at, base = (self._name, row.round, row.task_id), (row.base_digest, row.base_bytes)
        counted = self._state_round(row) if row.kind is TaskKind.FIT else None
        return Task(row.kind, *at, *base, self._remaining(), row.attempt, row.sum_of, counted)

    def _state_round(self, row: TaskRow) -> int:
        """The newest round whose site memory fits the state that a fit starts from."""
        if self._counted[0] != (attempt := (row.round, row.attempt)):  # while it is open, nothing is published
            self._counted = attempt, self._ledger.standing_rounds(self._name)
        return self._counted[1].get(row.site, 0)

    def heartbeat(self, site: SiteId, instance: str, progress: Progress) -> Signal:
        """Record a site's progress; ABORT when its task is no longer open.

        The first heartbeat of a task marks it as started; one with a failure declines it. With an idle one this may be
        called from any thread.
        """
        if progress.activity is Activity.IDLE:
            # Without a mark any call counts as life: an idle daemon has no progress that could move.
            self._presence.seen(site, instance)
            return Signal.CONTINUE
        self._presence.seen(site, instance, progress)
        if progress.failure is FailureReason.WITHDRAWN:
            self._presence.leaves(site)  # before its task is closed, which may open the next round
        row = self._run.invitations.of(site)
        if row is None or row.task_id != progress.task_id:
            return Signal.ABORT
        if progress.failure is not None:
            self._run.decline(row, progress.failure)
        else:
            self._run.invitations.started(row)
        return Signal.CONTINUE

    def report_scores(self, site: SiteId, instance: str, task_id: str, scores: Scores) -> None:
        """Record a site's scores, once for each task; scores that come too late are acknowledged and dropped.

        Raises:
            ProtocolError: a score has a name that this run or the site's role does not have, or a value that no score
                has. Then none counts, and the site is not asked again.
        """
        self._presence.seen(site, instance)
        row = self._invitation(site, task_id, TaskKind.SCORE)
        if not self._run.invitations.has(row):
            return  # an error would make the daemon retry what can never count
        if problem := self._score_names.problem(scores, self._presence.roles(site)):
            self._metrics.scores_refused()
            self._run.decline(row, "its scores were refused")
            raise ProtocolError(f"scores refused: {problem}")
        self._ledger.add_scores(row, scores)
        self._run.answered(row, phases.ScoresArrived(site, self._clock()))

    def _remaining(self) -> float:
        """Seconds until the phase's deadline. A duration, not a time: sites' clocks may differ from ours."""
        rules, now = self._run.recipe.federation, self._clock()
        match self._run.phase:
            case phases.Collecting() | phases.Refining():
                return max(0.0, self._run.phase.opened + rules.deadline_s - now)
            case phases.Summing():
                return max(0.0, self._run.phase.opened + rules.sum_step_s - now)
            case phases.Evaluating():
                return max(0.0, self._run.phase.opened + rules.score_deadline_s - now)
            case _:
                return 0.0

    def begin(
        self, site: SiteId, instance: str, task_id: str, round: int, base: Digest | None, manifest: Manifest
    ) -> Receipt | None:
        """Judge an announced upload before its first byte is sent; None: send it.

        Raises:
            ProtocolError: the site has no such task in this round, or too many updates were refused for it.
        """
        self._presence.seen(site, instance, task_id)
        row = self._invitation(site, task_id, *UPLOADED)
        if row.round != round:
            raise ProtocolError(f"the task belongs to round {row.round}, not to round {round}")
        if (settled := self._settled(row, manifest)) is not None:
            return settled
        self._check_refusals(row)
        problem = size_problem(manifest) or base_problem(base, row.base_digest)
        if problem is None and row.kind is TaskKind.INITIALISE:
            problem = first_model_problem(manifest, self._classes, self._max_model_mb)
        elif problem is None and row.sum_of is not None:
            problem = self._announced_for_sum(row, manifest)
        elif problem is None:
            problem = manifest_problem(manifest, self.expected(row))
        return self._refuse(row, manifest, problem) if problem else None

    def verdict_if_closed(self, site: SiteId, instance: str, task_id: str, manifest: Manifest) -> Receipt | None:
        """The verdict on an upload that can no longer count, whatever its bytes are; None: its invitation is open.

        Raises:
            ExcludedError, NotEnrolledError, FencedError: as of `SitePresence.seen`.
            ProtocolError: the site has no such task, or too many updates were refused for it.
        """
        self._presence.seen(site, instance)
        return self._settled(self._invitation(site, task_id, *UPLOADED), manifest)

    def examine(
        self, site: SiteId, task_id: str, manifest: Manifest, data: Buffer, base: Digest | None
    ) -> UpdateProblem | float:
        """The problem with the bytes of an update, or else its norm: 0 in a secure aggregation, where it has none.

        May be called from any thread.

        Raises:
            StateError: the model that it started from can no longer be read.
        """
        if any(spec.part is Part.SECURE_AGGREGATION for spec in manifest.tensors):
            check = None if self._run.sums is None else self._run.sums.prepared(task_id)
            # None: the step is over, as `commit` will say.
            return (check.problem(data, manifest) or 0.0) if check is not None else 0.0
        if base is None:
            return examined(data, manifest, None, self._max_norm)
        if isinstance(update := contents(data, manifest), UpdateProblem):
            return update
        model, norm = self._start(site, task_id, base, update)
        return examined(data, manifest, model, min(self._max_norm, relative_bound(norm, self._max_relative_norm)))

    def refuse(self, site: SiteId, task_id: str, manifest: Manifest, problem: UpdateProblem) -> Receipt:
        """Record the problem that `examine` returned."""
        row = self._invitation(site, task_id, *UPLOADED)
        return self._refuse(row, manifest, problem)

    def commit(
        self,
        site: SiteId,
        instance: str,
        task_id: str,
        manifest: Manifest,
        metrics: Scores,
        weight: float | None,
        norm: float | None,
    ) -> Receipt:
        """Judge an update whose blob is durable and passed `examine`; an ACCEPTED one counts from here on.

        Args:
            metrics: what training reported, by name.
            weight: the site's example count, if its policy discloses it.
            norm: as `examine` gave it.
        """
        self._presence.seen(site, instance)
        row = self._invitation(site, task_id, *UPLOADED)
        # Since `begin`, the round may have closed, or another upload of this task may have been accepted.
        if (settled := self._settled(row, manifest)) is not None:
            return settled
        if (problem := self._scalars_problem(row, metrics, weight)) is not None:
            return self._refuse(row, manifest, problem)
        (receipt,) = self._record([_counted(row, manifest, metrics, weight, norm)])
        # After the record: if the process dies here, the restarted one counts the update from the ledger.
        self._run.answered(row, phases.Arrived(site, self._clock()))
        return receipt

    def commit_all(self, commits: Sequence[Commit]) -> list[Receipt | Exception]:
        """`commit` or `refuse` of each, in order; accepted updates in a row share a transaction and its syncs.

        Returns:
            What each of the calls would have returned or raised.
        """
        answers: list[Receipt | Exception] = []
        while remaining := commits[len(answers) :]:
            now = self._clock()
            rows = self._acceptable(remaining, now)
            answers += self._accepted(rows, remaining, now) if len(rows) > 1 else [self._judged_alone(remaining[0])]
        return answers

    def _acceptable(self, commits: Sequence[Commit], now: float) -> list[UpdateRow]:
        """What would be recorded of the first commits, as long as each is accepted whatever becomes of the others.

        So each has an open invitation of its own, and the round goes on with the last of them at the earliest.
        """
        rows: list[UpdateRow] = []
        for commit in commits:
            row = self._acceptable_row(commit)
            if row is None or any(row.task.task_id == other.task.task_id for other in rows):
                break
            rows.append(row)
        return rows[: self._run.taken([phases.Arrived(row.task.site, now) for row in rows])]

    def _acceptable_row(self, commit: Commit) -> UpdateRow | None:
        """What would be recorded of a commit if it is accepted; None: `_judged_alone` says what is wrong with it."""
        row, examined = self._run.invitations.of(commit.site), commit.examined
        if row is None or row.task_id != commit.task_id:
            return None
        if row.kind not in UPLOADED or isinstance(examined, UpdateProblem):
            return None
        try:
            self._presence.seen(commit.site, commit.instance)
            if self._scalars_problem(row, commit.metrics, commit.weight) is not None:
                return None
        except Exception:  # the same error comes when it is judged alone
            return None
        return _counted(row, commit.manifest, commit.metrics, commit.weight, examined)

    def _accepted(self, rows: Sequence[UpdateRow], commits: Sequence[Commit], now: float) -> list[Receipt | Exception]:
        """Record updates, then count them: all are in the ledger before the first one moves the round.

        Args:
            commits: theirs, and perhaps others behind.
            now: when all of them arrived: a deadline that passes while they are written divides them no more.
        """
        answers: list[Receipt | Exception] = []
        try:
            receipts = self._record(rows)
        except Exception:  # perhaps because of one of them, which must not keep out the others
            return [self._judged_alone(commit) for commit in commits[: len(rows)]]
        for row, receipt in zip(rows, receipts, strict=True):
            try:
                self._run.answered(row.task, phases.Arrived(row.task.site, now))
                answers.append(receipt)
            except Exception as error:
                answers.append(error)
        return answers

    def _judged_alone(self, commit: Commit) -> Receipt | Exception:
        site, task_id, manifest = commit.site, commit.task_id, commit.manifest
        try:
            if isinstance(commit.examined, UpdateProblem):
                return self.refuse(site, task_id, manifest, commit.examined)
            return self.commit(site, commit.instance, task_id, manifest, commit.metrics, commit.weight, commit.examined)
        except Exception as error:
            return error

    def _scalars_problem(self, row: TaskRow, metrics: Scores, weight: float | None) -> UpdateProblem | None:
        problem = scalars_problem(metrics, weight, self.expected(row))
        if problem is None and weight is not None:
            if row.site not in self._weights:
                self._weights[row.site] = self._ledger.last_weight(self._name, row.site)
            problem = jump_problem(weight, self._weights[row.site])
        return problem

    def _invitation(self, site: SiteId, task_id: str, *kinds: TaskKind) -> TaskRow:
        """The invitation that a site's call answers: its open one, or an older one from the ledger.

        Raises:
            ProtocolError: there is none of this site, run and kind of task.
        """
        current = self._run.invitations.of(site)
        row = current if current is not None and current.task_id == task_id else self._ledger.task(task_id)
        if row is None or row.site != site or row.run != self._name or row.kind not in kinds:
            raise ProtocolError("no such task for this site; ask for the next task")
        return row

    def _settled(self, row: TaskRow, manifest: Manifest) -> Receipt | None:
        """The verdict that needs no look at the update; None while the invitation is open.

        The update that counts closes its invitation, so an open one has no verdict yet. A site that never heard its
        verdict uploads again, and is told DUPLICATE: the same bytes count once.
        """
        if self._run.invitations.has(row):
            return None
        self._ledger.settle_promises()
        if (counted := self._ledger.accepted(row)) is not None:
            if counted.digest == manifest.digest:
                self._metrics.update_judged(Verdict.DUPLICATE)
                return replace(counted.receipt(), verdict=Verdict.DUPLICATE)
            if (known := self._judged(row, manifest, Verdict.REFUSED)) is not None:
                return known
            log.error("equivocation", run=self._name, round=row.round, site=row.site, digest=manifest.digest)
            problem = "another update was already accepted for this task"
            return self._refuse(row, manifest, UpdateProblem(RefusalCode.EQUIVOCATION, problem))
        if row.task_status == "not-needed" or self._was_complete(row):
            verdict, reason = Verdict.NOT_NEEDED, f"round {row.round} had all the updates it needed"
        else:
            verdict, reason = Verdict.LATE, f"round {row.round} is closed"
        if (known := self._judged(row, manifest, verdict)) is not None:
            return known
        (receipt,) = self._record([UpdateRow(row, verdict, reason, manifest.digest, manifest.total_bytes, {}, None)])
        return receipt

    def _judged(self, row: TaskRow, manifest: Manifest, verdict: Verdict) -> Receipt | None:
        """The recorded verdict on an update for a closed invitation: asking again must not add a row each time.

        Raises:
            ProtocolError: it is not recorded, and too many others are.
        """
        known = self._ledger.judged(row, manifest.digest)
        if known is not None and known.verdict is verdict:
            return known.receipt()
        self._check_refusals(row)
        return None

    def _refusals(self, row: TaskRow) -> int:
        """Updates that were refused for an invitation."""
        if self._refused[0] != (attempt := (row.round, row.attempt)):
            self._refused = attempt, self._ledger.refusals(self._name, *attempt)
        return self._refused[1].get(row.task_id, 0)

    def _check_refusals(self, row: TaskRow) -> None:
        if self._refusals(row) >= MAX_REFUSED:
            raise ProtocolError(f"{MAX_REFUSED} updates were refused for this task: see why, and this site's log")

    def _refuse(self, row: TaskRow, manifest: Manifest, problem: UpdateProblem) -> Receipt:
        """Record a refusal. A site of this version then declines its task; for others the last one closes it."""
        of_bytes = manifest.digest, manifest.total_bytes
        (receipt,) = self._record([UpdateRow(row, Verdict.REFUSED, problem.text, *of_bytes, {}, None, problem.code)])
        if self._run.invitations.has(row) and self._refusals(row) >= MAX_REFUSED:
            self._run.decline(row, f"{MAX_REFUSED} updates were refused")
        return receipt

    def _record(self, updates: Sequence[UpdateRow]) -> list[Receipt]:
        """Record verdicts; the receipts are durable when this returns, so they may be sent."""
        for update in updates:
            row = update.task
            fields = {"run": self._name, "round": row.round, "site": row.site}
            if row.sum_of is not None:  # of a secure aggregation: which step of it
                fields["kind"] = row.kind.value
            if update.verdict is Verdict.ACCEPTED:
                log.info("update accepted", **fields, update_bytes=update.bytes)
            else:
                log.warning("update refused", **fields, verdict=update.verdict.value, reason=update.reason)
        if not all(update.is_accepted for update in updates):
            self._refused = NO_ATTEMPT, {}
        receipts = self._ledger.judge_all(updates)
        for update in updates:
            self._metrics.update_judged(update.verdict, update.code)
            if update.is_accepted and update.task.kind is TaskKind.FIT and update.norm is not None:
                self._metrics.update_norm(update.norm)
            if update.is_accepted and update.weight is not None:
                self._weights[update.task.site] = update.weight
        return receipts

    def _announced_for_sum(self, row: TaskRow, manifest: Manifest) -> UpdateProblem | None:
        published, sums = self._run.published, self._run.sums
        if sums is None or published is None:
            raise ProtocolError("this run has no secure aggregation")
        if (problem := sum_manifest_problem(manifest, sums.length(row, published.address, published.state))) is None:
            sums.prepare(row)
        return problem

    def _start(self, site: SiteId, task_id: str, base: Digest, update: Payload) -> tuple[Payload, float]:
        """The model that a site trained from, and its norm."""
        if (own := self._own_start(site, task_id, update)) is not None:
            return own, distance_norm(own, {})
        with self._loading:
            if self._newest_base is None or self._newest_base[0] != base:
                model = self._run.publisher.stored(base) or codec.view(self._blobs.view(base))
                self._newest_base = base, model, distance_norm(model, {})
            return self._newest_base[1:]

    def _own_start(self, site: SiteId, task_id: str, update: Payload) -> Payload | None:
        """What a site's open task trains from, if that is not what the site is sent."""
        row = self._run.invitations.of(site)
        if row is None or row.task_id != task_id or (published := self._run.published) is None:
            return None
        if row.kind is TaskKind.REFINE:
            return None if self._run.refinements is None else self._run.refinements.start()
        method = self._run.method
        if not callable(getattr(method, "start", None)) or not self._run.invitations.has(row):
            return None
        # A task that is still open now was open all the time, and is of the newest state.
        return cast("OwnStartMethod", method).start(published.state, site, update)

    def expected(self, row: TaskRow) -> ExpectedUpdate:
        """What an update that answers the invitation must look like."""
        if row.kind is TaskKind.REFINE:
            return NOTHING if self._run.refinements is None else self._run.refinements.expects()
        if row.kind is TaskKind.INITIALISE or row.sum_of is not None or (published := self._run.published) is None:
            return NOTHING
        return self._run.method.expects(published.state)

    def _was_complete(self, row: TaskRow) -> bool | None:
        """Whether the invitation's round got all its updates, while it is being aggregated; None: ask the ledger."""
        job = self._run.aggregation.job
        if job is None or job.phase.refines or (job.phase.round, job.phase.attempt) != (row.round, row.attempt):
            return None
        return job.complete


def _counted(row: TaskRow, manifest: Manifest, metrics: Scores, weight: float | None, norm: float | None) -> UpdateRow:
    """An accepted update; of a masked one no norm is known."""
    norm = None if row.sum_of is not None else norm
    return UpdateRow(row, Verdict.ACCEPTED, "", manifest.digest, manifest.total_bytes, metrics, weight, norm=norm)
