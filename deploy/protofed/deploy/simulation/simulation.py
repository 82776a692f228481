"""Simulate a deployment in one process: the same coordinator, agents, methods, privacy gate and codec.

The link is a function call through the codec, and time stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import structlog
import torch

from protofed.client.agent.agent import Agent, Site
from protofed.client.agent.computation import Computation, RemoteExecutor, ScoredModel, fit, score
from protofed.client.data.shared import Shared, share
from protofed.client.data.site import load_simulation
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods, refining
from protofed.client.models.catalogue import architectures, device_model
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules, unlimited
from protofed.client.site import DaemonStatus, Train, prepare, train_alone
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore, SiteState, Store
from protofed.client.task import build_client_task
from protofed.client.training.context import NoCheckpoints
from protofed.client.transport.link import Link
from protofed.common import codec, plugins
from protofed.common.codec import DTYPES, OF_SUMS
from protofed.common.config.recipe import Federation, Recipe
from protofed.common.errors import ConfigError, OutOfSpaceError, PolicyViolationError, TaskFailedError
from protofed.common.payload import Exchange, Part, Payload, SiteId
from protofed.common.protocol.messages import MAX_BYTES, Assignment, Role, Scores, Task, TaskKind, Verdict
from protofed.common.protocol.scores import LOSS
from protofed.deploy.simulation.sites import TRAINED, DirectLink, TrainingLog, settled_when_aggregated
from protofed.deploy.simulation.workers import Beginning, Block, WorkerPool, Workers
from protofed.server.access.certificates import Certificates
from protofed.server.method import joined, sent
from protofed.server.rounds.context import build_method, open_server
from protofed.server.rounds.machine.phases import Collecting, Evaluating, Phase
from protofed.server.rounds.machine.waiting import Waiting, WaitReason
from protofed.server.rounds.queue import RunQueue
from protofed.server.rounds.run import Run
from protofed.server.storage.blobs import Blobs
from protofed.server.storage.ledger import Ledger

log = structlog.get_logger()
EVALUATOR = "evaluator"
SHOWN = 3  # reasons in a sentence, and sites of each
NewPool: TypeAlias = Callable[[Block], WorkerPool]


@dataclass(frozen=True)
class Simulation:
    """One recipe's run, ready to start. Made by `simulation`, which closes it.

    Attributes:
        data: each site's data, without the evaluator's and those of sites that are held out.
        agents: the evaluator first, then the sites in order.
        held_out: the sites of `data.held_out_sites`, which take no part.
        workers: compute for the sites; None: all is computed in this process.
        violations: what a site's own policy refused last, and why.
        training: how much each site has trained.
    """

    recipe: Recipe
    runs: RunQueue
    ledger: Ledger
    blobs: Blobs
    data: Mapping[SiteId, SiteData]
    agents: Sequence[Agent]
    held_out: Sequence[Site] = ()
    workers: Workers | None = None
    violations: Mapping[SiteId, str] = field(default_factory=dict)
    training: TrainingLog = field(default_factory=lambda: TrainingLog(None))

    @property
    def run(self) -> Run:
        """The recipe's run at its server."""
        return self.runs.of(self.recipe.name)

    def go(self, until: Callable[[], bool] = lambda: False, on_task: Callable[[], None] = lambda: None) -> None:
        """Let the agents work in turns until the run ends.

        Args:
            until: stop early; asked before every pass over the agents.
            on_task: called after every task.

        Raises:
            OutOfSpaceError: the disk of the folder that keeps the simulation is full.
            ConfigError: no agent has a task and the run has not ended, as with fewer sites than `min_sites`.
        """
        while not self.runs.finished and not until():
            self.runs.tick()
            # Only where nobody is invited, as at the start, are all asked: of hundreds, a round invites a few.
            if self._step(self.runs.invitation, on_task) or self._step(lambda _: True, on_task) or self.runs.finished:
                continue
            waiting = self.run.waiting(Certificates(self.ledger))
            if waiting is not None and waiting.reason is WaitReason.DISK:
                raise OutOfSpaceError("the run waits for space")
            why = _why_stuck(waiting, self.run.recipe.federation)
            raise ConfigError(f"the run cannot continue: {why}{self.refused}")

    @property
    def refused(self) -> str:
        """What server and sites refused of the newest round, as the end of a sentence; empty: nothing.

        A server tells the sites a code alone; the reason is in its ledger.
        """
        newest = self.ledger.newest(self.recipe.name)
        rows = [] if newest is None else self.ledger.updates(self.recipe.name, newest.round)
        refused = [("the server, of", row.reason, row.task.site) for row in rows if row.verdict is Verdict.REFUSED]
        refused += [("the policy of", why, site) for site, why in self.violations.items()]
        by_reason: dict[tuple[str, str], set[SiteId]] = {}
        for who, why, site in refused:
            by_reason.setdefault((who, why), set()).add(site)
        listed = [f"{who} {_named(sorted(sites))}: {why}" for (who, why), sites in sorted(by_reason.items())]
        more = f"; and {len(listed) - SHOWN} reasons more" if len(listed) > SHOWN else ""
        return f"; refused by {'; by '.join(listed[:SHOWN])}{more}" if listed else ""

    def _step(self, is_asked: Callable[[SiteId], object], on_task: Callable[[], None]) -> bool:
        """Let the agents of those sites that are asked work, in turns; whether any had a task."""
        any_task = False
        for agent in self.agents:
            if self.workers is not None:
                self.workers.prefetch(_moment(self.run.phase), self._works)
            if is_asked(agent.name) and isinstance(agent.step(0.0), Task):
                any_task = True
                on_task()
        return any_task

    def _works(self) -> Iterator[Computation]:
        """What the sites will compute for their open tasks."""
        phase = self.run.phase
        intake = self.runs.intake(self.recipe.name)
        open_tasks = [(agent, intake.open_task(agent.name)) for agent in self.agents]
        invited = [(agent, task) for agent, task in open_tasks if task is not None]
        if isinstance(phase, Collecting):  # of a larger cohort, only the first are needed
            invited = invited[: phase.size - len(phase.reported)]
        for agent, task in invited:
            yield from agent.prefetch(task)


