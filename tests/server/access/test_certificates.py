"""The certificates that may call: what becomes of them, and what the ledger keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.server.conftest import Clock
from tests.support.pki import Authority

from protofed.common.errors import ConfigError, ConflictError, StateError
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.storage.journal import records
from protofed.server.access.certificates import Certificates, warn_of_expiry
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.recovery import open_journal

DAY_S = 86_400.0
BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
Issue = Callable[..., Path]


@pytest.fixture
def clock() -> Clock:
    return Clock(BEGAN.timestamp())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture
def issue(tmp_path: Path) -> Issue:
    """Writes identities with the days that they have left."""
    authority = Authority.make()

    def one(name: str, party: Party = Party.SITE, days: float = 365, copy: str = "") -> Path:
        dates: dict[str, Any] = {"begins": BEGAN - timedelta(days=400), "ends": BEGAN + timedelta(days=days)}
        return authority.issue(tmp_path / f"{party}-{name}{copy}", party, name, **dates) / "cert.pem"

    return one


def test_what_is_registered_and_revoked_survives_a_restart(url: str, issue: Issue, clock: Clock) -> None:
    ledger = Ledger(url)
    certificates = Certificates(ledger, clock)
    ann = certificates.register(issue("ann").read_text("ascii"))
    boss = certificates.register(issue("boss", Party.OPERATOR).read_bytes(), roles=["operator"])
    eva = certificates.register(issue("eva").read_bytes(), roles=["evaluator", "trainer", "trainer"])
    assert (ann.roles, boss.roles, eva.roles) == (("trainer",), ("operator",), ("trainer", "evaluator"))
    assert (ann.party, ann.name, ann.added_at, ann.revoked_at) == ("site", "ann", clock.now, None)
    clock.now += 60
    (gone,) = certificates.revoke("ann", "lost")
    assert (gone.revoked_at, gone.reason) == (clock.now, "lost")
    ledger.close()
    again = Certificates(Ledger(url), clock)
    assert again.all() == [boss, gone, eva]
    assert again.find(ann.fingerprint) == gone
    assert again.find("0" * 64) is None
    assert [again.status(row) for row in again.all()] == ["valid", "revoked", "valid"]


def test_registering_twice_is_no_harm_but_a_revoked_one_stays_so(issue: Issue, clock: Clock) -> None:
    certificates, pem = Certificates(Ledger(), clock), issue("ann").read_bytes()
    first = certificates.register(pem)
    clock.now += 1
    assert certificates.register(pem) is first
    certificates.revoke(first.fingerprint[:12], "lost")
    with pytest.raises(ConfigError, match=r"was revoked on 2030-01-01T00:00:01Z: lost; that is for ever"):
        certificates.register(pem)
    assert certificates.revoke("ann", "again")[0].reason == "lost"  # the first reason stays


@pytest.mark.parametrize(
    ("party", "days", "why"),
    [(Party.SERVER, 9, "is a server's; expected a site's or an operator's"), (Party.SITE, -1, "expired on 2029-12-31")],
)
def test_what_could_never_call_is_not_registered(
    issue: Issue, clock: Clock, party: Party, days: float, why: str
) -> None:
    certificates = Certificates(Ledger(), clock)
    with pytest.raises(ConfigError, match=why):
        certificates.register(issue("ann", party, days).read_bytes())
    with pytest.raises(ConfigError, match="cannot be read as a certificate"):
        certificates.register("-----BEGIN")
    assert certificates.all() == []


def test_a_name_means_all_its_certificates_and_nobody_elses(issue: Issue, clock: Clock) -> None:
    certificates = Certificates(Ledger(), clock)
    for copy in ("", "-renewed"):
        certificates.register(issue("ann", copy=copy).read_bytes(), renewal=bool(copy))
    for party, role in ((Party.SITE, "trainer"), (Party.OPERATOR, "operator")):
        certificates.register(issue("bob", party).read_bytes(), roles=[role])
    with pytest.raises(ConfigError, match="'bob' is more than one"):
        certificates.revoke("bob", "left")
    for unknown in ("cyd", "", certificates.all()[0].fingerprint[:7]):
        with pytest.raises(ConfigError, match=r"no certificate is registered under .*certs list --server HOST:PORT"):
            certificates.revoke(unknown, "left")
    assert len(certificates.revoke("ann", "left")) == 2
    assert [certificates.status(row) for row in certificates.all()] == ["valid", "revoked", "revoked", "valid"]


def test_a_sites_last_certificate_counts_for_when_it_ends(issue: Issue, clock: Clock) -> None:
    certificates = Certificates(Ledger(), clock)
    old = certificates.register(issue("ann", days=10).read_bytes())
    assert certificates.ending() == [old]
    new = certificates.register(issue("ann", days=300, copy="-new").read_bytes(), renewal=True)
    assert certificates.until(Party.SITE, "ann") == new.not_after
    assert certificates.ending() == []
    certificates.revoke(new.fingerprint, "lost")
    assert certificates.until(Party.SITE, "ann") == old.not_after
    assert certificates.until(Party.OPERATOR, "ann") == 0.0
    clock.now += 11 * DAY_S
    assert (certificates.until(Party.SITE, "ann"), certificates.ending()) == (0.0, [])


# A second certificate of a name


def test_a_second_certificate_of_a_name_is_a_renewal_or_refused(issue: Issue, clock: Clock) -> None:
    certificates = Certificates(Ledger(), clock)
    first = certificates.register(issue("ann", days=10).read_bytes())
    second = issue("ann", copy="-2").read_bytes()
    with pytest.raises(ConflictError, match=rf"site 'ann'.*{first.fingerprint[:16]}.*--renewal"):
        certificates.register(second)
    assert certificates.all() == [first]
    certificates.register(issue("ann", Party.OPERATOR).read_bytes(), roles=["operator"])  # another party's name
    clock.now += 11 * DAY_S  # the first has expired: nobody else speaks for the name
    assert certificates.register(second).name == "ann"
    certificates.register(issue("cyd").read_bytes())
    certificates.revoke(certificates.all()[-1].fingerprint, "lost")
    third = certificates.register(issue("cyd", copy="-2").read_bytes())  # without ado
    assert certificates.status(third) == "valid"


# Roles


def test_a_renewal_keeps_its_roles_and_a_registration_can_change_them(issue: Issue, clock: Clock) -> None:
    certificates = Certificates(Ledger(), clock)
    old = certificates.register(issue("eva", days=10).read_bytes(), roles=["evaluator"])
    clock.now += 1
    pem = issue("eva", copy="-2").read_bytes()
    new = certificates.register(pem, renewal=True)
    assert new.roles == ("evaluator",)
    assert certificates.register(pem, roles=["trainer"]).roles == ("trainer",)
    assert certificates.roles(Party.SITE, "eva") == {"trainer", "evaluator"}
    certificates.revoke(old.fingerprint, "renewed")
    assert certificates.roles(Party.SITE, "eva") == {"trainer"}
    found = certificates.find(new.fingerprint)
    assert found is not None
    assert (found.roles, found.added_at) == (("trainer",), clock.now)


@pytest.mark.parametrize(
    ("party", "roles"),
    [
        (Party.SITE, ["operator"]),
        (Party.SITE, ["trainer", "spy"]),
        (Party.OPERATOR, []),
        (Party.OPERATOR, ["trainer"]),
        (Party.OPERATOR, ["operator", "evaluator"]),
    ],
)
def test_nobody_gets_a_role_by_accident(issue: Issue, clock: Clock, party: Party, roles: list[str]) -> None:
    certificates = Certificates(Ledger(), clock)
    with pytest.raises(ConfigError, match="role"):
        certificates.register(issue("ann", party).read_bytes(), roles=roles)
    assert certificates.all() == []


# The first operators


def test_the_first_operators_come_from_the_servers_folder_once(issue: Issue, clock: Clock, tmp_path: Path) -> None:
    certificates, folder = Certificates(Ledger(), clock), tmp_path / "hub"
    certificates.register_first_operators(folder)  # there is none
    (folder / "operators").mkdir(parents=True)
    (folder / "operators" / "boss.pem").write_bytes(issue("boss", Party.OPERATOR).read_bytes())
    (folder / "operators" / "old.pem").write_bytes(issue("old", Party.OPERATOR, days=-1).read_bytes())
    certificates.register_first_operators(folder)
    assert [(row.name, row.roles) for row in certificates.all()] == [("boss", ("operator",))]
    (folder / "operators" / "boss.pem").write_bytes(issue("boss", Party.OPERATOR, copy="-2").read_bytes())
    certificates.register_first_operators(folder)  # a renewal, by whoever may write into the server's own folder
    assert len(certificates.revoke("boss", "left")) == 2
    certificates.register_first_operators(folder)
    assert [certificates.status(row) for row in certificates.all()] == ["revoked", "revoked"]
    (folder / "operators" / "ann.pem").write_bytes(issue("ann").read_bytes())
    with pytest.raises(ConfigError, match=r"ann\.pem.*'ann'"):
        certificates.register_first_operators(folder)


# What must not be lost


def test_a_revocation_that_the_ledger_has_lost_is_missed_at_the_start(url: str, issue: Issue, tmp_path: Path) -> None:
    journal, ledger = tmp_path / "journal.jsonl", Ledger(url)
    ledger.attach(open_journal(journal, ledger, give_up=False))
    certificates = Certificates(ledger)
    row = certificates.register(
        Authority.make().issue(tmp_path / "ann", Party.SITE, "ann").joinpath("cert.pem").read_bytes()
    )
    ledger.close()
    before = (tmp_path / "ledger.sqlite").read_bytes()
    ledger = Ledger(url)
    ledger.attach(open_journal(journal, ledger, give_up=False))
    Certificates(ledger).revoke("ann", "lost")
    ledger.close()
    assert [record.event for record in records(journal)] == ["certificate-registered", "certificate-revoked"]
    open_journal(journal, Ledger(url), give_up=False).close()
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()
    (tmp_path / "ledger.sqlite").write_bytes(before)
    with pytest.raises(StateError, match=r"lost 1 of the promises .*: the revocation of ann's certificate"):
        open_journal(journal, Ledger(url), give_up=False)
    assert row.revoked_at is None


# Warnings


def test_what_ends_soon_is_told_the_servers_own_too(tmp_path: Path) -> None:
    authority, certificates = Authority.make(), Certificates(Ledger())
    soon = datetime.now(UTC) + timedelta(days=29, hours=1)
    hub = authority.issue(tmp_path / "hub", Party.SERVER, "hub", ends=soon)
    for name, ends in (("ann", soon), ("bob", None)):
        folder = authority.issue(tmp_path / name, Party.SITE, name, ends=ends)
        certificates.register((folder / "cert.pem").read_bytes())
    with structlog.testing.capture_logs() as logs:
        warn_of_expiry(LiveIdentity(hub, Party.SERVER).current(), certificates)
    own, other = logs
    assert (own["log_level"], own["days_left"]) == ("warning", 29)
    assert "this server's certificate ends soon" in own["event"]
    assert (other["site"], other["until"][:10]) == ("ann", f"{soon:%Y-%m-%d}")
    fresh = authority.issue(tmp_path / "fresh", Party.SERVER, "hub")
    with structlog.testing.capture_logs() as logs:
        warn_of_expiry(LiveIdentity(fresh, Party.SERVER).current(), Certificates(Ledger()))
    assert logs == []
