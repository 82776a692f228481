"""What a site says of a server that it cannot reach: a kind, a sentence, a remedy; and it sends nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.connect_proxy import ConnectProxy
from tests.support.pki import Authority

from protofed.client.transport import diagnosis
from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode, diagnose
from protofed.client.transport.proxy import Proxy
from protofed.common.errors import ConfigError
from protofed.common.pki.identity import Identity, Party, fingerprint, read_identity

SECRET = "hunter2%40home"  # noqa: S105  (a test's)
Start = Callable[..., str]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def identity(authority: Authority, tmp_path: Path) -> Identity:
    return of(authority.issue(tmp_path / "ann", Party.SITE, "ann"))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "STEP_TIMEOUT_S", 0.5)


def of(folder: Path) -> Identity:
    return read_identity(folder, Party.SITE, datetime.now(UTC))


@pytest.fixture
def serve(authority: Authority, tmp_path: Path) -> Iterator[Start]:
    """Starts gRPC servers that want certificates; their addresses."""
    started: list[grpc.Server] = []

    def start(issuer: Authority = authority, trusted: Authority = authority, **certificate: Any) -> str:
        folder = issuer.issue(tmp_path / f"server-{len(started)}", Party.SERVER, "fl", **certificate)
        pair = (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair], trusted.pem, True))
        server.start()
        started.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in started:
        server.stop(None).wait()


@pytest.fixture
def listen() -> Iterator[Callable[[Callable[[socket.socket], object]], str]]:
    """Starts a listener that does something with each connection; its address."""
    listeners: list[socket.socket] = []

    def start(do: Callable[[socket.socket], object]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    with line, contextlib.suppress(OSError):
                        do(line)

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def handshake(context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def do(line: socket.socket) -> None:
        with context.wrap_socket(line, server_side=True) as tls:
            tls.recv(1)

    return do


def expect(found: ConnectionDiagnosis, kind: DiagnosisCode, *facts: str) -> None:
    assert found.kind is kind, found
    assert [fact for fact in facts if fact not in found.text] == []


def test_a_server_that_takes_the_certificate_is_fine_and_another_refuses_it(
    serve: Start, identity: Identity, tmp_path: Path
) -> None:
    found = diagnose(serve(), identity)
    expect(found, DiagnosisCode.FINE, "accepts the certificate of site 'ann'")
    assert found.server_fingerprint == fingerprint((tmp_path / "server-0" / "cert.pem").read_bytes())
    found = diagnose(serve(trusted=Authority.make()), identity)
    expect(found, DiagnosisCode.REFUSED, "site 'ann'", identity.certificate.fingerprint[:16])


def test_a_name_that_is_unknown_a_port_on_which_nothing_listens_and_no_answer_at_all(
    identity: Identity, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(diagnose("nowhere.invalid:7443", identity), DiagnosisCode.NO_NAME, "'nowhere.invalid'")
    expect(diagnose(f"127.0.0.1:{unused_port}", identity), DiagnosisCode.NOTHING_LISTENS, str(unused_port))

    def silent(*_: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    expect(diagnose("192.0.2.1:7443", identity), DiagnosisCode.NO_ANSWER, "192.0.2.1:7443")


def test_a_server_in_plain_text_or_one_that_is_busy(identity: Identity, listen: Any, context: ssl.SSLContext) -> None:
    address = listen(lambda line: (line.recv(4096), line.sendall(b"\0\0\x12\4\0\0\0\0\0" + bytes(18))))
    expect(diagnose(address, identity), DiagnosisCode.NOT_TLS, "does not speak TLS")
    expect(diagnose(listen(handshake(context)), identity), DiagnosisCode.BUSY, "hangs")
    expect(diagnose(listen(lambda line: line.close()), identity), DiagnosisCode.BUSY, "too many connections")


@pytest.fixture
def context(authority: Authority, tmp_path: Path) -> ssl.SSLContext:
    folder = authority.issue(tmp_path / "by-hand", Party.SERVER, "fl")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return made


def test_a_server_of_the_last_decade(context: ssl.SSLContext, identity: Identity, listen: Any) -> None:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    expect(diagnose(listen(handshake(context)), identity), DiagnosisCode.OLD_TLS, "TLS 1.3")


def test_an_alert_of_the_server_is_told(context: ssl.SSLContext, identity: Identity, listen: Any) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=Authority.make().pem.decode())
    expect(diagnose(listen(handshake(context)), identity), DiagnosisCode.REFUSED, "(unknown ca)")


def test_a_server_of_another_authority_purpose_or_name(serve: Start, identity: Identity, tmp_path: Path) -> None:
    found = diagnose(serve(Authority.make()), identity)
    expect(found, DiagnosisCode.SERVER_AUTHORITY, str(tmp_path / "ann" / "ca.pem"), "nothing was sent")
    assert found.server_fingerprint == fingerprint((tmp_path / "server-0" / "cert.pem").read_bytes())
    found = diagnose(serve(usage=ExtendedKeyUsageOID.CLIENT_AUTH), identity)
    expect(found, DiagnosisCode.SERVER_AUTHORITY, "purpose", "nothing was sent")
    found = diagnose(serve(hosts=("fl.example.org", "192.0.2.7")), identity)
    expect(found, DiagnosisCode.SERVER_NAME, "fl.example.org, 192.0.2.7", "not of '127.0.0.1'", "nothing was sent")
    assert found.server_fingerprint is not None


@pytest.mark.parametrize("days", [(-3, -1), (1, 3)], ids=["expired", "early"])
def test_a_server_whose_certificate_is_not_valid_now(days: tuple[int, int], serve: Start, identity: Identity) -> None:
    begins, ends = (datetime.now(UTC) + timedelta(days=day) for day in days)
    found = diagnose(serve(begins=begins, ends=ends), identity)
    expect(found, DiagnosisCode.SERVER_DATES, f"{begins:%Y-%m-%d}", f"{ends:%Y-%m-%d}", "clock")


@pytest.mark.parametrize(("days", "phrase"), [(400, "has expired"), (-2, "is not yet valid")])
def test_an_own_certificate_that_is_not_valid_is_not_shown_to_anybody(
    days: int, phrase: str, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC) + timedelta(days=days)
    monkeypatch.setattr(socket, "create_connection", None)
    found = diagnose("127.0.0.1:1", identity, clock=lambda: now)
    own = identity.certificate
    expect(found, DiagnosisCode.OWN_CERTIFICATE, phrase, f"{own.not_before:%Y-%m-%d}", f"{own.not_after:%Y-%m-%d}")


# Through a proxy


@pytest.fixture
def proxy() -> Iterator[Callable[..., ConnectProxy]]:
    started: list[ConnectProxy] = []

    def start(user: str | None = None) -> ConnectProxy:
        started.append(ConnectProxy(user))
        return started[-1]

    yield start
    for one in started:
        one.die()


def test_the_proxy_resolves_the_name_and_may_want_a_password(proxy: Any, serve: Start, identity: Identity) -> None:
    way = proxy("ann:hunter2@home")
    way.names["fl.test"] = "127.0.0.1"
    port = serve(hosts=("fl.test",)).rpartition(":")[2]
    found = diagnose(f"fl.test:{port}", identity, Proxy.read(f"http://ann:{SECRET}@{way.address}"))
    expect(found, DiagnosisCode.FINE)
    assert way.asked == [f"fl.test:{port}"]
    way = proxy("ann:other")
    found = diagnose("127.0.0.1:1", identity, Proxy.read(f"http://ann:{SECRET}@{way.address}"))
    expect(found, DiagnosisCode.PROXY_PASSWORD, way.address, "407")
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(("status", "phrase"), [(403, "does not allow"), (502, "cannot connect to 127.0.0.1:1")])
def test_a_proxy_that_refuses(status: int, phrase: str, proxy: Any, identity: Identity) -> None:
    way = proxy()
    way.status = status
    expect(diagnose("127.0.0.1:1", identity, Proxy.read(f"http://{way.address}")), DiagnosisCode.PROXY_REFUSES, phrase)


def test_a_proxy_that_is_away_or_none(identity: Identity, unused_port: int, listen: Any) -> None:
    away = Proxy.read(f"http://127.0.0.1:{unused_port}")
    expect(diagnose("127.0.0.1:1", identity, away), DiagnosisCode.PROXY_AWAY, f"the proxy 127.0.0.1:{unused_port}")
    nameless = Proxy.read("http://no.invalid:1")
    expect(diagnose("127.0.0.1:1", identity, nameless), DiagnosisCode.PROXY_AWAY, "does not resolve")
    other = Proxy.read("http://" + listen(lambda line: line.sendall(b"220 mail\r\n\r\n")))
    expect(diagnose("127.0.0.1:1", identity, other), DiagnosisCode.PROXY_AWAY, "is it an HTTP proxy?")


@pytest.mark.parametrize(
    "url",
    ["proxy:3128", "https://u:hunter2@h:1", "http://u:hunter2@h", "http://u:hunter2@h:x1", "http://u:hunter2@h:1/path"],
)
def test_a_proxy_that_cannot_be_read_is_refused_without_telling_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://") as raised:
        Proxy.read(url)
    assert "hunter2" not in repr(raised.value) + repr(raised.value.__context__)
    shown = Proxy.read("http://ann:hunter2@h:1")
    assert "hunter2" not in f"{shown} {shown!r}"


def test_an_own_identity_that_tls_does_not_take_is_no_fault_of_the_server(identity: Identity, serve: Start) -> None:
    broken = dataclasses.replace(identity, key_pem=b"-----BEGIN PRIVATE KEY-----\n")
    found = diagnose(serve(), broken)
    assert found.kind is DiagnosisCode.OWN_IDENTITY
    assert str(identity.folder) in found.text