def _moment(phase: Phase) -> Hashable:
    """Equal for as long as the same tasks are open."""
    match phase:
        case Collecting():
            return Collecting, phase.round, phase.attempt
        case Evaluating():
            return Evaluating, phase.round
        case _:
            return None


def everything(recipe: Recipe) -> Policy:
    """A policy for simulated sites that allows the recipe's method, all parts and its plug-ins."""
    return Policy(
        PolicyRules(
            methods=frozenset({recipe.method.name}),
            tasks=frozenset({recipe.task.name}),
            parts=frozenset(Part),
            exchange=frozenset(Exchange),
            metrics=frozenset({LOSS, *recipe.score_names().families}),
            plugins=recipe.names,
            dtypes=frozenset(DTYPES.values()) - OF_SUMS,
            max_tensor_mb=MAX_BYTES / 1e6,
            max_update_mb=MAX_BYTES / 1e6,
            example_count=True,
            class_distribution_estimate=True,
            min_samples_per_class=1,
            min_images_per_unit=1,
            partners="first-use",
            batch_order="recipe",
            limits=unlimited(set(architectures)),
        )
    )


def simulated(policy: Policy) -> Policy:
    """A site's policy as a simulation keeps it, without approval, schedule and limits a day.

    Nobody can be asked, and time stands still; batches follow the recipe's seed, so that runs repeat.
    """
    every_day = unlimited(policy.rules.limits.models)
    limits = policy.rules.limits.model_copy(
        update={"tasks_per_day": every_day.tasks_per_day, "scorings_per_day": every_day.scorings_per_day}
    )
    changes = {"approval": "automatic", "schedule": (), "batch_order": "recipe", "limits": limits}
    return Policy(policy.rules.model_copy(update=changes))


def aggregated_here(policy: Policy) -> Policy:
    """The policy of a simulated site. Its numbers are aggregated in this process, without masks."""
    metrics = policy.rules.metrics | policy.rules.aggregated_metrics
    changes = {"secure": "allowed", "hide_class_presence": False, "metrics": metrics}
    return Policy(policy.rules.model_copy(update=changes))


def build_agents(
    recipe: Recipe,
    connect: Callable[[SiteId, frozenset[Role]], Link],
    store: Callable[[SiteId], Store] | None = None,
    device: torch.device | None = None,
    data: Mapping[SiteId, SiteData] | None = None,
    policy: Policy | None = None,
    remote: RemoteExecutor | None = None,
    on_violation: Callable[[SiteId, PolicyViolationError], None] = lambda _site, _violation: None,
    train: Train = train_alone,
) -> list[Agent]:
    """The agents of the evaluator and of all sites of a recipe's [data], for any kind of link.

    Args:
        connect: makes the link of a site with its roles.
        store: makes the store of a site; None: in memory.
        data: the result of `load_data`, if the caller already has it.
        policy: of the sites, without what `simulated` removes; None: `everything`. The evaluator, which holds no
            site's data, always has `everything`.
        remote: computes for all of them; None: this process does.
        on_violation: called with what a site's policy refuses.
        train: what carries out a FIT task in this process.

    Raises:
        ConfigError: the recipe has no [data], or names an unknown method, model or option.
        DataError: its data cannot be loaded, or the evaluator has nothing to refine models on and the method needs it.
    """
    half, data = client_methods.build(recipe.method.name, recipe.method.options), data or load_data(recipe)
    if refining(half) is not None:
        data[EVALUATOR].for_refining()

    def agent(site: Site) -> Agent:
        return Agent(
            site,
            connect(site.name, site.roles),
            remote=remote,
            on_refusal=lambda _, violation: on_violation(site.name, violation),
        )

    return [agent(site) for site in _sites(recipe, store or (lambda _: MemoryStore()), device, data, policy, train)]


