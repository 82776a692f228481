"""What the gate refuses and withholds, rule by rule; nothing of what it looks at is in what leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protofed.client.policy import update_checks
from protofed.client.policy.policy import Policy, Released
from protofed.client.policy.rules import PolicyRules
from protofed.client.policy.update_checks import GateContext, PolicyRefusedError
from protofed.common import codec
from protofed.common.payload import NOT_ON_THE_WIRE, Array, Part, Payload, Update, same_tensors

CLASSES, D = 6, 8
EXAMPLES = np.array([40, 3, 0, 12, 1, 0])
ONES = np.ones(3, np.float32)


def rules(**changes: Any) -> PolicyRules:
    lax = {"class_distribution_estimate": True, "min_samples_per_class": 1}
    table = {"methods": ["fednh"], "parts": set(Part) - NOT_ON_THE_WIRE, **lax}
    return PolicyRules.model_validate({**table, **changes})


def row(seed: int) -> Array:
    made = np.random.default_rng(seed).normal(size=D)
    return np.asarray(made / np.linalg.norm(made), np.float32)


MADE: Payload = {Part.BODY: {"w": ONES}, Part.PROTOTYPES: {str(c): row(100 + c) for c in range(CLASSES) if EXAMPLES[c]}}


KNOWN = GateContext(EXAMPLES)


def let(payload: Payload, context: GateContext | None = None, **changes: Any) -> Payload:
    update = Update("ann", payload, {"loss": 0.5}, 56.0)
    return codec.decode(Policy(rules(**changes)).release(update, context or KNOWN).data)


def refused(payload: Payload, context: GateContext | None = None, **changes: Any) -> PolicyRefusedError:
    with pytest.raises(PolicyRefusedError) as found:
        Policy(rules(**changes)).release(Update("ann", payload), context)
    return found.value


SHARES: Payload = {Part.CLASS_SHARES: {"p": ONES}}
HEAD: Payload = {Part.HEAD: {"bias": np.ones(CLASSES, np.float32), "scale": np.array(1, np.float32)}}
PRESENCE: Payload = {Part.CLASS_PRESENCE: {"p": ONES}}
GRADIENTS: Payload = {Part.CLASS_GRADIENTS: {str(c): np.full((CLASSES, D), c, np.float32) for c in range(CLASSES)}}
STEPS: Payload = {Part.STEPS: {"steps": np.array(30, np.float32)}}
CONTROL: Payload = {Part.CONTROL: {"body.w": ONES}}
LARGE: Payload = {Part.BODY: {"v": ONES, "w": np.ones(300, np.float32)}}


@pytest.mark.parametrize(
    ("payload", "changes", "rule", "tensor", "part"),
    [
        ({Part.HEAD: {"w": ONES}}, {"parts": ["body"]}, "parts", None, Part.HEAD),
        (SHARES, {"class_distribution_estimate": False}, "class_distribution_estimate", None, Part.CLASS_SHARES),
        (SHARES, {"hide_class_presence": True}, "hide_class_presence", None, Part.CLASS_SHARES),
        (PRESENCE, {"hide_class_presence": True}, "hide_class_presence", None, Part.CLASS_PRESENCE),
        ({Part.PROTOTYPES: {"0": ONES}}, {"hide_class_presence": True}, "hide_class_presence", None, Part.PROTOTYPES),
        (HEAD, {"hide_class_presence": True}, "hide_class_presence", "head/bias", Part.HEAD),
        (GRADIENTS, {"hide_class_presence": True}, "hide_class_presence", None, Part.CLASS_GRADIENTS),
        (CONTROL, {"hide_class_presence": True, "example_count": True}, "hide_class_presence", None, Part.CONTROL),
        (CONTROL, {}, "example_count", None, Part.CONTROL),
        ({Part.CHOICE: {"w": ONES}}, {"hide_class_presence": True}, "hide_class_presence", None, Part.CHOICE),
        (STEPS, {}, "example_count", None, Part.STEPS),
        ({Part.SITE_MODELS: {"w": ONES}}, {}, "parts", None, Part.SITE_MODELS),
        ({Part.CLASS_MODELS: {"w": ONES}}, {}, "parts", None, Part.CLASS_MODELS),
        ({Part.PRIVATE: {"w": ONES}}, {}, "parts", None, Part.PRIVATE),
        ({Part.BODY: {"w": ONES.astype(np.float64)}}, {}, "dtypes", "body/w", Part.BODY),
        ({Part.BODY: {"n": np.array(1)}}, {"dtypes": ["float32"]}, "dtypes", "body/n", Part.BODY),
        ({Part.BODY: {"w": ONES * np.float32(np.nan)}}, {}, "finite", "body/w", Part.BODY),
        (LARGE, {"max_tensor_mb": 0.001}, "max_tensor_mb", "body/w", Part.BODY),
        ({Part.BODY: {"v": ONES, "w": ONES}}, {"max_update_mb": 20e-6}, "max_update_mb", None, None),
    ],
)
def test_a_refusal_names_the_rule_the_tensor_and_the_part(
    payload: Payload, changes: dict[str, Any], rule: str, tensor: str | None, part: Part | None
) -> None:
    found = refused(payload, KNOWN, **changes)
    assert (found.rule, found.tensor, found.part) == (rule, tensor, part)
    assert rule in str(found)
    assert tensor is None or tensor in str(found)


@pytest.mark.parametrize("tells", [False, True])
def test_counters_of_steps_leave_only_with_the_number_of_examples(tells: bool) -> None:
    weights = {"w": ONES, "scale": np.array(2, np.float32), "order": np.array([2, 1, 0])}
    counters = {"bn.num_batches_tracked": np.array(70), "n": np.array([7]), "s.num_batches_tracked": np.array([7, 7])}
    payload: Payload = {Part.BODY: weights | counters, Part.HEAD: dict(counters)}
    zeros = {name: np.zeros_like(counter) for name, counter in counters.items()}
    left = let(payload, example_count=tells)
    assert same_tensors(left, payload if tells else {Part.BODY: weights | zeros, Part.HEAD: zeros})
    assert payload[Part.HEAD]["bn.num_batches_tracked"] == 70  # the site's own is as it was


def test_what_no_rule_speaks_of_leaves_as_it_is_and_so_do_scalars() -> None:
    payload = {**MADE, Part.CLASS_SHARES: {"p": ONES}, Part.CLASS_PRESENCE: {"present": np.ones(CLASSES, np.float32)}}
    assert same_tensors(let(payload), payload)
    assert Policy(rules()).release(Update("ann", payload)).manifest  # nor does the gate have to know anything
    scalars: Payload = {Part.HEAD: {"scale": np.array(1, np.float32)}}
    assert same_tensors(let(scalars, hide_class_presence=True), scalars)
    assert refused({**scalars, Part.BODY: {"w": ONES}}, KNOWN, hide_class_presence=True).part is Part.BODY


@pytest.mark.parametrize(
    ("least", "stay"), [(1, set()), (2, {"4"}), (3, {"4"}), (4, {"1", "4"}), (41, {"0", "1", "3", "4"})]
)
def test_a_prototype_of_too_few_examples_stays(least: int, stay: set[str]) -> None:
    left = let(MADE, min_samples_per_class=least).get(Part.PROTOTYPES, {})
    assert left.keys() == MADE[Part.PROTOTYPES].keys() - stay
    assert all(np.array_equal(left[c], MADE[Part.PROTOTYPES][c]) for c in left)


def test_of_classes_with_too_few_examples_neither_presence_nor_gradients_leave() -> None:
    flags = (EXAMPLES > 0).astype(np.float32)
    told = let({Part.CLASS_PRESENCE: {"present": flags}}, min_samples_per_class=4)[Part.CLASS_PRESENCE]["present"]
    assert told.tolist() == [1, 0, 0, 1, 0, 0]
    assert told.dtype == np.float32
    left = let(GRADIENTS, min_samples_per_class=4)[Part.CLASS_GRADIENTS]
    assert {name: float(rows[0, 0]) for name, rows in left.items()} == {"0": 0.0, "3": 3.0}
    assert let(GRADIENTS)[Part.CLASS_GRADIENTS].keys() == GRADIENTS[Part.CLASS_GRADIENTS].keys()
    assert refused({Part.CLASS_GRADIENTS: {"6": ONES}}, KNOWN, min_samples_per_class=4).rule == "min_samples_per_class"


def test_a_gate_that_was_not_told_what_it_has_to_know_lets_nothing_pass() -> None:
    presence = {Part.CLASS_PRESENCE: {"present": np.ones(CLASSES, np.float32)}}
    for payload in (MADE, presence):
        assert refused(payload, None, min_samples_per_class=2).rule == "min_samples_per_class"
    assert refused(HEAD, None, hide_class_presence=True).rule == "hide_class_presence"


@pytest.mark.parametrize(
    ("name", "tensor"), [("mean", np.ones((CLASSES, D), np.float32)), ("6", row(0)), ("0", ONES.reshape(1, 3))]
)
def test_a_tensor_that_is_no_classs_row_stays_where_classes_count(name: str, tensor: Array) -> None:
    payload = {Part.PROTOTYPES: {name: tensor}}
    assert same_tensors(let(payload), payload)
    assert refused(payload, KNOWN, min_samples_per_class=2).tensor == f"prototypes/{name}"
    assert "expected [6]" in str(refused({Part.CLASS_PRESENCE: {"p": ONES}}, KNOWN, min_samples_per_class=2))


def test_steps_and_control_variates_leave_where_the_number_of_examples_may() -> None:
    """Beside a model that moved by J of them: J is then known."""
    for payload in (STEPS, CONTROL):
        assert same_tensors(let(payload, example_count=True), payload)


def reachable(root: object) -> list[object]:
    """All that can be got at from there, types and modules aside."""
    found, seen = [root], {id(root)}
    for one in found:
        for next_ in gc.get_referents(one):
            if id(next_) not in seen and not isinstance(next_, type) and not callable(next_):
                seen.add(id(next_))
                found.append(next_)
    return found


def test_nothing_that_the_gate_looked_at_can_be_got_at_from_what_it_released() -> None:
    context = KNOWN
    released = Policy(rules(min_samples_per_class=2)).release(Update("ann", MADE, {"loss": 0.5}, 56.0), context)
    got = reachable(released)
    assert released.data in got
    assert set(Released.__dataclass_fields__) == {"manifest", "data", "metrics", "weight", "_gate"}
    for secret in (context, context.examples):
        assert not any(one is secret for one in got)
    assert context.examples.tobytes() not in released.data
    for text in (repr(context), repr(released)):
        assert "40" not in text


@pytest.mark.parametrize("one", update_checks.CHECKS)
def test_every_check_lets_an_empty_update_pass(one: Callable[..., None]) -> None:
    one(rules(methods=[], parts=[]), {}, None)
