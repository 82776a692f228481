"""`protofed client preview`: what a site would send, receive and keep in a run, from the method's own declarations.

The method's client and server algorithms run once on tensors of ones. The site's data are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import dump
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules, discloses, is_own
from protofed.client.policy.run_limits import LimitCheck, RunFacts, checks, unchecked
from protofed.client.policy.update_checks import BY_CLASS, TELLS_STEPS, GateContext, PolicyRefusedError
from protofed.client.site import check_rules
from protofed.client.state.dp_ledger import Spent
from protofed.client.training.noisy_steps import check_model
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import check_defined
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Exchange, Part, Payload, Tensors, TensorSpec, Update, describe
from protofed.common.plugins import PluginKind, is_plugin
from protofed.common.protocol.messages import score_family
from protofed.common.protocol.scores import TESTS, ScoreNames
from protofed.common.secure_aggregation.linear_form import SumLayout, Sums, read_form
from protofed.common.secure_aggregation.score_sums import list_scores
from protofed.deploy.site.partners import NOBODY, PartnersView
from protofed.deploy.site.plan_request import asked, broken, still_open, withheld
from protofed.deploy.site.privacy import PrivacyPlan, privacy_plan
from protofed.deploy.site.privacy import plain as plain_privacy
from protofed.deploy.site.server_view import ServerView, server_view
from protofed.server.method import RoundContext, ServerMethod, SummableServerMethod, refining, sent, server_methods
from protofed.server.rounds.context import round_context
from protofed.server.rounds.secure_aggregation.totals import lay_out

WORD_BYTES = np.dtype(np.uint64).itemsize  # of a number under masks


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor of an update.

    Attributes:
        optional: sent only for classes that the site has.
        refused_by: the policy's rule that keeps it; None: it may be sent, or no policy was given.
    """

    spec: TensorSpec
    optional: bool
    refused_by: str | None


