"""What the gate does with an update, rule by rule: pure functions that refuse, withhold or disguise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from protofed.client.privacy.decoys import by_class, decoys
from protofed.client.privacy.rules import PolicyRules
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import Array, Part, Payload, Tensors

LOOKED_AT = frozenset({Part.PROTOTYPES})  # of what was received
# Say which classes a site has, and nothing else.
TELLING = frozenset({Part.CLASS_PRESENCE, Part.CLASS_SHARES, Part.LABEL_DISTRIBUTION})


class PolicyRefusedError(PolicyViolationError):
    """An update that may not leave.

    Args:
        rule: the key of the policy.
        what: what it refuses, and why.
        tensor: which one, `part/name`, if it is one.
        part: which one, if it is about one: the tensor's, or as given.
    """

    def __init__(self, rule: str, what: str, tensor: str | None = None, part: Part | None = None) -> None:
        super().__init__(what)
        self.rule, self.tensor = rule, tensor
        self.part = Part(tensor.partition("/")[0]) if tensor else part


@dataclass(frozen=True)
class GateContext:
    """What the gate looks at and never sends.

    Attributes:
        examples: how many the site trains on, by class, [C] int64.
        received: what the fit started from, as far as it is `LOOKED_AT`.
        secret: of this run alone, from what only the site knows; decoys are drawn from it.
    """

    examples: Array = field(repr=False)
    received: Payload = field(repr=False)
    secret: bytes = field(repr=False)


Check = Callable[[PolicyRules, Payload], None]
Disguise = Callable[[PolicyRules, Payload, GateContext | None], Payload]


def check(rules: PolicyRules, payload: Payload) -> None:
    """All that can be said of an update before it is disguised.

    Raises:
        Refusal: naming the rule.
    """
    for one in CHECKS:
        one(rules, payload)


def disguise(rules: PolicyRules, payload: Payload, background: GateContext | None) -> Payload:
    """What leaves of an update that passed `check`.

    Raises:
        Refusal: the gate has not been told what it has to know for that.
    """
    for one in DISGUISES:
        payload = one(rules, payload, background)
    return payload


def check_parts(rules: PolicyRules, payload: Payload) -> None:
    """`parts` names every part."""
    for part in sorted(payload):
        if part not in rules.parts:
            raise PolicyRefusedError("parts", f"part '{part}' is not in this site's policy (parts)", part=part)


def check_telling(rules: PolicyRules, payload: Payload) -> None:
    """Nothing that is about classes alone is beside the rules that are about classes."""
    for part in sorted(payload):
        if (why := untold(rules, part)) is not None:
            raise PolicyRefusedError(*why, part=part)


def untold(rules: PolicyRules, part: Part) -> tuple[str, str] | None:
    """The rule by which a part that `parts` names stays all the same, and why."""
    if part is Part.CLASS_SHARES and not rules.class_distribution_estimate:
        why = "is an estimate of the class distribution, which this site's policy does not let out"
        return "class_distribution_estimate", f"part '{part}' {why} (class_distribution_estimate)"
    if part in TELLING and rules.hide_class_presence:
        why = "says which classes the site has, and nothing else: there is no way to send it and to hide them"
        return "hide_class_presence", f"part '{part}' {why} (hide_class_presence)"
    return None


def check_dtypes(rules: PolicyRules, payload: Payload) -> None:
    """`dtypes` names every tensor's."""
    for path, tensor in _tensors(payload):
        if tensor.dtype.name not in rules.dtypes:
            allowed = ", ".join(sorted(rules.dtypes)) or "none"
            raise PolicyRefusedError(
                "dtypes", f"{path} is {tensor.dtype.name}; this site's policy lets out {allowed} (dtypes)", path
            )


def check_finite(_: PolicyRules, payload: Payload) -> None:
    """Every number is one."""
    for path, tensor in _tensors(payload):
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise PolicyRefusedError("finite", f"{path} has values that are not finite; nothing was sent", path)


def check_tensor_sizes(rules: PolicyRules, payload: Payload) -> None:
    """No tensor is above `max_tensor_mb`."""
    for path, tensor in _tensors(payload):
        if tensor.nbytes > rules.max_tensor_mb * 1e6:
            size, most = f"{tensor.nbytes / 1e6:.1f} MB", f"max_tensor_mb = {rules.max_tensor_mb:g}"
            raise PolicyRefusedError("max_tensor_mb", f"{path} of {size} is above this site's {most}", path)


def check_size(rules: PolicyRules, nbytes: int) -> None:
    """All together is not above `max_update_mb`."""
    if nbytes > rules.max_update_mb * 1e6:
        size, most = f"{nbytes / 1e6:.1f} MB", f"max_update_mb = {rules.max_update_mb:g}"
        raise PolicyRefusedError("max_update_mb", f"an update of {size} is above this site's {most}")


