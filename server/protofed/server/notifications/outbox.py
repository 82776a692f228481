"""What is to be told and what was, in memory and in an append-only journal: a restart loses and repeats nothing.

Each message is journalled before it is sent, and after it was. So it is sent at least once. If the server is killed
between a receiver's answer and the second record, it sends the message again, with the same id.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import structlog

from protofed.common.clock import parse_stamp
from protofed.common.config.settings import NotifyEvent
from protofed.common.errors import StateError
from protofed.common.storage.journal import Fact, Journal, Record, records
from protofed.server.notifications.notice import Notice

log = structlog.get_logger()
JOURNAL_FILE: Final = "notifications.jsonl"  # of the state folder
MAX_WAITING: Final = 1000  # messages of a channel; of more, the oldest is dropped


class Entry(StrEnum):
    """What a record of the journal says."""

    WATCHING = "watching"  # these events are told of, each since its time
    NOTICED = "noticed"  # a message waits for these channels
    OVER = "over"  # what was told by a key has ended; if there is a message that says so, it waits for these channels
    DELIVERED = "delivered"  # a channel has taken a message
    DROPPED = "dropped"  # a channel never gets a message


@dataclass(frozen=True)
class Told:
    """When something that was told was noticed, and since when it had lasted; both in Unix time."""

    at: float
    since: float

    @classmethod
    def by(cls, notice: Notice | None) -> Told:
        """By its message; None: of a later version, and told so long ago that nobody hears of its end."""
        if notice is None:
            return cls(0.0, 0.0)
        at, lasted_s = parse_stamp(notice.at).timestamp(), notice.facts.get("for_s")
        return cls(at, at - lasted_s if isinstance(lasted_s, int | float) else at)


class Outbox:
    """The messages that wait for each channel, and what was told; any thread may use it.

    A damaged journal is renamed: it must not keep a study's server from starting. If the journal cannot be written,
    messages are sent all the same, and perhaps again after a restart.

    Args:
        path: of the journal.
        channels: those of the settings; what waits for others is forgotten.
        events: that are told from now on.
        now: Unix time; a run that ended before its event was told of is no news.
    """

    def __init__(
        self,
        path: Path,
        channels: Collection[str],
        events: Collection[NotifyEvent],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._lock, self._path = threading.Lock(), path
        self._channels, self._closed, self._failing = tuple(channels), False, False
        self._told: dict[str, Told] = {}
        self._since: dict[str, float] = {}
        self._waiting: dict[str, OrderedDict[str, Notice]] = {channel: OrderedDict() for channel in channels}
        self._dropped: list[tuple[str, Notice]] = []  # for want of room, until `take_dropped`
        self._journal = self._open()
        if set(self._since) != set(events):
            self._since = {event.value: self._since.get(event.value, now()) for event in events}
            self._append(Entry.WATCHING, since=dict[str, Fact](self._since))

    def told(self) -> Mapping[str, Told]:
        """What was told and is not over, by its key."""
        with self._lock:
            return dict(self._told)

    def since(self, event: NotifyEvent) -> float:
        """Unix time since which an event is told of; infinite: it is not."""
        return self._since.get(event.value, float("inf"))

    def add(self, key: str, notice: Notice) -> None:
        """Let a message wait for every channel, once for each key until that is over."""
        with self._lock:
            if key in self._told:
                return
            self._append(Entry.NOTICED, key=key, **self._waits(notice))
            self._told[key] = Told.by(notice)
            self._queue(notice)

    def over(self, key: str, notice: Notice | None = None) -> None:
        """What was told by this key has ended: when it happens again, that is news.

        Args:
            notice: a message that says so. One record has both, so that it is neither lost nor made again.
        """
        with self._lock:
            if self._told.pop(key, None) is None:
                return
            self._append(Entry.OVER, key=key, **({} if notice is None else self._waits(notice)))
            if notice is not None:
                self._queue(notice)

    def next(self, channel: str) -> Notice | None:
        """The message that has waited longest; None: none waits."""
        with self._lock:
            return next(iter(self._waiting[channel].values()), None)

    def later(self, channel: str, notice: Notice) -> None:
        """Put a message behind the others: one that a receiver never takes must not keep them back."""
        with self._lock:
            if notice.id in self._waiting[channel]:
                self._waiting[channel].move_to_end(notice.id)

    def done(self, channel: str, notice: Notice, *, delivered: bool) -> None:
        """A channel has taken a message, or it was given up."""
        with self._lock:
            if self._waiting[channel].pop(notice.id, None) is not None:
                self._append(Entry.DELIVERED if delivered else Entry.DROPPED, id=notice.id, channel=channel)

    def take_dropped(self) -> list[tuple[str, Notice]]:
        """The channels and messages that were dropped for want of room since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        """Release the journal; a thread that is still sending can no longer write."""
        with self._lock:
            if self._journal is not None and not self._closed:
                self._journal.close()
            self._closed = True

    def _waits(self, notice: Notice) -> dict[str, Fact]:
        """Of a record: a message, and the channels that it waits for."""
        return {"channels": list[Fact](self._channels), "notice": notice.table()}

    def _queue(self, notice: Notice) -> None:
        for channel in self._channels:
            waiting = self._waiting[channel]
            waiting[notice.id] = notice
            if len(waiting) > MAX_WAITING:
                _, oldest = waiting.popitem(last=False)
                self._dropped.append((channel, oldest))
                self._append(Entry.DROPPED, id=oldest.id, channel=channel)

    def _open(self) -> Journal | None:
        try:
            return self._read()
        except StateError as error:
            aside = self._aside()
            log.error("the journal of notifications cannot be used; a new one begins", aside=aside.name, why=f"{error}")
        self._told, self._since = {}, {}
        self._waiting = {channel: OrderedDict() for channel in self._channels}
        try:
            self._path.rename(aside)
            return self._read()
        except (OSError, StateError) as error:
            log.error("notifications are not journalled: a restart may repeat or lose some", why=f"{error}")
            return None

    def _read(self) -> Journal:
        journal = Journal(self._path)  # first: it cuts off half a line
        try:
            for record in records(self._path):
                self._fold(record)
        except BaseException:
            journal.close()
            raise
        return journal

    def _fold(self, record: Record) -> None:
        facts: Mapping[str, Any] = record.facts
        match record.event:
            case Entry.WATCHING:
                self._since = dict(facts["since"])
            case Entry.NOTICED:
                self._told[facts["key"]] = Told.by(self._requeue(facts))
            case Entry.OVER:
                self._told.pop(facts["key"], None)
                if "notice" in facts:
                    self._requeue(facts)
            case Entry.DELIVERED | Entry.DROPPED:
                self._waiting.get(facts["channel"], OrderedDict()).pop(facts["id"], None)

    def _requeue(self, facts: Mapping[str, Any]) -> Notice | None:
        """Let the message of a record wait for those of its channels that there are still.

        Returns:
            It; None: it is of a later version, and not sent.
        """
        try:
            notice = Notice.read(facts["notice"])
        except TypeError:
            return None
        for channel in facts["channels"]:
            if channel in self._waiting:
                self._waiting[channel][notice.id] = notice
        return notice

    def _append(self, event: Entry, **facts: Fact) -> None:
        if self._journal is None or self._closed:
            return
        try:
            self._journal.append(event.value, **facts)
        except StateError as error:
            if not self._failing:
                log.error("the journal of notifications cannot be written: a restart may repeat some", why=f"{error}")
            self._failing = True
            return
        self._failing = False

    def _aside(self) -> Path:
        number = 1
        while (path := self._path.with_name(f"{self._path.stem}.damaged-{number}{self._path.suffix}")).exists():
            number += 1
        return path
