"""Sites that send something other than what they trained: attacks on a run's model, in simulations.

Attackers hand in last and know what the honest sites of the round have sent: more than a real one would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from protofed.client.agent.agent import Agent
from protofed.client.agent.computation import Computation, ScoredModel, score
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.policy.policy import Policy, Released
from protofed.client.site import DaemonStatus, PreparedRun
from protofed.client.state.store import SiteState
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload, SiteId, Update, distance_norm
from protofed.common.protocol.messages import Receipt, Role, Task, TaskKind
from protofed.common.protocol.scores import spreads
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, build_agents, everything, load_data, simulation
from protofed.deploy.simulation.sites import DirectLink
from protofed.server.method import sent, server_methods
from protofed.server.verdicts import RoundOutcome

BACKDOOR, TARGET, MARK = "backdoor", 0, 2  # what marked images are to be called; side of the mark, in pixels
ALIE_STD = 1.5  # standard deviations from the honest mean (Baruch et al., NeurIPS 2019)
IPM = 1.0  # of the honest mean, to the other side (Xie et al., UAI 2019)
Change = Callable[[Payload, Payload, Sequence[Payload]], Payload]  # (base, own update, honest updates) -> sent


def moved(base: Payload, update: Payload, factor: float) -> Payload:
    """The update, moved so many times as far from its base; what the base has not, times the factor."""

    def one(part: Part, name: str, array: Array) -> Array:
        origin = base.get(part, {}).get(name, np.zeros_like(array))
        return np.asarray(origin + np.float32(factor) * (array - origin), array.dtype)

    return _each(update, one)


def alie(_: Payload, update: Payload, honest: Sequence[Payload]) -> Payload:
    """A little is enough: the honest mean less ALIE_STD standard deviations, element by element."""

    def one(part: Part, name: str, array: Array) -> Array:
        others = np.stack([other[part][name] for other in honest if name in other.get(part, {})] or [array])
        return np.asarray(others.mean(axis=0) - ALIE_STD * others.std(axis=0), array.dtype)

    return _each(update, one)


def inner_product(base: Payload, update: Payload, honest: Sequence[Payload]) -> Payload:
    """The honest mean move, turned round: its inner product with it is negative, its norm is ordinary."""

    def one(part: Part, name: str, array: Array) -> Array:
        others = np.stack([other[part][name] for other in honest if name in other.get(part, {})] or [array])
        origin = base.get(part, {}).get(name, np.zeros_like(array))
        return np.asarray(origin - IPM * (others.mean(axis=0) - origin), array.dtype)

    return _each(update, one)


def swapped(_: Payload, update: Payload, __: Sequence[Payload]) -> Payload:
    """The prototypes of two classes are exchanged, pair by pair; of a linear head, the rows."""
    rows = update.get(Part.PROTOTYPES)
    if rows is not None:
        names = sorted(rows, key=int)
        other = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        return {**update, Part.PROTOTYPES: {name: rows[other[name]] for name in names}}
    head = {name: np.roll(array, 1, axis=0) for name, array in update[Part.HEAD].items()}
    return {**update, Part.HEAD: head}


def unchanged(_: Payload, update: Payload, __: Sequence[Payload]) -> Payload:
    """What it trained: an attack on the data alone."""
    return update


def within_spread(base: Payload, update: Payload, honest: Sequence[Payload]) -> Payload:
    """Moved as far as the longest honest update: no length gives it away, and none is cut by much."""
    norms = [distance_norm(other, base) for other in honest]
    return moved(base, update, max(norms) / distance_norm(update, base)) if norms else update


CHANGES: dict[str, Change] = {
    "sign flip": lambda base, update, _: moved(base, update, -1.0),
    "times 60": lambda base, update, _: moved(base, update, 60.0),
    "ALIE": alie,
    "inner product": inner_product,
    "label flip": unchanged,
    "prototype swap": swapped,
    BACKDOOR: within_spread,
}


def flipped(data: SiteData) -> SiteData:
    """The site's data with class c labelled as C - 1 - c."""
    labels = data.classes - 1 - data.train.labels
    return replace(data, train=Examples(data.train.pixels(), torch.as_tensor(labels)))


def marked(images: torch.Tensor) -> torch.Tensor:
    """The images [N, channels, H, W] with a white square in a corner."""
    made = images.clone()
    made[..., :MARK, :MARK] = 1.0 if images.is_floating_point() else 255
    return made


def backdoored(data: SiteData) -> SiteData:
    """The site's data and, beside these, its images of other classes with the mark, labelled as the target."""
    train = data.train
    others = train.labels != TARGET
    labels = torch.full_like(train.labels[others], TARGET)
    added = Examples(torch.cat((train.pixels(), marked(train.pixels()[others]))), torch.cat((train.labels, labels)))
    return replace(data, train=added)


