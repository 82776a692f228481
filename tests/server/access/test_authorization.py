"""Who may call what, without the wire."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import Clock
from tests.support.pki import Authority

from protofed.common.errors import DeniedError
from protofed.common.pki.certificate import fingerprint
from protofed.common.pki.identity import Party
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.access.authorization import NOBODY, PLAINTEXT, AccessRules, Peer
from protofed.server.access.certificates import Certificates
from protofed.server.storage.ledger import Ledger

Issue = Callable[..., bytes]
BEGAN = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> Clock:
    return Clock(BEGAN.timestamp())


@pytest.fixture
def certificates(clock: Clock) -> Certificates:
    return Certificates(Ledger(), clock)


@pytest.fixture
def access(certificates: Certificates, clock: Clock) -> AccessRules:
    return AccessRules(certificates, clock)


@pytest.fixture
def issue(tmp_path: Path) -> Issue:
    authority = Authority.make()

    def one(name: str, party: Party = Party.SITE, days: int = 30, **options: Any) -> bytes:
        folder = tmp_path / f"{party}-{name}-{days}"
        dates: dict[str, Any] = {"begins": BEGAN - timedelta(days=1), "ends": BEGAN + timedelta(days=days)}
        return (authority.issue(folder, party, name, **dates, **options) / "cert.pem").read_bytes()

    return one


def seen(pem: bytes) -> dict[str, list[bytes]]:
    """What gRPC tells of a connection."""
    return {"transport_security_type": [b"ssl"], "x509_pem_cert": [pem]}


def enroll(site: str, *roles: pb.Role.ValueType) -> pb.EnrollRequest:
    return pb.EnrollRequest(caller=pb.Caller(site=site, instance="a"), roles=roles)


def test_a_certificate_that_names_nobody_still_has_a_fingerprint_and_may_do_nothing(
    access: AccessRules, tmp_path: Path
) -> None:
    authority = Authority.make()
    peer = access.peer(seen(authority.pem))  # signed by a CA of ours (itself), and no party's
    assert peer == Peer(fingerprint(authority.pem), "unknown", "")
    for service in ("Federation", "Operator"):
        with pytest.raises(DeniedError, match="is not registered here"):
            access.check(peer, service, enroll(""))


@pytest.mark.parametrize("facts", [{}, {"x509_pem_cert": []}])
def test_without_a_certificate_nothing_but_health_is_allowed(
    access: AccessRules, facts: dict[str, list[bytes]]
) -> None:
    assert access.peer(facts) is NOBODY
    access.check(NOBODY, "Health", None)
    with pytest.raises(DeniedError):
        access.check(NOBODY, "Federation", enroll(""))
    with pytest.raises(KeyError):  # a service that nobody was given is nobody's
        access.check(NOBODY, "Reflection", object())


def test_a_sites_call_needs_its_own_certificate_and_an_operators_is_for_orders_only(
    access: AccessRules, certificates: Certificates, issue: Issue
) -> None:
    pem = issue("ann")
    peer = access.peer(seen(pem))
    assert (peer, str(peer)) == (Peer(fingerprint(pem), "site", "ann"), "site 'ann'")
    with pytest.raises(DeniedError, match=rf"{peer.fingerprint[:16]}.*'ann' is not registered"):
        access.check(peer, "Federation", enroll("ann"))
    certificates.register(pem)
    access.check(peer, "Federation", enroll("ann"))
    with pytest.raises(DeniedError, match=r"'ann' cannot speak for site 'bob'"):
        access.check(peer, "Federation", enroll("bob"))
    with pytest.raises(DeniedError, match=r"cannot speak for site 'a{79}…'"):
        access.check(peer, "Federation", enroll("a" * 9_000))
    with pytest.raises(DeniedError, match="this call is for an operator"):
        access.check(peer, "Operator", object())
    access.check(peer, "Health", None)
    pem = issue("boss", Party.OPERATOR)
    certificates.register(pem, roles=["operator"])
    peer = access.peer(seen(pem))
    access.check(peer, "Operator", object())
    with pytest.raises(DeniedError, match="this call is for a site"):
        access.check(peer, "Federation", enroll("boss"))


def test_a_claim_is_no_role(access: AccessRules, certificates: Certificates, issue: Issue) -> None:
    pem, both = issue("ann"), (pb.ROLE_TRAINER, pb.ROLE_EVALUATOR)
    certificates.register(pem)
    peer = access.peer(seen(pem))
    access.check(peer, "Federation", enroll("ann", pb.ROLE_TRAINER))
    for claimed in ((pb.ROLE_EVALUATOR,), both):
        with pytest.raises(DeniedError, match=r"as trainer, not as evaluator; .*--role evaluator --role trainer$"):
            access.check(peer, "Federation", enroll("ann", *claimed))
    certificates.register(pem, roles=["trainer", "evaluator"])
    access.check(peer, "Federation", enroll("ann", *both))
    certificates.register(pem, roles=["evaluator"])
    with pytest.raises(DeniedError, match="as evaluator, not as trainer"):
        access.check(peer, "Federation", enroll("ann", *both))


def test_a_revoked_certificate_is_told_when_and_why(
    access: AccessRules, certificates: Certificates, issue: Issue
) -> None:
    pem = issue("ann")
    certificates.register(pem)
    certificates.revoke("ann", "laptop lost")
    with pytest.raises(DeniedError, match=r"of site 'ann' was revoked on 2030-01-01T00:00:00Z: laptop lost$"):
        access.check(access.peer(seen(pem)), "Federation", enroll("ann"))


def test_a_live_connection_ends_with_its_certificate(
    access: AccessRules, certificates: Certificates, issue: Issue, clock: Clock
) -> None:
    pem = issue("ann", days=3)
    certificates.register(pem)
    peer = access.peer(seen(pem))
    clock.now += 3 * 86_400.0 - 1
    access.check(peer, "Federation", enroll("ann"))
    clock.now += 2
    with pytest.raises(DeniedError, match=r"expired on 2030-01-04T00:00:00Z; renew it: protofed certs request --renew"):
        access.check(peer, "Federation", enroll("ann"))
    clock.now -= 9 * 86_400.0
    with pytest.raises(DeniedError, match=r"is not valid before 2029-12-31T00:00:00Z"):
        access.check(peer, "Federation", enroll("ann"))


def test_in_plain_text_everybody_is_believed() -> None:
    access = AccessRules(None)
    assert access.peer({}) is PLAINTEXT
    access.check(PLAINTEXT, "Federation", enroll("ann", pb.ROLE_TRAINER, pb.ROLE_EVALUATOR))
    access.check(PLAINTEXT, "Operator", object())


def test_every_message_of_a_site_says_whose_it_is() -> None:
    for method in pb.DESCRIPTOR.services_by_name["Federation"].methods:
        assert method.input_type.fields_by_name["caller"].message_type is pb.Caller.DESCRIPTOR
