"""The link of a simulation: function calls, through the codec and the same intake as an upload."""

from __future__ import annotations

from dataclasses import dataclass

from protofed.client.policy.policy import Released, ReleasedScores
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    Finished,
    PauseReason,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    Wait,
)
from protofed.common.version import VERSION
from protofed.server.rounds.queue import RunQueue
from protofed.server.storage.blobs import Blobs
from protofed.server.verdicts import UpdateProblem


@dataclass(frozen=True)
class DirectLink:
    """The link of a simulated site; see `Link` for the methods."""

    runs: RunQueue
    blobs: Blobs
    site: SiteId
    roles: frozenset[Role]
    instance: str = "simulated"

    def enroll(self, pause_reason: PauseReason = PauseReason.NONE, wait_s: float = 0.0) -> Assignment | Finished:
        """Enroll the site."""
        return self.runs.enroll(self.site, self.instance, PROTOCOL_VERSION, VERSION, VERSION, self.roles, pause_reason)

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        """The site's next task. `wait_s` is ignored: in one process nothing arrives while it waits."""
        return self.runs.next_task(run, self.site, self.instance)

    def fetch(self, task: Task) -> bytes:
        """The bytes of the task's base model."""
        assert task.base_digest is not None  # noqa: S101  (the agent has asked)
        return self.blobs.get(task.base_digest)

    def push(self, task: Task, released: Released) -> Receipt:
        """Hand in an update; begin, examine and commit in the order of an upload over gRPC."""
        intake, manifest = self.runs.intake(task.run), released.manifest
        receipt = intake.begin(self.site, self.instance, task.task_id, task.round, task.base_digest, manifest)
        if receipt is not None:
            return receipt
        norm = intake.examine(self.site, task.task_id, manifest, released.data, task.base_digest)
        if isinstance(norm, UpdateProblem):
            return intake.refuse(self.site, task.task_id, manifest, norm)
        self.blobs.put(released.data)
        return intake.commit(self.site, self.instance, task.task_id, manifest, released.metrics, released.weight, norm)

    def report(self, task: Task, released: ReleasedScores) -> None:
        """Report scores."""
        self.runs.intake(task.run).report_scores(self.site, self.instance, task.task_id, released.scores)

    def beat(self, run: str, progress: Progress) -> Signal:
        """Report progress; simulated sites report only failures."""
        return self.runs.heartbeat(run, self.site, self.instance, progress)
