"""Thousands of enrolled sites against a real server process over loopback: what each of them costs while it is idle.

`python -m tests.bench.sites --sites 10000 [--plaintext]` measures, with mTLS unless told otherwise: the server's memory
and processor time for each site that waits while no run is queued, and while a run is paused; then rounds of 1 % of
them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from tests.bench import light_sites
from tests.bench.light_sites import Counts, Crowd
from tests.bench.report import Row
from tests.bench.server_process import bench_recipe, memory, process, processor, written
from tests.support.pki import Authority

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import UnavailableError
from protofed.common.pki.certificate import Party, read_certificate
from protofed.deploy.operator.connection import Operator
from protofed.server.rounds.context import open_server
from protofed.server.storage.rows import CertificateRow

PROCESSES = 4  # of sites
ROWS_SITES = 1000  # of `make bench`
MAX_S = 600.0  # for anything that is waited for


@dataclass(frozen=True)
class Case:
    """So many sites, and how they call.

    Attributes:
        idle_s: seconds for which each idle state is looked at.
        rounds: of `share` of the sites each.
        telemetry: policies release numbers of the machine, which heartbeats bring once a minute.
    """

    sites: int
    plaintext: bool = False
    idle_s: float = 40.0
    rounds: int = 5
    share: float = 0.01
    telemetry: bool = False

    @property
    def cohort(self) -> int:
        """Sites of a round."""
        return max(2, round(self.sites * self.share))

    @property
    def recipe(self) -> Recipe:
        """FedAvg of a share of the sites; never scored but at the end, by nobody."""
        rules = {"min_sites": self.cohort, "participation": self.share, "quorum": 1.0, "score_every": 0}
        return bench_recipe("crowd", self.rounds, federation=rules)


def names(sites: int) -> tuple[str, ...]:
    """Of all sites."""
    return tuple(f"site-{index}" for index in range(sites))


class Identities:
    """Certificates of a server, an operator and of sites that share one key; those of the sites are registered."""

    def __init__(self, folder: Path, state: Path, sites: int) -> None:
        authority = Authority.make()
        self.server = authority.issue(folder / "server", Party.SERVER, "hub")
        self.operator = authority.issue(folder / "boss", Party.OPERATOR, "boss")
        (self.server / "operators").mkdir()
        shutil.copy(self.operator / "cert.pem", self.server / "operators" / "boss.pem")
        first = authority.issue(folder / "site", Party.SITE, "site-0")
        pattern = x509.load_pem_x509_certificate((first / "cert.pem").read_bytes())
        certificates = {name: _alike(pattern, name, authority) for name in names(sites)}
        self.sites = authority.pem, (first / "key.pem").read_bytes(), certificates
        _register(state, certificates)


def _alike(pattern: x509.Certificate, name: str, authority: Authority) -> bytes:
    """A site's certificate: its name in place of the pattern's, and the same key."""
    uri = x509.UniformResourceIdentifier(f"protofed://{Party.SITE}/{name}")
    builder = x509.CertificateBuilder(
        issuer_name=pattern.issuer,
        subject_name=pattern.subject,
        public_key=pattern.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=pattern.not_valid_before_utc,
        not_valid_after=pattern.not_valid_after_utc,
    )
    for extension in pattern.extensions:
        own = isinstance(extension.value, x509.SubjectAlternativeName)
        value = x509.SubjectAlternativeName([uri]) if own else extension.value
        builder = builder.add_extension(value, critical=extension.critical)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _register(state: Path, certificates: dict[str, bytes]) -> None:
    """Let the sites in, as `protofed certs register` would, without its wait for the disk."""
    with mock.patch("os.fsync"), ExitStack() as stack:
        ledger = open_server(state, stack).ledger
        for pem in certificates.values():
            one = read_certificate(pem, "a site's")
            dates = one.not_before.timestamp(), one.not_after.timestamp()
            ledger.register(
                CertificateRow(one.fingerprint, one.party, one.name, *dates, time.time(), roles=("trainer",))
            )


@dataclass
class Serving:
    """A server process, and how to talk to it."""

    process: int
    address: str
    metrics: str
    identity: Path | None

    def operator(self) -> Operator:
        """Its operator's connection."""
        return Operator(self.address, self.identity or NO_TLS)

    def scrape(self) -> tuple[float, int]:
        """Seconds and bytes of an answer to Prometheus."""
        began = time.perf_counter()
        with urllib.request.urlopen(  # noqa: S310  (our own server's)
            f"{self.metrics}/metrics", timeout=60
        ) as answer:
            return time.perf_counter() - began, len(answer.read())

    def spends(self, seconds: float) -> float:
        """The share of a core that it takes."""
        before, began = processor(self.process), time.perf_counter()
        time.sleep(seconds)
        return (processor(self.process) - before) / (time.perf_counter() - began)


