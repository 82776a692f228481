"""What waits and what was told survives a restart, whatever becomes of the journal."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from tests.support.receivers import RUN_FAILED

from protofed.common.config.settings import NotifyEvent
from protofed.common.storage.journal import verify
from protofed.server.notifications import outbox as module
from protofed.server.notifications.notice import Notice
from protofed.server.notifications.outbox import JOURNAL_FILE, Outbox, Told
from protofed.server.notifications.wording import notice

EVENTS = frozenset(NotifyEvent)
NOTICE = notice(RUN_FAILED, "hub", 1_800_000_000.0)
KEY = RUN_FAILED.key


def numbered(number: int) -> Notice:
    return replace(NOTICE, id=f"{number:032x}")


class Folder:
    """A state folder, and the outboxes of one process after another."""

    def __init__(self, folder: Path) -> None:
        self.path, self.now, self._open = folder / JOURNAL_FILE, 100.0, list[Outbox]()

    def start(self, *channels: str, events: frozenset[NotifyEvent] = EVENTS) -> Outbox:
        for outbox in self._open:
            outbox.close()
        self._open.append(Outbox(self.path, channels or ("ops", "email"), events, lambda: self.now))
        return self._open[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_message_waits_for_each_channel_until_that_took_it(folder: Folder) -> None:
    outbox = folder.start()
    outbox.add(KEY, NOTICE)
    outbox.done("ops", NOTICE, delivered=True)
    for again in (outbox, folder.start()):
        assert again.next("ops") is None
        assert again.next("email") == NOTICE
    again.done("email", NOTICE, delivered=False)
    again = folder.start()
    assert (again.next("ops"), again.next("email")) == (None, None)
    assert again.told().keys() == {KEY}
    assert verify(folder.path) == 4


def test_what_is_told_is_not_told_again_before_it_is_over(folder: Folder) -> None:
    outbox = folder.start()
    outbox.add(KEY, NOTICE)
    outbox.add(KEY, numbered(2))
    outbox.over(KEY)
    outbox.over(KEY)
    assert not folder.start().told()
    outbox = folder.start()
    outbox.add(KEY, numbered(3))
    outbox.done("ops", NOTICE, delivered=True)
    assert outbox.next("ops") == numbered(3)


def test_that_it_is_over_waits_as_any_message_and_is_made_once(folder: Folder) -> None:
    outbox = folder.start()
    outbox.over(KEY, numbered(1))  # of nothing that was told
    outbox.add(KEY, NOTICE)
    outbox.over(KEY, numbered(2))
    outbox.over(KEY, numbered(3))
    assert verify(folder.path) == 3  # the end and its message are one record: a kill parts them not
    for channel in ("ops", "email"):
        outbox = folder.start()
        assert not outbox.told()
        outbox.done(channel, NOTICE, delivered=True)
        assert outbox.next(channel) == numbered(2)
        outbox.done(channel, numbered(2), delivered=True)
        assert folder.start().next(channel) is None
    outbox = folder.start()
    outbox.add(KEY, numbered(4))
    assert outbox.next("ops") == numbered(4)


def test_a_message_of_a_later_version_is_known_as_told_and_not_sent(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Notice, "table", lambda self: {**vars(self), "facts": dict(self.facts), "colour": "red"})
        folder.start().add(KEY, NOTICE)
    outbox = folder.start()
    assert outbox.told() == {KEY: Told(0.0, 0.0)}
    assert outbox.next("ops") is None


def test_a_channel_that_is_new_gets_what_is_new_and_one_that_is_gone_is_forgotten(folder: Folder) -> None:
    folder.start("ops").add(KEY, NOTICE)
    outbox = folder.start("email")
    assert outbox.next("email") is None
    outbox.add("other", numbered(2))
    outbox.add("another", replace(numbered(3), facts={"for_s": 900}))
    assert outbox.next("email") == numbered(2)
    outbox.later("email", numbered(2))  # one that is refused does not keep back the others
    assert (outbox.next("email") or NOTICE).id == numbered(3).id
    with folder.path.open("ab") as file:
        file.write(b'{"at":"20')  # half a line of a killed process loses nothing
    told = folder.start("email").told()["another"]
    assert told == Told(1_800_000_000.0, 1_800_000_000.0 - 900)  # since when it lasts
    assert folder.start("ops").next("ops") == NOTICE


def test_an_event_is_told_of_since_it_was_asked_for(folder: Folder) -> None:
    ended, silent = NotifyEvent.RUN_ENDED, NotifyEvent.SITE_SILENT
    assert folder.start(events=frozenset({ended})).since(ended) == 100.0
    folder.now = 200.0
    outbox = folder.start()
    assert (outbox.since(ended), outbox.since(silent)) == (100.0, 200.0)
    folder.now = 300.0
    assert folder.start(events=frozenset({silent})).since(ended) == float("inf")
    assert folder.start().since(ended) == 300.0


def test_a_channel_keeps_so_many_and_drops_the_oldest(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    outbox = folder.start("ops")
    for number in range(3):
        outbox.add(f"key-{number}", numbered(number))
    assert outbox.take_dropped() == [("ops", numbered(0))]
    assert outbox.take_dropped() == []
    assert folder.start("ops").next("ops") == numbered(1)


@pytest.mark.parametrize("where", [10, -20])
def test_a_damaged_journal_is_rejected_and_the_server_starts(folder: Folder, where: int) -> None:
    folder.start().add(KEY, NOTICE)
    folder.start().close()
    content = bytearray(folder.path.read_bytes())
    content[where] ^= 1
    folder.path.write_bytes(content)
    with structlog.testing.capture_logs() as lines:
        outbox = folder.start()
    assert [line["log_level"] for line in lines] == ["error"]
    assert (outbox.told(), outbox.next("ops")) == ({}, None)
    assert folder.path.with_name("notifications.damaged-1.jsonl").read_bytes() == content
    outbox.add(KEY, NOTICE)
    assert folder.start().next("ops") == NOTICE


def test_a_full_disk_keeps_nobody_from_being_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = folder.start("ops")

    def full(_file: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as lines:
        patched.setattr(os, "write", full)
        outbox.add("one", numbered(1))
        outbox.add("two", numbered(2))
    assert [line["log_level"] for line in lines] == ["error"]
    assert outbox.next("ops") == numbered(1)
    assert outbox.told().keys() == {"one", "two"}
    outbox.done("ops", numbered(1), delivered=True)
    assert not folder.start("ops").told()


def test_a_thread_that_still_sends_when_the_server_ends_writes_nothing_more(folder: Folder) -> None:
    outbox = folder.start("ops")
    outbox.add(KEY, NOTICE)
    outbox.close()
    before = folder.path.read_bytes()
    outbox.done("ops", NOTICE, delivered=True)
    outbox.close()
    assert folder.path.read_bytes() == before
    assert folder.start("ops").next("ops") == NOTICE
