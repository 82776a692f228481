"""A run's refinements, carried out: an evaluator is asked to make of a round's aggregate what the round publishes.

The state machine decides who is asked and how often. The aggregate is durable before anybody is, and so is what the
evaluator fetches. Its upload takes the way of every update, and `aggregation` makes the published state of it.
"""

from __future__ import annotations

import structlog

from protofed.common.codec import Digest
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import TaskKind
from protofed.server.method import NOTHING, ExpectedUpdate, RefiningMethod, ServerMethod, public_of, refining
from protofed.server.rounds.aggregation.aggregation import AggregationJob
from protofed.server.rounds.aggregation.publisher import Published, Publisher
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.invitations import Invitations
from protofed.server.rounds.machine import phases

log = structlog.get_logger()


class Refinements:
    """Holds the aggregate that is being refined; called from the coordinator's thread, as the run is.

    Attributes:
        aggregate: of the open round; None: it has none yet.
    """

    def __init__(
        self, run: str, method: RefiningMethod, publisher: Publisher, context: ServerContext, invitations: Invitations
    ) -> None:
        self._run, self._method, self._publisher = run, method, publisher
        self._context, self._ledger, self._invitations = context, context.ledger, invitations
        self.aggregate: Published | None = None

    @classmethod
    def of_run(
        cls, run: str, method: ServerMethod, publisher: Publisher, context: ServerContext, invitations: Invitations
    ) -> Refinements | None:
        """Those of a run; None: its method's states are not refined."""
        half = refining(method)
        return None if half is None else cls(run, half, publisher, context, invitations)

    def restore(self, address: Digest) -> None:
        """Take up an aggregate that was kept before a restart.

        Raises:
            StateError: its blob is gone or damaged.
        """
        self.aggregate = self._publisher.restore(address)

    def expects(self) -> ExpectedUpdate:
        """What the evaluator's update must look like."""
        return NOTHING if self.aggregate is None else self._method.expects_refined(self.aggregate.state)

    def start(self) -> Payload | None:
        """The model that the evaluator moves: of what it is sent, all but the models of single sites."""
        if (aggregate := self.aggregate) is None:  # read once: the round may close meanwhile
            return None
        sent = self._method.to_refine(aggregate.state)
        return {part: tensors for part, tensors in sent.items() if part is not Part.SITE_MODELS}

    def ask(self, phase: phases.Refining) -> None:
        """Invite the evaluator.

        Raises:
            OutOfSpaceError, DiskFailureError: something could not be stored.
        """
        assert self.aggregate is not None  # noqa: S101  (it is durable)
        sites = sorted(phase.asked)
        if phase.tries:  # the evaluator before may have failed because what it was sent had rotted on the disk
            self._publisher.recheck()
        base = public_of(self._method.to_refine(self.aggregate.state))
        bases = dict.fromkeys(sites, self._publisher.store(base, self.aggregate.state))
        log.info("refinement asked for", run=self._run, round=phase.round, site=sites[0])
        self._invitations.send(TaskKind.REFINE, phase.round, phase.attempt, sites, bases, self._ledger.invite)

    def recall(self, reason: str) -> None:
        """Close the evaluator's invitation, that another can be asked."""
        for row in self._invitations.open_rows():
            seen = self._context.presence.last_seen(row.site)
            log.warning("refinement recalled", run=self._run, round=row.round, site=row.site, reason=reason)
            self._ledger.set_task_status(row.task_id, "late", f"{reason}: {seen}")
        self._invitations.clear()

    def job(self, phase: phases.Aggregating) -> AggregationJob:
        """What makes the published state of the aggregate and of the evaluator's update."""
        row = self._ledger.newest(self._run)
        assert row is not None and self.aggregate is not None  # noqa: S101, PT018  (it is durable)
        silent = self._invitations.clear()
        return AggregationJob(phase, bool(row.complete), silent, self.aggregate.state, row.statistics)
