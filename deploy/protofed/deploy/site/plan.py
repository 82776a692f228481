"""What a site would send, receive and keep for a recipe, from the code's own declarations; no data is touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import protofed.client.methods
import protofed.server.methods  # noqa: F401  (registers the halves)
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import dump
from protofed.client.privacy.policy import GateContext, Policy, PolicyRefusedError
from protofed.client.training.score_sets import RELIABILITY, SCORES
from protofed.common.config.recipe import Recipe
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Part, Payload, TensorSpec, Update, describe
from protofed.common.plugins import PluginKind, is_plugin
from protofed.deploy.site.plan_rules import sentences
from protofed.server.method import server_methods

LOSS = "after training"
OWN, OWN_LOCAL = "own model, shared test set", "own model, own test set"
GLOBAL_LOCAL, GLOBAL = "global model, own test set", "global model, by an evaluator"
_PREFIXES = {OWN: "personal", OWN_LOCAL: "personal.local", GLOBAL_LOCAL: "global.local", GLOBAL: "global"}
_GROUPS, _PROBABILITIES = frozenset({"many", "medium", "few", "groups"}), frozenset({"auroc", "ece"})


@dataclass(frozen=True)
class Leaving:
    """A tensor of an update.

    Attributes:
        optional: only sent for a class that the site has; where the policy hides those, all are sent.
        refused: by which rule of the policy; None where it may leave, or no policy was given.
    """

    spec: TensorSpec
    optional: bool
    refused: str | None


@dataclass(frozen=True)
class SitePlan:
    """One site's part in a run.

    Attributes:
        leaves: the largest update, tensor by tensor.
        comes: the broadcast from round 2 on; that of round 1 can lack parts that sites make.
        scalars: the names that the site offers, by what they are taken of.
        released: likewise, those that the policy lets pass; all without a policy.
        count_needed: the run weighs sites by their numbers of examples.
        count_leaves: whether the number leaves; None without a policy.
        remembers: what the method does on a site, in its own words: they name what it keeps for itself.
        first_model: why the policy would not let the site make the run's first model, which holds nothing of a site.
        rules: what the policy does to what leaves, and when, in sentences; none without a policy.
        refusals: why the policy would refuse the run; empty where it would not, or without a policy.
    """

    recipe: Recipe
    leaves: tuple[Leaving, ...]
    comes: tuple[TensorSpec, ...]
    scalars: Mapping[str, tuple[str, ...]]
    released: Mapping[str, tuple[str, ...]]
    count_needed: bool
    count_leaves: bool | None
    remembers: str
    first_model: str | None
    rules: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of an update: the least, of a site without any class of its own, and the most."""
        return sum(t.spec.nbytes for t in self.leaves if not t.optional), sum(t.spec.nbytes for t in self.leaves)

    @property
    def received_bytes(self) -> int:
        """Of a broadcast."""
        return sum(spec.nbytes for spec in self.comes)


def site_plan(recipe: Recipe, policy: Policy | None = None) -> SitePlan:
    """What a site would send, receive and keep, and what its policy says to it.

    Raises:
        ConfigError: the recipe names a method, model or option that is not known.
        PolicyViolation: its model is not of the catalogue, and the policy does not name it: it must not be run.
    """
    name, options = recipe.method.name, recipe.method.options
    allowed = None if policy is None else policy.rules.plugins
    client, server = client_methods.build(name, options, allowed), server_methods.build(name, options, allowed)
    model = _first_model(recipe, policy)
    first = server.init(model, recipe.classes)
    expected = server.expects(first)
    weight = 1.0 if expected.weight else None
    update = Update("site", _ones(itertools.chain(expected.required, expected.optional)), weight=weight)
    scalars = _scalars(recipe, client, global_model=server.global_model)
    hidden = policy is not None and policy.rules.hide_class_presence
    refused = _refused_by(policy, name, update, recipe.classes)
    return SitePlan(
        recipe=recipe,
        leaves=tuple(
            Leaving(spec, optional, refused.get(spec.part))
            for specs, optional in ((expected.required, False), (expected.optional, not hidden))
            for spec in specs
        ),
        comes=describe(server.broadcast(server.aggregate(first, [update]), "site")),
        scalars=scalars,
        released=_released(scalars, policy),
        count_needed=expected.weight,
        count_leaves=None if policy is None else policy.rules.example_count,
        remembers=(type(client).__doc__ or "").strip().splitlines()[0],
        first_model=None if policy is None else _objection(policy, Update("site", model), recipe.classes),
        rules=() if policy is None else sentences(policy.rules, update.payload.keys()),
        refusals=() if policy is None else _refusals(policy, name, client, update, recipe.classes),
    )


