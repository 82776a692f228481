"""A run against the policy's `[limits]`: pure checks, each with what is asked and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from protofed.client.policy.rules import Limits
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.common.codec import Digest
from protofed.common.config.recipe import LocalLoss, Plan, Recipe
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.config.transforms import is_allowed
from protofed.common.errors import count, short
from protofed.common.payload import Part

# Of a larger momentum the sum below would be a difference of nearly equal numbers; it only grows with it.
MAX_MOMENTUM = 0.99
# Rules whose text follows from the site's own images.
BY_IMAGES = frozenset({"limits.min_contrast", "limits.steps", "limits.min_step_sum"})
LABELLED = frozenset({Part.HEAD, Part.PROTOTYPES})  # parts whose movement tells labels


@dataclass(frozen=True)
class RunFacts:
    """What a site knows of a run beside its recipe.

    Attributes:
        digest: of the recipe's JSON as the server sent it.
        sends: the parts that the method's updates may have.
        plugins: code that the policy names: a model among it needs no place in `models`.
        cohort: sites that a round aggregates at least, as the server announces; None: not known yet, not checked.
        examples: of the site's training set; None: not loaded yet, or none: what depends on them is not checked.
        contrast: of the site's training images, as `Examples.contrast`; None: likewise.
        own_losses: what the method trains by beside the plan's loss, as its `Declaration` says.
        features: that the model's body gives of an image; None: the model is not built yet, not checked.
    """

    digest: Digest
    sends: frozenset[Part]
    plugins: frozenset[str] = frozenset()
    cohort: int | None = None
    examples: int | None = None
    contrast: float | None = None
    own_losses: frozenset[LocalLoss] = frozenset()
    features: int | None = None


@dataclass(frozen=True)
class LimitCheck:
    """One limit and one run.

    Attributes:
        key: of `[limits]`.
        asked: what the recipe says, or what follows from it at this site.
        allowed: what the policy allows.
        holds: whether the run keeps the limit.
    """

    key: str
    asked: str
    allowed: str
    holds: bool

    @property
    def rule(self) -> str:
        """The policy's key, as errors and the audit log name it."""
        return f"limits.{self.key}"


def admit(recipe: Recipe, limits: Limits, facts: RunFacts) -> None:
    """Check a run before anything is trained for it.

    Raises:
        PolicyRefusedError: naming the first rule that it breaks. The text may follow from the site's number of
            examples: it must not be sent.
    """
    for check in checks(recipe, limits, facts):
        if not check.holds:
            text = f"{check.asked}: this site's policy allows {check.allowed} ({check.rule})"
            raise PolicyRefusedError(check.rule, text)


def checks(recipe: Recipe, limits: Limits, facts: RunFacts) -> tuple[LimitCheck, ...]:
    """Every limit that can be checked by these facts, in the order of the policy's keys."""
    return (
        *_model(recipe.model, limits, facts.plugins),
        *_transforms(recipe.transforms, limits, facts.plugins),
        *_features(recipe.classes, limits, facts),
        *_input(recipe.input, limits),
        *_contrast(limits, facts),
        *_plan(recipe, limits),
        *_own_losses(recipe, limits, facts),
        *_robust(recipe, limits, facts),
        *_movement(recipe, limits, facts),
        *_method(recipe, limits),
        *_server(limits, facts),
    )


def unchecked(facts: RunFacts, *, noisy: bool = False) -> tuple[str, ...]:
    """Rules that `checks` leaves out, because these facts do not say enough; in the order of the policy's keys.

    Args:
        noisy: the run has `[plan.dp]`, and images are not asked.
    """
    by_count = ("limits.steps", "limits.min_step_sum") if facts.sends & LABELLED else ("limits.steps",)
    needed = (
        (facts.features, ("limits.min_features_per_class",)),
        (facts.contrast, ("limits.min_contrast",) if facts.sends and not noisy else ()),
        (facts.examples, by_count if facts.sends else ()),
        (facts.cohort, ("limits.min_cohort",)),
    )
    return tuple(rule for fact, rules in needed if fact is None for rule in rules)


def step_sum(plan: Plan, steps: int, rate: float) -> float:
    """How far one fit of `steps` optimizer steps of learning rate `rate` moves along a constant gradient of norm 1.

    Without momentum this is the sum of the learning rates; with it, step t moves by (1 - m^t) / (1 - m) rates.
    """
    m = min(plan.momentum, MAX_MOMENTUM) if plan.optimizer == "sgd" else 0.0
    return rate * (steps - m * (1 - m**steps) / (1 - m)) / (1 - m)


def _model(model: NamedOptions, limits: Limits, plugins: frozenset[str]) -> Iterator[LimitCheck]:
    allowed = ", ".join(sorted(limits.models)) or "none"
    yield LimitCheck("models", f"model '{model.name}'", allowed, model.name in limits.models | plugins)
    name, value = max(_numbers(model.options), key=lambda pair: abs(pair[1]), default=("", 0.0))
    requested = f"model.{name} = {value:g}" if name else "a model without options"
    yield LimitCheck("max_width", requested, f"at most {limits.max_width}", abs(value) <= limits.max_width)


def _transforms(names: tuple[str, ...], limits: Limits, plugins: frozenset[str]) -> Iterator[LimitCheck]:
    allowed = ", ".join(sorted(limits.transforms)) or "none"
    for name in dict.fromkeys(names):
        holds = name in plugins or is_allowed(name, limits.transforms)
        yield LimitCheck("transforms", f"transform '{name}'", allowed, holds)


