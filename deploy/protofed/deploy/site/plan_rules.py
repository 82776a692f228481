"""A policy's rules in sentences: what they do to a run's updates, for whoever answers for the site's data."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from protofed.client.policy.rules import PolicyRules
from protofed.client.policy.update_checks import BY_CLASS, TELLS_STEPS
from protofed.common.payload import Exchange, Part


def sentences(
    rules: PolicyRules,
    parts: Collection[Part],
    exchanges: Collection[Exchange] = (),
    *,
    secure: bool = False,
    noisy: bool = False,
) -> tuple[str, ...]:
    """The rules that apply to an update of these parts, each with its key in the policy.

    Args:
        exchanges: what the method moves between single sites.
        secure: it leaves in a secure sum.
        noisy: the run has `[plan.dp]`.

    What depends on the site's data is stated as a condition, for a plan does not read the data.
    """
    return (
        *_sums(rules),
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
            yield "Whatever is trained or scored here leaves only in a secure sum (secure)."
        case "allowed":
            yield "Updates and the scores named leave with secure sums and without (secure)."


def _noise(rules: PolicyRules, noisy: bool) -> Iterator[str]:
    if (dp := rules.dp) is not None:
        yield (
            f"Only runs with noise are taken part in, until all of them have spent epsilon {dp.epsilon:g} at delta "
            f"{dp.delta:g} on one {dp.unit} (dp)."
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
            yield f"A class with {few} here counts as absent in what is summed by class (min_samples_per_class)."
        return
    if rules.secure == "required":
        return  # `_sums` has said it
    if rules.hide_class_presence:
        yield (
            "Nothing that tells of classes leaves, neither a prototype nor a trained model, before a run offers a "
            "secure sum (hide_class_presence): federation.secure = true."
        )
        return
    if Part.PROTOTYPES in parts and rules.min_samples_per_class > 1:
        yield f"No prototype leaves of a class with {few} here (min_samples_per_class)."
    if Part.CLASS_PRESENCE in parts and rules.min_samples_per_class > 1:
        yield f"A class with {few} here is reported as absent (min_samples_per_class)."
    if BY_CLASS & set(parts):
        yield "Which classes the site has is not hidden (hide_class_presence)."
    if Part.CLASS_SHARES in parts:
        may = "may" if rules.class_distribution_estimate else "may not"
        yield f"An estimate of the class distribution {may} leave (class_distribution_estimate)."


def _tensors(rules: PolicyRules, parts: Collection[Part]) -> Iterator[str]:
    if rules.min_images_per_unit > 1:
        few = f"fewer than {rules.min_images_per_unit} training images"
        yield f"Units of the model that {few} activate leave as they were received (min_images_per_unit)."
    yield f"Only tensors of {' and '.join(sorted(rules.dtypes)) or 'no type'} leave (dtypes)."
    tensor, update = f"{rules.max_tensor_mb:g} MB (max_tensor_mb)", f"{rules.max_update_mb:g} MB (max_update_mb)"
    yield f"No tensor of more than {tensor} and no update of more than {update} leaves."
    if not rules.example_count:
        # As BatchNorm's num_batches_tracked.
        yield "Counters of steps among weights leave as zeros: they would tell the number of examples (example_count)."
    for part in sorted(TELLS_STEPS & set(parts)):
        may = "may leave" if rules.example_count else "may not leave, in a sum either"
        yield f"Part {part} {may}: it tells about how many examples the site has (example_count)."


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
