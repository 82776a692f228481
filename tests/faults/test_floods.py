"""Connections that are no site's: rows 7, 11 and 12 of the fault table, against a server in a process of its own."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.faults.conftest import ProxiedProcesses
from tests.support.pki import Authority
from tests.support.raw_client import Code, RawClient, memory, refused
from tests.support.tls_server import still_served

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party

MIB = 1 << 20
HANDSHAKE_S, JOIN_S = 10.0, 5.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Opened = Callable[[], socket.socket]


class Besieged:
    """A server over TLS with one legitimate site, and what strangers do to it."""

    def __init__(self, here: ProxiedProcesses) -> None:
        here.authority = Authority.make()
        self.here, self.process = here, here.server()
        self.site = self.join("site-1")
        host, _, port = here.address.rpartition(":")
        self.address = host, int(port)

    def join(self, name: str) -> RawClient:
        """A legitimate site that comes now."""
        identity = self.here.identity(Party.SITE, name)
        return RawClient(self.here.address, self.here.recipe.name, name, identity=identity).enroll()

    def silent(self) -> socket.socket:
        """Connects and says nothing."""
        return socket.create_connection(self.address, timeout=JOIN_S)

    def saying(self, data: bytes) -> socket.socket:
        """Connects and says something that is not TLS, or not all of it."""
        line = self.silent()
        line.sendall(data)
        return line

    def hello(self) -> bytes:
        """The first half of a handshake."""
        outgoing = ssl.MemoryBIO()
        half = self.context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
        return outgoing.read()

    def preface(self) -> socket.socket:
        """A whole handshake with a good certificate, and the first words of HTTP/2, but no more."""
        line = self.secured(ssl.TLSVersion.TLSv1_3)
        line.sendall(PREFACE)
        return line

    def secured(self, version: ssl.TLSVersion) -> ssl.SSLSocket:
        """A handshake with a good certificate, in this version and no other."""
        context = self.context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        if version < ssl.TLSVersion.TLSv1_2:
            context.set_ciphers("ALL:@SECLEVEL=0")
        return context.wrap_socket(self.silent(), server_hostname="localhost")

    def context(self) -> ssl.SSLContext:
        """With the site's own certificate."""
        identity = self.here.identity(Party.SITE, "site-1")
        context = ssl.create_default_context(cafile=str(identity / "ca.pem"))
        context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
        context.set_alpn_protocols(["h2"])
        return context

    def descriptors(self) -> int:
        """That the server has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def logged(self) -> list[str]:
        """The server's lines so far."""
        return (self.here.folder / "server.log").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def besieged(
    processes_of: Callable[[Recipe], ProxiedProcesses], quick_recipe: Callable[..., Recipe], room_for_sockets: None
) -> Iterator[Besieged]:
    """Its run waits for a second site."""
    made = Besieged(processes_of(quick_recipe()))
    yield made
    assert still_served(made.site)
    made.site.channel.close()


@pytest.fixture
def room_for_sockets() -> Iterator[None]:
    """As many of them as this process may ever have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def crowd(opened: Opened, count: int) -> Iterator[list[socket.socket]]:
    """So many of them at once."""
    with ExitStack() as held:
        yield [held.enter_context(opened()) for _ in range(count)]


def closed(line: socket.socket) -> bool:
    """Whether the other end has hung up; what it says is not listened to."""
    line.setblocking(False)
    try:
        while line.recv(1 << 16):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    return True


def seconds_until(condition: Callable[[], bool], patience_s: float) -> float:
    """How long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience_s
        time.sleep(0.05)
    return time.monotonic() - began


# Row 7

STRANGERS: dict[str, Callable[[Besieged], socket.socket]] = {
    "random bytes": lambda at: at.saying(os.urandom(4096)),
    "HTTP/1.1": lambda at: at.saying(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "HTTP/2 in plain text": lambda at: at.saying(PREFACE),
    "a TLS record that never ends": lambda at: at.saying(b"\x16\x03\x01\x40\x00" + bytes(100)),
    "one byte": lambda at: at.saying(b"\x16"),
    "silence": lambda at: at.silent(),
}


def test_row_07_whoever_does_not_speak_tls_is_hung_up_on_and_not_logged(besieged: Besieged) -> None:
    before = len(besieged.logged())
    with ExitStack() as held:
        lines = {(who, n): held.enter_context(STRANGERS[who](besieged)) for who in STRANGERS for n in range(50)}
        seconds_until(lambda: all(closed(line) for line in lines.values()), HANDSHAKE_S + 2.0)
    plain = RawClient(besieged.here.address, besieged.here.recipe.name, "site-2")
    assert refused(plain.enroll)[0] is Code.UNAVAILABLE
    plain.channel.close()
    assert len(besieged.logged()) - before <= 1  # how many there were


@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1", "TLSv1_2"])
def test_row_07_older_tls_is_refused_even_with_a_good_certificate(besieged: Besieged, version: str) -> None:
    before = len(besieged.logged())
    for _ in range(20):
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            besieged.secured(ssl.TLSVersion[version])
    with besieged.secured(ssl.TLSVersion.TLSv1_3) as line:
        assert (line.version(), line.selected_alpn_protocol()) == ("TLSv1.3", "h2")
    assert len(besieged.logged()) - before <= 1


# Rows 11 and 12


def test_row_11_a_site_joins_while_1500_strangers_hold_connections(besieged: Besieged) -> None:
    idle, hello = besieged.descriptors(), besieged.hello()
    with (
        crowd(besieged.silent, 500) as silent,
        crowd(lambda: besieged.saying(hello), 500) as half,
        crowd(besieged.preface, 500) as greeting,
    ):
        assert besieged.descriptors() >= idle + 1400  # they are all inside
        began = time.monotonic()
        newcomer = besieged.join("site-2")
        assert time.monotonic() - began < JOIN_S
        assert still_served(besieged.site)
        strangers = [*silent, *half, *greeting]
        seconds_until(lambda: all(closed(line) for line in strangers), HANDSHAKE_S + 4.0)
        assert still_served(newcomer)
    seconds_until(lambda: besieged.descriptors() <= idle + 4, 5.0)
    newcomer.channel.close()


@pytest.mark.faults
def test_row_12_of_10000_connections_as_many_are_held_as_there_is_room_for(besieged: Besieged) -> None:
    """And four times: what the first flood leaves in memory, the others use again. (The allocator keeps it in pieces:
    now and then one is added, but far less than a flood's.)
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 11_000:
        pytest.skip("this process may not open 10,000 connections")
    idle, before, lines = besieged.descriptors(), memory(besieged.process.pid), len(besieged.logged())
    after: list[int] = []
    for _ in range(4):
        with crowd(besieged.silent, 10_000) as strangers:
            seconds_until(lambda: sum(map(closed, strangers)) >= 5_000, 5.0)  # those over the cap, at once
            assert idle + 3_000 < besieged.descriptors() <= idle + 4_096
            assert still_served(besieged.site)
            seconds_until(lambda: all(map(closed, strangers)), HANDSHAKE_S + 5.0)
            assert still_served(besieged.site)
        seconds_until(lambda: besieged.descriptors() <= idle + 4, 5.0)
        began = time.monotonic()
        besieged.join("site-2").channel.close()
        assert time.monotonic() - began < JOIN_S
        after.append(memory(besieged.process.pid))
    assert after[0] - before < 256 * MIB
    assert after[-1] - after[0] < (after[0] - before) / 2
    assert len(besieged.logged()) - lines <= 8
