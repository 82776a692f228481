"""The threads that notice and send: one that looks, one for each channel, so that a slow channel delays nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

import structlog

from protofed.common.clock import parse_stamp, utc_now
from protofed.server.metrics import SendOutcome
from protofed.server.notifications.channels import Channel, NotSentError
from protofed.server.notifications.notice import Notice
from protofed.server.notifications.outbox import Outbox, Told
from protofed.server.notifications.watch import News
from protofed.server.notifications.wording import Occurrence, notice

log = structlog.get_logger()
EVERY_S: Final = 5.0  # between two looks
RETRY_S, MAX_RETRY_S = 10.0, 300.0  # after one failure, doubled with each further one, up to the second
GIVE_UP: Final = timedelta(days=3)  # after which a message that no receiver takes is dropped
STOP_S: Final = 10.0  # that a server waits for its messages when it stops; what is left goes out at its next start


Count = Callable[[str, SendOutcome], None]  # of a channel


class Sender(threading.Thread):
    """Sends one channel's messages, one at a time, until each was taken.

    Args:
        retry_s: seconds after a first failure.
    """

    def __init__(self, channel: Channel, outbox: Outbox, count: Count, retry_s: float = RETRY_S) -> None:
        super().__init__(name=f"notify-{channel.name}", daemon=True)
        self._channel, self._outbox, self._count, self._retry_s = channel, outbox, count, retry_s
        self._wake, self._end = threading.Event(), threading.Event()

    def run(self) -> None:
        """Send what waits; at the end once more, until something fails."""
        failures = 0
        while True:
            ending = self._end.is_set()
            if (waiting := self._outbox.next(self._channel.name)) is None:
                if ending:
                    return
                self._wake.wait()
                self._wake.clear()
                continue
            failures = 0 if self._handle(waiting, failures) else failures + 1
            if failures:
                if ending:
                    return
                self._end.wait(self._pause_s(failures))

    def wake(self) -> None:
        """There may be a message."""
        self._wake.set()

    def stop(self) -> None:
        """Send what waits if that goes without a failure, and end; returns at once."""
        self._end.set()
        self._wake.set()

    def _pause_s(self, failures: int) -> float:
        return min(self._retry_s * (1 << min(failures - 1, 16)), MAX_RETRY_S)

    def _handle(self, waiting: Notice, failures: int) -> bool:
        """Send or give up one message; False: the channel does not take it now."""
        fields = {"channel": self._channel.name, "notice": waiting.event, "id": waiting.id}
        if utc_now() - parse_stamp(waiting.at) > GIVE_UP:
            self._outbox.done(self._channel.name, waiting, delivered=False)
            self._count(self._channel.name, SendOutcome.DROPPED)
            log.error("a notification was given up: it could not be sent for days", **fields)
            return True
        try:
            answer = self._channel.send(waiting)
        except NotSentError as error:
            why = f"{error}"
        except Exception as error:  # a defect: the thread goes on; its text might have a secret
            why = f"unexpected {type(error).__name__}"
        else:
            self._outbox.done(self._channel.name, waiting, delivered=True)
            self._count(self._channel.name, SendOutcome.DELIVERED)
            log.info("notification sent", **fields, answer=answer)
            return True
        self._outbox.later(self._channel.name, waiting)
        self._count(self._channel.name, SendOutcome.FAILED)
        log.warning(
            "a notification could not be sent; trying again", **fields, why=why, in_s=self._pause_s(failures + 1)
        )
        return False


class Notifier(threading.Thread):
    """Looks what there is to tell, and has it sent.

    Args:
        server: its name in messages.
        look: as `Watch.look`.
        every_s: seconds between two looks; `retry_s`: after a first failure to send.
    """

    def __init__(
        self,
        server: str,
        look: Callable[[Mapping[str, Told]], News],
        outbox: Outbox,
        channels: Sequence[Channel],
        count: Count,
        *,
        now: Callable[[], float] = time.time,
        every_s: float = EVERY_S,
        retry_s: float = RETRY_S,
    ) -> None:
        super().__init__(name="notify", daemon=True)
        self._server, self._look, self._outbox, self._count, self._now = server, look, outbox, count, now
        self._every_s, self._end, self._blind = every_s, threading.Event(), False
        self._senders = [Sender(channel, outbox, count, retry_s) for channel in channels]

    def start(self) -> None:
        """Begin to look and to send, first what an earlier process left."""
        for sender in self._senders:
            sender.start()
        super().start()

    def run(self) -> None:
        """Look until stopped, and then once more: a server may end because its last run has."""
        ending = False
        while not ending:
            ending = self._end.wait(self._every_s)
            self.poll()

    def stop(self) -> None:
        """Look once more, send what can be sent, and end; waits for at most `STOP_S`, and leaves a stuck thread."""
        until = time.monotonic() + STOP_S
        self._end.set()
        self.join(STOP_S)
        for sender in self._senders:
            sender.stop()
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))

    def poll(self) -> None:
        """Look once, and have sent what is new; the thread does it again and again."""
        try:
            news = self._look(self._outbox.told())
        except Exception as error:  # as a scrape: the server must not notice
            if not self._blind:
                log.warning("what there is to notify of cannot be read; looking again", why=f"{error}")
            self._blind = True
            return
        self._blind = False
        for key, end in news.over.items():
            self._outbox.over(key, None if end is None else self._notice(end))
        for occurrence in news.occurrences:
            self._outbox.add(occurrence.key, self._notice(occurrence))
        for channel, dropped in self._outbox.take_dropped():
            self._count(channel, SendOutcome.DROPPED)
            log.error("a notification was dropped: too many wait", channel=channel, notice=dropped.event)
        if news.occurrences or any(news.over.values()):
            for sender in self._senders:
                sender.wake()

    def _notice(self, occurrence: Occurrence) -> Notice:
        return notice(occurrence, self._server, self._now())
