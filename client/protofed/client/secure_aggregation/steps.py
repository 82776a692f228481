"""The tasks of a secure aggregation: what the site sends for each, once its session of the sum is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import structlog

from protofed.client.policy.policy import PolicyRefusedError, Released, ReleasedVector
from protofed.client.policy.rules import PERSONAL
from protofed.client.secure_aggregation import session as steps
from protofed.client.secure_aggregation.partners import Membership
from protofed.client.secure_aggregation.session import Session
from protofed.client.site import PreparedRun, Site, is_aggregated
from protofed.client.training.dp import NoiseShare, share_std
from protofed.common.codec import Digest
from protofed.common.errors import FailureReason, SecureAggregationError, StateError, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.payload import Array, Payload, SiteId, Update, describe
from protofed.common.protocol.messages import (
    CONTRIBUTORS_STEPS,
    SUM_STEPS,
    Receipt,
    Scores,
    SumOf,
    Task,
    TaskKind,
    Verdict,
)
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.keys import SumContext, Vector
from protofed.common.secure_aggregation.linear_form import POINT, SumLayout, read_form
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
_SUMS_OF = {TaskKind.FIT: SumOf.UPDATE, TaskKind.SCORE_SUM: SumOf.SCORES}  # of a sum, by what begins it


def _share(site: Site, run: PreparedRun, task: Task, std: float) -> NoiseShare:
    return run.noise_share(site.name, task, site.store.last_counted(task.run, task.state_before), std)


class SumSteps:
    """Works on one site's tasks of secure aggregation.

    Attributes:
        membership: None: this site takes part in no run with them.

    Raises:
        PolicyRefusedError: from every method: the step is refused, by its SecureAggregationError's code or the policy.
        StateError: from every method: a session cannot be read or written; nothing was sent.
    """

    def __init__(self, site: Site, fetch: Callable[[Task], bytes], membership: Membership | None) -> None:
        self._site, self._fetch, self.membership = site, fetch, membership

    def check_member(self, run: PreparedRun) -> None:
        """Check that a site can take part in a run's secure aggregation; ranks that only train need no identity.

        Raises:
            TaskFailedError: it cannot.
        """
        if is_aggregated(self._site, run.recipe) and self.membership is None:
            text = (
                f"run {run.recipe.name} has federation.secure = true; this site has no identity for secure aggregation"
            )
            raise TaskFailedError(FailureReason.REFUSED, text)

    def check_open(self, run: PreparedRun, task: Task) -> None:
        """Check that a FIT task is of a sum that is not over, and of no other model or recipe than it began from.

        Asked before anything is trained: what is staged then would take the place of what the sum is of.
        """
        with _refusals():
            self._found(self._context(run, task, task.base_digest))

    def begin(self, run: PreparedRun, task: Task, update: Update, base: Callable[[], Payload]) -> Released:
        """The site's keys, for a FIT task whose update is staged; the same bytes again if it had started.

        Args:
            base: what the fit started from.
        """
        with _refusals():
            sessions, context = self._membership().sessions, self._context(run, task, task.base_digest)
            sessions.wipe_before(task.run, task.round, task.attempt, SumOf.UPDATE)
            if (earlier := self._found(context)) is not None:
                return self._released(earlier)
            session = self._started(run, context, update, base())
            sessions.save(session)
            reach("sum-started")
            return self._released(session)

    def scored(self, run: PreparedRun, task: Task) -> Released | None:
        """The site's keys for a SCORE_SUM task whose scores are taken; None: they are not."""
        _check_aggregated(self._site, run, task)
        with _refusals():
            session = self._found(self._context(run, task, task.base_digest))
            return None if session is None else self._released(session)

    def begin_scores(self, run: PreparedRun, task: Task, scores: Scores) -> Released:
        """The site's keys, for a SCORE_SUM task whose scores were just taken; they are stored with them.

        What the policy lets out of them is asked at each step. A site whose policy names none takes part with none, so
        that no other site's scores stay out of the sum for it.

        Args:
            scores: of the secret half of its test set, with random numbers in place of what is withheld.
        """
        with _refusals():
            membership, context = self._membership(), self._context(run, task, task.base_digest)
            membership.sessions.wipe_before(task.run, task.round, task.attempt, SumOf.SCORES)
            names = run.recipe.score_names()
            layout = score_sums.lay_out_scores(names)
            session = steps.started(context, layout, self._site.name, membership.identity, membership.endorsement())
            session = replace(session, scores=score_sums.summable(names, self._aggregated_scores(run, task, scores)))
            membership.sessions.save(session)
            reach("sum-started")
            return self._released(session)

    def _aggregated_scores(self, run: PreparedRun, task: Task, scores: Scores) -> Scores:
        """Without those of an own model that follows from what the server sent and, if at all, from the label shares.

        Such a model is a question of the server's about them, and the sum of three answers is not hidden by adding up.
        """
        untrained = self._site.store.last_counted(task.run, task.round + 1).round == 0
        if run.method.declares.mixes_classes or (run.method.declares.personal == "loaded" and untrained):
            return {name: score for name, score in scores.items() if not name.startswith(PERSONAL)}
        return scores

    def vector(self, run: PreparedRun, update: Update, base: Payload) -> ReleasedVector:
        """What of an update the policy lets into a sum: asked before the update is staged, and others count on it."""
        with _refusals():
            layout = SumLayout.of(read_form(run.method, run.recipe.method.name), describe(update.payload), base)
            if clipped := layout.clipped(update, POINT.limit):  # said here alone: the server must not know whose
                why = f"above {POINT.limit:g}, as in {clipped[0]}: training diverges"
                log.warning("numbers leave clipped in a sum", run=run.recipe.name, why=why)
            return self._site.policy.release_sum(update, layout, run.gate_context())

    def step(self, run: PreparedRun, task: Task) -> Released:
        """What the site sends for a later step, of the update that is staged for this sum."""
        _check_aggregated(self._site, run, task)
        with _refusals():
            membership = self._membership()
            session = self._session(run, task)
            before, (session, payload) = session, self._worked(run, task, session, membership.sessions.opened(session))
            if Vector.VALUES in session.revealed and Vector.VALUES not in before.revealed:
                membership.record("aggregated", {**_identify(session), "sites": list(session.survivors[Vector.VALUES])})
            membership.sessions.save(session)
            reach(f"sum-{task.kind}")
            return self._site.policy.release_step(payload)

    def staged(self, task: Task) -> tuple[Task, Update]:
        """What is staged for the sum that a task is of, with the task that it was trained for.

        Raises:
            TaskFailedError: nothing is.
        """
        for fitted, update in self._site.store.unsettled(task.run):
            if (fitted.round, fitted.attempt) == (task.round, task.attempt):
                return fitted, update
        text = f"this site has no update for the secure aggregation of round {task.round}, attempt {task.attempt}"
        raise TaskFailedError(FailureReason.REFUSED, text)

    def settles(self, task: Task) -> Task | None:
        """The fit that a step's receipt settles: that of its numbers, or, if a kill lost it, that of the last step."""
        if task.kind not in (TaskKind.MASK, TaskKind.REVEAL) or task.sum_of is not SumOf.UPDATE:
            return None
        fits = (fitted for fitted, _ in self._site.store.unsettled(task.run))
        return next((fit for fit in fits if (fit.round, fit.attempt) == (task.round, task.attempt)), None)

    def drop_over(self, run: str) -> None:
        """Remove what is staged for sums that are over: the server opened its round again, without this site."""
        if (member := self.membership) is None:
            return
        with _kept_if_unreadable(run):
            for task, _ in self._site.store.unsettled(run):
                if task.attempt and member.sessions.is_over(run, task.round, task.attempt, SumOf.UPDATE):
                    self._site.store.settle(task, Receipt(Verdict.LATE, "its sum is over", Digest(""), ""))

    def settled(self, task: Task) -> None:
        """Wipe a sum's secrets once the server has all that it gets: with them its records give an update."""
        if (member := self.membership) is not None and task.kind is TaskKind.REVEAL and task.sum_of is not None:
            with _kept_if_unreadable(task.run):
                member.sessions.wipe_one(task.run, task.round, task.attempt, task.sum_of)

    def over(self, run: str) -> None:
        """Wipe the secrets of a run that is over, or that the site has left."""
        if self.membership is not None:
            with _kept_if_unreadable(run):
                self.membership.sessions.wipe(run)

    def only(self, run: str) -> None:
        """Wipe the secrets of all other runs."""
        if self.membership is not None:
            with _kept_if_unreadable(run):
                self.membership.sessions.wipe_all_but(run)

    def _worked(
        self, run: PreparedRun, task: Task, session: Session, before: tuple[SiteId, ...] | None
    ) -> tuple[Session, Payload]:
        membership, blob = self._membership(), self._fetch(task)
        vector = Vector.CONTRIBUTORS if task.kind in CONTRIBUTORS_STEPS else Vector.VALUES
        match task.kind:
            case TaskKind.SHARE:
                pin = membership.sessions.group()
                pinned = None if pin is None else pin.group
                fewest = max(run.recipe.federation.sum_group, self._site.policy.rules.sum_group)
                trust = partial(membership.trust, required=self._site.policy.rules.partners == "confirmed")
                return steps.share(session, blob, trust, pinned=pinned, fewest=fewest)
            case TaskKind.CONTRIBUTORS:
                flags = self._released_vector(run, session, task).flags()
                return steps.send_flags(session, blob, flags, membership.identity)
            case TaskKind.MASK:
                released = self._released_vector(run, session, task)
                classes = steps.open_flags(session, blob, released.flags(), _fewest(run, session))
                self._record_scores(run, session, released.flags(), classes)
                words = self._leaving(run, session, task, released.words(POINT, classes))
                return steps.send_values(session, blob, words)
            case TaskKind.AGREE_CONTRIBUTORS | TaskKind.AGREE:
                return steps.agree(session, blob, vector, membership.identity, before)
            case _:
                return steps.reveal(session, blob, vector, before)

    def _started(self, run: PreparedRun, context: SumContext, update: Update, base: Payload) -> Session:
        layout, membership = self.vector(run, update, base).layout, self._membership()
        session = steps.started(context, layout, self._site.name, membership.identity, membership.endorsement())
        return replace(session, noise_std=share_std(run.recipe.plan, context.round, run.recipe.rounds, base))

    def _leaving(self, run: PreparedRun, session: Session, task: Task, words: Array) -> Array:
        """What of a site's terms [N] uint64 goes under the masks: with its share of the noise, where that is shared.

        Random words in place of a withheld update. If the site sent the received model, for example, the aggregate
        would be over the other sites alone. A server could then ask so that all but one site withhold, and read that
        site's update.
        """
        if session.sum_of is not SumOf.UPDATE:
            return words
        fitted, _ = self.staged(task)
        if self._site.store.trained_by(fitted).withheld:
            return session.secrets.random_words(len(words))
        if not run.shares_noise:
            return words
        share = _share(self._site, run, fitted, session.noise_std)
        return share.on_words(session.layout, words, POINT.bits)

    def _released(self, session: Session) -> Released:
        return self._site.policy.release_step(steps.advertise(session))

    def _released_vector(self, run: PreparedRun, session: Session, task: Task) -> ReleasedVector:
        if session.sum_of is SumOf.SCORES:
            return self._site.policy.release_score_sum(session.scores, run.recipe.score_names(), noisy=run.noisy)
        fitted, update = self.staged(task)
        if fitted.base_digest != session.base:
            # All others may have been sent one that teaches them nothing: the sum would be this site's update alone.
            raise SecureAggregationError(
                "other-base", "this site's update was trained from another model than the secure aggregation has"
            )
        return self._site.policy.release_sum(update, session.layout, run.gate_context())

    def _record_scores(self, run: PreparedRun, session: Session, flags: Array, classes: Array | None) -> None:
        """Write which of the site's scores are about to be sent under masks, where scores are aggregated.

        The site has its own record of their values. It does not wait until the server decrypts the sum, because the
        server does not tell this site.
        """
        if session.sum_of is SumOf.SCORES and Vector.VALUES not in session.sent:
            names = run.recipe.score_names()
            rows = (flags if classes is None else flags * classes).nonzero()[0]
            leaving_rows = [score_sums.list_scores(names)[row] for row in rows]
            sent = [name for name in leaving_rows if score_sums.is_score(names, name, session.scores[name])]
            leaving: list[Fact] = [*sent]
            self._membership().record("masked", {**_identify(session), "scores": leaving})
            log.info("own scores leave in a sum", run=session.run, round=session.round, scores=leaving)

    def _session(self, run: PreparedRun, task: Task) -> Session:
        sum_of = task.sum_of or SumOf.UPDATE
        session = self._membership().sessions.find(task.run, task.round, task.attempt, sum_of)
        if session is None:
            raise SecureAggregationError(
                "out-of-order",
                f"the server sent a {task.kind} task of a secure aggregation that this site has not started",
            )
        steps.check_same(session, self._context(run, task, Digest(session.base)))
        return session

    def _found(self, context: SumContext) -> Session | None:
        """The session of a sum, if it was started, for this very context."""
        at = (context.run, context.round, context.attempt, context.sum_of)
        if (session := self._membership().sessions.find(*at)) is not None:
            steps.check_same(session, context)
        return session

    def _context(self, run: PreparedRun, task: Task, base: Digest | None) -> SumContext:
        """Of what this site itself was given: it signs nothing that names another recipe or model."""
        if (
            task.sum_of is None
            or task.sum_of is not _SUMS_OF.get(task.kind, task.sum_of)
            or not (task.attempt and base)
        ):
            raise SecureAggregationError(
                "out-of-order",
                f"the server sent a {task.kind} task that does not say which secure aggregation it belongs to",
            )
        rows = task.sum_of is SumOf.SCORES or read_form(run.method, run.recipe.method.name).by_class
        vectors = (Vector.CONTRIBUTORS, Vector.VALUES) if rows else (Vector.VALUES,)
        at = (task.run, task.round, task.attempt, task.sum_of)
        return SumContext(*at, Digest(run.recipe.fingerprint()), base, vectors)

    def _membership(self) -> Membership:
        if self.membership is None:
            raise TaskFailedError(FailureReason.REFUSED, "this site has no identity for secure aggregation")
        return self.membership