@contextmanager
def serving(case: Case, folder: Path, identities: Identities | None) -> Iterator[Serving]:
    """`protofed server start`, with room for all sites; ended by SIGTERM."""
    state = folder / "state"
    security = ["--identity=none"] if identities is None else [f"--identity={identities.server}"]
    command = [sys.executable, "-c", "from protofed.deploy.cli.main import main; main()", "server", "start"]
    ports = ["--listen=127.0.0.1:0", "--metrics=127.0.0.1:0"]
    room = {"PROTOFED_SERVER_MAX_CONNECTIONS": str(case.sites + case.sites // 4 + 100)}
    with process([*command, *ports, *security, f"--state={state}"], folder, {**os.environ, **room}) as one:
        address = written(state / "address", one, folder)
        found = _until(lambda: re.search(r'"metrics": "(http:[^"]+)"', (folder / "log").read_text("utf-8")), "its port")
        boss = None if identities is None else identities.operator
        yield Serving(one.pid, address, found[1], boss)


def _until(question: Callable[[], Any], what: str, every_s: float = 0.1) -> Any:
    """The first answer that counts as true."""
    ends = time.monotonic() + MAX_S
    while not (answer := question()):
        assert time.monotonic() < ends, f"never: {what}"
        time.sleep(every_s)
    return answer


@contextmanager
def crowds(case: Case, address: str, identities: Identities | None) -> Iterator[Any]:
    """The sites, in processes of their own; what they count."""
    context = multiprocessing.get_context("spawn")
    counts, processes = [context.Array("q", 5, lock=False) for _ in range(PROCESSES)], []
    for index, shared in enumerate(counts):
        own = names(case.sites)[index::PROCESSES]
        credentials = None
        if identities is not None:
            authority, key, all_of_them = identities.sites
            credentials = authority, key, {name: all_of_them[name] for name in own}
        from protofed.client.agent import heartbeat  # after the server was started: it imports torch

        crowd = Crowd(address, own, credentials, heartbeat.IDLE_S if case.telemetry else math.inf)
        processes.append(context.Process(target=light_sites.run, args=(crowd, shared), daemon=True))
        processes[-1].start()
    try:
        yield lambda which: sum(shared[which] for shared in counts)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """One server from its start: empty, with all sites idle, and through its rounds."""
    found: dict[str, Any] = {"sites": case.sites, "tls": not case.plaintext, "telemetry": case.telemetry}
    identities = None if case.plaintext else Identities(folder / "identities", folder / "state", case.sites)
    with serving(case, folder, identities) as server:
        server.scrape()
        time.sleep(2.0)
        empty, _ = memory(server.process)
        found["empty_mb"], found["core_empty"] = empty, server.spends(5.0)
        began, spent = time.perf_counter(), processor(server.process)
        with crowds(case, server.address, identities) as counted:
            _until(lambda: counted(Counts.THERE) == case.sites, "all sites have enrolled")
            found["connect_s"] = time.perf_counter() - began
            found["connect_core_s"] = processor(server.process) - spent
            time.sleep(5.0)
            found["no_run"] = _idle(case, server, counted, empty)
            with server.operator() as operator:
                spent, began = processor(server.process), time.perf_counter()
                operator.start(case.recipe)
                operator.pause(case.recipe.name)
                _until(lambda: counted(Counts.IN_RUN) == case.sites, "all sites know of the run")
                found["begin_s"], found["begin_core_s"] = time.perf_counter() - began, processor(server.process) - spent
                time.sleep(5.0)
                found["paused"] = _idle(case, server, counted, empty)
                with suppress(OSError):  # its connections end after some seconds
                    found["scrape_s"], found["scrape_bytes"] = server.scrape()
                found |= _rounds(case, server, operator, counted)
            found["peak_mb"] = memory(server.process)[1]
    return found


def _idle(case: Case, server: Serving, counted: Any, empty: float) -> dict[str, float]:
    calls, failed, began = counted(Counts.CALLS), counted(Counts.FAILED), time.perf_counter()
    core = server.spends(case.idle_s)
    passed, (now, _) = time.perf_counter() - began, memory(server.process)
    idle = {
        "kb_a_site": 1e3 * (now - empty) / case.sites,
        "core": core,
        "calls_a_second": (counted(Counts.CALLS) - calls) / passed,
        "failed": counted(Counts.FAILED) - failed,
    }
    print(idle, file=sys.stderr, flush=True)  # noqa: T201  (the rest takes minutes)
    return idle


def _rounds(case: Case, server: Serving, operator: Operator, counted: Any) -> dict[str, float]:
    """The rounds, from the first model to the last update, and then the scores of all sites."""
    began, spent = time.perf_counter(), processor(server.process)
    operator.resume(case.recipe.name)
    _until(lambda: counted(Counts.UPDATES) == case.rounds * case.cohort, "all updates are in", every_s=0.02)
    rounds, rounds_core = time.perf_counter() - began, processor(server.process) - spent
    print({"round_s": rounds / case.rounds}, file=sys.stderr, flush=True)  # noqa: T201

    def ended() -> bool:
        with suppress(UnavailableError):  # of thousands of scores the operator's question may be the last
            return bool(operator.show(case.recipe.name, 1).info.ended_at)
        return False

    _until(ended, "the run ends", every_s=0.5)
    return {
        "round_s": rounds / case.rounds,
        "round_core_s": rounds_core / case.rounds,
        "end_s": time.perf_counter() - began - rounds,
        "end_core_s": processor(server.process) - spent - rounds_core,
    }


def rows() -> Iterator[Row]:
    """Of `make bench`: 1,000 sites, beside the goals of 10,000."""
    case = Case(ROWS_SITES, rounds=3)
    with tempfile.TemporaryDirectory(prefix="protofed-sites-") as folder:
        found = measure(case, Path(folder))
    command = f"python -m tests.bench.sites --sites {case.sites} --rounds {case.rounds}"
    for state, words in (("no_run", "without a run"), ("paused", "with a run")):
        idle, what = found[state], f"{ROWS_SITES} idle sites {words}, mTLS"
        yield Row(f"{what}: server memory a site", idle["kb_a_site"], "kB", at_most=50.0, command=command)
        most, note = 0.2 * ROWS_SITES / 10_000, f"{idle['calls_a_second']:.0f} calls a second"
        yield Row(f"{what}: processor", idle["core"], "cores", at_most=most, command=command, note=note)
    yield Row(f"a round of {case.cohort} of {ROWS_SITES} sites", found["round_s"], "s", command=command, details=found)


def main() -> None:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--plaintext", action="store_true")
    parser.add_argument("--idle-s", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--telemetry", action="store_true", help="heartbeats bring numbers of the machine")
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the result
    case = Case(given.sites, given.plaintext, given.idle_s, given.rounds, telemetry=given.telemetry)
    with tempfile.TemporaryDirectory(prefix="protofed-sites-") as folder:
        print(json.dumps(measure(case, Path(folder)), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
