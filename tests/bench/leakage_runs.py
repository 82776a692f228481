"""Simulations under policies, whose server keeps all that it is sent; and what it sees of each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from tests.attacks.hostile_server import LONG_TAIL, MULTI_LABEL, as_task, digits, has
from tests.bench.attack_views import Scores, Seen
from tests.bench.leakage_scores import Counts, Victim

from protofed.client.agent.agent import Agent, Site
from protofed.client.models.catalogue import device_model
from protofed.client.models.split import load
from protofed.client.policy.policy import Policy
from protofed.client.state.store import MemoryStore
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.payload import Part, Payload, SiteId, Tensors, Update
from protofed.common.protocol.messages import Role, TaskKind
from protofed.common.protocol.scores import spreads
from protofed.common.secure_aggregation.linear_form import SumLayout, Sums
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import EVALUATOR, Simulation, everything
from protofed.deploy.simulation.sites import DirectLink
from protofed.server.method import OwnStartMethod, server_methods
from protofed.server.rounds.context import ServerContext
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.queue import RunQueue
from protofed.server.rounds.secure_aggregation.totals import lay_out, unmasked_total
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger

NOISE = 512  # images
SCORED = ("global.accuracy", "personal.pm_v")


@dataclass(frozen=True)
class Case:
    """A recipe with changes of its method and plan under a policy.

    Attributes:
        secure: under secure aggregation.
        by_sites: as another site sees it, which is sent the models, and not as the server does.
        task: what is learnt of the digits, as of `as_task`.
    """

    recipe: str
    rules: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] = field(default_factory=dict)
    secure: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)
    by_sites: bool = False
    task: str = CLASSIFICATION

    @property
    def said(self) -> str:
        """What is other than by default."""
        other = self.task != CLASSIFICATION
        flags = {self.task: other, "secure": self.secure, "as another site sees it": self.by_sites}
        changes = {**self.rules, **self.method, **self.plan, **{name: True for name, on in flags.items() if on}}
        return ", ".join(key if value is True else f"{key} = {value}" for key, value in changes.items())


def attacked(case: Case, seed: int, rounds: int) -> tuple[list[Victim], dict[str, float]]:
    """One simulation's sites as the server saw them, and the scores of its last round."""
    recipe = seeded(case, seed, rounds)
    running = posed(recipe, Policy(everything(recipe).rules.model_copy(update=_allowed(case.rules))))
    running.go()
    ledger, number = running.ledger, recipe.rounds
    aggregated = ledger.score_sums(recipe.name, number).get(number, {})
    last = spreads(ledger.scores(recipe.name, number).get(number, {}), aggregated)
    seen = sites_seen(running, by_sites=case.by_sites)
    victims = [Victim(seen[site], _counts(running, site), seed) for site in running.data]
    running.ledger.close()
    return victims, {name: last[name].mean for name in SCORED if name in last}


def seeded(case: Case, seed: int, rounds: int) -> Recipe:
    """The case's recipe with LONG_TAIL, scored once, at its end."""
    recipe = shipped.recipe(case.recipe)
    assert recipe.data is not None
    made = recipe.model_copy(
        update={
            "seed": seed,
            "rounds": min(recipe.rounds, rounds),
            "data": recipe.data.model_copy(update={"seed": seed, "long_tail": LONG_TAIL}),
            "method": recipe.method.model_copy(update=dict(case.method)),
            "plan": recipe.plan.model_copy(update=dict(case.plan)),
            "federation": recipe.federation.model_copy(update={"score_every": 0, "secure": case.secure}),
        }
    )
    return as_task(made, case.task)


def posed(recipe: Recipe, policy: Policy) -> Simulation:
    """A simulation whose sites have this policy, and whose server forgets nothing."""
    ledger, blobs, data = Ledger("sqlite://"), MemoryBlobs(), digits(recipe)
    runs = RunQueue(
        [recipe], ServerContext(ledger, blobs, SitePresence(ledger, float), float, keep_rounds=0, simulated=True)
    )
    model = device_model(recipe, torch.device("cpu"), policy.rules.plugins)

    def agent(name: SiteId) -> Agent:
        roles = frozenset({Role.EVALUATOR if name == EVALUATOR else Role.TRAINER})
        # Under secure aggregation the updates stay in this process, and `sums_of` adds them up.
        held = Site(name, roles, policy, MemoryStore(), lambda _: data[name], lambda _: model)
        site = replace(held, simulated=recipe.federation.secure)
        return Agent(site, DirectLink(runs, blobs, name, roles))

    sites = {name: held for name, held in data.items() if name != EVALUATOR}
    return Simulation(recipe, runs, ledger, blobs, sites, [agent(name) for name in data])


def sites_seen(running: Simulation, *, by_sites: bool = False) -> dict[SiteId, list[Seen]]:
    """By site, its updates as they are in the server's ledger and blobs, round by round; if secure, the sums.

    Args:
        by_sites: as they are sent on to other sites, which know what they were sent of the site before.
    """
    recipe = running.recipe
    secure = recipe.federation.secure
    test = digits(recipe)[EVALUATOR].test
    truth = has(test.labels, recipe.classes)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(NOISE, *recipe.input.shape, generator=draw)
    model = device_model(recipe, torch.device("cpu"), frozenset())
    model.eval()

    def features(payload: Payload) -> tuple[Scores, Scores]:
        load(model.body, payload[Part.BODY])
        with torch.no_grad():
            return tuple(model.body(images).double().numpy() for images in (test.normalised(recipe.input), noise))

    seen: dict[SiteId, list[Seen]] = {site: [] for site in running.data}
    rounds = sums_of(running) if secure else rounds_of(running)
    for sent, received in sent_on(rounds) if by_sites else rounds:
        known = {id(payload): features(payload) for payload in received.values()}
        for site, payload in sent.items():
            (after, noise_after), (before, noise_before) = features(payload), known[id(received[site])]
            others = [theirs.get(Part.PROTOTYPES, {}) for name, theirs in sent.items() if name != site and not secure]
            seen[site].append(
                Seen(
                    recipe.classes,
                    payload,
                    received[site],
                    others,
                    after,
                    before,
                    truth,
                    noise_after,
                    noise_before,
                    findings=recipe.task.name == MULTI_LABEL,
                )
            )
    return seen


