"""A simulation is a deployment in one process: the same coordinator, agents, methods, gate and codec; the link is a
function call through the codec, and time stands still.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from protofed.client.agent.agent import Agent, Site
from protofed.client.data.site import load_sites, load_test
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.privacy.policy import Policy
from protofed.client.privacy.rules import PolicyRules
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore, Store
from protofed.client.training.score_sets import SCALARS
from protofed.client.transport.link import Link
from protofed.common import plugins
from protofed.common.codec import DTYPES
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, SiteId
from protofed.common.protocol.messages import MOST_BYTES, Role, Task
from protofed.deploy.simulation.direct_link import DirectLink as DirectLink
from protofed.server.assembly import open_server
from protofed.server.rounds.coordinator import Coordinator
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger

EVALUATOR = "evaluator"


@dataclass(frozen=True)
class Simulation:
    """One recipe's run, ready to go.

    Attributes:
        data: what each site holds, the evaluator not among them.
        agents: the evaluator first, then the sites in order.
    """

    recipe: Recipe
    runs: RunQueue
    ledger: Ledger
    blobs: Blobs
    data: Mapping[SiteId, SiteData]
    agents: Sequence[Agent]

    @property
    def coordinator(self) -> Coordinator:
        """Of the recipe's run."""
        return self.runs.of(self.recipe.name)

    def go(self, until: Callable[[], bool] = lambda: False, turned: Callable[[], None] = lambda: None) -> None:
        """Give every site its turn, again and again, until the run has ended (or `until` says so, between two rows of
        turns). `turned` is called after every task.

        Raises:
            ConfigError: nobody can do anything any more, as with more `min_sites` than there are sites.
        """
        while not self.runs.finished and not until():
            self.runs.tick()
            worked = False
            for agent in self.agents:
                if isinstance(agent.step(0.0), Task):
                    worked = True
                    turned()
            if not worked and not self.runs.finished:
                wanted = self.recipe.federation.min_sites
                raise ConfigError(
                    f"the run cannot go on: {len(self.agents) - 1} sites, and federation.min_sites is {wanted}"
                )


def everything(recipe: Recipe) -> Policy:
    """The policy of simulated sites: all parts, this method, the plug-ins that it names. Nothing leaves the process."""
    return Policy(
        PolicyRules(
            methods=frozenset({recipe.method.name}),
            parts=frozenset(Part),
            metrics=SCALARS,
            plugins=recipe.names,
            dtypes=frozenset(DTYPES.values()),
            max_tensor_mb=MOST_BYTES / 1e6,
            max_update_mb=MOST_BYTES / 1e6,
            example_count=True,
            class_distribution_estimate=True,
        )
    )


def simulated(policy: Policy) -> Policy:
    """What a site's policy is in a simulation: nobody is asked for an approval, and there is no time of the day."""
    return Policy(policy.rules.model_copy(update={"approval": "automatic", "schedule": ()}))


def simulated_secret(recipe: Recipe, site: SiteId) -> bytes:
    """In place of what only a site knows, so that a simulation under a policy that hides classes can be repeated."""
    return hashlib.blake2b(f"simulated/{recipe.seed}/{site}".encode(), digest_size=32).digest()


def agents_of(
    recipe: Recipe,
    connect: Callable[[SiteId, frozenset[Role]], Link],
    store: Callable[[SiteId], Store] | None = None,
    device: torch.device | None = None,
    data: Mapping[SiteId, SiteData] | None = None,
    policy: Policy | None = None,
) -> list[Agent]:
    """The evaluator and all sites of a recipe's [data], the same wherever their links lead.

    Args:
        data: as of `data_of`, if that was called before.
        policy: of the sites, as far as one has a say in a simulation (see `simulated`); the evaluator, which holds
            nothing of a site, has `everything`.

    Raises:
        ConfigError: the recipe has no [data], or names a method, model or option that is not known.
        DataError: its data cannot be had.
    """
    client_methods.build(recipe.method.name, recipe.method.options)
    where = device or torch.device("cpu")
    free = everything(recipe)
    under = free if policy is None else simulated(policy)
    shared = device_model(recipe, where, under.rules.plugins)  # sites have their turns one by one

    def agent(name: SiteId, examples: SiteData) -> Agent:
        role = Role.EVALUATOR if name == EVALUATOR else Role.TRAINER
        own = MemoryStore(simulated_secret(recipe, name)) if store is None else store(name)
        rules, roles = free if role is Role.EVALUATOR else under, frozenset({role})
        return Agent(Site(name, roles, rules, own, lambda _: examples, lambda _: shared), connect(name, roles))

    return [agent(name, examples.placed(where)) for name, examples in (data or data_of(recipe)).items()]


@contextmanager
def simulation(
    recipe: Recipe,
    state: Path | None = None,
    device: torch.device | None = None,
    sites: Sequence[SiteData] | None = None,
    policy: Policy | None = None,
) -> Iterator[Simulation]:
    """A simulation of a recipe; `sites` as in `data_of`, `policy` as in `agents_of`.

    Args:
        state: a folder in which it survives; without one it lives in memory. An unfinished run in it goes on.

    Raises:
        ConfigError: the recipe cannot be used.
        DataError: its data cannot be had.
        StateError: the folder is in use, or holds another recipe's run of this name.
    """
    plugins.allow((everything(recipe) if policy is None else policy).rules.plugins)
    with ExitStack() as opened:
        context = open_server(state, opened, simulated=True)
        runs, blobs = RunQueue([recipe], context), context.blobs

        def store(name: SiteId) -> Store:
            if state is None:
                return MemoryStore(simulated_secret(recipe, name))
            folder = DiskStore(state / "sites" / name, simulated_secret(recipe, name))
            opened.callback(folder.close)
            return folder

        data = data_of(recipe, sites)
        agents = agents_of(
            recipe, lambda name, roles: DirectLink(runs, blobs, name, roles), store, device, data, policy
        )
        of_sites = {name: held for name, held in data.items() if name != EVALUATOR}
        yield Simulation(recipe, runs, context.ledger, blobs, of_sites, agents)


def site_names(count: int) -> list[SiteId]:
    """site-1 … site-K, all of one length, so that their order is the order of their names."""
    width = len(str(count))
    return [f"site-{number:0{width}d}" for number in range(1, count + 1)]


def data_of(recipe: Recipe, sites: Sequence[SiteData] | None = None) -> dict[SiteId, SiteData]:
    """What the evaluator, who comes first, and every site hold.

    Args:
        sites: in place of those of the recipe's [data]; the evaluator then shares the first one's test set.

    Raises:
        ConfigError: the recipe has no [data].
        DataError: its data cannot be had.
    """
    if sites is not None:
        test = SiteData.for_scoring(sites[0].test, recipe.input, recipe.classes)
    elif recipe.data is None:
        raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
    else:
        sites = load_sites(recipe.data, recipe.input, recipe.classes, class_names=recipe.class_names)
        test = load_test(recipe.data, recipe.input, recipe.classes, class_names=recipe.class_names)
    return {EVALUATOR: test, **dict(zip(site_names(len(sites)), sites, strict=True))}
