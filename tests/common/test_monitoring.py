"""Metrics as data; /metrics, /healthz and /readyz, as Prometheus, a health check and a stranger meet them."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs
from tests.support.pki import Authority, key_pem

from protofed.common import monitoring
from protofed.common.config.settings import Monitoring
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.monitoring import Metric, Monitor, table
from protofed.common.pki.identity import Party

FREE = Metric("protofed_free_bytes", "gauge", ("site",), "How much room is left.")
SEEN = Metric("protofed_seen_total", "counter", (), "How often it was seen.")


def test_values_are_told_by_their_labels() -> None:
    family = FREE.family({("ann",): 1.5, ("bob",): 2.0})
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("protofed_free_bytes", {"site": "ann"}, 1.5),
        ("protofed_free_bytes", {"site": "bob"}, 2.0),
    ]
    assert (family.type, family.documentation) == ("gauge", "How much room is left.")
    assert [sample.name for sample in SEEN.family({(): 3}).samples] == ["protofed_seen_total"]
    for labels in (("ann", "bob"), ()):
        with pytest.raises(ValueError, match="has the labels"):
            FREE.family({labels: 1.0})


def test_a_counter_that_counts_is_one_series_and_a_histogram_has_its_buckets() -> None:
    registry = CollectorRegistry()
    SEEN.counter(registry).inc(2)
    found = [(sample.name, sample.value) for family in registry.collect() for sample in family.samples]
    assert found == [("protofed_seen_total", 2.0)]
    Metric("protofed_s", "histogram", ("phase",), "Time.").histogram(registry, (1, 10)).labels("fit").observe(5)
    for limit, count in (("1.0", 0), ("10.0", 1)):
        assert registry.get_sample_value("protofed_s_bucket", {"phase": "fit", "le": limit}) == count


def test_a_summary_is_counts_and_sums() -> None:
    family = Metric("protofed_step_seconds", "summary", ("site",), "Time.").summary({("ann",): (3, 1.5)})
    assert family.type == "summary"
    assert [(sample.name, sample.labels, sample.value) for sample in family.samples] == [
        ("protofed_step_seconds_count", {"site": "ann"}, 3),
        ("protofed_step_seconds_sum", {"site": "ann"}, 1.5),
    ]


def test_the_table_has_a_row_for_each() -> None:
    assert table((FREE, SEEN)).splitlines()[2:] == [
        "| `protofed_free_bytes{site}` | gauge | How much room is left. |",
        "| `protofed_seen_total` | counter | How often it was seen. |",
    ]


TOKEN = "a2c4e6"  # noqa: S105


class Watched:
    """A monitor that answers, and what it is asked about."""

    def __init__(self, **where: Any) -> None:
        self.registry, self.missing = CollectorRegistry(), list[str]()
        Counter("seen", "How often.", registry=self.registry).inc(3)
        given = Monitoring(listen=where.pop("listen", "127.0.0.1:0"), **where)
        self.monitor = Monitor(given, self.registry, lambda: self.missing)
        self.url = self.monitor.start()
        self.host, _, port = self.url.rpartition("/")[2].rpartition(":")
        self.port = int(port)

    def get(self, path: str, method: str = "GET", trust: bytes | None = None, **headers: str) -> tuple[int, str, Any]:
        """Status, text and headers."""
        connection = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=10)
        if trust is not None:
            context = ssl.create_default_context(cadata=trust.decode())
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=10, context=context)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, answer.headers

    def dial(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=10)


Start = Callable[..., Watched]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Watched] = []

    def make(**where: Any) -> Watched:
        started.append(Watched(**where))
        return started[-1]

    yield make
    for one in started:
        one.monitor.stop()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    return path


def test_metrics_in_the_format_that_is_asked_for(start: Start) -> None:
    watched = start()
    status, text, headers = watched.get("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "seen_total 3.0\n" in text
    _, text, headers = watched.get("/metrics?x=1", Accept="application/openmetrics-text;version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


def test_it_is_alive_though_not_ready(start: Start) -> None:
    watched = start()
    assert watched.get("/readyz")[:2] == (200, "ready\n")
    watched.missing = ["identity: expired", "disk: full"]
    assert watched.get("/readyz")[:2] == (503, "identity: expired\ndisk: full\n")
    assert watched.get("/healthz")[:2] == (200, "alive\n")


def test_there_is_nothing_else_it_is_only_read_and_names_no_software(start: Start) -> None:
    watched = start()
    for path in ("/", "/metrics/", "/../etc/passwd"):
        assert watched.get(path)[:2] == (404, "here are /metrics, /healthz and /readyz\n")
    for method in ("POST", "PUT", "HEAD"):
        assert watched.get("/metrics", method)[0] == 501
    for path, method in (("/metrics", "GET"), ("/nothing", "GET"), ("/metrics", "POST")):
        _, text, headers = watched.get(path, method)
        assert headers["Server"] is None
        assert "python" not in text.lower() + str(headers).lower()


def test_a_registry_that_breaks_says_nothing_of_why(start: Start) -> None:
    class Broken:
        def collect(self) -> Any:
            raise RuntimeError("patient 4711")

    watched = start()
    watched.registry.register(Broken())
    with capture_logs() as logs:
        assert watched.get("/metrics")[:2] == (500, "see this daemon's log\n")
    assert [entry["event"] for entry in logs] == ["monitor: no answer"]
    assert watched.get("/healthz")[0] == 200


def test_metrics_are_for_those_who_have_the_token(start: Start, token: Path) -> None:
    watched = start(token=token)
    assert watched.get("/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert watched.get("/metrics", Authorization=f"bearer  {TOKEN} ")[0] == 200
    for wrong in ("", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN, "Bearer", "Bearer \xe9"):
        status, text, headers = watched.get("/metrics", Authorization=wrong)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), wrong
        assert "seen_total" not in text
    assert watched.get("/readyz")[0] == watched.get("/healthz")[0] == 200


def test_a_token_that_others_can_read_or_that_is_none(token: Path) -> None:
    for mode in (0o644, 0o640, 0o602):
        token.chmod(mode)
        with pytest.raises(ConfigError, match=f"can be read or changed by others .mode {mode:04o}.; expected 0600"):
            Watched(token=token)
    token.chmod(0o600)
    for text in ("", "\n\n", "two words", "tökén"):
        token.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="expected one line with the token"):
            Watched(token=token)
    with pytest.raises(ConfigError, match="No such file or directory; expected a file of this account's"):
        Watched(token=token.with_name("none"))


@pytest.mark.parametrize(
    ("listen", "has_token", "told"), [("0.0.0.0:0", False, 1), ("0.0.0.0:0", True, 0), ("127.0.0.1:0", False, 0)]
)
def test_a_port_for_all_is_told_once(start: Start, token: Path, listen: str, has_token: bool, told: int) -> None:
    with capture_logs() as logs:
        start(listen=listen, token=token if has_token else None)
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == [
        "metrics without a token: whoever reaches this port can read the sites' names and scores"
    ] * told


def test_an_address_that_cannot_be_had_and_a_port_that_is_free_again(start: Start) -> None:
    taken = start()
    for listen in (f"127.0.0.1:{taken.port}", "192.0.2.1:9100"):  # the second is not this machine's
        with pytest.raises(UnavailableError, match=listen):
            Watched(listen=listen)
    with pytest.raises(ConfigError, match="expected host:port"):
        Watched(listen="localhost")
    taken.get("/healthz")
    taken.monitor.stop()
    assert start(listen=f"127.0.0.1:{taken.port}").get("/healthz")[0] == 200


def test_ipv6_too(start: Start) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text(encoding="ascii"):
        pytest.skip("this machine has no IPv6")
    watched = start(listen="[::1]:0")
    assert watched.url == f"http://[::1]:{watched.port}"
    assert watched.get("/healthz")[0] == 200


def test_a_silent_peer_holds_up_nobody_and_goes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "SILENCE_S", 0.5)
    watched = start()
    with watched.dial() as silent:
        assert watched.get("/healthz")[0] == 200
        assert silent.recv(100) == b""


def test_a_peer_that_sends_few_bytes_is_cut(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "LONGEST_S", 0.5)
    watched = start()
    began = time.monotonic()
    with watched.dial() as slow:
        slow.settimeout(0.1)
        while time.monotonic() < began + 20:
            with contextlib.suppress(TimeoutError):
                slow.sendall(b"G")
                if slow.recv(1) == b"":
                    break
    assert time.monotonic() - began < 10


def test_one_connection_too_many_is_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "CONNECTIONS", 2)
    watched = start()
    with watched.dial(), watched.dial(), watched.dial() as third:
        third.settimeout(3)  # before the silence of the two ends
        assert third.recv(100) == b""
    until = time.monotonic() + 10
    while True:
        try:
            assert watched.get("/healthz")[0] == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < until


def test_a_body_or_long_headers_are_not_read(start: Start) -> None:
    watched = start()
    assert watched.get("/healthz", "GET", None, **{"Content-Length": "1000000000"})[0] == 200
    assert watched.get("/healthz", X="x" * 70_000)[0] == 431
    assert watched.get("/" + "x" * 70_000)[0] == 414


def test_peers_leave_no_thread_behind(start: Start) -> None:
    watched, others = start(), threading.enumerate()
    for _ in range(20):
        watched.get("/healthz")
        watched.dial().close()
    until = time.monotonic() + 10
    while any("process_request_thread" in thread.name and thread not in others for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def identity(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "hub", Party.SERVER, "hub")


def test_https_by_a_certificate(start: Start, authority: Authority, identity: Path, token: Path) -> None:
    watched = start(identity=identity, token=token)
    assert watched.url == f"https://127.0.0.1:{watched.port}"
    assert watched.get("/metrics", trust=authority.pem)[0] == 401
    assert watched.get("/metrics", trust=authority.pem, Authorization=f"Bearer {TOKEN}")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        watched.get("/metrics", trust=Authority.make().pem)
    with pytest.raises((OSError, http.client.HTTPException)):
        watched.get("/metrics")
    assert watched.get("/healthz", trust=authority.pem)[0] == 200


def test_nothing_older_than_tls_1_2(start: Start, identity: Path) -> None:
    watched = start(identity=identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with watched.dial() as line, pytest.raises(OSError, match=r"ALERT|EOF|reset|protocol"):
        context.wrap_socket(line)


def test_a_renewed_certificate_is_taken_up_a_bad_one_not(
    start: Start, authority: Authority, identity: Path, tmp_path: Path
) -> None:
    watched = start(identity=identity)
    assert watched.get("/healthz", trust=authority.pem)[0] == 200
    other = Authority.make()
    other.issue(identity, Party.SERVER, "hub")
    assert watched.get("/healthz", trust=other.pem)[0] == 200
    (identity / "cert.pem").write_bytes(b"half a certifi")
    with capture_logs() as logs:
        for _ in range(3):
            assert watched.get("/healthz", trust=other.pem)[0] == 200
    assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1
    made = authority.issue(tmp_path / "next", Party.SERVER, "hub")  # a key that waits for its certificate
    os.rename(made / "key.pem", identity / "key.next.pem")
    for name in ("cert.pem", "ca.pem"):
        os.rename(made / name, identity / name)
    assert watched.get("/healthz", trust=authority.pem)[0] == 200


def test_folders_that_cannot_be_used(identity: Path, authority: Authority) -> None:
    (identity / "key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read or changed by others"):
        Watched(identity=identity)
    (identity / "key.pem").chmod(0o600)
    (identity / "key.pem").write_bytes(key_pem(authority.key))
    with pytest.raises(ConfigError, match=r"cert\.pem.*key\.pem"):
        Watched(identity=identity)
    (identity / "key.pem").unlink()
    with pytest.raises(ConfigError, match=r"cert\.pem.*key\.pem"):
        Watched(identity=identity)


def test_who_speaks_no_tls_harms_nobody(start: Start, authority: Authority, identity: Path) -> None:
    watched = start(identity=identity)
    with watched.dial() as confused:
        confused.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with watched.dial():  # silent, in the middle of a handshake
            assert watched.get("/healthz", trust=authority.pem)[0] == 200


def test_an_expired_certificate_still_answers(start: Start, authority: Authority, tmp_path: Path) -> None:
    ended = datetime.now(UTC) - timedelta(minutes=1)
    watched = start(identity=authority.issue(tmp_path / "old", Party.SERVER, "hub", ends=ended))
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        watched.get("/healthz", trust=authority.pem)
    assert refused.value.verify_code == 10  # X509_V_ERR_CERT_HAS_EXPIRED