def rounds_of(running: Simulation) -> Iterator[tuple[dict[SiteId, Payload], dict[SiteId, Payload]]]:
    """What was sent, and what it started from, by site."""
    for number in range(1, running.recipe.rounds + 1):
        rows = [row for row in running.ledger.updates(running.recipe.name, number) if row.task.kind is TaskKind.FIT]
        bases = {
            row.task.base_digest: codec.decode(running.blobs.get(row.task.base_digest))
            for row in rows
            if row.task.base_digest
        }
        sent = {row.task.site: codec.decode(running.blobs.get(row.digest)) for row in rows if row.counts}
        received = {row.task.site: bases[row.task.base_digest] for row in rows if row.task.base_digest}
        yield sent, {site: _started(running, number, site, sent.get(site), base) for site, base in received.items()}


def sent_on(
    rounds: Iterator[tuple[dict[SiteId, Payload], dict[SiteId, Payload]]],
) -> Iterator[tuple[dict[SiteId, Payload], dict[SiteId, Payload]]]:
    """The models that others are sent as they are, and what they had of each site before: at first what all have."""
    known: dict[SiteId, Payload] = {}
    for sent, received in rounds:
        models: dict[SiteId, Payload] = {
            site: {part: payload[part] for part in (Part.BODY, Part.HEAD)} for site, payload in sent.items()
        }
        yield models, {site: known.get(site, received[site]) for site in models}
        known.update(models)


def _started(running: Simulation, number: int, site: SiteId, update: Payload | None, base: Payload) -> Payload:
    """What a site trained from: what it was sent, or what the server half says."""
    half = server_methods.build(running.recipe.method.name, running.recipe.method.options)
    if update is None or not hasattr(half, "start"):
        return base
    rounds = running.ledger.rounds(running.recipe.name)
    (state,) = (row.state for row in rounds if row.round == number - 1 and row.state is not None)
    return cast("OwnStartMethod", half).start(codec.decode(running.blobs.get(state)), site, update)


def _counts(running: Simulation, site: SiteId) -> Counts:
    data = running.data[site]
    return np.asarray(data.task.counts(data.train.labels, running.recipe.classes))


def _allowed(rules: Mapping[str, Any]) -> dict[str, Any]:
    """What the attacked methods cannot do without, and this case's rules."""
    return {"class_distribution_estimate": True, **rules}


# Under secure aggregation: one opened sum a round, the same of every site in it


def sums_of(running: Simulation) -> Iterator[tuple[dict[SiteId, Payload], dict[SiteId, Payload]]]:
    """By round and site, what the round's opened sum gives, as if it were the site's update; and where the site began.

    A simulation has the updates themselves. The sum is made of them by the server's own code, and they are dropped.
    """
    recipe = running.recipe
    method = server_methods.build(recipe.method.name, recipe.method.options)
    states = {
        row.round: codec.decode(running.blobs.get(row.state)) for row in running.ledger.rounds(recipe.name) if row.state
    }
    last = updates_of(running, 0)[0].payload
    for number in range(1, recipe.rounds + 1):
        updates, state = updates_of(running, number), states[number - 1]
        began = method.broadcast(state, "")
        if Part.BODY not in began:  # cwFedAVG sends a model for each class
            began = {part: last[part] for part in (Part.BODY, Part.HEAD)}
        last = as_update(opened(recipe, lay_out(method, state), updates))
        sites = [update.site for update in updates]
        yield dict.fromkeys(sites, last), dict.fromkeys(sites, began)


def updates_of(running: Simulation, number: int) -> list[Update]:
    """Those that count in a round."""
    rows = [row for row in running.ledger.updates(running.recipe.name, number) if row.counts]
    return [Update(row.task.site, codec.decode(running.blobs.get(row.digest)), {}, row.weight) for row in rows]


def opened(recipe: Recipe, layout: SumLayout, updates: Sequence[Update]) -> Sums:
    """What the server of a secure run has of a round."""
    fixed_point, fewest = recipe.federation.fixed_point, recipe.federation.min_contributors
    assert fixed_point is not None
    return Sums.opened(layout, unmasked_total(layout, lambda: updates, fixed_point, fewest), fixed_point)


def as_update(sums: Sums) -> Payload:
    """The sums divided by what they are over: the mean of updates, which attacks then read as one of them."""
    form = sums.layout.form
    found: dict[Part, Tensors] = {part: sums.mean(part) for part in form.means}
    if form.rows is not None:
        found[form.rows.part] = sums.row_means()
    if form.shares is None:
        return found
    mass = sums.mixture_mass()
    if form.shares is Part.CLASS_PRESENCE:
        return {**found, Part.CLASS_PRESENCE: {"present": mass}}
    for part in form.mixtures:
        mixtures = sums.mixtures(part)
        found[part] = {name: np.tensordot(mass / mass.sum(), stack, 1) for name, stack in mixtures.items()}
    return {**found, Part.CLASS_SHARES: {"shares": mass / mass.sum()}}