@dataclass(frozen=True)
class SitePlan:
    """One site's part in a run.

    Attributes:
        outgoing: the largest possible update, tensor by tensor.
        masked: under secure aggregation, how many numbers of 8 bytes the masked vector has that is sent in its place;
            None: the update is sent as it is.
        incoming: the broadcast from round 2 on; that of round 1 may lack parts that sites make.
        scalars: names of the scores that the site offers, by the model and data that they are of.
        released: likewise, those that the policy releases by themselves; all without a policy.
        aggregated: likewise, those that it releases only within a secure aggregation; none in a run without.
        count_needed: the run weighs sites by their numbers of examples.
        count_leaves: whether the number of examples is sent; None without a policy.
        method_summary: the first line of the client algorithm's docstring, which names what the method keeps at a site.
        first_model: the reason why the policy would not let the site send the run's initial model; None: it would.
        rules: what the policy does to updates, and when, in sentences; none without a policy.
        refusals: reasons why the policy would refuse the run; empty if it would not, or without a policy.
        requests: everything that the server asks for, in words, by what it is about.
        limits: each limit of the policy beside what the run asks; none without a policy.
        withheld: sentences on limits for which the site would send random numbers instead of what it trains.
        still_open: sentences on limits that the run may break yet, because what decides them is not known here.
        server_view: what the server sees of an update, with secure aggregation and without.
        exchanges: what the method moves between single sites.
        privacy: what its noise is worth; None: it has none.
    """

    recipe: Recipe
    outgoing: tuple[OutgoingTensor, ...]
    masked: int | None
    incoming: tuple[TensorSpec, ...]
    scalars: NamesByModel
    released: NamesByModel
    aggregated: NamesByModel
    count_needed: bool
    count_leaves: bool | None
    method_summary: str
    first_model: str | None
    rules: tuple[str, ...]
    refusals: tuple[str, ...]
    requests: Mapping[str, str]
    limits: tuple[LimitCheck, ...]
    withheld: tuple[str, ...]
    still_open: tuple[str, ...]
    server_view: ServerView
    exchanges: frozenset[Exchange]
    privacy: PrivacyPlan | None = None

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that leave for an update: the least, of a site that has none of the classes, and the most."""
        if self.masked is not None:
            return (self.masked * WORD_BYTES,) * 2
        return sum(t.spec.nbytes for t in self.outgoing if not t.optional), sum(t.spec.nbytes for t in self.outgoing)

    @property
    def received_bytes(self) -> int:
        """Bytes of a broadcast."""
        return sum(spec.nbytes for spec in self.incoming)


def site_plan(
    recipe: Recipe,
    policy: Policy | None = None,
    *,
    digest: Digest | None = None,
    cohort: int | None = None,
    examples: int | None = None,
    contrast: float | None = None,
    spent: Spent | None = None,
    partners: PartnersView | None = None,
) -> SitePlan:
    """What a site would send, receive and keep, and what its policy allows.

    Args:
        digest: of the recipe's JSON as the server sent it; None: of the recipe as it is read here.
        cohort: sites that a round aggregates at least, as the server announced; None: not known.
        examples: of the site's training set; None: not known, and the limits that depend on it are left out.
        contrast: of the site's training images, as `Examples.contrast`; None: likewise.
        spent: of the site's privacy, before this run; None: not known.
        partners: of the site; None: not known, as of one that has confirmed none.

    Raises:
        ConfigError: the recipe names an unknown method, model or option, or one without secure aggregation. Or its
            method is not defined for its task. Or the recipe has noise, and its method does not say what a round
            costs, or its model has no gradients by example.
        PolicyViolationError: the model is a plug-in that the policy does not name, so its code must not run here.
    """
    name, options = recipe.method.name, recipe.method.options
    allowed = None if policy is None else policy.rules.plugins
    client, server = client_methods.build(name, options, allowed), server_methods.build(name, options, allowed)
    check_defined(name, client.declares.tasks, recipe.task.name)
    model, features = _first_model(recipe, policy)
    sites = recipe.federation.min_sites  # how many there will be is not known here
    first = server.init(model, round_context(recipe, 0, sites))
    expected = server.expects(first)
    layout = lay_out(server, first) if recipe.federation.secure and read_form(client, name) else None
    # Such updates are aggregated below: they say what the server half sends from round 2 on.
    weight = 1.0 if expected.weight else None
    update = Update("site", _update_of_ones(itertools.chain(expected.required, expected.optional)), weight=weight)
    scalars = offered_scores(recipe, global_model=server.global_model)
    refused_by = _refused_by(policy, recipe, client.declares.exchanges, update, layout)
    secure, noisy = recipe.federation.secure, recipe.plan.dp is not None
    offered, plugins = digest or recipe.fingerprint(), allowed or frozenset()
    if noisy:  # images are not asked, as at a site
        contrast = None
    facts = RunFacts(offered, client.sends, plugins, cohort, examples, contrast, client.declares.own_losses, features)
    privacy = privacy_plan(recipe, client, None if policy is None else policy.rules.dp, spent)
    judged = _Judged() if policy is None else _judged(policy, recipe, client, update, model, layout, facts, privacy)
    return SitePlan(
        recipe=recipe,
        outgoing=tuple(
            OutgoingTensor(spec, optional, refused_by.get(spec.part))
            for specs, optional in ((expected.required, False), (expected.optional, True))
            for spec in specs
        ),
        masked=None if layout is None else layout.size,
        incoming=describe(sent(server, _after(server, first, update, layout, round_context(recipe, 1, sites)), "site")),
        scalars=scalars,
        released=released_scores(scalars, policy, secure=secure, noisy=noisy),
        aggregated=aggregated_scores(
            scalars, policy, recipe.score_names(), secure=secure, noisy=noisy, mixes=client.declares.mixes_classes
        ),
        count_needed=expected.weight,
        count_leaves=judged.count_leaves,
        method_summary=(type(client).__doc__ or "").strip().splitlines()[0],
        first_model=judged.first_model,
        rules=judged.rules,
        refusals=judged.refusals,
        requests=asked(recipe, cohort, examples, model),
        limits=judged.limits,
        withheld=judged.withheld,
        still_open=judged.still_open,
        server_view=server_view(recipe, client, update.payload, _who_reads(recipe, policy, partners)),
        exchanges=client.declares.exchanges,
        privacy=privacy,
    )


def _who_reads(recipe: Recipe, policy: Policy | None, partners: PartnersView | None) -> str:
    least = max(recipe.federation.sum_group, 1 if policy is None else policy.rules.sum_group)
    required = None if policy is None else policy.rules.partners == "confirmed"
    return (partners or NOBODY).who_reads(least, required=required)


def plain(plan: SitePlan) -> dict[str, Any]:
    """The plan for `--json`."""
    least, most = plan.sent_bytes
    return {
        "recipe": plan.recipe.name,
        "method": plan.recipe.method.name,
        "model": plan.recipe.model.name,
        "leaves": [{**_plain(t.spec), "optional": t.optional, "refused": t.refused_by} for t in plan.outgoing],
        "comes": [_plain(spec) for spec in plan.incoming],
        "discloses": {part: part.discloses for part in dict.fromkeys(t.spec.part for t in plan.outgoing)},
        "bytes_per_round": {
            "sent_least": least,
            "sent_most": most,
            "masked": plan.masked is not None,
            "received": plan.received_bytes,
        },
        "scalars": plan.scalars,
        "released_scalars": plan.released,
        "aggregated_scalars": plan.aggregated,
        "scalars_disclose": {name: discloses(name) for names in plan.scalars.values() for name in names},
        "exchange": {exchange: exchange.discloses for exchange in sorted(plan.exchanges)},
        "example_count": {"needed": plan.count_needed, "leaves": plan.count_leaves},
        "first_model_refused": plan.first_model,
        "rules": plan.rules,
        "refusals": plan.refusals,
        "asked": dict(plan.requests),
        "privacy": plain_privacy(plan.privacy),
        "limits": [asdict(check) for check in plan.limits],
        "withheld": plan.withheld,
        "still_open": plan.still_open,
        "server_sees": {
            "secure": plan.server_view.secure,
            "parts": [{**asdict(part), "seen": plan.server_view.seen(part)} for part in plan.server_view.parts],
            "of_the_sum": plan.server_view.whole,
            "no_sums": plan.server_view.why_not,
        },
    }


@dataclass(frozen=True)
class _Judged:
    """What a policy says to a run, as `SitePlan` has it; without a policy nothing."""

    count_leaves: bool | None = None
    first_model: str | None = None
    rules: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    limits: tuple[LimitCheck, ...] = ()
    withheld: tuple[str, ...] = ()
    still_open: tuple[str, ...] = ()


def _judged(
    policy: Policy,
    recipe: Recipe,
    client: ClientMethod,
    update: Update,
    model: Payload,
    layout: SumLayout | None,
    facts: RunFacts,
    privacy: PrivacyPlan | None,
) -> _Judged:
    limits = checks(recipe, policy.rules.limits, facts)
    refusals = _refusals(policy, recipe, client, update, model[Part.HEAD], layout)
    secure, noisy, exchanges = layout is not None, privacy is not None, client.declares.exchanges
    return _Judged(
        count_leaves=policy.rules.example_count and not noisy,
        first_model=_first_model_refusal(policy, recipe, model),
        rules=sentences(policy.rules, update.payload.keys(), exchanges, secure=secure, noisy=noisy),
        refusals=(*refusals, *_no_budget(privacy), *broken(limits, secure=secure)),
        limits=limits,
        withheld=tuple(withheld(limits, secure=secure)),
        still_open=tuple(still_open(unchecked(facts, noisy=noisy))),
    )


def _after(
    server: ServerMethod, state: Payload, update: Update, layout: SumLayout | None, context: RoundContext
) -> Payload:
    """The state after a round in which each site sent such an update, as an evaluator refines it, if one does.

    With a layout, after one of the update's sum.
    """
    if layout is None:
        other_updates = (replace(update, site=f"{update.site}-{number}") for number in range(1, context.sites))
        new = server.aggregate(state, [update, *other_updates], context)
    else:
        new = cast("SummableServerMethod", server).from_sums(state, Sums(layout, layout.numbers(update)), context)
    if (half := refining(server)) is None:
        return new
    return half.refined(new, Update("", _update_of_ones(half.expects_refined(new).required)), context)


def _plain(spec: TensorSpec) -> dict[str, Any]:
    return {
        "tensor": spec.name,
        "part": spec.part.value,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "bytes": spec.nbytes,
    }


def _first_model(recipe: Recipe, policy: Policy | None) -> tuple[Payload, int | None]:
    """The built model, and how many features its body gives."""
    allowed = frozenset() if policy is None else policy.rules.plugins
    plugin = recipe.model.name not in set(architectures) and is_plugin(PluginKind.MODEL, recipe.model.name)
    if policy is not None and plugin and recipe.model.name not in allowed:
        raise PolicyViolationError(f"model '{recipe.model.name}' is not in this site's policy (plugins)")
    with torch.random.fork_rng(devices=[]):  # `build` draws weights: the caller's generator stays where it was
        model = build(recipe.model, recipe.input, recipe.classes, allowed)
    if recipe.plan.dp is not None:
        check_model(model, recipe.input, torch.device("cpu"))
    return {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)}, model.features


def _update_of_ones(specs: Iterable[TensorSpec]) -> Payload:
    """An update of the declared shapes; the gate refuses values that are not finite, so it has ones."""
    payload: dict[Part, dict[str, Any]] = {}
    for spec in specs:
        payload.setdefault(spec.part, {})[spec.name] = np.ones(spec.shape, spec.dtype)
    return payload


def _refused_by(
    policy: Policy | None,
    recipe: Recipe,
    exchanges: frozenset[Exchange],
    update: Update,
    layout: SumLayout | None,
) -> dict[Part, str]:
    """The rule that keeps each part at the site. If a task, a method or a size is not allowed, it keeps all parts."""
    method, classes = recipe.method.name, recipe.classes
    form = None if layout is None else layout.form
    aggregated = frozenset() if form is None else {form.shares}
    refusals = dict.fromkeys(NOT_ON_THE_WIRE - aggregated, "outside simulations")
    if policy is None:
        return refusals
    if recipe.task.name not in policy.rules.tasks:
        return dict.fromkeys(update.payload, "tasks")
    if method not in policy.rules.methods:
        return dict.fromkeys(update.payload, "methods")
    for part in update.payload:
        refusal = _refusal(partial(policy.admit, exchanges=exchanges), method, frozenset({part}), form)
        if refusal is None and part is Part.HEAD and form is None:
            refusal = _refusal(policy.admit_head, update.payload[part], classes)
        refusals = ({part: refusal.rule} if isinstance(refusal, PolicyRefusedError) else {}) | refusals
    if any(part in refusals for part in update.payload):
        return refusals
    refusal = _refusal(_gate(policy, layout), update, _all_classes(classes))
    return dict.fromkeys(update.payload, refusal.rule) if isinstance(refusal, PolicyRefusedError) else {}


def _first_model_refusal(policy: Policy, recipe: Recipe, model: Payload) -> str | None:
    return _violation(policy.release_public, Update("site", model), _all_classes(recipe.classes))


def _refusals(
    policy: Policy, recipe: Recipe, client: ClientMethod, update: Update, head: Tensors, layout: SumLayout | None
) -> tuple[str, ...]:
    """The gate's own messages, and one for a weight that the server needs and the policy withholds."""
    refusals = [_violation(policy.admit_task, recipe.task.name)]
    if layout is not None:
        refusals.append(_violation(policy.admit_group, recipe.federation.sum_group))
        refusals.append(_violation(policy.admit_rows, recipe.method))
    refusals.append(_violation(policy.admit_noise, recipe))
    if recipe.plan.dp is not None:
        refusals.append(_violation(check_rules, client, policy.rules))
    admit = partial(policy.admit, exchanges=client.declares.exchanges)
    admitted = _violation(admit, recipe.method.name, client.sends, None if layout is None else layout.form)
    refusals.append(admitted)
    if Part.HEAD in client.sends and admitted is None and layout is None:  # as the site prepares the run
        refusals.append(_violation(policy.admit_head, head, recipe.classes))
    refusals.append(_violation(_gate(policy, layout), update, _all_classes(recipe.classes)))
    if update.weight is not None and not policy.rules.example_count:
        refusals.append("the run weighs sites by their numbers of examples, which this site's policy withholds")
    return tuple(dict.fromkeys(reason for reason in refusals if reason is not None))


