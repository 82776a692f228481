"""Who is let in, and what it may do then: rows 2, 3, 4, 8 and 9 of the fault table, as the server meets them."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography.x509.oid import ExtendedKeyUsageOID
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.pki import Authority
from tests.support.raw_client import FEDERATION, OPERATOR, Code, RawClient, refused
from tests.support.tls_server import TlsServer, still_served, tls_server

from protofed.common.codec import digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DeniedError
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import PROTOCOL_VERSION, Role
from protofed.common.storage.journal import verify
from protofed.deploy.operator.connection import Operator
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rpc import server

RecipeOf = Callable[..., Recipe]
NOW, DAY = datetime.now(UTC), timedelta(days=1)


@pytest.fixture
def tls(live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path) -> Iterator[TlsServer]:
    """Its run goes on with one site."""
    rules = {"min_sites": 1, "quorum": 1, "score_every": 0}
    with tls_server(tmp_path / "identities", live_server, recipe_of("fedavg", federation=rules)) as made:
        yield made


@pytest.fixture
def site(tls: TlsServer) -> Iterator[RawClient]:
    """A legitimate one, which is served all the time."""
    made = tls.site()
    yield made
    assert still_served(made)


def said(tls: TlsServer, code: Code) -> list[dict[str, Any]]:
    """What the audit holds of the calls that ended so."""
    return [dict(record.facts) for record in tls.calls(code.name)]


# The handshake

OUTSIDERS: dict[str, dict[str, Any]] = {
    "row 2: of another CA": {"authority": True},
    "row 3: expired": {"begins": NOW - 9 * DAY, "ends": NOW - DAY},
    "row 3: not yet valid": {"begins": NOW + DAY, "ends": NOW + 9 * DAY},
    "row 4: for a server's use": {"usage": ExtendedKeyUsageOID.SERVER_AUTH},
}


@pytest.mark.parametrize("how", OUTSIDERS.values(), ids=OUTSIDERS)
def test_row_02_03_04_a_certificate_that_is_not_good_is_refused_in_the_handshake(
    tls: TlsServer, site: RawClient, how: dict[str, Any]
) -> None:
    """It is registered all the same, so that nothing else can be the reason."""
    authority = Authority.make() if "authority" in how else tls.authority
    dates = {key: value for key, value in how.items() if key != "authority"}
    folder = authority.issue(tls.folder / "outsider", Party.SITE, "site-2", **dates)
    tls.know(folder)
    (folder / "ca.pem").write_bytes(tls.authority.pem)
    code, text = refused(tls.client(folder, "site-2").enroll)
    assert code is Code.UNAVAILABLE
    assert "Socket closed" in text
    assert still_served(site)
    assert "site-2" not in {record["peer"]["name"] for code in Code for record in said(tls, code)}
    assert "site-2" not in tls.server.ledger.sites()


def test_row_01_nobody_comes_in_without_a_certificate(tls: TlsServer, site: RawClient) -> None:
    trusted = grpc.ssl_channel_credentials(tls.authority.pem)
    with grpc.secure_channel(tls.server.address, trusted) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        code, text = refused(lambda: check(health_pb2.HealthCheckRequest(), timeout=10))
    assert (code, "Socket closed" in text) == (Code.UNAVAILABLE, True)


def test_row_02_handshakes_that_failed_are_counted_in_one_line(
    live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKES_EVERY_S", 2.0)
    began = time.monotonic()
    with structlog.testing.capture_logs() as logs, tls_server(tmp_path, live_server, recipe_of("fedavg")) as tls:
        site = tls.site()
        foreign = Authority.make().issue(tmp_path / "foreign", Party.SITE, "site-2")
        (foreign / "ca.pem").write_bytes(tls.authority.pem)
        for _ in range(7):
            refused(tls.client(foreign, "site-2").enroll)
        told: list[Any] = []
        while sum(line["count"] for line in told) < 7:
            assert time.monotonic() < began + 20
            time.sleep(0.1)
            told = [line for line in list(logs) if line["event"].startswith("connections without a call")]
        assert sum(line["of"] for line in told) >= 9  # with those of boss and site-1
        assert len(told) <= (time.monotonic() - began) / 2.0
        assert still_served(site)


# The calls of those who came in


def test_row_08_a_site_cannot_speak_for_another(tls: TlsServer, site: RawClient) -> None:
    liar = tls.client(tls.identity("site-1", Party.SITE), "site-2")
    other = tls.site("site-2")
    calls = [method.name for method in FEDERATION.methods]
    for call in calls:
        message = GetMessageClass(FEDERATION.methods_by_name[call].input_type)(caller=liar.caller)
        code, text = refused(liar.say, call, message)
        assert (code, "of site 'site-1' cannot speak for site 'site-2'" in text) == (Code.PERMISSION_DENIED, True), call
    found = said(tls, Code.PERMISSION_DENIED)
    assert [record["call"] for record in found] == calls
    assert {record["peer"]["name"] for record in found} == {"site-1"}
    enrolled = GetMessageClass(FEDERATION.methods_by_name["Enroll"].input_type)(caller=liar.caller)
    assert found[calls.index("Enroll")]["digest"] == digest(enrolled.SerializeToString())
    assert verify(tls.server.audit_file) > len(calls)
    assert still_served(site)
    assert still_served(other)


def test_row_08_a_call_that_does_not_say_whose_it_is_is_nobodys(tls: TlsServer, site: RawClient) -> None:
    for method in FEDERATION.methods:
        code, text = refused(site.say, method.name, GetMessageClass(method.input_type)())
        assert (code, "cannot speak for site ''" in text) == (Code.PERMISSION_DENIED, True), method.name


def test_row_08_a_site_is_no_operator_and_an_operator_no_site(tls: TlsServer, site: RawClient) -> None:
    for method in OPERATOR.methods:
        code, text = refused(site.say, method.name, GetMessageClass(method.input_type)())
        assert (code, "this call is for an operator" in text) == (Code.PERMISSION_DENIED, True), method.name
    boss = tls.client(tls.identity("boss", Party.OPERATOR), "boss")
    code, text = refused(boss.enroll)
    assert (code, "this call is for a site" in text) == (Code.PERMISSION_DENIED, True)
    assert [info.name for info in tls.server.ledger.certificates() if info.party == "site"] == ["site-1"]


def test_a_certificate_of_the_ca_that_nobody_registered_may_ask_for_health_only(
    tls: TlsServer, site: RawClient
) -> None:
    stranger = tls.client(tls.identity("site-3", Party.SITE), "site-3")
    code, text = refused(stranger.enroll)
    assert (code, "of site 'site-3' is not registered here" in text) == (Code.PERMISSION_DENIED, True)
    answer = health_pb2_grpc.HealthStub(stranger.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert [record["call"] for record in said(tls, Code.PERMISSION_DENIED)] == ["Enroll"]
    tls.register(tls.identity("site-3", Party.SITE))
    stranger.enroll()  # on the same connection


def test_a_role_that_is_not_registered_is_refused_by_name(tls: TlsServer, site: RawClient) -> None:
    claim = pb.EnrollRequest(caller=site.caller, protocol_version=PROTOCOL_VERSION, roles=[pb.ROLE_EVALUATOR])
    code, text = refused(site.say, "Enroll", claim)
    assert code is Code.PERMISSION_DENIED
    assert "of site 'site-1' is registered as trainer, not as evaluator" in text
    (record,) = said(tls, Code.PERMISSION_DENIED)
    assert (record["call"], record["peer"]["name"]) == ("Enroll", "site-1")
    assert tls.server.context.presence.roles("site-1") == {Role.TRAINER}
    assert still_served(site)
    tls.register(tls.identity("site-1", Party.SITE), "trainer", "evaluator")
    site.say("Enroll", claim)  # on the same connection
    assert tls.server.context.presence.roles("site-1") == {Role.EVALUATOR}


def test_a_daemon_in_a_role_that_was_taken_from_it_has_to_enroll_again(tls: TlsServer) -> None:
    task = (site := tls.site()).task()
    tls.register(tls.identity("site-1", Party.SITE), "evaluator")
    row = tls.server.ledger.task(task.task_id)
    assert (row.is_open, "registered as evaluator" in row.reason) == (False, True)
    assert refused(still_served, site)[0] is Code.UNAUTHENTICATED
    assert refused(site.enroll)[0] is Code.PERMISSION_DENIED


def test_a_second_certificate_of_a_site_is_kept_out(tls: TlsServer, site: RawClient) -> None:
    second = tls.authority.issue(tls.folder / "second", Party.SITE, "site-1")
    with pytest.raises(ConfigError, match=r"site 'site-1' has a certificate .*--renewal"):
        tls.register(second)
    assert refused(tls.client(second).enroll)[0] is Code.PERMISSION_DENIED


def test_row_09_a_revoked_certificate_is_refused_at_its_next_call_on_a_live_connection(
    tls: TlsServer, site: RawClient
) -> None:
    gone = tls.site("site-2")
    assert still_served(gone)
    with tls.operator() as operator:
        (info,) = operator.revoke("site-2", "laptop [lost]")
    code, text = refused(still_served, gone)
    assert code is Code.PERMISSION_DENIED
    assert f"certificate {info.fingerprint[:16]} of site 'site-2' was revoked on {NOW:%Y}-" in text
    assert text.endswith(": laptop [lost]")
    (record,) = said(tls, Code.PERMISSION_DENIED)
    assert record["peer"] == {"fingerprint": info.fingerprint, "party": "site", "name": "site-2"}
    assert refused(tls.client(tls.identity("site-2", Party.SITE), "site-2").enroll)[0] is Code.PERMISSION_DENIED


def test_row_09_a_revoked_certificate_is_logged_once_and_each_of_its_calls_counted(
    tls: TlsServer, site: RawClient
) -> None:
    gone = tls.site("site-2")
    with structlog.testing.capture_logs() as logs, tls.operator() as operator:
        operator.revoke("site-2", "laptop lost")
        for _ in range(3):
            assert refused(gone.enroll)[0] is Code.PERMISSION_DENIED
    denied = [line for line in logs if line["event"].startswith("calls denied")]
    assert [(line["because"], line["site"]) for line in denied] == [("revoked", "site-2")]
    assert not [line for line in logs if line["event"] == "call refused"]
    assert tls.server.operation.metrics.registry.get_sample_value(*COUNTED, {"because": "revoked"}) == 3
    assert len(said(tls, Code.PERMISSION_DENIED)) == 3  # the audit log has each of them


def test_row_09_an_exclusion_is_logged_once_and_again_after_the_site_was_back(tls: TlsServer, site: RawClient) -> None:
    other = tls.site("site-2")
    with structlog.testing.capture_logs() as logs, tls.operator() as operator:
        for _ in range(2):
            operator.exclude("site-2", "holidays")
            for _ in range(3):
                assert refused(other.enroll)[0] is Code.PERMISSION_DENIED
            operator.admit("site-2")
            other.enroll()
    denied = [line for line in logs if line["event"].startswith("calls denied")]
    assert [(line["because"], line["site"]) for line in denied] == [("excluded", "site-2")] * 2
    assert tls.server.operation.metrics.registry.get_sample_value(*COUNTED, {"because": "excluded"}) == 6


COUNTED = ("protofed_denied_calls_total",)


def test_row_09_a_site_revoked_by_mistake_comes_back_with_a_new_key_and_no_other_way(
    tls: TlsServer, site: RawClient
) -> None:
    gone, old = tls.site("site-2"), tls.identity("site-2", Party.SITE)
    with tls.operator() as operator:
        operator.revoke("site-2", "a mistake")
    with pytest.raises(ConfigError, match="make a new key and certificate"):
        tls.register(old)
    assert refused(gone.enroll)[0] is Code.PERMISSION_DENIED
    new = tls.authority.issue(tls.folder / "new", Party.SITE, "site-2")
    tls.register(new)  # the name has no valid certificate: it is no renewal
    back = tls.client(new, "site-2")
    back.enroll()
    assert still_served(back)


def test_row_09_a_revoked_operator_is_refused_on_a_live_connection(tls: TlsServer, site: RawClient) -> None:
    second = tls.identity("second", Party.OPERATOR)
    tls.register(second, "operator")
    with tls.operator() as boss, Operator(tls.server.address, second) as live:
        assert live.runs()
        boss.revoke("second", "left")
        with pytest.raises(DeniedError, match=r"was revoked on .*: left"):
            live.runs()


def test_row_09_nobody_waits_for_a_site_whose_last_certificate_was_revoked(tls: TlsServer) -> None:
    task = tls.site().task()
    assert task.kind == pb.TASK_KIND_INITIALISE
    second = tls.authority.issue(tls.folder / "renewed", Party.SITE, "site-1")
    tls.register(second, renewal=True)
    first = tls.server.operation.certificates.all()[1].fingerprint
    with tls.operator() as operator:
        operator.revoke(first, "renewed")
        assert tls.server.ledger.task(task.task_id).is_open  # the site goes on with its other certificate
        assert still_served(tls.client(second))
        operator.revoke("site-1", "left")
    row = tls.server.ledger.task(task.task_id)
    assert (row.is_open, "certificate revoked: left" in row.reason) == (False, True)


def test_a_site_is_added_while_a_run_goes_on(tls: TlsServer, site: RawClient) -> None:
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    newcomer = tls.site("site-2")
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    assert newcomer.task().round == 2


def test_a_renewed_server_certificate_needs_no_restart(tls: TlsServer, site: RawClient) -> None:
    before = (tls.identity() / "cert.pem").read_bytes()
    shown = tls.authority.issue(tls.folder / "renewed", Party.SERVER, "hub")
    for name in ("key.pem", "cert.pem"):
        (shown / name).replace(tls.identity() / name)
    assert (tls.identity() / "cert.pem").read_bytes() != before
    late = tls.site("site-2")
    host, _, port = tls.server.address.rpartition(":")
    assert ssl.get_server_certificate((host, int(port))) == (tls.identity() / "cert.pem").read_text("ascii")
    assert still_served(late)


def test_another_ca_is_taken_in_without_a_restart(tls: TlsServer, site: RawClient) -> None:
    second = Authority.make()
    folder = second.issue(tls.folder / "site-2", Party.SITE, "site-2")
    (folder / "ca.pem").write_bytes(tls.authority.pem)
    tls.register(folder)
    assert refused(tls.client(folder, "site-2").enroll)[0] is Code.UNAVAILABLE
    (tls.identity() / "ca.pem").write_bytes(tls.authority.pem + second.pem)
    assert still_served(tls.client(folder, "site-2").enroll())