def _sites(
    recipe: Recipe,
    store: Callable[[SiteId], Store],
    device: torch.device | None,
    data: Mapping[SiteId, SiteData],
    policy: Policy | None,
    train: Train,
) -> list[Site]:
    """Simulated sites with these data; the arguments as of `build_agents`."""
    on_device = device or torch.device("cpu")
    unrestricted = everything(recipe)
    site_policy = unrestricted if policy is None else simulated(policy)
    if recipe.federation.secure:
        site_policy = aggregated_here(site_policy)
    shared = device_model(
        recipe, on_device, site_policy.rules.plugins
    )  # one model for all: agents work in turns and load their state first

    def site(name: SiteId, examples: SiteData) -> Site:
        role = Role.EVALUATOR if name == EVALUATOR else Role.TRAINER
        rules = unrestricted if role is Role.EVALUATOR else site_policy
        return Site(
            name, frozenset({role}), rules, store(name), lambda _: examples, lambda _: shared, fit=train, simulated=True
        )

    return [site(name, examples.placed(on_device)) for name, examples in data.items()]


@contextmanager
def simulation(
    recipe: Recipe,
    state: Path | None = None,
    device: torch.device | None = None,
    sites: Sequence[SiteData] | None = None,
    policy: Policy | None = None,
    pool: NewPool | None = None,
) -> Iterator[Simulation]:
    """Open a simulation of a recipe; `sites` as in `load_data`, `policy` as in `build_agents`.

    Args:
        state: folder that keeps the simulation; an unfinished run in it continues. None: in memory.
        pool: starts the workers that compute, given the memory with the data of all sites; None: this process does.

    Raises:
        ConfigError: the recipe cannot be used.
        DataError: its data cannot be loaded.
        OutOfSpaceError: the folder's disk is full; so does what is done with the simulation.
        StateError: the folder is in use, or holds another recipe's run of this name.
    """
    allowed = recipe.names if policy is None else policy.rules.plugins
    plugins.allow(allowed)
    with _full_disk_named(state), ExitStack() as resources:
        context = open_server(state, resources, simulated=True)
        runs, blobs = RunQueue([recipe], context), context.blobs

        def store(name: SiteId) -> Store:
            folder: MemoryStore | DiskStore = MemoryStore() if state is None else DiskStore(state / "sites" / name)
            result = settled_when_aggregated(folder, context.ledger) if recipe.federation.secure else folder
            if isinstance(folder, DiskStore):
                resources.callback(folder.close)
                resources.callback(result.newest_counted, recipe.name)  # which settles the last round's
            return result

        training = resources.enter_context(closing(TrainingLog(None if state is None else state / TRAINED)))
        (data, held_out), workers = _all_data(recipe, sites), None
        if pool is not None:
            block = resources.enter_context(closing(Block()))
            contents, memory = share(data, block.sized, augmented=recipe.plan.augmentation != "none")
            shared = Shared(
                contents, memory, recipe.input, recipe.classes, build_client_task(recipe.task, recipe.names)
            )
            data = {name: shared.site(name) for name in data}
            worker_pool = resources.enter_context(closing(pool(block)))
            where = str(device or "cpu")
            beginning = Beginning(recipe=recipe.model_dump_json(), plugins=allowed, device=where, data=contents)
            workers = Workers(worker_pool, beginning, blobs.get, training.note)
        violations: dict[SiteId, str] = {}
        agents = build_agents(
            recipe,
            lambda name, roles: DirectLink(runs, blobs, name, roles),
            store,
            device,
            data,
            policy,
            workers,
            lambda site, violation: violations.update({site: str(violation)}),
            training.fit,
        )
        of_sites = {name: site_data for name, site_data in data.items() if name != EVALUATOR}
        outside = _sites(recipe, lambda _: MemoryStore(), device, held_out, policy, train_alone) if held_out else []
        yield Simulation(recipe, runs, context.ledger, blobs, of_sites, agents, outside, workers, violations, training)


def site_names(count: int) -> list[SiteId]:
    """site-1 … site-K, zero-padded to one length, so that sorting by name keeps the order."""
    width = len(str(count))
    return [f"site-{number:0{width}d}" for number in range(1, count + 1)]