def disguise_presence(rules: PolicyRules, payload: Payload, background: GateContext | None) -> Payload:
    """A class with too few examples is one that the site does not have."""
    if Part.CLASS_PRESENCE not in payload or rules.min_samples_per_class == 1:
        return payload
    there = _present(rules, _known(background, "min_samples_per_class"))
    return {
        **payload,
        Part.CLASS_PRESENCE: {
            name: np.where(there, flags, np.zeros_like(flags))
            for name, flags in payload[Part.CLASS_PRESENCE].items()
            if _is_of_classes(flags, there)
        },
    }


def disguise_prototypes(rules: PolicyRules, payload: Payload, background: GateContext | None) -> Payload:
    """Prototypes of classes with too few examples stay; where classes are hidden, all that are not there get decoys."""
    prototypes = payload.get(Part.PROTOTYPES)
    if prototypes is None or (rules.min_samples_per_class == 1 and not rules.hide_class_presence):
        return payload
    known = _known(background, "hide_class_presence" if rules.hide_class_presence else "min_samples_per_class")
    there = _present(rules, known)
    made = _rows(prototypes, len(there))
    own = {c: row for c, row in made.items() if there[c]}
    if rules.hide_class_presence:
        own |= _decoys(own, made, there, known)
    return {**payload, Part.PROTOTYPES: {str(c): own[c] for c in sorted(own)}}


def disguise_counters(rules: PolicyRules, payload: Payload, _: GateContext | None) -> Payload:
    """Counters of steps are zeros: with the epochs and the batch size they tell the number of examples."""
    if rules.example_count:
        return payload
    return {
        part: {name: np.zeros_like(array) if _counts(name, array) else array for name, array in tensors.items()}
        for part, tensors in payload.items()
    }


def _counts(name: str, array: Array) -> bool:
    """Any single whole number may be a counter, whatever its name; BatchNorm's, in stacked models, are several."""
    return array.dtype.kind != "f" and (array.size == 1 or name.endswith("num_batches_tracked"))


def _decoys(own: dict[int, Array], made: dict[int, Array], there: Array, known: GateContext) -> dict[int, Array]:
    shapes = {row.shape for row in made.values()}
    received = {
        c: row
        for c, row in by_class(known.received.get(Part.PROTOTYPES, {})).items()
        if c < len(there) and row.shape in (shapes or {row.shape}) and np.isfinite(row).all()
    }
    if not own and not received:
        why = "no class has examples enough for a prototype, and none was received to make decoys of"
        raise PolicyRefusedError("hide_class_presence", f"{why} (hide_class_presence, min_samples_per_class)")
    if not known.secret:
        raise PolicyRefusedError("hide_class_presence", "decoys need a secret of the site's own (hide_class_presence)")
    return decoys(own, sorted(set(range(len(there))) - own.keys()), received, known.secret)


def _rows(prototypes: Tensors, classes: int) -> dict[int, Array]:
    """By class; a tensor that is no class's row could tell anything."""
    for name, tensor in prototypes.items():
        if not name.isdecimal() or int(name) >= classes or tensor.ndim != 1:
            path, expected = f"{Part.PROTOTYPES}/{name}", f"one row for each class from 0 to {classes - 1}"
            raise PolicyRefusedError(
                "min_samples_per_class", f"{path} is {list(tensor.shape)}: expected {expected}", path
            )
    return {int(name): row for name, row in prototypes.items()}


def _is_of_classes(flags: Array, there: Array) -> bool:
    if flags.shape != there.shape:
        path, shapes = f"{Part.CLASS_PRESENCE}", f"{list(flags.shape)}: expected {list(there.shape)}, a flag a class"
        raise PolicyRefusedError("min_samples_per_class", f"{path} is {shapes}", path)
    return True


def _present(rules: PolicyRules, known: GateContext) -> Array:
    return np.asarray(known.examples >= rules.min_samples_per_class)


def _known(background: GateContext | None, rule: str) -> GateContext:
    if background is None:
        raise PolicyRefusedError(
            rule, f"the gate was not told what the site has, so that it lets no class pass ({rule})"
        )
    return background


def _tensors(payload: Payload) -> Iterator[tuple[str, Array]]:
    for part in sorted(payload):
        for name in sorted(payload[part]):
            yield f"{part}/{name}", payload[part][name]


CHECKS: tuple[Check, ...] = (check_parts, check_telling, check_dtypes, check_finite)
DISGUISES: tuple[Disguise, ...] = (disguise_presence, disguise_prototypes, disguise_counters)
