"""Asks sites for the steps of a run's secure aggregation, and says what their uploads must be.

`SumRecord` is one sum as the ledger has it: what each step's sites are sent, the total, and what is wrong with an
upload. Everything is a function of accepted uploads alone, so a restarted server sends the same bytes and computes the
same sum. What only the sum itself shows is not looked for in an upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import structlog

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import (
    CodecError,
    DiskFailureError,
    FailureReason,
    OutOfSpaceError,
    SecureAggregationError,
    StateError,
)
from protofed.common.failpoint import reach
from protofed.common.payload import Array, Part, Payload, SiteId, TensorSpec
from protofed.common.protocol.messages import CONTRIBUTORS_STEPS, Manifest, SumOf, TaskKind
from protofed.common.protocol.scores import Spread
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.groups import Groups, whole
from protofed.common.secure_aggregation.keys import KeyAdvert, Roster, SumContext, Vector, check_keys, check_signature
from protofed.common.secure_aggregation.linear_form import SumLayout
from protofed.common.secure_aggregation.masking import (
    Masks,
    Opened,
    Revealed,
    check_signed,
    check_vector,
    opened,
    unmasked,
)
from protofed.common.secure_aggregation.messages import (
    MESSAGE,
    VECTOR,
    ContributorsMessage,
    Message,
    RosterMessage,
    SharesMessage,
    SignatureMessage,
    SurvivorsMessage,
    pack,
    unpack,
)
from protofed.server.method import ServerMethod
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.machine import phases
from protofed.server.rounds.machine.rules import Grouping, left_out
from protofed.server.rounds.presence import Invitations
from protofed.server.rounds.secure_aggregation.totals import counts_contributors, lay_out
from protofed.server.storage.rows import TaskRow, UpdateRow
from protofed.server.verdicts import RefusalCode, Rejection, RejectionCode, UpdateProblem

M = TypeVar("M", bound=Message)
BEGINNINGS = frozenset({TaskKind.FIT, TaskKind.SCORE_SUM})  # what begins a sum: the site has computed what is summed
GROUPED = BEGINNINGS | {TaskKind.SHARE, TaskKind.CONTRIBUTORS, TaskKind.MASK}  # what whole groups do, or nobody
_MASKED = {Vector.CONTRIBUTORS: TaskKind.CONTRIBUTORS, Vector.VALUES: TaskKind.MASK}
_SIGNED = {Vector.CONTRIBUTORS: TaskKind.AGREE_CONTRIBUTORS, Vector.VALUES: TaskKind.AGREE}
_REVEALED = {Vector.CONTRIBUTORS: TaskKind.REVEAL_CONTRIBUTORS, Vector.VALUES: TaskKind.REVEAL}
MAX_SITE_BYTES = 64 << 10  # of one site's message: one made of those of all sites must not be above MAX_MESSAGE_BYTES
_ANSWERS: dict[TaskKind, type[Message]] = {
    TaskKind.FIT: KeyAdvert,
    TaskKind.SCORE_SUM: KeyAdvert,
    TaskKind.SHARE: SharesMessage,
    TaskKind.CONTRIBUTORS: SignatureMessage,
    TaskKind.AGREE_CONTRIBUTORS: SignatureMessage,
    TaskKind.REVEAL_CONTRIBUTORS: Revealed,
    TaskKind.MASK: SignatureMessage,
    TaskKind.AGREE: SignatureMessage,
    TaskKind.REVEAL: Revealed,
}


def build_context(task: TaskRow, recipe: Digest, *, contributors: bool) -> SumContext:
    """What the sum that begins with this task is about.

    Args:
        recipe: the run's fingerprint.
    """
    assert task.sum_of is not None  # noqa: S101  (it begins a sum)
    vectors = (Vector.CONTRIBUTORS, Vector.VALUES) if contributors else (Vector.VALUES,)
    base = task.base_digest or Digest("")
    return SumContext(task.run, task.round, task.attempt, task.sum_of, recipe, base, vectors)


def choose_vector(kind: TaskKind) -> Vector:
    """The vector that a step is about; VALUES for those before either."""
    return Vector.CONTRIBUTORS if kind in CONTRIBUTORS_STEPS else Vector.VALUES


@dataclass(frozen=True)
class SumRecord:
    """One sum up to the step that its newest uploads answer.

    Attributes:
        uploads: digests of accepted ones, by step and site.
        read: gives a blob.
        groups: of the run's sites. Who has sent keys, shares, flags or numbers without all others of its group counts
            as dropped out.
    """

    context: SumContext
    uploads: Mapping[TaskKind, Mapping[SiteId, Digest]]
    read: Callable[[Digest], Buffer]
    groups: Groups

    @classmethod
    def of(
        cls,
        rows: Iterable[UpdateRow],
        recipe: Digest,
        read: Callable[[Digest], Buffer],
        groups: Groups,
        *,
        contributors: bool,
        sum_of: SumOf = SumOf.UPDATE,
    ) -> SumRecord:
        """The sum of one attempt.

        Args:
            rows: all commits of the attempt.

        Raises:
            SecureAggregationError: no site has started it, or two began it with different models.
        """
        uploads: dict[TaskKind, dict[SiteId, Digest]] = {}
        contexts: list[SumContext] = []
        for row in rows:
            if row.counts and row.task.sum_of is sum_of:
                uploads.setdefault(row.task.kind, {})[row.task.site] = row.digest
                if row.task.kind in BEGINNINGS:
                    contexts.append(build_context(row.task, recipe, contributors=contributors))
        if not contexts:
            raise SecureAggregationError("too-few-sites", "no site has sent keys")
        if any(context != contexts[0] for context in contexts):
            raise SecureAggregationError("other-base", "the sites of this sum were sent different models")
        return cls(contexts[0], uploads, read, groups)

    @cached_property
    def roster(self) -> Roster:
        """The keys of all sites of whole groups that sent some."""
        started_by = TaskKind.SCORE_SUM if self.context.sum_of is SumOf.SCORES else TaskKind.FIT
        adverts = self._all(started_by, KeyAdvert)
        groups = tuple(group for group in self.groups if adverts.keys() >= set(group))
        return Roster(self.context, tuple(adverts.values()), groups)

    def masks(self, vector: Vector) -> Masks:
        """Which masks are in a vector: of the sites that dealt shares; with contributors, that also sent flags."""
        counted = vector is Vector.VALUES and Vector.CONTRIBUTORS in self.context.vectors
        return Masks(self.roster, vector, self._sites(TaskKind.CONTRIBUTORS if counted else TaskKind.SHARE))

    def survivors(self, vector: Vector) -> tuple[SiteId, ...]:
        """The sites whose masked vectors are there."""
        return self._sites(_MASKED[vector])

    def bases(self, step: TaskKind, sites: Iterable[SiteId]) -> dict[SiteId, Payload]:
        """By site, what it is sent for a step: the same object for all, where it is the same for all.

        Raises:
            SecureAggregationError: what sites sent does not give it.
        """
        vector = choose_vector(step)
        match step:
            case TaskKind.SHARE:
                message: Message = RosterMessage(self.roster.adverts, self.roster.groups)
            case TaskKind.MASK if Vector.CONTRIBUTORS in self.context.vectors:
                message = self._contributors()
            case TaskKind.CONTRIBUTORS | TaskKind.MASK:
                return self._deliveries(sites)
            case TaskKind.AGREE_CONTRIBUTORS | TaskKind.AGREE:
                message = SurvivorsMessage(self.survivors(vector), {})
            case TaskKind.REVEAL_CONTRIBUTORS | TaskKind.REVEAL:
                signed = self._all(_SIGNED[vector], SignatureMessage)
                signatures = {site: signed_message.signature for site, signed_message in signed.items()}
                message = SurvivorsMessage(self.survivors(vector), signatures)
            case _:
                raise ValueError(f"{step} is no step of a secure aggregation that sends something to sites")
        return dict.fromkeys(sites, pack(message))

    def total(self) -> Array:
        """The sum [N] uint64 of the survivors' numbers.

        Raises:
            SecureAggregationError: what sites revealed does not open it.
        """
        masks, survivors = self.masks(Vector.VALUES), self.survivors(Vector.VALUES)
        vectors = (self._vector(TaskKind.MASK, site) for site in survivors)
        return unmasked(masks, survivors, vectors, self._opened(Vector.VALUES))

    def _deliveries(self, sites: Iterable[SiteId]) -> dict[SiteId, Payload]:
        dealt = {site: message.sealed for site, message in self._all(TaskKind.SHARE, SharesMessage).items()}
        return {
            site: pack(SharesMessage({by: sealed[site] for by, sealed in dealt.items() if by != site}))
            for site in sites
        }

    def _contributors(self) -> ContributorsMessage:
        signed = self._all(TaskKind.CONTRIBUTORS, SignatureMessage)
        vectors = {site: self._vector(TaskKind.CONTRIBUTORS, site) for site in signed}
        signatures = {site: message.signature for site, message in signed.items()}
        return ContributorsMessage(vectors, signatures, self._opened(Vector.CONTRIBUTORS))

    def _opened(self, vector: Vector) -> Opened:
        return opened(self.masks(vector), self.survivors(vector), self._all(_REVEALED[vector], Revealed))

    def _sites(self, kind: TaskKind) -> tuple[SiteId, ...]:
        there = self.uploads.get(kind, {}).keys()
        return tuple(sorted(whole(self.groups, there) if kind in GROUPED else there))

    def _all(self, kind: TaskKind, message: type[M]) -> dict[SiteId, M]:
        return {site: unpack(self.read(self.uploads[kind][site]), message)[0] for site in self._sites(kind)}

    def _vector(self, kind: TaskKind, site: SiteId) -> Array:
        _, vector = unpack(self.read(self.uploads[kind][site]), SignatureMessage)
        assert vector is not None  # noqa: S101  (`SumCheck` lets no other in)
        return vector


def manifest_problem(manifest: Manifest, length: int | None) -> UpdateProblem | None:
    """Whether an upload announces a message, and a masked vector where one is asked for.

    Args:
        length: of the vector; None: there is to be none.
    """
    announced = {spec.name: spec for spec in manifest.tensors if spec.part is Part.SECURE_AGGREGATION}
    names = {MESSAGE} if length is None else {MESSAGE, VECTOR}
    if announced.keys() != names or len(manifest.tensors) != len(names):
        text = f"expected the tensors {', '.join(sorted(names))} of part {Part.SECURE_AGGREGATION}, and no others"
        return UpdateProblem(RefusalCode.TENSORS, text)
    message = announced[MESSAGE]
    if message.dtype != "uint8" or len(message.shape) != 1 or message.shape[0] > MAX_SITE_BYTES:
        text = f"the message is {message.dtype} {list(message.shape)}, expected uint8 [{MAX_SITE_BYTES} at most]"
        return UpdateProblem(RefusalCode.TENSORS, text)
    if length is not None and announced[VECTOR] != TensorSpec(Part.SECURE_AGGREGATION, VECTOR, "uint64", (length,)):
        vector = announced[VECTOR]
        text = f"the masked vector is {vector.dtype} {list(vector.shape)}, expected uint64 [{length}]"
        return UpdateProblem(RefusalCode.TENSORS, text)
    return None


@dataclass(frozen=True)
class SumCheck:
    """What a site's upload to one step is examined by.

    Attributes:
        record: what was sent before this step; None: the step is the first.
    """

    kind: TaskKind
    site: SiteId
    context: SumContext
    record: SumRecord | None

    def problem(self, data: Buffer, manifest: Manifest) -> UpdateProblem | None:
        """The problem with an upload's bytes. May be called from any thread."""
        try:
            if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
                return UpdateProblem(RefusalCode.CONTENTS, "the upload holds other tensors than were announced")
            self._check(data)
        except CodecError as error:
            return UpdateProblem(RefusalCode.DAMAGED, str(error))
        except SecureAggregationError as error:
            return UpdateProblem(RefusalCode.SECURE_AGGREGATION, str(error))
        return None

    def _check(self, data: Buffer) -> None:
        """Raises: CodecError, SecureAggregationError."""
        message, vector = unpack(data, _ANSWERS[self.kind])
        if isinstance(message, KeyAdvert):
            self._check_advert(message)
            return
        assert self.record is not None  # noqa: S101  (of every later step)
        about = choose_vector(self.kind)
        masks, survivors = self.record.masks(about), self.record.survivors(about)
        match message:
            case SharesMessage(sealed):
                self._check_sites("shares", sealed.keys(), self.record.roster.by_site.keys() - {self.site})
            case SignatureMessage(signature) if self.kind is TaskKind.CONTRIBUTORS and vector is not None:
                check_vector(masks, self.site, vector, signature)
            case SignatureMessage(signature) if self.kind is not TaskKind.MASK:
                check_signed(masks, survivors, self.site, signature)
            case Revealed(self_seeds, mask_seeds):
                self._check_sites("shares of self masks", self_seeds.keys(), set(survivors))
                self._check_sites("shares of mask keys", mask_seeds.keys(), set(masks.included) - set(survivors))

    def _check_advert(self, advert: KeyAdvert) -> None:
        vectors = len(self.context.vectors)
        if advert.site != self.site or (len(advert.mask_keys), len(advert.commitments)) != (vectors, vectors):
            raise SecureAggregationError("bad-keys", f"expected the keys of {self.site} for {vectors} vectors")
        check_signature(advert.identity, advert.signature, self.context.bind("keys", advert.facts), self.site)
        check_keys(advert)  # in a roster they would end the sum of all sites

    def _check_sites(self, what: str, actual: object, expected: object) -> None:
        if actual != expected:
            raise SecureAggregationError("bad-shares", f"{what}: expected those of this step's sites, each once")