def _no_budget(privacy: PrivacyPlan | None) -> tuple[str, ...]:
    if privacy is None or privacy.budget is None or privacy.allowed != 0:
        return ()
    return (f"the budget of epsilon {privacy.budget.epsilon:g} has no room for a single round of this run (dp)",)


def _gate(policy: Policy, layout: SumLayout | None) -> Callable[[Update, GateContext], object]:
    """How an update is sent: as it is, or into a sum."""
    if layout is None:
        return policy.release
    return lambda update, context: policy.release_sum(update, layout, context)


def _violation(gate: Any, *arguments: Any) -> str | None:
    return None if (violation := _refusal(gate, *arguments)) is None else str(violation)


def _refusal(gate: Any, *arguments: Any) -> PolicyViolationError | None:
    try:
        gate(*arguments)
    except PolicyViolationError as violation:
        return violation
    return None


def _all_classes(classes: int) -> GateContext:
    """The gate's context at a site with enough examples of every class: its update is the largest that can leave."""
    return GateContext(np.full(classes, np.iinfo(np.int64).max))


LOSS = "after training"  # the rows of names: the models and data that a site's scores are of
OWN, OWN_LOCAL = "own model, shared test set", "own model, own test set"
GLOBAL_LOCAL, GLOBAL = "global model, own test set", "global model, by an evaluator"
_PREFIXES = {OWN: "personal", OWN_LOCAL: "personal.local", GLOBAL_LOCAL: "global.local", GLOBAL: "global"}

