"""That a stall or a silence is over: told once of what was told, also by another process, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.server.conftest import Clock
from tests.support.operator_lab import operator_lab

from protofed.common.config.settings import Notify, NotifyEvent
from protofed.server.notifications.notice import Notice
from protofed.server.notifications.notifier import Notifier
from protofed.server.notifications.outbox import JOURNAL_FILE, Outbox
from protofed.server.notifications.watch import Watch, WatchSources

STALLED_S, SILENT_S = 900.0, 3600.0
ALL = ("ann", "bob", "cyd")
BEGINS = frozenset({NotifyEvent.RUN_STALLED, NotifyEvent.SITE_SILENT})
RUNS, SITES = ("run-ended", "run-stalled", "run-goes-on"), ("site-silent", "site-back")
Begin = Callable[..., "Server"]


class Server:
    """A lab whose messages are taken at once; one process after another, over one journal."""

    def __init__(self, folder: Path, events: tuple[str, ...], now: Clock) -> None:
        self.lab, self.now = operator_lab(), now
        self._path, self._events = folder / JOURNAL_FILE, frozenset(map(NotifyEvent, events))
        self._begin(self._events)

    def _begin(self, events: frozenset[NotifyEvent]) -> None:
        lab, hook = self.lab, {"name": "ops", "url": "https://hook.example/"}
        notify = Notify.model_validate({"webhooks": [hook], "events": events})
        self.outbox = Outbox(self._path, notify.channels, notify.events, self.now)
        certificates = lab.operation.certificates
        sources = WatchSources(
            lab.runs, lab.presence, lab.ledger, certificates, None, self.outbox.since, lab.clock, self.now
        )
        look = Watch(notify, sources).look
        self._notifier = Notifier("hub", look, self.outbox, [], lambda _channel, _outcome: None, now=self.now)

    def restart(self, *gone: str, down_s: float = 0.0, events: frozenset[NotifyEvent] | None = None) -> None:
        """Another process takes over; the sites enroll with it, but for those that are `gone`."""
        self.outbox.close()
        self.now.now += down_s
        for site in gone:
            self.lab.here.pop(site, None)
        self.lab.restart()
        self._begin(self._events if events is None else events)

    def look(self) -> list[Notice]:
        """What is news."""
        self._notifier.poll()
        found = []
        while (waiting := self.outbox.next("ops")) is not None:
            self.outbox.done("ops", waiting, delivered=True)
            found.append(waiting)
        return found

    def later(self, seconds: float, *alive: str) -> list[Notice]:
        """Time passes in 30 s steps, while these sites live; the news."""
        found = []
        for _ in range(int(seconds // 30)):
            self.now.now += 30.0
            self.lab.later(30.0, alive)
            found += self.look()
        return found

    def come(self, *sites: str) -> list[Notice]:
        """Sites appear, and the run notices."""
        self.lab.enroll(*sites)
        self.lab.runs.tick()
        return self.look()

    def advance(self) -> list[Notice]:
        """The sites that are there do the round that is open, the first models included."""
        self.lab.first_models()
        self.lab.round(**{site: 1.0 for site in ALL if self.lab.asked(site) is not None})
        return self.look()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    made, now = list[Server](), Clock(1_800_000_000.0)
    monkeypatch.setattr("protofed.server.storage.ledger.time", SimpleNamespace(time=now))

    def _begin(*events: str) -> Server:
        made.append(Server(tmp_path, events, now))
        return made[-1]

    yield _begin
    for server in made:
        server.outbox.close()


@pytest.fixture
def stalled(begin: Begin) -> Server:
    """A run that nobody came to, which was told."""
    server = begin(*RUNS)
    server.lab.start("one", rounds=5, federation={"max_attempts": 100_000})
    assert events(server.later(STALLED_S + 60)) == ["run-stalled"]
    return server


@pytest.fixture
def silent(begin: Begin) -> Server:
    """A run of which one site is silent, which was told."""
    server = begin(*SITES)
    server.lab.start("one", federation={"max_attempts": 100_000})
    server.lab.enroll(*ALL)
    assert about(server.later(SILENT_S + 60, "ann", "bob")) == [("site-silent", "cyd")]
    return server


def events(found: list[Notice]) -> list[str]:
    return [each.event for each in found]


def about(found: list[Notice]) -> list[tuple[str, str | None]]:
    return [(each.event, each.site or each.run) for each in found]


# Runs


def test_a_run_that_advances_is_told_once_with_how_long_it_had_not(stalled: Server) -> None:
    stalled.later(3 * 3600 - STALLED_S - 60)
    assert stalled.come(*ALL) == []  # a round that is open has not been done yet
    stalled.lab.first_models()
    (found,) = stalled.look()
    assert (found.event, found.severity, found.run, found.site) == ("run-goes-on", "info", "one", None)
    assert found.facts == {"round": 1, "stalled_round": 0, "for_s": 3 * 3600 - 30}  # noticed after the first step
    assert "3 hours" in found.text
    assert stalled.later(60, *ALL) == []
    stalled.restart()
    assert stalled.look() == []
    assert "run-goes-on" not in events(stalled.advance())


def test_a_server_that_restarts_while_it_lasts_tells_of_the_end_once_and_counts_the_time_that_it_was_down(
    stalled: Server,
) -> None:
    stalled.restart(down_s=2 * 86_400)
    assert stalled.later(STALLED_S + 60) == []
    assert stalled.come(*ALL) == []
    stalled.lab.first_models()
    stalled.restart()  # what happened in between is news to this process alone
    (found,) = stalled.look()
    assert (found.event, found.facts["for_s"]) == ("run-goes-on", 2 * 86_400 + 2 * int(STALLED_S + 60) - 30)
    assert "2 days" in found.text
    stalled.restart()
    assert stalled.look() == []


def test_a_run_that_stalls_again_in_the_next_round_is_told_each_time_once(stalled: Server) -> None:
    found = stalled.come(*ALL)
    stalled.lab.first_models()
    found += stalled.look()
    for _ in range(2):
        found += stalled.later(STALLED_S + 300)  # nobody lives: the round is abandoned
        found += stalled.come(*ALL)
        while not stalled.lab.asked("ann"):  # until after the back-off
            found += stalled.later(30, *ALL)
        found += stalled.advance()
    assert events(found) == ["run-goes-on", *["run-stalled", "run-goes-on"] * 2]
    assert [each.facts.get("stalled_round", each.facts["round"]) for each in found] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_that_ends_does_not_go_on_be_it_that_it_is_rolled_back_later(stalled: Server, restarts: bool) -> None:
    stalled.come(*ALL)
    stalled.lab.first_models()
    assert events(stalled.look()) == ["run-goes-on"]
    assert events(stalled.later(STALLED_S + 300)) == ["run-stalled"]
    stalled.lab.operation.abort("one", "enough")
    if restarts:
        stalled.restart()
    assert events(stalled.look()) == ["run-ended"]
    stalled.lab.operation.roll_back("one", 0)
    stalled.lab.enroll(*ALL)
    assert stalled.later(60, *ALL) == []
    assert stalled.advance() == []
    assert stalled.lab.phase.round == 2  # type: ignore[union-attr]


def test_a_pause_ends_a_stall_without_a_word_and_one_after_it_is_news(stalled: Server) -> None:
    stalled.lab.operation.pause("one", paused=True)
    assert stalled.look() == []
    stalled.lab.operation.pause("one", paused=False)
    stalled.lab.enroll(*ALL)
    assert stalled.later(60, *ALL) == []
    stalled.lab.first_models()
    assert stalled.look() == []
    assert events(stalled.later(STALLED_S + 300)) == ["run-stalled"]
    stalled.lab.operation.pause("one", paused=True)
    assert stalled.later(60) == []
    stalled.lab.operation.pause("one", paused=False)
    assert events(stalled.later(STALLED_S + 60)) == ["run-stalled"]


def test_a_run_that_is_rolled_back_has_not_advanced(stalled: Server) -> None:
    stalled.come(*ALL)
    stalled.lab.first_models()
    stalled.look()
    stalled.advance()
    assert events(stalled.later(STALLED_S + 300)) == ["run-stalled"]
    stalled.lab.operation.roll_back("one", 0)
    assert stalled.look() == []
    stalled.lab.enroll(*ALL)
    assert stalled.later(60, *ALL) == []
    assert [stalled.advance() for _ in range(2)] == [[], []]  # past the round in which it stood


# Sites


def test_a_site_that_is_back_is_told_once_and_so_is_the_next_time(silent: Server) -> None:
    (found,) = silent.come("cyd")
    assert (found.event, found.severity, found.run, found.site) == ("site-back", "info", "one", "cyd")
    assert found.facts == {"for_s": SILENT_S + 60}
    assert "61 minutes" in found.text
    assert silent.later(600, *ALL) == []
    silent.restart()
    assert silent.later(600, *ALL) == []
    assert about(silent.later(SILENT_S + 60, "ann", "bob")) == [("site-silent", "cyd")]
    assert about(silent.come("cyd")) == [("site-back", "cyd")]


def test_a_restart_brings_no_site_back_and_forgets_none_that_is_awaited(silent: Server) -> None:
    silent.restart("cyd", down_s=86_400)
    assert silent.later(SILENT_S, "ann", "bob") == []
    silent.lab.operation.pause("one", paused=True)
    assert silent.later(SILENT_S, "ann", "bob") == []
    (found,) = silent.come("cyd")
    assert (found.event, found.facts["for_s"]) == ("site-back", 86_400 + 3 * SILENT_S + 60)
    silent.restart()
    assert silent.look() == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_site_that_is_excluded_or_forgotten_while_it_is_silent_is_not_back_when_it_comes(
    silent: Server, forgotten: bool
) -> None:
    if forgotten:
        silent.lab.operation.forget("cyd")
    else:
        silent.lab.operation.exclude("cyd", "patient 4711")
    assert silent.look() == []
    if not forgotten:
        silent.lab.operation.admit("cyd")
    assert silent.come("cyd") == []
    assert silent.later(60, *ALL) == []


def test_a_site_that_comes_while_no_run_is_left_is_not_told_of(silent: Server) -> None:
    silent.lab.operation.abort("one", "")
    assert silent.later(60) == []
    assert silent.come("cyd") == []
    silent.lab.start("two", federation={"max_attempts": 100_000})
    assert silent.later(60, *ALL) == []


def test_a_site_that_is_silent_from_one_run_to_the_next_is_told_of_there(silent: Server) -> None:
    silent.lab.operation.abort("one", "")
    silent.lab.start("two", federation={"max_attempts": 100_000})
    assert silent.later(SILENT_S, "ann", "bob") == []
    (found,) = silent.come("cyd")
    assert (found.event, found.run, found.facts["for_s"]) == ("site-back", "two", 2 * SILENT_S + 60)


# Settings


def test_what_was_noticed_before_somebody_asked_how_it_ends_is_over_without_a_word(silent: Server) -> None:
    silent.restart(events=frozenset({NotifyEvent.SITE_SILENT}))
    silent.restart("cyd", down_s=60)
    assert silent.come("cyd") == []
    assert about(silent.later(SILENT_S + 60, "ann", "bob")) == [("site-silent", "cyd")]
    assert about(silent.come("cyd")) == [("site-back", "cyd")]


@pytest.mark.parametrize("asked_late", [False, True])
def test_how_it_ends_is_not_told_if_nobody_asked_before_it_was_noticed(begin: Begin, asked_late: bool) -> None:
    server = begin("run-stalled", "site-silent")
    server.lab.start("one", federation={"max_attempts": 100_000})
    server.lab.enroll(*ALL)
    found = server.later(SILENT_S + 60, "ann", "bob")
    if asked_late:
        server.restart(down_s=60, events=frozenset(map(NotifyEvent, (*RUNS, *SITES))))
    found += server.come("cyd") + server.later(600, *ALL)
    server.lab.first_models()
    assert set(events(found + server.look())) == {"run-stalled", "site-silent"}
