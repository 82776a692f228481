"""The tasks of a secure sum: what the site hands in for each, once its session of the sum is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from protofed.client.agent.site import PreparedRun, Site
from protofed.client.privacy.policy import PolicyRefusedError, Released, ReleasedVector
from protofed.client.sums import session as steps
from protofed.client.sums.membership import Membership
from protofed.client.sums.session import Session
from protofed.common.codec import Digest
from protofed.common.errors import FailureReason, SecureSumError, StateError, TaskFailedError
from protofed.common.failpoint import reach
from protofed.common.payload import Payload, SiteId, Update, describe
from protofed.common.protocol.messages import Receipt, Task, TaskKind, Verdict
from protofed.common.secure_sums.context import Subject, SumContext, Vector
from protofed.common.secure_sums.linear_form import SumLayout, form_of
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
_OF_HOLDERS = (TaskKind.HOLDERS, TaskKind.AGREE_HOLDERS, TaskKind.REVEAL_HOLDERS)
_STEPS = (*_OF_HOLDERS, TaskKind.SHARE, TaskKind.MASK, TaskKind.AGREE, TaskKind.REVEAL)


def is_summed(site: Site, run: PreparedRun) -> bool:
    """Whether updates of a run leave in secure sums only; those of a simulation stay in its process."""
    return run.recipe.federation.secure and not site.simulated


def check_member(site: Site, run: PreparedRun) -> None:
    """Check that a site can take part in secure sums, if a run has them; ranks that only train need no identity.

    Raises:
        TaskFailedError: it cannot.
    """
    if is_summed(site, run) and site.membership is None:
        text = f"run {run.recipe.name} has federation.secure = true, and this site has no identity for secure sums"
        raise TaskFailedError(FailureReason.REFUSED, text)


class SumSteps:
    """Works on one site's tasks of secure sums.

    Raises:
        PolicyRefusedError: from every method: the step is refused by the code of its SecureSumError, or by the policy.
        StateError: from every method: a session cannot be read or written; nothing was sent.
    """

    def __init__(self, site: Site, fetch: Callable[[Task], bytes]) -> None:
        self._site, self._fetch = site, fetch

    def check_open(self, run: PreparedRun, task: Task) -> None:
        """Check that a FIT task is of a sum that is not over, and of no other model or recipe than it began from.

        Asked before anything is trained: what is staged then would take the place of what the sum is of.
        """
        with _refusals():
            self._found(self._context(run, task, task.base_digest))

    def begin(self, run: PreparedRun, task: Task, update: Update, base: Callable[[], Payload]) -> Released:
        """The site's keys, for a FIT task whose update is staged; the same bytes again if it had begun.

        Args:
            base: what the fit started from.
        """
        with _refusals():
            sessions, context = self._membership().sessions, self._context(run, task, task.base_digest)
            sessions.wipe_before(task.run, task.round, task.attempt, Subject.UPDATE)
            if (found := self._found(context)) is not None:
                return self._released(found)
            session = self._begun(run, context, update, base())
            sessions.save(session)
            reach("sum-begun")
            return self._released(session)

    def vector(self, run: PreparedRun, update: Update, base: Payload) -> ReleasedVector:
        """What of an update the policy lets into a sum: asked before the update is staged, and others count on it."""
        with _refusals():
            layout = SumLayout.of(form_of(run.method, run.recipe.method.name), describe(update.payload), base)
            layout.check_limit(update, run.recipe.federation.sum_limit)
            return self._site.policy.release_sum(update, layout, run.gate_context())

    def step(self, run: PreparedRun, task: Task) -> Released:
        """What the site hands in for a later step, of the update that is staged for this sum."""
        if not is_summed(self._site, run) or task.kind not in _STEPS:
            raise TaskFailedError(FailureReason.REFUSED, f"a {task.kind} task, which this run, or version, has not")
        with _refusals():
            membership = self._membership()
            session = self._session(run, task)
            before, (session, payload) = session, self._worked(run, task, session, membership.sessions.opened(session))
            if Vector.VALUES in session.revealed and Vector.VALUES not in before.revealed:
                membership.record("summed", _summed(session))
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
        text = f"no update waits here for the sum of round {task.round}, attempt {task.attempt}"
        raise TaskFailedError(FailureReason.REFUSED, text)

    def drop_over(self, run: str) -> None:
        """Remove what is staged for sums that are over: the server opened its round again, without this site."""
        if (member := self._site.membership) is None:
            return
        with _kept_if_unreadable(run):
            for task, _ in self._site.store.unsettled(run):
                if task.attempt and member.sessions.is_over(run, task.round, task.attempt, Subject.UPDATE):
                    self._site.store.settle(task, Receipt(Verdict.STALE, "its sum is over", Digest(""), ""))

    def over(self, run: str) -> None:
        """Wipe the secrets of a run that is over, or that the site has left."""
        if self._site.membership is not None:
            with _kept_if_unreadable(run):
                self._site.membership.sessions.wipe(run)

    def only(self, run: str) -> None:
        """Wipe the secrets of all other runs."""
        if self._site.membership is not None:
            with _kept_if_unreadable(run):
                self._site.membership.sessions.wipe_all_but(run)

    def _worked(
        self, run: PreparedRun, task: Task, session: Session, before: tuple[SiteId, ...] | None
    ) -> tuple[Session, Payload]:
        membership, blob = self._membership(), self._fetch(task)
        vector = Vector.HOLDERS if task.kind in _OF_HOLDERS else Vector.VALUES
        match task.kind:
            case TaskKind.SHARE:
                pinned = membership.sessions.group(task.run)
                fewest = max(run.recipe.federation.sum_group, self._site.policy.rules.sum_group)
                return steps.share(session, blob, membership.peers.trust, pinned=pinned, fewest=fewest)
            case TaskKind.HOLDERS:
                flags = self._released_vector(run, session, task).flags()
                return steps.send_flags(session, blob, flags, membership.identity)
            case TaskKind.MASK:
                federation = run.recipe.federation
                kept = steps.open_flags(session, blob, federation.min_contributors)
                assert federation.fixed_point is not None  # noqa: S101  (the run has secure sums)
                words = self._released_vector(run, session, task).words(federation.fixed_point, kept)
                return steps.send_values(session, blob, words)
            case TaskKind.AGREE_HOLDERS | TaskKind.AGREE:
                return steps.agree(session, blob, vector, membership.identity, before)
            case _:
                return steps.reveal(session, blob, vector, before)

    def _begun(self, run: PreparedRun, context: SumContext, update: Update, base: Payload) -> Session:
        layout, membership = self.vector(run, update, base).layout, self._membership()
        return steps.begun(context, layout, self._site.name, membership.identity, membership.endorsement())

    def _released(self, session: Session) -> Released:
        return self._site.policy.release_step(steps.advertise(session))

    def _released_vector(self, run: PreparedRun, session: Session, task: Task) -> ReleasedVector:
        fitted, update = self.staged(task)
        if fitted.base_digest != session.base:
            # All others may have been sent one that teaches them nothing: the sum would be this site's update alone.
            raise SecureSumError(
                "other-base", "the update that waits here was trained from another model than the sum's"
            )
        return self._site.policy.release_sum(update, session.layout, run.gate_context())

    def _session(self, run: PreparedRun, task: Task) -> Session:
        found = self._membership().sessions.find(task.run, task.round, task.attempt, Subject.UPDATE)
        if found is None:
            raise SecureSumError("out-of-order", f"a {task.kind} task of a sum that this site has not begun")
        steps.check_same(found, self._context(run, task, Digest(found.base)))
        return found

    def _found(self, context: SumContext) -> Session | None:
        """The session of a sum, if it was begun, for this very context."""
        at = (context.run, context.round, context.attempt, context.subject)
        if (found := self._membership().sessions.find(*at)) is not None:
            steps.check_same(found, context)
        return found

    def _context(self, run: PreparedRun, task: Task, base: Digest | None) -> SumContext:
        """Of what this site itself was given: it signs nothing that names another recipe or model."""
        if task.attempt < 1 or task.subject is not Subject.UPDATE or base is None:
            raise SecureSumError("out-of-order", f"a {task.kind} task that does not say which sum it is of")
        form = form_of(run.method, run.recipe.method.name)
        vectors = (Vector.HOLDERS, Vector.VALUES) if form.by_class else (Vector.VALUES,)
        at = (task.run, task.round, task.attempt, Subject.UPDATE)
        return SumContext(*at, Digest(run.recipe.fingerprint()), base, vectors)

    def _membership(self) -> Membership:
        if self._site.membership is None:
            raise TaskFailedError(FailureReason.REFUSED, "this site has no identity for secure sums")
        return self._site.membership


def _summed(session: Session) -> dict[str, Fact]:
    """What the audit log has of a sum that this site lets the server open."""
    at: dict[str, Fact] = {"run": session.run, "round": session.round, "attempt": session.attempt}
    return {**at, "subject": session.subject, "sites": list(session.survivors[Vector.VALUES])}


@contextmanager
def _kept_if_unreadable(run: str) -> Iterator[None]:
    """Secrets that cannot be wiped now stay until the next task or run, and must not end the daemon."""
    try:
        yield
    except StateError as error:
        log.warning("secrets of secure sums that are over stay", run=run, why=str(error))


@contextmanager
def _refusals() -> Iterator[None]:
    """What must not be acted on is refused, counted and audited as what the policy refuses, by its code."""
    try:
        yield
    except SecureSumError as error:
        rule = f"secure-sum.{error.code}"
        raise PolicyRefusedError(rule, f"{error} ({rule})") from error