NamesByModel: TypeAlias = Mapping[str, tuple[str, ...]]  # by the model and data that they are of


def offered_scores(recipe: Recipe, *, global_model: bool) -> NamesByModel:
    """All that a site of a run offers."""
    names = recipe.score_names()
    models = [OWN, OWN_LOCAL, *([GLOBAL_LOCAL, GLOBAL] if global_model else [])]
    taken = [name for name in names.families if names.spelled(name)]
    of_model = {model: tuple(name for name in taken if _tested(name) == _PREFIXES[model]) for model in models}
    return {LOSS: ("loss",), **of_model}


def _tested(family: str) -> str:
    """The test set of a score, as `global.local`."""
    return max((test for test in TESTS if family.startswith(f"{test}.")), key=len)


def released_scores(offered: NamesByModel, policy: Policy | None, *, secure: bool, noisy: bool) -> NamesByModel:
    """Those of the offered ones that leave by themselves; all that may without a policy."""
    alone = {
        model: [name for name in names if not ((secure or noisy) and is_own(name))] for model, names in offered.items()
    }
    if policy is None:
        return {model: tuple(names) for model, names in alone.items()}
    return {model: tuple(policy.release_scores(dict.fromkeys(names, 0.0)).scores) for model, names in alone.items()}


def aggregated_scores(
    offered: NamesByModel, policy: Policy | None, names: ScoreNames, *, secure: bool, noisy: bool, mixes: bool
) -> NamesByModel:
    """Those of the offered ones that leave within a secure aggregation alone; none in a run without.

    Args:
        names: of the run.
        mixes: the own model is one that no sum has scores of, as `Declaration.mixes_classes`.
    """
    if not secure:
        return dict.fromkeys(offered, ())
    hidden = {OWN, OWN_LOCAL} if mixes else set()
    own = {
        model: [name for name in names if is_own(name) and not noisy and model not in hidden]
        for model, names in offered.items()
    }
    if policy is None:
        return {model: tuple(names) for model, names in own.items()}
    rows = list_scores(names)
    flags = policy.release_score_sum(dict.fromkeys(rows, 0.0), names).flags()
    leaving = set(map(score_family, itertools.compress(rows, flags)))
    return {model: tuple(name for name in offered_names if name in leaving) for model, offered_names in own.items()}


