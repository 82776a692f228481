"""A run's events in the order in which they are taken; while the disk is full the first one waits for room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from protofed.common.errors import OutOfSpaceError
from protofed.server.rounds import phases
from protofed.server.rounds.aggregation import PAUSE_S


class EventQueue:
    """Of one run; changed on the coordinator's thread alone.

    Args:
        clock: seconds, monotonic.

    Attributes:
        full: why the first event waits: what follows from it could not be recorded. None: it does not wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[phases.Event] = deque()
        self._again_at = 0.0
        self.full: OutOfSpaceError | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next event may be taken: it does not wait, or its pause is over."""
        return self.full is None or self._clock() >= self._again_at

    def add(self, event: phases.Event) -> None:
        """Take it after all others."""
        self._events.append(event)

    def take(self) -> phases.Event | None:
        """The next one; one that waited has the time of now, so that what it begins has its whole deadline."""
        if not self._events:
            return None
        event, waited = self._events.popleft(), self.full is not None
        self.full = None
        if not waited or isinstance(event, phases.Stop | phases.Broken):
            return event
        return replace(event, now=self._clock())

    def put_back(self, event: phases.Event, error: OutOfSpaceError) -> None:
        """Take it again, before all others, after a pause."""
        self._events.appendleft(event)
        self._again_at, self.full = self._clock() + PAUSE_S, error

    def clear(self) -> None:
        """Forget all: the run goes back to an earlier round."""
        self._events.clear()
        self.full = None