def load_data(recipe: Recipe, sites: Sequence[SiteData] | None = None) -> dict[SiteId, SiteData]:
    """The data of the evaluator (first) and of every site that takes part, by name.

    Args:
        sites: used instead of the recipe's [data]; the evaluator then scores on the first site's test set.

    Raises:
        ConfigError: the recipe has no [data], or holds out all of its sites.
        DataError: its data cannot be loaded.
    """
    return _all_data(recipe, sites)[0]


def _all_data(
    recipe: Recipe, sites: Sequence[SiteData] | None
) -> tuple[dict[SiteId, SiteData], dict[SiteId, SiteData]]:
    """As `load_data`, and the data of the sites that are held out."""
    task = build_client_task(recipe.task, recipe.names)
    if sites is not None:
        test = SiteData.for_scoring(sites[0].test, recipe.input, recipe.classes, task=sites[0].task)
    elif recipe.data is None:
        raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
    else:
        of_run, noisy = (recipe.input, recipe.classes, recipe.class_names), recipe.plan.dp is not None
        sites, test = load_simulation(recipe.data, *of_run, noisy=noisy, task=task)
    by_name = list(zip(site_names(len(sites)), sites, strict=True))
    held_out = 0 if recipe.data is None else recipe.data.held_out_sites
    if (part := len(by_name) - held_out) < 1:
        raise ConfigError(
            f"data.held_out_sites = {held_out} of {len(by_name)} sites: expected fewer, so that some take part"
        )
    return {EVALUATOR: test, **dict(by_name[:part])}, dict(by_name[part:])


def held_out_scores(running: Simulation) -> dict[SiteId, Scores]:
    """By held-out site, the scores of its own model after one round of training from the last state of an ended run.

    The site trains as if the last round invited it for the first time, with that round's learning rate. If the server
    makes the site's own model, the site predicts with that model. The run gets nothing from the site. A site whose
    policy refuses the run has no scores.
    """
    if not running.held_out:
        return {}
    recipe = running.run.recipe
    last = [row for row in running.ledger.rounds(recipe.name) if row.state is not None][-1]
    assert last.state is not None  # noqa: S101  (see above)
    state, scores = codec.decode(running.blobs.get(last.state)), dict[SiteId, Scores]()
    for site in running.held_out:
        try:
            scores[site.name] = _after_training(recipe, site, state, max(last.round, 1))
        except (TaskFailedError, PolicyViolationError) as refusal:
            log.warning("a held-out site cannot take part in the run", site=site.name, why=str(refusal))
    return scores


def _after_training(recipe: Recipe, site: Site, state: Payload, round: int) -> Scores:
    offered = Assignment(recipe.name, recipe.wire(), preprocessing_digest=recipe.preprocessing_digest())
    half, run = build_method(recipe), prepare(site, offered)
    base = codec.encode(sent(half, state, site.name))
    task = Task(TaskKind.FIT, recipe.name, round, f"held-out-{site.name}", codec.digest(base), len(base), 0.0)
    computation = Computation(site.name, run, task, SiteState(), site.policy.rules.min_images_per_unit)
    outcome = fit(computation, codec.decode(base), DaemonStatus(), NoCheckpoints(), train_alone)
    own = replace(computation, state=SiteState(round, outcome.client_state, outcome.personal), scored=ScoredModel.OWN)
    then = codec.encode(sent(half, joined(half, state, outcome.update), site.name))
    return site.policy.release_scores(score(own, codec.decode(then), DaemonStatus()), noisy=run.noisy).scores


def _why_stuck(waiting: Waiting | None, rules: Federation) -> str:
    """What a run waits for while no site has a task: time stands still, so it never comes."""
    if waiting is None:
        return "no site has a task"
    least = f" (federation.min_sites is {rules.min_sites}, quorum {rules.quorum})"
    return f"round {waiting.round} {waiting.text}{least if waiting.reason is WaitReason.TRAINERS else ''}"


@contextmanager
def _full_disk_named(state: Path | None) -> Iterator[None]:
    """Name the simulation's folder where a disk is full: there is no server here whose disk it could be.

    Raises:
        OutOfSpaceError: again, with the folder.
    """
    try:
        yield
    except OutOfSpaceError as error:
        if state is None:
            raise
        raise OutOfSpaceError(
            f"the disk of {state}, which keeps this simulation, is full ({error}); free space, then run the same "
            "command again: it goes on from there"
        ) from error


def _named(sites: Sequence[SiteId]) -> str:
    return ", ".join(sites[:SHOWN]) + (f" and {len(sites) - SHOWN} more" if len(sites) > SHOWN else "")