def sentences(
    rules: PolicyRules,
    parts: Collection[Part],
    exchanges: Collection[Exchange] = (),
    *,
    secure: bool = False,
    noisy: bool = False,
) -> tuple[str, ...]:
    """The rules that apply to an update with such parts, each with its key in the policy.

    Args:
        exchanges: what the method moves between single sites.
        secure: it is sent in a secure aggregation.
        noisy: the run has `[plan.dp]`.

    What depends on the site's data is stated as a condition, for a plan does not read the data.
    """
    return (
        *_sums(rules),
        f"Runs may learn {', '.join(sorted(rules.tasks)) or 'nothing'} (tasks).",
        *_noise(rules, noisy),
        *_exchange(rules, exchanges),
        *_classes(rules, parts, secure),
        *_tensors(rules, parts),
        *_order(rules, noisy),
        *_machine(rules),
        *_times(rules),
    )


def _sums(rules: PolicyRules) -> Iterator[str]:
    match rules.secure:
        case "required":
            yield "What is trained here, and the site's own scores, are sent only in a secure aggregation (secure)."
        case "allowed":
            yield "Updates and the named scores are sent with secure aggregation and without (secure)."


def _noise(rules: PolicyRules, noisy: bool) -> Iterator[str]:
    if (dp := rules.dp) is not None:
        yield (
            f"The site takes part only in runs with noise, until they together have spent epsilon {dp.epsilon:g} at "
            f"delta {dp.delta:g} for a {dp.unit} (dp)."
        )
    if noisy or dp is not None:
        yield "The loss, scores of the site's own and its number of examples stay: they have no noise (plan.dp)."


