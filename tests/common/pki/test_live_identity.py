"""A running daemon takes a renewal up by itself, and is never left without an identity on the way."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog
from tests.support.pki import BEGINS, ENDS, NOW, Authority

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import LiveIdentity, Party, read_identity


def write_key(path: Path, data: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(data)


class Clock:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def live(site: Path) -> LiveIdentity:
    return LiveIdentity(site, Party.SITE, Clock())


def renewed(authority: Authority, folder: Path) -> dict[str, bytes]:
    made = authority.issue(folder, Party.SITE, "hospital-a", begins=BEGINS, ends=ENDS)
    return {path.name: path.read_bytes() for path in made.iterdir()}


def test_the_same_identity_is_given_while_nothing_changes(live: LiveIdentity) -> None:
    assert live.current() is live.current()


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="certificate missing"):
        LiveIdentity(tmp_path, Party.SITE)


def test_a_renewal_is_taken_up_and_a_half_way_state_is_not(
    authority: Authority, site: Path, live: LiveIdentity, tmp_path: Path
) -> None:
    before, new = live.current(), renewed(authority, tmp_path / "new")
    with structlog.testing.capture_logs() as logs:
        (site / "cert.pem").write_bytes(new["cert.pem"])
        assert live.current() is before
        assert live.current() is before
        (site / "key.pem").write_bytes(new["key.pem"])
        after = live.current()
    assert after.certificate_pem == new["cert.pem"]
    assert after.key_pem == new["key.pem"]
    assert [entry["event"] for entry in logs] == ["a renewed identity cannot be used", "identity renewed"]
    assert "is not the key of" in logs[0]["why"]
    assert "PRIVATE" not in str(logs)


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_the_last_good_identity_stays_when_a_file_vanishes(name: str, site: Path, live: LiveIdentity) -> None:
    before, data = live.current(), (site / name).read_bytes()
    (site / name).unlink()
    assert live.current() is before
    write_key(site / name, data)
    assert live.current() == before


def test_a_certificate_of_tomorrow_is_taken_up_tomorrow(authority: Authority, site: Path) -> None:
    clock = Clock()
    live = LiveIdentity(site, Party.SITE, clock)
    before = live.current()
    tomorrow = NOW + timedelta(days=1)
    authority.issue(site, Party.SITE, "hospital-a", begins=tomorrow, ends=ENDS)
    assert live.current() is before
    clock.now = tomorrow
    assert live.current().certificate.not_before == tomorrow


def test_a_pending_key_changes_nothing_until_its_certificate_is_there(
    authority: Authority, site: Path, live: LiveIdentity, tmp_path: Path
) -> None:
    before, new = live.current(), renewed(authority, tmp_path / "new")
    write_key(site / "key.next.pem", new["key.pem"])
    assert live.current() == before
    (site / "cert.pem").write_bytes(new["cert.pem"])
    assert live.current().key_pem == new["key.pem"]
    assert read_identity(site, Party.SITE, NOW).key_pem == new["key.pem"]


def test_another_ca_is_taken_up(authority: Authority, site: Path, live: LiveIdentity) -> None:
    (site / "ca.pem").write_bytes(authority.pem + Authority.make("next").pem)
    assert live.current().authorities_pem == (site / "ca.pem").read_bytes()


def test_it_is_known_why_new_files_are_not_used(authority: Authority, site: Path, live: LiveIdentity) -> None:
    assert live.problem == ""
    before = (site / "cert.pem").read_bytes()
    for _ in range(2):
        (site / "cert.pem").unlink()
        live.current()
        assert "certificate missing" in live.problem
        (site / "cert.pem").write_bytes(before)
        live.current()
        assert live.problem == ""


def test_a_folder_that_is_away_for_a_moment_leaves_no_problem(site: Path, live: LiveIdentity) -> None:
    site.rename(away := site.with_name("away"))
    live.current()
    assert live.problem
    away.rename(site)
    live.current()
    assert live.problem == ""


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_certificate_of_another_name_is_no_renewal_where_the_name_counts(
    authority: Authority, site: Path, keeps_name: bool
) -> None:
    live = LiveIdentity(site, Party.SITE, Clock(), keeps_name=keeps_name)
    authority.issue(site, Party.SITE, "hospital-b", begins=BEGINS, ends=ENDS)
    assert live.current().certificate.name == ("hospital-a" if keeps_name else "hospital-b")
    assert ("hospital-b" in live.problem) is keeps_name
    authority.issue(site, Party.SITE, "hospital-a", begins=BEGINS, ends=ENDS)
    assert live.current().certificate_pem == (site / "cert.pem").read_bytes()
    assert live.problem == ""