def _features(classes: int, limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    if facts.features is not None:
        least = limits.min_features_per_class
        requested = f"a model of {facts.features} features for {classes} classes"
        allowed = f"at least {least:g} for each class"
        yield LimitCheck("min_features_per_class", requested, allowed, facts.features >= least * classes)


def _input(images: Input, limits: Limits) -> Iterator[LimitCheck]:
    least, most = limits.sides
    sides = images.shape[1:]
    holds = least <= min(sides) and max(sides) <= most
    yield LimitCheck("sides", f"images of {sides[0]}x{sides[1]} pixels", f"sides from {least} to {most}", holds)
    requested = f"input.std = {list(images.std)}, input.mean = {list(images.mean)}"
    if not limits.min_std:
        yield LimitCheck("min_std", requested, "any", True)
        return
    holds = (
        limits.min_std <= min(images.std) and max(images.std) <= 1 and 0 <= min(images.mean) <= max(images.mean) <= 1
    )
    yield LimitCheck("min_std", requested, f"std from {limits.min_std:g} to 1 and mean from 0 to 1", holds)


def _contrast(limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    if facts.contrast is not None and facts.sends:  # of what sends nothing, nothing can be learnt
        requested = f"an input with a typical difference of {facts.contrast:.3g} between two training images here"
        holds = facts.contrast >= limits.min_contrast
        yield LimitCheck("min_contrast", requested, f"at least {limits.min_contrast:g}", holds)


def _plan(recipe: Recipe, limits: Limits) -> Iterator[LimitCheck]:
    plan, (least, most) = recipe.plan, limits.batches
    holds = least <= plan.batch_size <= most
    yield LimitCheck("batches", f"plan.batch_size = {plan.batch_size}", f"{least} to {most}", holds)
    for key, name, chosen, allowed in (
        ("losses", "plan.loss", plan.loss, limits.losses),
        ("samplings", "plan.sampling", plan.sampling, limits.samplings),
    ):
        yield LimitCheck(key, f"{name} = '{chosen}'", ", ".join(sorted(allowed)) or "none", chosen in allowed)
    for key, name, value, limit in (
        ("epochs", "plan.epochs", plan.epochs, limits.epochs),
        ("lr", "plan.lr", plan.lr, limits.lr),
        ("weight_decay", "plan.weight_decay", plan.weight_decay, limits.weight_decay),
        ("rounds", "rounds", recipe.rounds, limits.rounds),
    ):
        yield LimitCheck(key, f"{name} = {value:g}", f"at most {limit:g}", value <= limit)
    norm = plan.max_grad_norm
    requested = "plan.max_grad_norm is not set" if norm is None else f"plan.max_grad_norm = {norm:g}"
    holds = norm is None or norm >= limits.min_grad_norm
    yield LimitCheck("min_grad_norm", requested, f"at least {limits.min_grad_norm:g}, or none", holds)


def _own_losses(recipe: Recipe, limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    """The losses that a method has whatever the plan says: an update by them tells as much as by the plan's."""
    allowed = ", ".join(sorted(limits.losses)) or "none"
    for loss in sorted(facts.own_losses):
        requested = f"method '{recipe.method.name}', which trains by '{loss}' whatever plan.loss says"
        yield LimitCheck("losses", requested, allowed, loss in limits.losses)


def _robust(recipe: Recipe, limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    """By what rule updates are aggregated; a secure aggregation has none, and what sends none needs none."""
    rule = recipe.federation.robust
    allowed = ", ".join(sorted(limits.robust)) or "none of them"
    yield LimitCheck("robust", f"federation.robust = '{rule}'", allowed, rule in limits.robust or not facts.sends)


def _movement(recipe: Recipe, limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    if facts.examples is None or not facts.sends:
        return
    plan = recipe.plan
    steps = plan.steps_per_epoch(facts.examples)
    requested = (
        f"{count(steps, 'optimizer step')} an epoch with this site's examples and plan.batch_size = {plan.batch_size}"
    )
    if plan.dp is not None:  # of public numbers: a refusal by the site's own would tell of them
        steps = plan.dp.steps(1)
        requested = f"{steps} steps an epoch at plan.dp.sampling_rate = {plan.dp.sampling_rate:g}"
    yield LimitCheck("steps", requested, f"at least {limits.steps}", steps >= limits.steps)
    if not facts.sends & LABELLED:
        return
    moved = step_sum(plan, steps * plan.epochs, plan.lowest_rate(recipe.rounds))
    requested = (
        f"learning rates that add up to {moved:.3g} over {steps * plan.epochs} steps of a fit here, in the round "
        "with the lowest rate"
    )
    yield LimitCheck("min_step_sum", requested, f"at least {limits.min_step_sum:g}", moved >= limits.min_step_sum)


def _method(recipe: Recipe, limits: Limits) -> Iterator[LimitCheck]:
    # A tiny temperature is a huge factor: of a number and its inverse, the larger one counts.
    sizes = [(max(abs(value), 1 / abs(value)), name, value) for name, value in _numbers(recipe.method.options) if value]
    size, name, value = max(sizes, default=(0.0, "", 0.0))
    requested = f"method.{name} = {value:g}" if name else "a method without options"
    most = limits.max_method_number
    yield LimitCheck("max_method_number", requested, f"{1 / most:g} to {most:g}, or 0", size <= most)


def _server(limits: Limits, facts: RunFacts) -> Iterator[LimitCheck]:
    if facts.cohort is not None:
        requested, allowed = f"rounds of {facts.cohort} sites or more", f"at least {limits.min_cohort}"
        yield LimitCheck("min_cohort", requested, allowed, facts.cohort >= limits.min_cohort)
    allowed = ", ".join(short(pinned) for pinned in sorted(limits.recipes)) or "any recipe"
    holds = not limits.recipes or facts.digest in limits.recipes
    yield LimitCheck("recipes", f"a recipe with digest {short(facts.digest)}", allowed, holds)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in options, lists and tables within them included, by the option's name; flags are none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, name or str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
