"""A pilot on one machine that a real Prometheus looks at: server, evaluator and sites are processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.support.free_ports import free_port
from tests.support.pki import Authority
from tests.support.processes import Processes
from tests.support.prometheus import Prometheus, target

from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator

SITES = ("north", "south", "west")
EVALUATOR = "evaluator"
ADDRESS = "metrics-address"  # of a state folder


@dataclass
class Pilot:
    """The processes, and what the story below does with them.

    Attributes:
        began: seconds of the epoch.
        events: what happened when, for captions.
    """

    processes: Processes
    prometheus: Prometheus
    began: float = field(default_factory=time.time)
    events: list[tuple[float, str]] = field(default_factory=list)

    def run(self, recipe: Recipe) -> None:
        with self.operator() as operator:
            operator.start(recipe)
        self.events.append((time.time(), f"{recipe.name} begins"))

    def until_round(self, run: str, number: int) -> None:
        """Wait until a run has come so far, or has ended."""
        self.processes.wait_for(lambda: self._round(run) >= number, 600)

    def until_ended(self, run: str) -> str:
        """Wait for it; how it ended."""
        self.processes.wait_for(lambda: self._status(run) in ("completed", "failed", "aborted"), 600)
        self.events.append((time.time(), f"{run} {self._status(run)}"))
        return self._status(run)

    def lose(self, site: str, seconds: float) -> None:
        """Kill a site's daemon and start it again later."""
        self.processes.kill(site)
        self.events.append((time.time(), f"{site} is killed"))
        time.sleep(seconds)
        join(self.processes, site)
        self.processes.wait_for(lambda: site in scraped(self.processes))
        self.prometheus.scrape(scraped(self.processes))
        self.events.append((time.time(), f"{site} is back"))

    def operator(self) -> Operator:
        return Operator(self.processes.address, self.processes.identity(Party.OPERATOR, "operator"))

    def _status(self, run: str) -> str:
        with self.operator() as operator:
            return {info.run: info.status for info in operator.runs()}[run]

    def _round(self, run: str) -> int:
        with self.processes.ledger() as ledger:
            rounds = ledger.rounds(run)
        return 10**6 if self._status(run) == "failed" else rounds[-1].round if rounds else -1


def recipe(name: str, method: str, rounds: int, epochs: int = 6, **federation: object) -> Recipe:
    """A run on the digits among three sites, one of which may be missing."""
    return Recipe.model_validate(
        {
            "name": name,
            "rounds": rounds,
            "classes": 10,
            "input": {"shape": [1, 8, 8]},
            "method": {"name": method, **({"scale": 10.0} if method == "fednh" else {})},
            "model": {"name": "digits-cnn"},
            "plan": {"epochs": epochs, "batch_size": 8, "lr": 0.01, "momentum": 0.9, "max_grad_norm": 10.0},
            "federation": {
                "min_sites": 2,
                "quorum": 2,
                "deadline_s": 60,
                "grace": 0.05,
                "stall_timeout_s": 5,
                "heartbeat_s": 0.5,
                **federation,
            },
            "data": {
                "source": "digits",
                "long_tail": 0.1,
                "test_fraction": 0.3,
                "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.3},
            },
        }
    )


@contextmanager
def pilot(folder: Path) -> Iterator[Pilot]:
    """Everything is there and waits for a run; nothing is left running afterwards."""
    processes = Processes.of(folder, recipe("first", "fednh", 1))
    processes.authority = Authority.make()
    try:
        identity = processes.identity(Party.SERVER, "server")
        ends = datetime.now(UTC) + timedelta(days=20)  # soon enough for an alert
        processes.authority.issue(identity, Party.SERVER, "server", ends=ends)
        processes.start(
            "server", "server", "start", "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0", party=Party.SERVER
        )
        address = folder / "server" / "address"
        processes.wait_for(lambda: address.exists() or processes.running["server"].poll() is not None)
        assert address.exists(), processes.logs()
        processes.address = address.read_text(encoding="utf-8")
        server = target((folder / "server" / ADDRESS).read_text("utf-8"))
        with Prometheus(folder / "prometheus", server, {}, free_port()) as prometheus:
            for name in (EVALUATOR, *SITES):
                join(processes, name)
            processes.wait_for(lambda: len(scraped(processes)) == len(SITES) + 1)
            prometheus.scrape(scraped(processes))
            processes.wait_for(lambda: all_up(prometheus))
            yield Pilot(processes, prometheus)
    finally:
        processes.end()


def join(processes: Processes, name: str) -> None:
    """Start a daemon that stays, with metrics."""
    policy = shipped.folder("policies") / "open.toml"
    share = ("--role=evaluator",) if name == EVALUATOR else (f"--partition-index={SITES.index(name)}",)
    (processes.folder / name / ADDRESS).unlink(missing_ok=True)
    known = (f"--settings={processes.folder / 'site.toml'}", f"--site={name}", f"--server={processes.address}")
    more = (f"--policy={policy}", "--metrics=127.0.0.1:0", *share)
    processes.start(name, "client", "start", *known, *more)


def scraped(processes: Processes) -> dict[str, str]:
    """Where each daemon that runs answers /metrics."""
    files = {name: processes.folder / name / ADDRESS for name in (EVALUATOR, *SITES)}
    return {name: target(file.read_text("utf-8")) for name, file in files.items() if file.exists()}


def all_up(prometheus: Prometheus) -> bool:
    targets = prometheus.targets()
    return len(targets) == len(SITES) + 2 and all(one["health"] == "up" for one in targets)