def _identify(session: Session) -> dict[str, Fact]:
    """Which sum a record of the audit log is of."""
    return {"run": session.run, "round": session.round, "attempt": session.attempt, "sum_of": session.sum_of}


def _check_aggregated(site: Site, run: PreparedRun, task: Task) -> None:
    if not is_aggregated(site, run.recipe) or task.kind not in (*SUM_STEPS, TaskKind.SCORE_SUM):
        raise TaskFailedError(
            FailureReason.REFUSED, f"the server sent a {task.kind} task, which this run or this version does not have"
        )


def _fewest(run: PreparedRun, session: Session) -> int:
    """How many must hold a row of a sum."""
    return score_sums.CONTRIBUTORS if session.sum_of is SumOf.SCORES else run.recipe.federation.min_contributors


@contextmanager
def _kept_if_unreadable(run: str) -> Iterator[None]:
    """Secrets that cannot be wiped now stay until the next task or run, and must not end the daemon."""
    try:
        yield
    except StateError as error:
        log.warning("the secrets of an ended secure aggregation could not be deleted", run=run, why=str(error))


@contextmanager
def _refusals() -> Iterator[None]:
    """What must not be acted on is refused, counted and audited as what the policy refuses, by its code."""
    try:
        yield
    except SecureAggregationError as error:
        rule = f"secure-aggregation.{error.code}"
        raise PolicyRefusedError(rule, f"{error} ({rule})") from error
