"""The threads: what they do with receivers that fail, hang and come back; what is counted and logged."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from tests.support.receivers import ARRIVES_S, RUN_FAILED, MailReceiver, WebhookReceiver, secret_file, settings_of

from protofed.common.config.settings import NotifyEvent
from protofed.server.metrics import SendOutcome, ServerMetrics
from protofed.server.notifications.channels import NotSentError, open_channels
from protofed.server.notifications.notice import Notice
from protofed.server.notifications.notifier import Notifier
from protofed.server.notifications.outbox import JOURNAL_FILE, Outbox, Told
from protofed.server.notifications.watch import News
from protofed.server.notifications.wording import Occurrence, notice

SOON_S = 0.01  # between two looks and two attempts


class World:
    """What there is to tell, as a watch would find it."""

    def __init__(self) -> None:
        self.found: list[Occurrence] = []
        self.looked = threading.Semaphore(0)
        self.broken = False

    def look(self, told: Mapping[str, Told]) -> News:
        self.looked.release()
        if self.broken:
            raise RuntimeError("the ledger cannot be read")
        return News([each for each in self.found if each.key not in told], {})

    def wait(self, looks: int = 2) -> None:
        """Until the watch has looked so often again."""
        for _ in range(looks):
            assert self.looked.acquire(timeout=ARRIVES_S)


class Stub:
    """A channel that does as it is told."""

    def __init__(self, name: str) -> None:
        self.name, self.failures = name, 0
        self.taken: queue.Queue[Notice] = queue.Queue()
        self.tried: queue.Queue[Notice] = queue.Queue()
        self.free = threading.Event()
        self.free.set()
        self.error: Exception = NotSentError("not now")

    def send(self, notice: Notice) -> str:
        self.tried.put(notice)
        self.free.wait()
        if self.failures:
            self.failures -= 1
            raise self.error
        self.taken.put(notice)
        return "taken"


class Lab:
    """Notifiers over one folder, one process after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.world, self.metrics = folder, World(), ServerMetrics()
        self._running: list[tuple[Notifier, Outbox]] = []

    def start(self, *channels: Stub) -> Notifier:
        self.stop()
        outbox = Outbox(self.folder / JOURNAL_FILE, [channel.name for channel in channels], frozenset(NotifyEvent))
        made = Notifier(
            "hub",
            self.world.look,
            outbox,
            channels,
            self.metrics.notification,
            every_s=SOON_S,
            retry_s=SOON_S,
        )
        self._running.append((made, outbox))
        made.start()
        return made

    def stop(self) -> None:
        for notifier, outbox in self._running:
            notifier.stop()
            outbox.close()
        self._running.clear()

    def counted(self, channel: str, outcome: SendOutcome) -> float | None:
        labels = {"channel": channel, "outcome": outcome.value}
        return self.metrics.registry.get_sample_value("protofed_notifications_total", labels)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    made.stop()


def test_a_channel_that_fails_gets_the_same_message_again_until_it_takes_it(lab: Lab) -> None:
    ops = Stub("ops")
    ops.failures = 3
    lab.world.found = [RUN_FAILED]
    lab.start(ops)
    got = ops.taken.get(timeout=ARRIVES_S)
    tried = [ops.tried.get_nowait() for _ in range(4)]
    assert {each.id for each in tried} == {got.id}
    lab.stop()
    assert lab.counted("ops", SendOutcome.FAILED) == 3
    assert lab.counted("ops", SendOutcome.DELIVERED) == 1
    assert ops.tried.empty()


def test_a_channel_that_hangs_keeps_nothing_back_and_gets_the_rest_later(lab: Lab) -> None:
    stuck, well = Stub("stuck"), Stub("well")
    stuck.free.clear()
    lab.world.found = [RUN_FAILED]
    lab.start(stuck, well)
    stuck.tried.get(timeout=ARRIVES_S)
    well.taken.get(timeout=ARRIVES_S)
    lab.world.found.append(replace(RUN_FAILED, key="another", run="lesions"))
    assert well.taken.get(timeout=ARRIVES_S).run == "lesions"
    lab.world.wait()  # whoever looks is not stuck
    assert stuck.taken.empty()
    stuck.free.set()
    assert [stuck.taken.get(timeout=ARRIVES_S).run for _ in range(2)] == ["digits", "lesions"]


