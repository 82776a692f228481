"""What a daemon is doing: its agent writes it, heartbeat, metrics and decision watch read it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from protofed.client.training.context import FitProgress, Throughput
from protofed.common.errors import WithdrawnError
from protofed.common.protocol.messages import Activity, Progress

# Fixed at the site, and long: a server that could shorten it would see single batches, and count the examples.
PROGRESS_WINDOW_S = 60.0
# Scoring takes 512 images at a time whatever the recipe says: on a CPU one such batch may take minutes, and with the
# window of a fit each would be seen, and so the number of test images.
SCORING_WINDOW_S = 300.0
_WINDOWS_S = {Activity.TRAINING: PROGRESS_WINDOW_S, Activity.SCORING: SCORING_WINDOW_S}


class TaskAbortedError(Exception):
    """The server no longer waits for the task that is being worked on."""


@dataclass
class DaemonStatus:
    """What the daemon is doing. The agent and its training write it, the heartbeat's thread and the metrics read it.

    Attributes:
        clock: monotonic seconds.
        progressed_at: when training or scoring last began a batch, by that clock.
        asks: a call of the agent's for a run or a task is under way.
        own_scores: the newest of the site's own scores of the run, by family; never sent.
        privacy: epsilon that the site has spent, and the policy's budget (None: it has none); None: not computed yet.
        left_run: the run that the site has left, as the decision watch saw it; empty: none.
    """

    run: str = ""
    task_id: str = ""
    round: int = 0  # of the task with `task_id`
    activity: Activity = Activity.IDLE
    fit_progress: FitProgress = field(default_factory=FitProgress)
    throughput: Throughput = field(default_factory=Throughput)  # for the site's own metrics; never sent
    aborted_task_id: str = ""  # the task that the server no longer waits for
    left_run: str = ""
    heartbeat_s: float = 1.0  # replaced by the run's, once there is a run
    idle_heartbeat_s: float = 1.0  # likewise
    asks: bool = False
    clock: Callable[[], float] = time.monotonic
    progressed_at: float = -math.inf
    own_scores: Mapping[str, float] = field(default_factory=dict)
    privacy: tuple[float, float | None] | None = None

    def progress(self, bytes_moved: int, telemetry: Mapping[str, float] | None = None) -> Progress:
        """The content of a heartbeat: of training the epoch, and of it and of scoring whether they got on lately.

        Args:
            bytes_moved: by the link, since the daemon's start.
            telemetry: the numbers that the site's policy releases.
        """
        activity, fit = self.activity, self.fit_progress  # read once: the agent writes them meanwhile
        making_progress = self.clock() - self.progressed_at < _WINDOWS_S.get(activity, 0.0)
        return Progress(
            self.task_id,
            activity,
            fit.epoch,
            fit.epochs,
            making_progress,
            bytes_moved,
            telemetry=telemetry or {},
        )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note that the agent asks the server for work, for as long as the context lasts."""
        self.asks = True
        try:
            yield
        finally:
            self.asks = False

    def log_fields(self) -> dict[str, str | int]:
        """Run and round of the current task, for the log; empty while the daemon is idle."""
        return {"run": self.run, "round": self.round} if self.task_id else {}

    def check(self) -> None:
        """Called between the batches of training and of scoring.

        Raises:
            TaskAbortedError: the server no longer waits for this task.
            WithdrawnError: the site has left the run.
        """
        self.progressed_at = self.clock()
        if self.left_run and self.left_run == self.run:
            raise WithdrawnError(f"this site has left run {self.run}: its fit ends here")
        if self.aborted_task_id and self.aborted_task_id == self.task_id:
            raise TaskAbortedError
