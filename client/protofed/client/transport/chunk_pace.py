"""How many chunks are under way at once, and how long one may take: on a slow link one, and longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IN_FLIGHT = 4  # chunks at a time: with 2 MiB each, unary calls reach 2 GB/s on loopback
CHUNK_S = 120.0  # of one attempt at a chunk
LONGEST_S = 8 * CHUNK_S  # 2 KB/s, with one chunk of 2 MiB at a time
# A chunk that took no longer by itself: then `IN_FLIGHT` at once, each a share of the link, need half of `CHUNK_S`.
QUICK_S = CHUNK_S / (2 * IN_FLIGHT)
# Of a connection that breaks only after this long, the end of a ping's patience (`channels`) is the likely reason: on a
# slow link the ping waits behind the chunks.
PINGED_S = 20.0


@dataclass(frozen=True)
class Turn:
    """One attempt at one chunk.

    Attributes:
        deadline_s: seconds that it may take.
        waited_s: for others' attempts, before it began.
    """

    deadline_s: float
    waited_s: float


class ChunkPace:
    """The pace of one direction of a link, which threads share.

    Each deadline that passes costs what has arrived of a chunk, and of those beside it. So there is one chunk at a time
    until one arrives within `QUICK_S`, and again after a deadline, which then doubles up to `LONGEST_S`.
    """

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._under_way, self._most, self._deadline_s = 0, 1, CHUNK_S

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait until another chunk may be under way; it is, for as long as the context lasts."""
        asked_at = time.monotonic()
        with self._ended:
            self._ended.wait_for(lambda: self._under_way < self._most)
            self._under_way += 1
            turn = Turn(self._deadline_s, time.monotonic() - asked_at)
        try:
            yield turn
        finally:
            with self._ended:
                self._under_way -= 1
                self._ended.notify_all()

    def arrived(self, took_s: float) -> None:
        """A chunk arrived, in so many seconds."""
        if took_s <= QUICK_S:
            with self._ended:
                self._most, self._deadline_s = IN_FLIGHT, CHUNK_S
                self._ended.notify_all()

    def late(self, turn: Turn) -> None:
        """A chunk's deadline passed."""
        with self._ended:
            self._most = 1
            if turn.deadline_s >= self._deadline_s:  # those that were under way beside it double it no more
                self._deadline_s = min(2 * self._deadline_s, LONGEST_S)

    def broke(self, took_s: float) -> None:
        """The connection broke while a chunk was under way, after so many seconds."""
        if took_s >= PINGED_S:
            with self._ended:
                self._most = 1