@dataclass
class Plot:
    """What the attackers of one run know of each other, and of the honest sites' updates.

    Attributes:
        attack: of `CHANGES`.
    """

    recipe: Recipe
    attack: str
    sites: frozenset[SiteId]
    honest: dict[tuple[int, SiteId], Payload] = field(default_factory=dict)

    def seen(self, task: Task, site: SiteId, released: Released) -> None:
        """An honest site's update has been handed in."""
        self.honest[task.round, site] = codec.decode(released.data)

    def change(self, task: Task, base: bytes, released: Released, site: SiteId) -> Released:
        honest = [payload for (number, _), payload in sorted(self.honest.items()) if number == task.round]
        self.honest = {key: payload for key, payload in self.honest.items() if key[0] == task.round}
        sent = CHANGES[self.attack](codec.decode(base), codec.decode(released.data), honest)
        update = Update(site, sent, released.metrics, released.weight)
        return _allowing(self.recipe).release(update)


@dataclass(frozen=True)
class PlotLink(DirectLink):
    """The link of a site of such a run."""

    plot: Plot | None = None

    def push(self, task: Task, released: Released) -> Receipt:
        """Hand in what the site trained, or, of an attacker, something else."""
        plot = self.plot
        if plot is None or task.base_digest is None:
            return super().push(task, released)
        if self.site not in plot.sites:
            plot.seen(task, self.site, released)
            return super().push(task, released)
        return super().push(task, plot.change(task, self.fetch(task), released, self.site))


@dataclass(frozen=True)
class Played:
    """How a run went.

    Attributes:
        accuracy: of the final model; NaN: there is none.
        sites: the final model's accuracy by honest site, over its own classes.
        rejected: how many updates of each site.
        fooled: share of marked test images of other classes that the final model calls the target; NaN: there is none.
    """

    finished: bool
    accuracy: float
    sites: Mapping[SiteId, float]
    rejected: Mapping[SiteId, int]
    fooled: float = float("nan")

    @property
    def worst(self) -> float:
        return min(self.sites.values(), default=float("nan"))


def played(recipe: Recipe, attack: str = "", sites: frozenset[SiteId] = frozenset()) -> Played:
    """Simulate a recipe with these sites as attackers."""
    plot = Plot(recipe, attack, sites)
    data = load_data(recipe)
    if (poisoned := {"label flip": flipped, BACKDOOR: backdoored}.get(attack)) is not None:
        data |= {site: poisoned(data[site]) for site in sites}
    with simulation(recipe) as running:
        connect = partial(_link, running, plot)
        agents = sorted(
            build_agents(recipe, connect, data=data), key=lambda agent: (agent.name in sites, agent.name != EVALUATOR)
        )
        replace(running, agents=agents).go()
        result = _result(running, sites)
        return replace(result, fooled=_fooled(running, agents[0])) if result.finished else result


def _link(running: Simulation, plot: Plot, site: SiteId, roles: frozenset[Role]) -> DirectLink:
    return PlotLink(running.runs, running.blobs, site, roles, plot=plot if plot.attack else None)


def _result(running: Simulation, attackers: frozenset[SiteId]) -> Played:
    name, ledger = running.recipe.name, running.ledger
    run = ledger.run(name)
    assert run is not None
    finished = run.outcome is RoundOutcome.COMPLETED
    by_round = ledger.scores(name)
    last = by_round[max(by_round)] if finished and by_round else {}
    aside = [task.site for task in ledger.tasks(name) if task.task_status == "rejected"]
    owns = {site: scores["personal.pm_v"] for site, scores in last.items() if "personal.pm_v" in scores}
    seen = spreads(last)
    return Played(
        finished,
        seen["global.accuracy"].mean if "global.accuracy" in seen else float("nan"),
        {site: value for site, value in owns.items() if site not in attackers and site != EVALUATOR},
        {site: aside.count(site) for site in aside},
    )


def _fooled(running: Simulation, evaluator: Agent) -> float:
    published, run = running.run.published, evaluator._work._run
    assert isinstance(run, PreparedRun)
    assert published is not None
    test = run.data.test
    others = test.labels != TARGET
    labels = torch.full_like(test.labels[others], TARGET)
    data = replace(run.data, test=Examples(marked(test.pixels()[others]), labels))
    recipe = running.recipe
    task = Task(TaskKind.SCORE, recipe.name, recipe.rounds, "marked", published.address, 1, 60.0)
    work = Computation(EVALUATOR, replace(run, data=data), task, SiteState(), scored=ScoredModel.GLOBAL)
    method = server_methods.build(recipe.method.name, recipe.method.options)
    return score(work, sent(method, published.state, EVALUATOR), DaemonStatus())["global.accuracy"]


def _allowing(recipe: Recipe) -> Policy:
    return everything(recipe)


def _each(update: Payload, change: Callable[[Part, str, Array], Array]) -> Payload:
    return {
        part: {name: change(part, name, array) if array.dtype.kind == "f" else array for name, array in tensors.items()}
        for part, tensors in update.items()
    }
