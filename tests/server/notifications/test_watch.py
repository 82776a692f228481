"""What there is to tell of runs, sites and certificates, and what there is not; clocks are moved by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import Clock, Later
from tests.support.dashboards import rules
from tests.support.operator_lab import OperatorLab, operator_lab
from tests.support.pki import Authority

from protofed.common.config.settings import Notify, NotifyEvent
from protofed.common.errors import OutOfSpaceError
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.server.access.certificates import Certificates
from protofed.server.notifications import outbox
from protofed.server.notifications.watch import DAY_S, Watch, WatchSources
from protofed.server.notifications.wording import Occurrence, notice
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RoundOutcome

STALLED_S, SILENT_S = 900.0, 3600.0
HOOK = {"webhooks": [{"name": "ops", "url": "https://hook.example/"}]}


@dataclass
class Told:
    """A watch over a lab, and what an outbox would know."""

    lab: OperatorLab
    known: dict[str, outbox.Told] = field(default_factory=dict)
    now: Clock = field(default_factory=lambda: Clock(time.time()))
    since: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    sources: WatchSources | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another process looks."""
        made = WatchSources(
            self.lab.runs,
            self.lab.presence,
            self.lab.ledger,
            self.lab.operation.certificates,
            None,
            lambda _event: self.since,
            self.lab.clock,
            self.now,
        )
        self.watch = Watch(Notify.model_validate({**HOOK, **self.settings}), self.sources or made)

    def look(self) -> list[Occurrence]:
        """What is news."""
        news = self.watch.look(self.known)
        for key in news.over:
            del self.known[key]
        for each in news.occurrences:
            made = notice(each, "hub", self.now())
            assert made.todo
            assert made.runbook or made.severity == "info" or "aborted" in made.title
            section = made.runbook.partition("#")[2]
            assert not section or section in {rule["alert"].lower() for rule in rules("alerts")}
            self.known[each.key] = outbox.Told.by(made)
        return news.occurrences

    def later(self, seconds: float, *alive: str) -> list[Occurrence]:
        """Time passes in 30 s steps, while these sites live; the news."""
        found = []
        for _ in range(int(seconds // 30)):
            self.lab.later(30.0, alive)
            found += self.look()
        return found


def about(found: list[Occurrence]) -> list[tuple[str, str | None]]:
    return [(each.event.value, each.site or each.run) for each in found]


@pytest.fixture
def told() -> Told:
    lab = operator_lab()
    lab.start("one")
    return Told(lab)


# Runs that end


def test_a_run_that_ends_is_told_once_with_its_outcome_and_not_its_reason(told: Told) -> None:
    assert told.look() == []
    told.lab.operation.abort("one", "patient 4711 was in it")
    (found,) = told.look()
    assert (found.event, found.run, found.facts) == (NotifyEvent.RUN_ENDED, "one", {"outcome": "aborted"})
    assert b"4711" not in notice(found, "hub", 0.0).body()
    told.restart()
    assert told.look() == []


def test_a_run_that_fails_is_told_as_failed_and_one_of_before_is_no_news(told: Told) -> None:
    told.lab.ledger.end_run("one", "it could not be taken up", RoundOutcome.FAILED)
    told.since = time.time() + 1
    assert told.look() == []
    told.since = 0.0
    (found,) = told.look()
    assert found.facts == {"outcome": "failed"}


def test_a_run_that_was_rolled_back_ends_again_which_is_news(told: Told) -> None:
    lab = told.lab
    lab.enroll("ann", "bob", "cyd")
    lab.runs.tick()
    lab.first_models()
    lab.operation.abort("one", "enough")
    assert about(told.look()) == [("run-ended", "one")]
    lab.operation.roll_back("one", 0)
    assert told.look() == []
    lab.operation.abort("one", "enough")
    assert about(told.look()) == [("run-ended", "one")]


# Runs that do not go on


def test_a_run_without_sites_is_told_after_the_time_and_once_until_it_advances(told: Told) -> None:
    assert told.later(STALLED_S) == []
    (found,) = told.later(600)
    assert (found.event, found.run) == (NotifyEvent.RUN_STALLED, "one")
    assert (found.facts["reason"], found.facts["round"], found.facts["missing"]) == ("trainers", 0, [])
    assert told.later(2 * STALLED_S) == []
    told.restart()
    assert told.later(2 * STALLED_S) == []


def test_a_run_that_advanced_between_two_looks_has_not_stood_since_before(told: Told) -> None:
    told.later(3 * STALLED_S)
    told.lab.enroll("ann", "bob", "cyd")
    told.lab.runs.tick()
    told.lab.first_models()
    told.lab.later(200.0)  # round 1 is abandoned
    assert told.later(STALLED_S - 60) == []
    (found,) = told.later(120)
    assert (found.event, found.facts["round"]) == (NotifyEvent.RUN_STALLED, 1)
    assert found.facts["for_s"] == STALLED_S


def test_rounds_that_are_abandoned_again_and_again_are_a_stall(told: Told) -> None:
    lab = told.lab
    lab.operation.abort("one", "")
    lab.start("two", federation={"max_attempts": 1000})
    lab.enroll("ann", "bob", "cyd")
    lab.runs.tick()
    told.look()
    found = told.later(2 * STALLED_S, "ann", "bob", "cyd")
    assert about(found) == [("run-stalled", "two")]
    assert found[0].facts["reason"] in ("abandoned", "back-off")


def test_a_round_that_is_open_long_past_its_deadline_is_a_stall(told: Told) -> None:
    lab, work = told.lab, Later()
    lab.work = work  # an aggregation that never ends
    lab.restart()
    told.restart()
    lab.enroll("ann", "bob", "cyd")
    lab.runs.tick()
    for site in ("ann", "bob", "cyd"):
        if lab.asked(site):
            lab.push(site, lab.model(1.0))
    assert told.later(STALLED_S, "ann", "bob", "cyd") == []
    told.now.now += 1000.0
    (found,) = told.later(STALLED_S + 60, "ann", "bob", "cyd")
    assert found.facts["reason"] == "overdue"


def test_a_round_that_a_restarted_server_took_up_has_its_whole_deadline_again(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, sites = told.lab, ("ann", "bob", "cyd")
    lab.operation.abort("one", "")
    lab.start("two", federation={"deadline_s": 4 * STALLED_S})
    lab.enroll(*sites)
    lab.runs.tick()
    lab.first_models()
    told.look()
    told.now.now += DAY_S  # the server is down for longer than the deadline
    monkeypatch.setattr(time, "time", told.now)
    lab.restart()
    told.restart()
    assert told.later(2 * STALLED_S, *sites) == []
    told.now.now += 4 * STALLED_S + 60
    (found,) = told.later(STALLED_S + 60, *sites)
    assert found.facts["reason"] == "overdue"


def test_a_full_disk_is_a_stall_also_while_a_round_is_open(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = told.lab
    lab.enroll("ann", "bob", "cyd")
    lab.runs.tick()

    def full(*_args: Any) -> None:
        raise OutOfSpaceError("no space left on device; free some")

    monkeypatch.setattr(lab.ledger, "abandon", full)
    (found,) = told.later(2 * STALLED_S, "ann", "bob", "cyd")
    assert found.facts["reason"] == "disk"


def test_a_paused_run_and_a_server_without_one_disturb_nobody(told: Told) -> None:
    told.lab.operation.pause("one", paused=True)
    assert told.later(3 * SILENT_S) == []
    told.settings = {"events": ["certificate-ends"]}
    told.restart()
    told.lab.operation.abort("one", "")
    assert told.look() == []  # what is not asked for is not told
    assert told.later(3 * SILENT_S) == []


# Sites


@pytest.fixture
def busy(told: Told) -> Told:
    told.lab.operation.abort("one", "")
    told.lab.start("two", federation={"max_attempts": 100_000})
    told.lab.enroll("ann", "bob", "cyd")
    told.settings = {"events": ["site-silent"]}
    told.restart()
    return told


def test_a_silent_site_is_told_once_and_again_after_it_was_back(busy: Told) -> None:
    assert busy.later(SILENT_S - 60, "ann", "bob") == []
    assert about(busy.later(120, "ann", "bob")) == [("site-silent", "cyd")]
    assert busy.later(2 * SILENT_S, "ann", "bob") == []
    busy.lab.enroll("cyd")
    assert busy.later(60, "ann", "bob", "cyd") == []
    assert about(busy.later(SILENT_S + 60, "ann", "bob")) == [("site-silent", "cyd")]
    del busy.lab.here["cyd"]
    busy.lab.restart()
    busy.restart()  # which does not tell again of a site that stays away
    assert busy.later(2 * SILENT_S, "ann", "bob") == []


def test_a_site_that_does_not_come_back_after_a_restart_counts_from_there(busy: Told) -> None:
    del busy.lab.here["cyd"]
    busy.lab.restart()
    busy.restart()
    assert busy.later(SILENT_S - 60, "ann", "bob") == []
    assert about(busy.later(120, "ann", "bob")) == [("site-silent", "cyd")]


# Certificates


@pytest.fixture
def certified(told: Told, tmp_path: Path) -> Iterator[Told]:
    now, authority = datetime.now(UTC), Authority.make()
    ledger, clock = Ledger(), told.now
    certificates = Certificates(ledger, clock)
    ann = authority.issue(tmp_path / "ann", Party.SITE, "ann", ends=now + timedelta(days=40))
    certificates.register((ann / "cert.pem").read_bytes())
    hub = authority.issue(tmp_path / "hub", Party.SERVER, "hub", ends=now + timedelta(days=20))
    identity = LiveIdentity(hub, Party.SERVER)
    told.sources = replace(
        WatchSources(told.lab.runs, told.lab.presence, told.lab.ledger, certificates, identity, lambda _event: 0.0),
        clock=told.lab.clock,
        now=clock,
    )
    told.settings = {"events": ["certificate-ends"]}
    told.restart()
    yield told
    ledger.close()


def test_an_end_is_told_at_each_mark_once_and_the_servers_own_too(certified: Told) -> None:
    (hub,) = certified.look()
    assert (hub.facts["party"], hub.facts["name"], hub.site) == ("server", "hub", None)
    assert certified.look() == []
    certified.now.now += 15 * DAY_S  # 5 days of the server's are left, 25 of the site's
    found = {(each.facts["party"], each.facts["name"]): each for each in certified.look()}
    assert found.keys() == {("server", "hub"), ("site", "ann")}
    assert found["site", "ann"].site == "ann"
    assert (found["server", "hub"].facts["days_left"], found["site", "ann"].facts["days_left"]) == (4, 24)
    certified.restart()
    assert certified.look() == []
    certified.now.now += 24.5 * DAY_S
    assert sorted(about(certified.look()), key=str) == [("certificate-ends", "ann"), ("certificate-ends", None)]


def test_a_renewed_certificate_is_news_only_when_it_ends_itself(certified: Told, tmp_path: Path) -> None:
    assert certified.sources is not None
    certified.look()
    longer = Authority.make().issue(
        tmp_path / "renewed", Party.SITE, "ann", ends=datetime.now(UTC) + timedelta(days=200)
    )
    certified.sources.certificates.register((longer / "cert.pem").read_bytes(), renewal=True)
    certified.now.now += 15 * DAY_S
    assert [each.facts["name"] for each in certified.look()] == ["hub"]
    certified.now.now += 160 * DAY_S
    assert "ann" in [each.facts["name"] for each in certified.look()]
