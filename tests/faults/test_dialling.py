"""Faults of dialling, seen from a site: who it is, whom it believes, and the ways that lead there (rows 1, 3, 5, 6, 10,
13, 14).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from tests.faults.conftest import take_turns
from tests.support.audit_logs import MemoryAuditLog
from tests.support.command_line import called
from tests.support.connect_proxy import ConnectProxy
from tests.support.pki import Authority
from tests.support.policies import standard_with_plain_updates
from tests.support.processes import undisturbed
from tests.support.tls_server import TlsServer, tls_server

from protofed.client.agent.agent import EXCLUDED_PAUSE_S
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.grpc_link import GrpcLink
from protofed.client.transport.proxy import Proxy
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DiskFailureError
from protofed.common.pki.identity import LiveIdentity, Party, fingerprint
from protofed.common.storage.journal import Record, records
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents

pytestmark = pytest.mark.timeout(300)
NAMES = ("site-1", "site-2", EVALUATOR)
PASSWORD = "hunter2"  # noqa: S105  (a test's)
Dial = Callable[..., tuple[int, str]]


@pytest.fixture
def recipe(quick_recipe: Callable[..., Recipe]) -> Recipe:
    """Three rounds of two sites."""
    return quick_recipe()


@pytest.fixture
def here(recipe: Recipe, live_server: Callable[..., Any], tmp_path: Path) -> Iterator[TlsServer]:
    """A server at work."""
    with tls_server(tmp_path / "realm", live_server, recipe) as started:
        yield started


@pytest.fixture
def client(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Dial:
    """Runs `protofed client` in this process: exit code, standard error."""

    def run(server: str, *more: object) -> tuple[int, str]:
        policy, settings = standard_with_plain_updates(tmp_path), shipped.folder("sites") / "digits-trio.toml"
        known = [f"--server={server}", "--site=site-1", f"--policy={policy}", f"--settings={settings}"]
        code, _, said = called(capfd, "client", "start", *known, f"--state={tmp_path / 'state'}", *more)
        return code, said

    return run


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Of a server that is never to be dialled."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def check_refused(client: Dial, listener: socket.socket, identity: Path, *phrases: str) -> None:
    """The daemon says why it ends, and has connected to nobody."""
    code, said = client(f"127.0.0.1:{listener.getsockname()[1]}", f"--identity={identity}")
    assert code == 78, said
    for phrase in phrases:
        assert phrase in said
    with pytest.raises(BlockingIOError):
        listener.accept()


def audited(state: Path) -> list[Record]:
    return list(records(state / "audit.jsonl"))


class Run:
    """The sites of a recipe, each with an identity of its own, which take turns in this process.

    Attributes:
        kept: audit logs, by site.
    """

    def __init__(
        self,
        here: TlsServer,
        recipe: Recipe,
        address: str = "",
        proxy: Proxy | None = None,
        unknown: Sequence[str] = (),
        **kept: MemoryAuditLog,
    ) -> None:
        self.kept = {name: kept.get(name.replace("-", "_"), MemoryAuditLog()) for name in NAMES}
        self._links: list[GrpcLink] = []

        def connect(name: str, roles: frozenset[Any]) -> GrpcLink:
            folder = here.identity(name, Party.SITE)
            if name not in unknown:
                here.register(folder, *roles)
            link = GrpcLink(
                address or here.server.address,
                name,
                "tested",
                roles,
                identity=LiveIdentity(folder, Party.SITE),
                proxy=proxy,
                audit=ClientAudit(self.kept[name]),
                give_up_after_s=100.0,
            )
            self._links.append(link)
            return link

        self.agents = build_agents(recipe, connect)

    def go(self, until: Callable[[], bool] = lambda: False) -> None:
        """To the end, or until this is so."""
        self.agents = take_turns(self.agents, until)

    def close(self) -> None:
        for link in self._links:
            link.close()


@pytest.fixture
def run(here: TlsServer, recipe: Recipe) -> Iterator[Callable[..., Run]]:
    """Makes runs' sites."""
    made: list[Run] = []

    def make(**options: Any) -> Run:
        made.append(Run(here, recipe, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def published(here: TlsServer, recipe: Recipe) -> int:
    """Rounds."""
    return sum(row.state is not None for row in here.server.ledger.rounds(recipe.name))


def final(here: TlsServer, recipe: Recipe) -> str:
    assert published(here, recipe) == recipe.rounds + 1
    found: str = here.server.runs.of(recipe.name).published.address
    return found


# Rows 1 to 5: who the site is


def test_row_01_a_client_without_a_certificate_says_so_and_ends(
    client: Dial, listener: socket.socket, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    began = time.monotonic()
    check_refused(client, listener, tmp_path / "empty", "certificate missing: ")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("days", "phrase"), [((-3, -1), "has expired"), ((1, 3), "is not yet valid")])
def test_row_03_a_certificate_out_of_its_time_is_refused_here(
    days: tuple[int, int], phrase: str, client: Dial, listener: socket.socket, tmp_path: Path
) -> None:
    begins, ends = (datetime.now(UTC) + timedelta(days=day) for day in days)
    authority = Authority.make(begins=datetime.now(UTC) - timedelta(days=9))
    folder = authority.issue(tmp_path / "ann", Party.SITE, "site-1", begins=begins, ends=ends)
    check_refused(client, listener, folder, phrase, f"{begins:%Y-%m-%dT%H:%M:%SZ}", f"{ends:%Y-%m-%dT%H:%M:%SZ}")


def test_row_05_another_key_and_another_sites_identity_are_refused_here(
    client: Dial, listener: socket.socket, tmp_path: Path
) -> None:
    authority = Authority.make()
    folder, other = (authority.issue(tmp_path / name, Party.SITE, name) for name in ("site-1", "site-2"))
    check_refused(client, listener, other, "is of site 'site-2', and this is site 'site-1'")
    (folder / "key.pem").write_bytes((other / "key.pem").read_bytes())
    check_refused(client, listener, folder, "is not the key of")


def test_a_site_that_is_not_registered_yet_waits_for_that(
    here: TlsServer, recipe: Recipe, run: Callable[..., Run]
) -> None:
    sites, pauses = run(unknown=["site-2"]), list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            here.register(here.identity("site-2", Party.SITE))

    for agent in sites.agents:
        agent._pause = pause
    with structlog.testing.capture_logs() as logs:
        sites.go()
    assert pauses == [EXCLUDED_PAUSE_S] * 3
    (said,) = [entry for entry in logs if entry["event"].startswith("the server refuses this site")]  # once
    assert "is not registered here" in said["why"]
    assert final(here, recipe) == undisturbed(recipe)


class Broken(MemoryAuditLog):
    """A disk that breaks when a site is about to send its model."""

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        if any(facts.get("call") == "PutChunk" for _, facts in entries):
            raise DiskFailureError("cannot write audit.jsonl")
        super().append_all(entries)


def test_a_site_whose_audit_log_cannot_be_written_ends_and_sends_nothing(
    here: TlsServer, run: Callable[..., Run]
) -> None:
    sites = run(site_1=Broken())
    with pytest.raises(DiskFailureError, match=r"audit\.jsonl"):
        sites.go()
    told: list[Any] = [line.facts for line in here.calls("OK")]
    calls = [(facts["peer"]["name"], facts["call"]) for facts in told]
    assert ("site-1", "BeginUpload") in calls
    assert ("site-1", "PutChunk") not in calls


# Row 6: whom the site believes


@pytest.mark.parametrize("wrong", ["server-name", "server-authority"])
def test_row_06_a_server_that_is_another_gets_nothing(
    wrong: str, recipe: Recipe, live_server: Callable[..., Any], client: Dial, tmp_path: Path
) -> None:
    hosts = ("fl.example.org",) if wrong == "server-name" else ("127.0.0.1",)
    ours = Authority.make()
    theirs = ours if wrong == "server-name" else Authority.make()
    folder = theirs.issue(tmp_path / "hub", Party.SERVER, "hub", hosts)
    server = live_server(recipe, identity=folder)
    site = ours.issue(tmp_path / "site-1", Party.SITE, "site-1")
    code, said = client(server.address, f"--identity={site}")
    assert code == 78, said
    assert "nothing was sent" in said
    if wrong == "server-name":
        assert "fl.example.org" in said
    shown = fingerprint((folder / "cert.pem").read_bytes())
    first, *told = audited(tmp_path / "state")
    assert first.event == "policy"
    assert [(line.event, line.facts["finding"], line.facts["certificate"]) for line in told] == [
        ("server", wrong, shown)
    ]
    assert not [line for line in records(server.audit_file) if line.event == "call"]


# Row 10: a renewal of everything


def test_row_10_the_ca_is_replaced_while_a_run_goes_on(
    here: TlsServer, recipe: Recipe, run: Callable[..., Run]
) -> None:
    sites, new = run(), Authority.make()
    parties = {**dict.fromkeys(NAMES, Party.SITE), "hub": Party.SERVER}
    folders = {name: here.identity(name, party) for name, party in parties.items()}
    both = here.authority.pem + new.pem

    def trust(pem: bytes) -> None:
        for folder in folders.values():
            (folder / "ca.pem").write_bytes(pem)

    sites.go(until=lambda: published(here, recipe) == 1)
    trust(both)
    sites.go(until=lambda: published(here, recipe) == 2)
    for name, party in parties.items():
        new.issue(folders[name], party, name)
        (folders[name] / "ca.pem").write_bytes(both)
        if party is Party.SITE:
            here.server.operation.register((folders[name] / "cert.pem").read_text("ascii"), renewal=True)
    sites.go(until=lambda: published(here, recipe) == 3)
    trust(new.pem)
    sites.go()

    assert final(here, recipe) == undisturbed(recipe)
    for kept in sites.kept.values():
        shown = [facts["certificate"] for facts in kept.of("sent")]
        assert len(set(shown)) == 2
        assert shown == sorted(shown, key=shown.index)  # never back to the old one
    late = Authority(here.authority.certificate, here.authority.key).issue(here.folder / "late", Party.SITE, "site-1")
    with pytest.raises(grpc.RpcError):  # the old CA's word counts no more
        here.client(late).enroll()


# Row 13: names


@pytest.mark.parametrize("lasts_s", [2.0, pytest.param(60.0, marks=pytest.mark.faults)])
def test_row_13_a_name_that_is_unknown_for_a_while(
    lasts_s: float,
    here: TlsServer,
    recipe: Recipe,
    run: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, real, looked = time.monotonic(), socket.getaddrinfo, []

    def resolve(host: str, *more: Any, **options: Any) -> Any:
        if host == "localhost" and time.monotonic() < began + lasts_s:
            looked.append(time.monotonic())
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = here.server.address.rpartition(":")[2]
    sites = run(address=f"localhost:{port}")
    with structlog.testing.capture_logs() as logs:
        sites.go()
    assert final(here, recipe) == undisturbed(recipe)
    assert 3 <= len(looked) <= 10 + lasts_s  # 0.25 s at first, then up to 8 s apart
    whys = [entry["why"] for entry in logs if entry["event"].startswith("the server does not answer")]
    assert re.match(r"the name 'localhost' of the server localhost:\d+ does not resolve", whys[0])


# Row 14: through a proxy


@pytest.fixture
def way() -> Iterator[ConnectProxy]:
    """Wants a password; only it knows where `fl.test` is."""
    proxy = ConnectProxy(f"ann:{PASSWORD}")
    proxy.names["fl.test"] = "127.0.0.1"
    yield proxy
    proxy.die()


class Trigger(MemoryAuditLog):
    """Does something once, when the site is about to send a chunk of its model in a round."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self._do, self.done = do, False

    def append_all(self, entries: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        super().append_all(entries)
        if not self.done and any(facts.get("call") == "PutChunk" for _, facts in entries):
            self.done = True
            self._do()


def test_row_14_a_run_through_a_proxy_that_dies_and_returns(
    recipe: Recipe,
    way: ConnectProxy,
    live_server: Callable[..., Any],
    tmp_path: Path,
) -> None:
    def die() -> None:
        way.die()
        threading.Timer(1.0, way.start).start()

    trigger = Trigger(die)
    with tls_server(tmp_path / "realm", live_server, recipe) as here:
        port = here.server.address.rpartition(":")[2]
        proxy = Proxy.read(f"http://ann:{PASSWORD}@{way.address}")
        here.authority.issue(here.identity(), Party.SERVER, "hub", ("fl.test", "127.0.0.1"))
        sites = Run(here, recipe, f"fl.test:{port}", proxy, site_2=trigger)
        sites.go()
        sites.close()
        assert final(here, recipe) == undisturbed(recipe)
    assert trigger.done
    assert set(way.asked) == {f"fl.test:{port}"}
    assert len(way.asked) > 2 * len(NAMES)


def test_row_14_a_proxy_that_wants_another_password(
    here: TlsServer, way: ConnectProxy, client: Dial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    here.register(folder := here.identity("site-1", Party.SITE))
    monkeypatch.setenv("PROTOFED_CLIENT_PROXY", f"http://ann:{PASSWORD}x@{way.address}")
    code, said = client(here.server.address, f"--identity={folder}")
    assert code == 78, said
    assert f"the proxy {way.address} wants another user and password (407)" in said
    assert re.search(
        rf'"server": "{here.server.address}", "version": "[^"]+", "certificate": "certificate of site \'site-1\'"', said
    ), said
    assert '"days_left": 364' in said
    assert "no_proxy" not in os.environ
    check_secret(said, tmp_path)


def check_secret(said: str, folder: Path) -> None:
    """The password is nowhere but in the setting."""
    assert PASSWORD not in said
    for path in (folder / "state").rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()


@pytest.mark.parametrize("fault", ["away", "refuses", "unreadable", "other-setting"])
def test_a_proxys_password_is_in_no_log_and_no_error(
    fault: str,
    here: TlsServer,
    way: ConnectProxy,
    client: Dial,
    tmp_path: Path,
    unused_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here.register(folder := here.identity("site-1", Party.SITE))
    address = f"127.0.0.1:{unused_port}" if fault == "away" else way.address
    way.status = 503
    scheme = "https" if fault == "unreadable" else "http"
    monkeypatch.setenv("PROTOFED_CLIENT_PROXY", f"{scheme}://ann:{PASSWORD}@{address}")
    if fault == "other-setting":
        monkeypatch.setenv("PROTOFED_CLIENT_THREADS", "0")
    code, said = client(here.server.address, f"--identity={folder}", "--give-up-after=0.5")
    phrase = {"unreadable": "proxy: expected", "other-setting": "threads = "}.get(fault, f"the proxy {address}")
    assert (code, phrase in said) == (69 if fault in ("away", "refuses") else 78, True), said
    check_secret(said, tmp_path)