def test_a_restart_repeats_nothing_and_sends_what_was_not_taken(lab: Lab) -> None:
    away, well = Stub("away"), Stub("well")
    away.failures = 1_000_000
    lab.world.found = [RUN_FAILED]
    lab.start(away, well)
    first = well.taken.get(timeout=ARRIVES_S)
    away.tried.get(timeout=ARRIVES_S)
    lab.stop()
    away.failures = 0
    lab.start(away, well)
    assert away.taken.get(timeout=ARRIVES_S).id == first.id
    lab.world.wait()
    lab.stop()
    lab.start(away, well)
    lab.world.wait()
    lab.stop()
    assert (away.taken.empty(), well.taken.empty()) == (True, True)


def test_what_happens_just_before_the_end_is_still_told(lab: Lab) -> None:
    ops = Stub("ops")
    notifier = lab.start(ops)
    lab.world.wait(1)
    lab.world.found = [RUN_FAILED]
    notifier.stop()
    assert ops.taken.get_nowait().run == "digits"


def test_a_message_that_nobody_took_for_days_is_given_up(lab: Lab) -> None:
    old = notice(RUN_FAILED, "hub", 1_700_000_000.0)
    outbox = Outbox(lab.folder / JOURNAL_FILE, ["ops"], frozenset(NotifyEvent))
    outbox.add(RUN_FAILED.key, old)
    outbox.close()
    ops = Stub("ops")
    lab.world.found = [replace(RUN_FAILED, key="new")]
    lab.start(ops)
    assert ops.taken.get(timeout=ARRIVES_S).id != old.id
    lab.stop()
    assert lab.counted("ops", SendOutcome.DROPPED) == 1


def test_a_look_that_fails_is_logged_once_and_looked_again(lab: Lab) -> None:
    ops = Stub("ops")
    lab.world.broken = True
    with structlog.testing.capture_logs() as lines:
        lab.start(ops)
        lab.world.wait(3)
        lab.world.found, lab.world.broken = [RUN_FAILED], False
        ops.taken.get(timeout=ARRIVES_S)
    assert len([line for line in lines if line.get("why") == "the ledger cannot be read"]) == 1


def test_a_defect_of_a_channel_ends_no_thread_and_shows_no_secret(lab: Lab) -> None:
    ops = Stub("ops")
    ops.failures, ops.error = 1, ValueError("Bearer t0ken")
    lab.world.found = [RUN_FAILED]
    with structlog.testing.capture_logs() as lines:
        lab.start(ops)
        ops.taken.get(timeout=ARRIVES_S)
    assert [line["why"] for line in lines if "why" in line] == ["unexpected ValueError"]


# With real receivers


def test_a_receiver_that_was_down_gets_its_message_when_it_is_up(lab: Lab, tmp_path: Path) -> None:
    token, hook, mail = secret_file(tmp_path, "t0ken-of-ops"), WebhookReceiver(), MailReceiver()
    hook.stop()
    mail.stop()
    notify = settings_of(
        tmp_path,
        f'[[notify.webhooks]]\nname = "ops"\nurl = "{hook.url}"\nbearer_token = "{token}"\n'
        f'[notify.smtp]\nhost = "127.0.0.1"\nport = {mail.port}\nsecurity = "none"\n'
        'sender = "hub@example.org"\nto = ["ann@example.org"]\n',
    ).notify
    assert notify is not None
    outbox = Outbox(tmp_path / JOURNAL_FILE, notify.channels, notify.events)
    failed = {channel: threading.Event() for channel in notify.channels}

    def count(channel: str, outcome: SendOutcome) -> None:
        if outcome is SendOutcome.FAILED:
            failed[channel].set()

    lab.world.found = [RUN_FAILED]
    notifier = Notifier("hub", lab.world.look, outbox, open_channels(notify), count, every_s=SOON_S, retry_s=SOON_S)
    with structlog.testing.capture_logs() as lines:
        notifier.start()
        assert all(event.wait(ARRIVES_S) for event in failed.values())
        with WebhookReceiver(port=hook.port) as again, MailReceiver(port=mail.port) as post_office:
            post, letter = again.post(), post_office.mail()
            notifier.stop()
            assert (again.posts.empty(), post_office.mails.empty()) == (True, True)
        outbox.close()
    assert post.headers["authorization"] == "Bearer t0ken-of-ops"
    assert letter.message["Message-ID"] == f"<{post.json['id']}@example.org>"
    written = repr(lines) + (tmp_path / JOURNAL_FILE).read_text("utf-8")
    assert not [secret for secret in ("t0ken-of-ops", "s3cret-hook") if secret in written]
