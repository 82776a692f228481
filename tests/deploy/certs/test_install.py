"""Installing: what is refused, what a renewal and a rotation of the CA leave at every instant, and after a crash."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.pki import key_pem

from protofed.common.errors import ConfigError, OutOfSpaceError
from protofed.common.pki.identity import LiveIdentity, Party, read_identity
from protofed.common.storage import files
from protofed.deploy.certs import lifecycle
from protofed.deploy.certs.files import read_key
from protofed.deploy.certs.lifecycle import Authority, make_authority
from protofed.deploy.certs.request import make_request, read_request


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path / "ca")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return make_authority(tmp_path / "ca2")


def approved(asked: bytes, authority: Authority, also: Authority | None = None) -> bytes:
    asked_for = read_request(asked, "request")
    return lifecycle.sign_request(asked_for, authority, also=also.pem if also else None, renewal=True)


@pytest.fixture
def site(authority: Authority, tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    lifecycle.install(folder, approved(lifecycle.request(folder, Party.SITE, "a"), authority))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_renewal_has_a_new_key_and_the_same_name(authority: Authority, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    lifecycle.install(
        folder, approved(lifecycle.request(folder, Party.SERVER, "main", ["localhost", "127.0.0.1"]), authority)
    )
    live = LiveIdentity(folder, Party.SERVER)
    before, asked = live.current(), lifecycle.renew(folder)
    assert live.current() == before, "a pending renewal changes nothing"
    assert lifecycle.renew(folder) != before.certificate_pem, "it can be asked for again"
    lifecycle.install(folder, approved(asked, authority))
    after = live.current()
    assert (after.certificate.name, after.certificate.hosts) == ("main", ("localhost", "127.0.0.1"))
    assert after.key_pem != before.key_pem
    assert not (folder / "key.next.pem").exists()
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600


def test_nothing_to_renew_is_said_and_the_same_bundle_again_changes_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    with pytest.raises(ConfigError, match="no certificate to renew; `protofed certs request`"):
        lifecycle.renew(tmp_path)
    asked = lifecycle.request(tmp_path / "a", Party.SITE, "a")
    bundle = approved(asked, authority)
    lifecycle.install(tmp_path / "a", bundle)
    before = contents(tmp_path / "a")
    lifecycle.install(tmp_path / "a", bundle)
    assert contents(tmp_path / "a") == before


def test_what_cannot_be_installed_changes_nothing(authority: Authority, other: Authority, site: Path) -> None:
    now, asked = datetime.now(UTC), lifecycle.renew(site)
    good, before = approved(asked, authority), contents(site)
    own = lifecycle.read_bundle(good, "bundle").certificate_pem
    foreign = approved(lifecycle.request(site.parent / "b", Party.SITE, "b"), authority)
    renamed = approved(make_request(Party.SITE, "b", (), read_key(site / "key.next.pem")), authority)
    key = key_pem(ec.generate_private_key(ec.SECP256R1()))
    cases = [
        (b"garbage", now, "cannot be read as a certificate"),
        (asked, now, "is the request; send it to the operator"),
        (own, now, "1 certificates and 0 CA certificates"),
        (authority.pem, now, "0 certificates and 1 CA certificates"),
        (good + own, now, "2 certificates and 1 CA certificates"),
        (good + key, now, "holds a private key"),
        (own + other.pem, now, r"not signed by a CA in ca\.pem"),
        (foreign, now, r"certificate of site 'b' is for another key \(.*\) than .* has \(.* or .*\)"),
        (renamed, now, "holds the certificate of site 'a', the bundle the certificate of site 'b'"),
        (good, now + timedelta(days=366), "has expired: valid from"),
        (good, now - timedelta(days=1), "is not yet valid"),
        (approved(asked, other), now, r"changes which CAs.*new: protofed CA .*gone: protofed CA .*--new-ca"),
        (approved(asked, authority, other), now, r"changes which CAs this party trusts; new: protofed CA [^;]*\. Ask"),
    ]
    for data, at, said in cases:
        with pytest.raises(ConfigError, match=said):
            lifecycle.install(site, data, now=at)
        assert contents(site) == before


def test_one_ca_takes_over_from_another_in_three_steps(authority: Authority, other: Authority, site: Path) -> None:
    live = LiveIdentity(site, Party.SITE)
    lifecycle.install(site, approved(lifecycle.renew(site), authority, other), new_ca=True)
    assert live.current().authorities_pem == authority.pem + other.pem
    lifecycle.install(site, approved(lifecycle.renew(site), other, authority))
    assert live.current().authorities_pem == other.pem + authority.pem
    lifecycle.install(site, approved(lifecycle.renew(site), other), new_ca=True)
    assert live.current().authorities_pem == other.pem
    asked = read_request(lifecycle.renew(site), "request")
    with pytest.raises(ConfigError, match="--also"):
        lifecycle.sign_request(asked, authority, also=(site / "cert.pem").read_bytes())


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_daemon_that_starts_after_a_crash_finds_a_usable_set(
    writes: int, other: Authority, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, done = datetime.now(UTC), 0
    bundle, real = approved(lifecycle.renew(site), other), files.write

    def crashing(path: Path, data: bytes) -> None:
        nonlocal done
        if done == writes:
            raise OutOfSpaceError("full")
        done += 1
        real(path, data)

    old = read_identity(site, Party.SITE, now).certificate
    monkeypatch.setattr(files, "write", crashing)
    with pytest.raises(OutOfSpaceError):
        lifecycle.install(site, bundle, new_ca=True)
    monkeypatch.setattr(files, "write", real)
    new = lifecycle.read_bundle(bundle, "bundle").certificate
    assert read_identity(site, Party.SITE, now).certificate == (old if writes < 2 else new)
    lifecycle.install(site, bundle, new_ca=True)
    found = read_identity(site, Party.SITE, now)
    assert (found.certificate, found.authorities_pem) == (new, other.pem)
    assert not (site / "key.next.pem").exists()


def test_a_reader_never_meets_a_mixture(authority: Authority, other: Authority, site: Path) -> None:
    failures, ended, read = [], threading.Event(), 0

    def reader() -> None:
        nonlocal read
        while not ended.is_set():
            try:
                read_identity(site, Party.SITE, datetime.now(UTC))
                read += 1
            except ConfigError as error:
                failures.append(str(error))

    thread = threading.Thread(target=reader)
    thread.start()
    for number in range(20):
        lifecycle.install(site, approved(lifecycle.renew(site), (authority, other)[number % 2]), new_ca=True)
    ended.set()
    thread.join()
    assert failures == []
    assert read > 20
