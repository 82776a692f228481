"""Real processes with proxies in between; none is left running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.fault_proxy import PASS, Proxy
from tests.support.invariants import Checked, check
from tests.support.processes import Process, Processes, undisturbed

from protofed.client.agent.agent import Agent
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Finished

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

    def trainers(self, fails: str = "") -> None:
        """Start both."""
        for site in SITES:
            self.trainer(site, fails)

    def wait_until_all(self, status: str, round: int = 1) -> None:
        """Until this is so of both sites' tasks in a round."""
        self.wait_for(lambda: list(self.task_statuses(round).values()) == [status] * len(SITES))

    def over(self) -> bool:
        """Whether the run has ended; its server stays until the sites know that, for half a minute at most."""
        with self.ledger() as records:
            run = records.run(self.recipe.name)
        return run is not None and run.ended_at is not None

    def in_last_round(self) -> bool:
        """Whether the last round is open. A fault that ends here costs no site the answer that the run has ended."""
        return bool(rounds := self.attempts()) and rounds[-1][0] == self.recipe.rounds

    def heal(self) -> None:
        """Nothing is wrong with any way any more."""
        for proxy in self.proxies.values():
            proxy.mode = PASS

    def invariants(self, *, final: str | None = None) -> Checked:
        """N1 to N4, N6 to N8, after the end."""
        return check(
            self.folder / "server", self.recipe.name, sites=[self.folder / site for site in SITES], final=final
        )

    def ended_like_undisturbed(self, *others: str, updates: int = 0, traces: bool = False) -> Checked:
        """All ended well, with what a run without faults gives; nothing that was acknowledged is lost.

        Args:
            updates: that were handed in besides two first models, and two a round.
            traces: of what failed, in the logs.
        """
        assert self.finish(["server", *others, *SITES]) == [0] * (3 + len(others)), self.logs()
        found, rounds = self.invariants(final=undisturbed(self.recipe)), self.recipe.rounds
        assert (found.published, found.updates) == (rounds + 1, 2 * rounds + 2 + updates)
        assert min(found.receipts, found.recomputed) >= 2
        assert found.recorded > 0
        assert traces or "Traceback" not in self.logs()
        return found

    def end(self) -> None:
        """Leave nothing running."""
        super().end()
        for proxy in self.proxies.values():
            proxy.close()


def take_turns(agents: Iterable[Agent], until: Callable[[], bool] = lambda: False, step_s: float = 0.02) -> list[Agent]:
    """Let sites work in turns until the run has ended for all, or this is so; those for whom it has not."""
    working, ends = list(agents), time.monotonic() + 100
    while working and not until():
        assert time.monotonic() < ends, "the run does not end"
        working = [agent for agent in working if not isinstance(agent.step(step_s), Finished)]
    return working


MakeRun: TypeAlias = Callable[..., ProxiedProcesses]


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
def make_run(quick_recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[MakeRun]:
    """A folder for the server and clients of a quick recipe with changes, which the test starts."""
    made: list[ProxiedProcesses] = []

    def make(**changes: object) -> ProxiedProcesses:
        made.append(ProxiedProcesses.of(tmp_path, quick_recipe(**changes)))
        return made[-1]

    yield make
    for one in made:
        one.end()
