"""Real processes with proxies in between; none is left running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.fault_proxy import PASS, Proxy
from tests.support.invariants import Checked, check
from tests.support.processes import Process, Processes

from protofed.common.config.recipe import Recipe
from protofed.deploy.simulation.simulation import simulation

SITES = ("site-1", "site-2")


@dataclass
class ProxiedProcesses(Processes):
    """A server and the daemons of two sites, each behind a proxy of its own.

    Attributes:
        proxies: by site.
    """

    proxies: dict[str, Proxy] = field(default_factory=dict)

    def behind(self, site: str) -> Proxy:
        """The site's proxy."""
        if site not in self.proxies:
            self.proxies[site] = Proxy(self.address)
        return self.proxies[site]

    def trainer(self, site: str, fails: str = "") -> Process:
        """Start a site's daemon behind its proxy."""
        return self.site(site, f"--partition-index={SITES.index(site)}", via=self.behind(site).address, fails=fails)

    def trainers(self) -> None:
        """Start both."""
        for site in SITES:
            self.trainer(site)

    def wait_until_open(self, round: int) -> None:
        """Until the round was opened."""
        self.wait_for(lambda: bool(self.task_statuses(round)))

    def over(self) -> bool:
        """Whether the run has ended; its server stays until the sites know that, for half a minute at most."""
        with self.ledger() as records:
            run = records.run(self.recipe.name)
        return run is not None and run.ended_at is not None

    def in_last_round(self) -> bool:
        """Whether the last round is open. A fault that ends here costs no site the answer that the run has ended."""
        with self.ledger() as records:
            rounds = records.rounds(self.recipe.name)
        return bool(rounds) and rounds[-1].round == self.recipe.rounds

    def heal(self) -> None:
        """Nothing is wrong with any way any more."""
        for proxy in self.proxies.values():
            proxy.mode = PASS

    def invariants(self, *, final: str | None = None, keep_rounds: int = 2) -> Checked:
        """N1 to N4, N6 to N8, after the end."""
        sites = [self.folder / site for site in SITES]
        return check(self.folder / "server", self.recipe.name, sites=sites, final=final, keep_rounds=keep_rounds)

    def end(self) -> None:
        """Leave nothing running."""
        super().end()
        for proxy in self.proxies.values():
            proxy.close()


@pytest.fixture(scope="session")
def quick_recipe(recipe_of: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """FedAvg of two sites on the digits, over in a second of training; `federation` changes single keys."""

    def make(*, federation: dict[str, object] | None = None, **changes: object) -> Recipe:
        known: dict[str, object] = {"min_sites": 2, "quorum": 1.0, "heartbeat_s": 0.2}
        data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 2, "beta": 0.5}}
        table = {"name": "quick", "plan": {"batch_size": 64, "lr": 0.05}, "data": data, **changes}
        return recipe_of("fedavg", **table, federation=known | (federation or {}))

    return make


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[[Recipe], ProxiedProcesses]]:
    """A folder for the server and clients of a recipe, which the test starts."""
    made: list[Processes] = []

    def make(recipe: Recipe) -> ProxiedProcesses:
        here = ProxiedProcesses.of(tmp_path, recipe)
        made.append(here)
        return here

    yield make
    for one in made:
        one.end()


@pytest.fixture(scope="session")
def undisturbed() -> Callable[[Recipe], str]:
    """The final state's digest of a run without faults; each recipe is run once."""
    known: dict[str, str] = {}

    def final(recipe: Recipe) -> str:
        if (key := recipe.model_dump_json()) not in known:
            with simulation(recipe) as running:
                running.go()
                assert running.run.published is not None
                known[key] = running.run.published.address
        return known[key]

    return final