def expected_length(kind: TaskKind, numbers: int, classes: int) -> int | None:
    """The length of the masked vector that answers a step; None: there is none."""
    lengths = {TaskKind.CONTRIBUTORS: classes, TaskKind.MASK: numbers}
    return lengths.get(kind)


log = structlog.get_logger()
MAX_DOUBLED = 1 << 20  # more attempts than any round had; a task has 32 bits for the number


class SumRounds:
    """The secure aggregation of one run; all methods but `prepared` are called from the coordinator's thread."""

    def __init__(self, recipe: Recipe, method: ServerMethod, context: ServerContext, invitations: Invitations) -> None:
        self._run, self._recipe, self._method = recipe.name, recipe.fingerprint(), method
        self.contributors = counts_contributors(method, recipe)
        self._grouping = Grouping(recipe.name, recipe.seed, recipe.federation.sum_group)
        self.scores = recipe.score_names()
        self._ledger, self._blobs, self._clock = context.ledger, context.blobs, context.clock
        self._invitations = invitations
        self._layout: tuple[Digest, SumLayout] | None = None  # of the newest state, by its address
        self._record: tuple[tuple[int, int, SumOf, TaskKind], SumRecord] | None = None  # of which step
        self._checks: dict[str, SumCheck] = {}  # by task_id, of the step that is open

    def ask(self, phase: phases.Summing, *, complete: bool) -> tuple[phases.Insufficient, ...]:
        """Store what each site is sent, record the tasks with the end of the last step's, wake the sites.

        Args:
            complete: the round needs none of the updates that are not there yet.

        Returns:
            The event that what sites have sent gives nothing to go on with; nothing: they are asked.

        Raises:
            OutOfSpaceError, DiskFailureError: something cannot be written; no site is asked.
        """
        try:
            self._ask(phase, complete=complete)
        except (OutOfSpaceError, DiskFailureError):
            raise
        except (SecureAggregationError, StateError) as error:  # of a site that lied, or of a blob that is damaged
            log.error("no secure aggregation", run=self._run, round=phase.round, kind=phase.step, why=str(error))
            return (phases.Insufficient(f"{phase.step} of the secure aggregation: {error}", self._clock()),)
        return ()

    def _ask(self, phase: phases.Summing, *, complete: bool) -> None:
        at = phase.round, phase.attempt
        reach("sum-step-closed")
        log.info(
            "secure aggregation goes on", run=self._run, round=phase.round, kind=phase.step, cohort=sorted(phase.cohort)
        )
        rows = [row for row in self._ledger.updates(self._run, *at) if row.task.sum_of is phase.sum_of]
        self._checks = {}
        record = self._recorded(rows, phase.groups, phase.sum_of)
        self._record = (*at, phase.sum_of, phase.step), record
        sites = sorted(phase.cohort)
        bases = self._stored(record.bases(phase.step, sites))
        status, silent = "not-needed" if complete else "late", self._invitations.clear()
        self._invitations.send(
            phase.step,
            *at,
            sites,
            bases,
            lambda tasks: self._ledger.go_on(tasks, status, silent, phase.groups),
            phase.sum_of,
        )
        if phase.step is TaskKind.SHARE:
            try:
                self._reject(rows, phase)
            except OutOfSpaceError as error:  # the step is asked for; the aggregation rejects who is not in the sum
                log.warning("no space to reject updates", run=self._run, round=phase.round, why=str(error))
        reach("sum-step-asked")

    def attempt_after(self, round: int, last: int) -> int:
        """The number of the attempt at a round after this one; 0: there was none.

        A site takes part in no attempt twice. It declines, by its policy, an attempt that it knows to be over: then
        this ledger is a copy from before that attempt. The number is doubled, so it is soon above all that sites know.
        The doubling ends: a site may decline for another reason, such as a limit a day, as often as the recipe allows
        attempts.
        """
        declined = 0 < last < MAX_DOUBLED and any(
            task.reason == FailureReason.POLICY for task in self._ledger.tasks(self._run, round, last)
        )
        return 2 * last if declined else 1 + last

    def length(self, task: TaskRow, address: Digest, state: Payload) -> int | None:
        """The length of the masked vector that answers a task on top of this state; None: there is none."""
        if task.sum_of is SumOf.SCORES:
            layout = score_sums.lay_out_scores(self.scores)
            return expected_length(task.kind, layout.size, layout.classes)
        if self._layout is None or self._layout[0] != address:
            self._layout = address, lay_out(self._method, state)
        layout = self._layout[1]
        return expected_length(task.kind, layout.size, layout.classes)

    def prepare(self, task: TaskRow) -> None:
        """Read what the upload that answers an open task is examined by."""
        assert task.sum_of is not None  # noqa: S101  (of a sum)
        if task.kind in BEGINNINGS:
            context = build_context(task, self._recipe, contributors=self._counts_contributors(task.sum_of))
            self._checks[task.task_id] = SumCheck(task.kind, task.site, context, None)
            return
        at = task.round, task.attempt, task.sum_of, task.kind
        if self._record is None or self._record[0] != at:  # after a restart
            rows = self._ledger.updates(self._run, task.round, task.attempt)
            self._record = at, self._recorded(rows, self._started(rows), task.sum_of)
        record = self._record[1]
        self._checks[task.task_id] = SumCheck(task.kind, task.site, record.context, record)

    def prepared(self, task_id: str) -> SumCheck | None:
        """What `prepare` read; None: the step is over. May be called from any thread."""
        return self._checks.get(task_id)

    def opened_scores(self, round: int, attempt: int) -> dict[str, Spread]:
        """What the sum of the sites' own scores says, after all steps.

        Raises:
            SecureAggregationError: what sites sent does not open it.
            StateError: an upload can no longer be read.
        """
        rows = self._ledger.updates(self._run, round, attempt)
        record = self._recorded(rows, self._started(rows), SumOf.SCORES)
        return score_sums.opened(self.scores, record.total())

    def _counts_contributors(self, sum_of: SumOf) -> bool:
        return sum_of is SumOf.SCORES or self.contributors

    def _recorded(self, rows: Sequence[UpdateRow], groups: Groups, sum_of: SumOf) -> SumRecord:
        contributors = self._counts_contributors(sum_of)
        return SumRecord.of(rows, self._recipe, self._blobs.view, groups, contributors=contributors, sum_of=sum_of)

    def _started(self, rows: Sequence[UpdateRow]) -> Groups:
        """The groups of a sum that has started; none is dissolved meanwhile."""
        return self._grouping.started(self._ledger.groups(), {row.task.site for row in rows})

    def _reject(self, rows: Sequence[UpdateRow], phase: phases.Summing) -> None:
        """Say of sites that are not in the sum what they wait for; after its tasks, whose groups are without them."""
        ready = [row for row in rows if row.counts]
        reasons = left_out(self._ledger.groups(), {row.task.site for row in ready}, self._grouping.fewest)
        for row in ready:
            if row.task.site not in phase.roster:
                self._ledger.reject(row, Rejection(RejectionCode.GROUP, reasons[row.task.site]))

    def _stored(self, payloads: Mapping[SiteId, Payload]) -> dict[SiteId, tuple[Digest, int]]:
        """Digest and bytes by site; what is the same object for all is stored once."""
        stored: dict[int, tuple[Digest, int]] = {}
        for payload in payloads.values():
            if id(payload) not in stored:
                pieces = codec.encoded(payload)
                stored[id(payload)] = self._blobs.put(*pieces), sum(map(len, pieces))
        return {site: stored[id(payload)] for site, payload in payloads.items()}