def _exchange(rules: PolicyRules, exchanges: Collection[Exchange]) -> Iterator[str]:
    for exchange in sorted(exchanges):
        allowed = "is allowed" if exchange in rules.exchange else "is not allowed"
        yield f"{exchange.discloses} It {allowed} (exchange)."


def _classes(rules: PolicyRules, parts: Collection[Part], secure: bool) -> Iterator[str]:
    few = f"fewer than {rules.min_samples_per_class} examples"
    if secure:
        if rules.min_samples_per_class > 1:
            yield f"A class with {few} here counts as absent in secure aggregation by class (min_samples_per_class)."
        return
    if rules.secure == "required":
        return  # `_sums` has said it
    if rules.hide_class_presence:
        yield (
            "What tells about classes, a prototype or a trained model, is sent only in a secure aggregation "
            "(hide_class_presence): the run needs federation.secure = true."
        )
        return
    if Part.PROTOTYPES in parts and rules.min_samples_per_class > 1:
        yield f"No prototype is sent for a class with {few} here (min_samples_per_class)."
    if Part.CLASS_PRESENCE in parts and rules.min_samples_per_class > 1:
        yield f"A class with {few} here is reported as absent (min_samples_per_class)."
    if BY_CLASS & set(parts):
        yield "Which classes the site has is not hidden (hide_class_presence)."
    if Part.CLASS_SHARES in parts:
        may = "may" if rules.class_distribution_estimate else "may not"
        yield f"An estimate of the class distribution {may} be sent (class_distribution_estimate)."


def _tensors(rules: PolicyRules, parts: Collection[Part]) -> Iterator[str]:
    if rules.min_images_per_unit > 1:
        few = f"fewer than {rules.min_images_per_unit} training images"
        yield f"Units of the model that {few} activate are sent as they were received (min_images_per_unit)."
    yield f"Only tensors of {' and '.join(sorted(rules.dtypes)) or 'no type'} are sent (dtypes)."
    tensor, update = f"{rules.max_tensor_mb:g} MB (max_tensor_mb)", f"{rules.max_update_mb:g} MB (max_update_mb)"
    yield f"No tensor of more than {tensor} and no update of more than {update} is sent."
    if not rules.example_count:
        # As BatchNorm's num_batches_tracked.
        yield "Step counters among weights are sent as zeros: they would tell the number of examples (example_count)."
    for part in sorted(TELLS_STEPS & set(parts)):
        may = "may be sent" if rules.example_count else "may not be sent, not even in a sum"
        yield f"Part {part} {may}: it tells roughly how many examples the site has (example_count)."


def _machine(rules: PolicyRules) -> Iterator[str]:
    if not rules.telemetry:
        yield "Heartbeats say nothing about the site's machine (telemetry)."
    for number in sorted(rules.telemetry):
        yield f"Heartbeats have {number} (telemetry). {number.discloses}"


def _order(rules: PolicyRules, noisy: bool) -> Iterator[str]:
    if noisy:
        yield "Samples of a step, and its noise, are drawn from a secret of the site's own, whatever batch_order says."
        return
    match rules.batch_order:
        case "secret":
            yield "Which examples make which step is drawn from a secret of the site's own (batch_order)."
        case "recipe":
            yield "Which examples make which step follows the recipe's seed, which the server knows (batch_order)."


def _times(rules: PolicyRules) -> Iterator[str]:
    match rules.approval:
        case "manual":
            yield "The site takes part once somebody has run `protofed client approve` for this recipe (approval)."
        case "automatic":
            yield "The site takes part without anybody's approval (approval)."
    times = "; ".join(map(str, rules.schedule))
    yield f"Tasks are taken {times}, UTC (schedule)." if times else "Tasks are taken at any time (schedule)."