def plain(plan: SitePlan) -> dict[str, Any]:
    """The plan as JSON takes it."""
    least, most = plan.sent_bytes
    return {
        "recipe": plan.recipe.name,
        "method": plan.recipe.method.name,
        "model": plan.recipe.model.name,
        "leaves": [{**_plain(t.spec), "optional": t.optional, "refused": t.refused} for t in plan.leaves],
        "comes": [_plain(spec) for spec in plan.comes],
        "discloses": {part: part.discloses for part in dict.fromkeys(t.spec.part for t in plan.leaves)},
        "bytes_per_round": {"sent_least": least, "sent_most": most, "received": plan.received_bytes},
        "scalars": plan.scalars,
        "released_scalars": plan.released,
        "example_count": {"needed": plan.count_needed, "leaves": plan.count_leaves},
        "first_model_refused": plan.first_model,
        "rules": plan.rules,
        "refusals": plan.refusals,
    }


def _plain(spec: TensorSpec) -> dict[str, Any]:
    return {
        "tensor": spec.name,
        "part": spec.part.value,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "bytes": spec.nbytes,
    }


def _first_model(recipe: Recipe, policy: Policy | None) -> Payload:
    allowed = frozenset() if policy is None else policy.rules.plugins
    own = recipe.model.name not in set(architectures) and is_plugin(PluginKind.MODEL, recipe.model.name)
    if policy is not None and own and recipe.model.name not in allowed:
        raise PolicyViolationError(f"model '{recipe.model.name}' is not in this site's policy (plugins)")
    with torch.random.fork_rng(devices=[]):
        model = build(recipe.model, recipe.input, recipe.classes, allowed)
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}


def _ones(specs: Iterable[TensorSpec]) -> Payload:
    """An update that looks like a site's."""
    payload: dict[Part, dict[str, Any]] = {}
    for spec in specs:
        payload.setdefault(spec.part, {})[spec.name] = np.ones(spec.shape, spec.dtype)
    return payload


def _refused_by(policy: Policy | None, method: str, update: Update, classes: int) -> dict[Part, str]:
    """The rule by which the gate keeps a part here; a method or a size that is not allowed keeps all of them."""
    found = dict.fromkeys(NOT_ON_THE_WIRE, "outside simulations")
    if policy is None:
        return found
    if method not in policy.rules.methods:
        return dict.fromkeys(update.payload, "methods")
    for part in update.payload:
        alone = _refusal(policy.admit, method, frozenset({part}))
        found = ({part: alone.rule} if isinstance(alone, PolicyRefusedError) else {}) | found
    if any(part in found for part in update.payload):
        return found
    whole = _refusal(policy.release, update, _every_class(classes))
    return dict.fromkeys(update.payload, whole.rule) if isinstance(whole, PolicyRefusedError) else {}


def _refusals(policy: Policy, name: str, client: ClientMethod, update: Update, classes: int) -> tuple[str, ...]:
    """In the words of the gate itself, and of the server, which needs what the policy withholds."""
    found = [_violation(policy.admit, name, client.sends), _objection(policy, update, classes)]
    if update.weight is not None and not policy.rules.example_count:
        found.append("the run weighs sites by their numbers of examples, which this site's policy withholds")
    return tuple(dict.fromkeys(why for why in found if why is not None))


def _objection(policy: Policy, update: Update, classes: int) -> str | None:
    return _violation(policy.release, update, _every_class(classes))


def _violation(gate: Any, *arguments: Any) -> str | None:
    return None if (refusal := _refusal(gate, *arguments)) is None else str(refusal)


def _refusal(gate: Any, *arguments: Any) -> PolicyViolationError | None:
    try:
        gate(*arguments)
    except PolicyViolationError as violation:
        return violation
    return None


def _every_class(classes: int) -> GateContext:
    """Of a site that has examples enough of all: what others withhold, it would send."""
    return GateContext(np.full(classes, np.iinfo(np.int64).max), {}, b"plan")


def _scalars(recipe: Recipe, client: ClientMethod, *, global_model: bool) -> dict[str, tuple[str, ...]]:
    asked = recipe.evaluation
    left_out = (frozenset() if asked.frequency_groups else _GROUPS) | (
        frozenset() if asked.probabilities else _PROBABILITIES
    )
    taken = tuple(name for name in SCORES if name not in left_out)
    of = [
        OWN,
        OWN_LOCAL,
        *([GLOBAL_LOCAL] if client.personal == "trained" else []),
        *([GLOBAL] if global_model else []),
    ]
    scores = {what: tuple(f"{_PREFIXES[what]}.{name}" for name in taken) for what in of}
    if asked.probabilities and global_model:
        scores[GLOBAL] += tuple(sorted(RELIABILITY))
    return {LOSS: ("loss",), **scores, OWN: (*scores[OWN], "personal.pm_v", "personal.pm_l")}


def _released(scalars: Mapping[str, tuple[str, ...]], policy: Policy | None) -> Mapping[str, tuple[str, ...]]:
    if policy is None:
        return scalars
    return {of: tuple(policy.release_scores(dict.fromkeys(names, 0.0)).scores) for of, names in scalars.items()}
