"""The policy's rules on updates, one pure function each: they refuse an update, or withhold parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from protofed.client.policy.rules import PolicyRules
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import FROM_THE_SERVER, Array, Part, Payload, Tensors, dtype_name

# Parts with one row or number a class: which of them are there, or how large they are, tells which classes a site has.
BY_CLASS = frozenset(
    {
        *(Part.PROTOTYPES, Part.CLASS_PRESENCE, Part.CLASS_SHARES, Part.CLASS_MODELS, Part.LABEL_DISTRIBUTION),
        Part.CLASS_GRADIENTS,
    }
)
# Parts of a tensor a class, of which a class with too few examples has none.
ROWS = frozenset({Part.PROTOTYPES, Part.CLASS_GRADIENTS})
# Parts that tell of classes without a row for each, and how.
_TELLING = {
    Part.BODY: "was trained to tell classes apart",
    Part.CONTROL: "is a gradient of what tells classes apart",
    Part.CHOICE: "says which model suits this site's classes",
}
# Of control variates with the model beside them: it has moved by their mean step, times the number of steps.
TELLS_STEPS = frozenset({Part.STEPS, Part.CONTROL})
SECURE_RUN = "ask for a run with federation.secure = true"
_ONLY_IN_A_SUM = (
    "which tells this site's classes. The site sends it only in a secure aggregation (hide_class_presence): "
    f"{SECURE_RUN}. Or set hide_class_presence = false, if the server may know the classes"
)


class PolicyRefusedError(PolicyViolationError):
    """The policy refuses an update or a run.

    Args:
        rule: the policy's key.
        text: what is refused and why; names the rule.
        tensor: `part/name`, if a single tensor is refused.
        part: the part that is refused, if there is one; taken from `tensor` if that is given.
    """

    def __init__(self, rule: str, text: str, tensor: str | None = None, part: Part | None = None) -> None:
        super().__init__(text)
        self.rule, self.tensor = rule, tensor
        self.part = Part(tensor.partition("/")[0]) if tensor else part


@dataclass(frozen=True)
class GateContext:
    """Facts about the site that the rules need; they never leave it, nor appear in a `repr`.

    Attributes:
        examples: number of training examples by class, [C] int64.
        noisy: the run has `[plan.dp]`: what has no noise, a loss, a score or a count, stays.
    """

    examples: Array = field(repr=False)
    noisy: bool = False


Check = Callable[[PolicyRules, Payload, GateContext | None], None]
Withhold = Callable[[PolicyRules, Payload, GateContext | None], Payload]


def check(rules: PolicyRules, payload: Payload, context: GateContext | None) -> None:
    """Run all `CHECKS` on an update as the method made it.

    Raises:
        PolicyRefusedError: naming the rule.
    """
    for check_rule in CHECKS:
        check_rule(rules, payload, context)


def withhold(rules: PolicyRules, payload: Payload, context: GateContext | None) -> Payload:
    """Run all of `WITHHOLDING` on an update that passed `check`; returns what may leave.

    Raises:
        PolicyRefusedError: a rule needs the context, and there is none; or a part has not the shape that it needs.
    """
    for withhold_from in WITHHOLDING:
        payload = withhold_from(rules, payload, context)
    return payload


def check_parts(rules: PolicyRules, payload: Payload, _: GateContext | None) -> None:
    """Rule `parts`: it names every part of the update."""
    for part in sorted(payload):
        if part not in rules.parts:
            raise PolicyRefusedError("parts", f"part '{part}' is not in this site's policy (parts)", part=part)


def check_class_revealing(rules: PolicyRules, payload: Payload, _: GateContext | None) -> None:
    """Rules `class_distribution_estimate`, `example_count`, `hide_class_presence`, on parts that they refuse whole."""
    for part in sorted(payload):
        if (refusal := refusal_of_part(rules, part)) is not None:
            raise PolicyRefusedError(*refusal, part=part)


def refusal_of_part(rules: PolicyRules, part: Part) -> tuple[str, str] | None:
    """The rule that refuses a part although `parts` names it, and the reason; None: no rule does."""
    if part is Part.CLASS_SHARES and not rules.class_distribution_estimate:
        reason = "is an estimate of the class distribution, which this site's policy does not release"
        return "class_distribution_estimate", f"part '{part}' {reason} (class_distribution_estimate)"
    if part in FROM_THE_SERVER:
        return "parts", f"part '{part}' comes from the server: no site sends it (parts)"
    if part in TELLS_STEPS and not rules.example_count:
        reason = "tells roughly how many examples this site has, which its policy does not release"
        return "example_count", f"part '{part}' {reason} (example_count)"
    if rules.hide_class_presence and part in BY_CLASS:
        return "hide_class_presence", f"part '{part}' has a row for each class, {_ONLY_IN_A_SUM}"
    if rules.hide_class_presence and part in _TELLING:
        return "hide_class_presence", f"part '{part}' {_TELLING[part]}, {_ONLY_IN_A_SUM}"
    return None


def check_head(rules: PolicyRules, payload: Payload, context: GateContext | None) -> None:
    """Rule `hide_class_presence` on the head: no tensor of it has a row a class."""
    if Part.HEAD in payload and rules.hide_class_presence:
        check_head_rows(rules, payload[Part.HEAD], len(_require(context, "hide_class_presence").examples))


def check_head_rows(rules: PolicyRules, head: Tensors, classes: int) -> None:
    """Rule `hide_class_presence` on the tensors of a head, whether trained yet or not.

    Training moves the rows and biases of the classes that a site has, in proportion to their shares.

    Args:
        classes: C, of the run; a tensor with a dimension of that size counts as one with class rows.
    """
    if not rules.hide_class_presence:
        return
    for name in sorted(head):
        if classes in head[name].shape:
            path = f"{Part.HEAD}/{name}"
            text = f"{path} {list(head[name].shape)} has a row for each class, {_ONLY_IN_A_SUM}"
            raise PolicyRefusedError("hide_class_presence", text, path)


def check_dtypes(rules: PolicyRules, payload: Payload, _: GateContext | None) -> None:
    """Rule `dtypes`: it names the dtype of every tensor."""
    for part, name, tensor in _tensors(payload):
        if dtype_name(tensor.dtype) not in rules.dtypes:
            path, allowed = f"{part}/{name}", ", ".join(sorted(rules.dtypes)) or "none"
            raise PolicyRefusedError(
                "dtypes", f"{path} is {tensor.dtype.name}; this site's policy releases {allowed} (dtypes)", path
            )


def check_finite(_: PolicyRules, payload: Payload, __: GateContext | None) -> None:
    """Not a key of the policy: an update with NaN or infinities never leaves."""
    for part, name, tensor in _tensors(payload):
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            path = f"{part}/{name}"
            raise PolicyRefusedError("finite", f"{path} has values that are not finite; nothing was sent", path)


def check_tensor_sizes(rules: PolicyRules, payload: Payload) -> None:
    """Rule `max_tensor_mb`, in units of 10^6 bytes."""
    for part, name, tensor in _tensors(payload):
        if tensor.nbytes > rules.max_tensor_mb * 1e6:
            path, size, most = (
                f"{part}/{name}",
                f"{tensor.nbytes / 1e6:.1f} MB",
                f"max_tensor_mb = {rules.max_tensor_mb:g}",
            )
            raise PolicyRefusedError("max_tensor_mb", f"{path} of {size} is above this site's {most}", path)


def check_size(rules: PolicyRules, nbytes: int) -> None:
    """Rule `max_update_mb`, in units of 10^6 bytes, on the encoded update of `nbytes`."""
    if nbytes > rules.max_update_mb * 1e6:
        size, most = f"{nbytes / 1e6:.1f} MB", f"max_update_mb = {rules.max_update_mb:g}"
        raise PolicyRefusedError("max_update_mb", f"an update of {size} is above this site's {most}")


def withhold_class_numbers(rules: PolicyRules, payload: Payload, context: GateContext | None) -> Payload:
    """Rule `min_samples_per_class` on presence and true shares, [C]: 0 for classes with fewer examples."""
    parts = payload.keys() & {Part.CLASS_PRESENCE, Part.LABEL_DISTRIBUTION}
    if not parts or rules.min_samples_per_class == 1:
        return payload
    present = _present(rules, _require(context, "min_samples_per_class"))
    remaining = {
        part: {
            name: np.where(present, numbers, np.zeros_like(numbers))
            for name, numbers in payload[part].items()
            if _has_class_shape(part, numbers, present)
        }
        for part in sorted(parts)
    }
    return {**payload, **remaining}


def withhold_rows(rules: PolicyRules, payload: Payload, context: GateContext | None) -> Payload:
    """Rule `min_samples_per_class` on what has a tensor a class: those of classes with fewer examples stay."""
    parts = sorted(ROWS & payload.keys())
    if not parts or rules.min_samples_per_class == 1:
        return payload
    present = _present(rules, _require(context, "min_samples_per_class"))
    remaining: dict[Part, Tensors] = {}
    for part in parts:
        rows = _rows(part, payload[part], len(present))
        remaining[part] = {str(c): rows[c] for c in sorted(rows) if present[c]}
    return {**payload, **remaining}


def withhold_counters(rules: PolicyRules, payload: Payload, _: GateContext | None) -> Payload:
    """Rule `example_count`: zero all step counters, which with epochs and batch size give the number of examples."""
    if rules.example_count:
        return payload
    return {
        part: {name: np.zeros_like(array) if _may_be_counter(name, array) else array for name, array in tensors.items()}
        for part, tensors in payload.items()
    }


def _may_be_counter(name: str, array: Array) -> bool:
    # Any single integer, whatever its name; BatchNorm's counters have more than one element in stacked models.
    return array.dtype.kind != "f" and (array.size == 1 or name.endswith("num_batches_tracked"))


def _rows(part: Part, tensors: Tensors, classes: int) -> dict[int, Array]:
    """Tensors by class, of prototypes rows [D]. Any other tensor is refused: the rules cannot say what it reveals."""
    for name, tensor in tensors.items():
        of_class = name.isdecimal() and int(name) < classes
        if not of_class or (part is Part.PROTOTYPES and tensor.ndim != 1):
            path, expected = f"{part}/{name}", f"one row for each class from 0 to {classes - 1}"
            raise PolicyRefusedError(
                "min_samples_per_class", f"{path} is {list(tensor.shape)}: expected {expected}", path
            )
    return {int(name): row for name, row in tensors.items()}


def _has_class_shape(part: Part, numbers: Array, present: Array) -> bool:
    """True, or PolicyRefusedError."""
    if numbers.shape != present.shape:
        shapes = f"{list(numbers.shape)}: expected {list(present.shape)}, one number for each class"
        raise PolicyRefusedError("min_samples_per_class", f"{part} is {shapes}", part)
    return True


def _present(rules: PolicyRules, context: GateContext) -> Array:
    """[C] bool: which classes have enough examples to be shown."""
    return np.asarray(context.examples >= rules.min_samples_per_class)


def _require(context: GateContext | None, rule: str) -> GateContext:
    if context is None:
        raise PolicyRefusedError(rule, f"the gate does not know the site's classes, so it releases no class ({rule})")
    return context


def _tensors(payload: Payload) -> Iterator[tuple[Part, str, Array]]:
    """Part, name and tensor, in a fixed order, so that the same update is always refused for the same tensor."""
    for part in sorted(payload):
        for name in sorted(payload[part]):
            yield part, name, payload[part][name]


CHECKS: tuple[Check, ...] = (check_parts, check_class_revealing, check_head, check_dtypes, check_finite)
WITHHOLDING: tuple[Withhold, ...] = (withhold_class_numbers, withhold_rows, withhold_counters)
