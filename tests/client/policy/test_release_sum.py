"""What the policy lets into a secure aggregation, and what it lets leave in no other way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.score_names import score_names

from protofed.client.policy.policy import GateContext, Policy, PolicyRefusedError, ReleasedVector
from protofed.client.policy.rules import PolicyRules
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import Part, Payload, Update, describe
from protofed.common.secure_aggregation.linear_form import POINT, ClassRows, SumForm, SumLayout
from protofed.common.secure_aggregation.messages import SignatureMessage, pack
from protofed.common.secure_aggregation.score_sums import list_scores

FORM = SumForm((Part.BODY,), rows=ClassRows(Part.PROTOTYPES, (Part.PROTOTYPES, "mean")))
SENT: Payload = {Part.BODY: {"w": np.zeros(2, np.float32)}, Part.PROTOTYPES: {"mean": np.zeros((3, 2), np.float32)}}
ROW = np.array([1.0, 2.0], dtype=np.float32)
UPDATE = Update(
    "ann", {Part.BODY: {"w": ROW}, Part.PROTOTYPES: {"0": ROW, "2": ROW}}, {"loss": 1.0, "global.accuracy": 0.5}, 7.0
)
LAYOUT = SumLayout.of(FORM, describe(UPDATE.payload), SENT)
CONTEXT = GateContext(np.array([20, 0, 3]))


def policy(**table: Any) -> Policy:
    rules = {"methods": ["fednh"], "parts": ["body", "prototypes"], "metrics": ["loss", "global.accuracy"], **table}
    return Policy(PolicyRules.model_validate(rules))


@pytest.mark.parametrize("rule", [{}, {"secure": "required"}, {"hide_class_presence": True}])
def test_rows_leave_in_a_sum_but_those_of_too_few_examples(rule: dict[str, Any]) -> None:
    gate = policy(min_samples_per_class=10, **rule)
    gate.admit("fednh", frozenset({Part.BODY, Part.PROTOTYPES}), FORM, exchanges=frozenset())
    released = gate.release_sum(UPDATE, LAYOUT, CONTEXT)
    assert released.flags().tolist() == [1, 0, 0]  # of class 2 it has three examples
    numbers = POINT.decoded(released.words(POINT, np.array([False, True, True])))
    assert not LAYOUT.named(numbers)["rows"].any()
    assert LAYOUT.named(numbers)["mean/body/w"].tolist() == [1.0, 2.0]
    assert "20" not in repr(released)


def test_true_shares_leave_in_a_sum_but_those_of_too_few_examples() -> None:
    form = SumForm(mixtures=(Part.BODY,), shares=Part.LABEL_DISTRIBUTION)
    shares = np.array([0.75, 0.0, 0.25], dtype=np.float32)
    update = Update("ann", {Part.BODY: {"w": ROW}, Part.LABEL_DISTRIBUTION: {"shares": shares}})
    layout = SumLayout.of(form, describe(update.payload), {})
    released = policy(min_samples_per_class=10).release_sum(update, layout, CONTEXT)
    assert released.flags().tolist() == [1, 0, 0]  # of class 2 it has three examples
    sums = layout.named(POINT.decoded(released.words(POINT, np.ones(3, dtype=bool))))
    assert sums["mass"].tolist() == [0.75, 0.0, 0.0]
    assert sums["mixture/body/w"].tolist() == [[0.75, 1.5], [0.0, 0.0], [0.0, 0.0]]


def test_other_rules_hold_in_a_sum_and_only_the_gate_makes_a_vector() -> None:
    for gate, update, rule in (
        (policy(parts=["body"]), UPDATE, "parts"),
        (policy(max_update_mb=1e-6), UPDATE, "max_update_mb"),
        (policy(), Update("ann", {**UPDATE.payload, Part.BODY: {"w": ROW * np.inf}}, {}, None), "finite"),
    ):
        with pytest.raises(PolicyRefusedError) as caught:
            gate.release_sum(update, LAYOUT, CONTEXT)
        assert caught.value.rule == rule
    with pytest.raises(PolicyViolationError):
        ReleasedVector(LAYOUT, UPDATE)
    message = pack(SignatureMessage(b""), np.zeros(2, np.uint64))
    assert policy().release_step(message).metrics == {}
    for wrong in (UPDATE.payload, {**message, **UPDATE.payload}, {Part.SECURE_AGGREGATION: {"vector": ROW}}):
        with pytest.raises(PolicyRefusedError):
            policy().release_step(wrong)


@pytest.mark.parametrize("rule", [{"secure": "required"}, {"hide_class_presence": True}])
def test_what_leaves_only_in_a_sum_leaves_in_no_other_way(rule: dict[str, Any]) -> None:
    gate = policy(**rule, min_samples_per_class=1)
    body = Update("ann", {Part.BODY: {"w": ROW}}, UPDATE.metrics, None)  # tells of classes, too: see `make leakage`
    for update in (UPDATE, body):
        with pytest.raises(PolicyRefusedError, match="secure aggregation"):
            gate.release(update, CONTEXT)
        with pytest.raises(PolicyRefusedError, match="secure aggregation"):
            gate.admit("fednh", frozenset(update.payload), exchanges=frozenset())
        assert policy(min_samples_per_class=1).release(update, CONTEXT).data
    own = set() if "secure" in rule else {"loss"}
    assert gate.release_scores(UPDATE.metrics).scores.keys() == {"global.accuracy"} | own
    first = Update("ann", {Part.BODY: SENT[Part.BODY]}, {}, None)
    assert gate.release_public(first).data


def test_a_site_that_trains_alone_sends_nothing_that_a_sum_would_hide() -> None:
    """Of its numbers the policy's `metrics` decide, and its own scores leave in sums alone."""
    alone = Update("ann", {}, UPDATE.metrics, None)
    gate = policy(secure="required")
    gate.admit("fednh", frozenset(), exchanges=frozenset())
    assert gate.release(alone, CONTEXT).metrics == {"global.accuracy": 0.5}
    assert policy().release(alone, CONTEXT).metrics == {"global.accuracy": 0.5, "loss": 1.0}


def test_the_first_model_has_learnt_nothing_and_leaves_whatever_hides_classes() -> None:
    rules = {"methods": ["fednh"], "parts": ["body", "head"], "secure": "required", "hide_class_presence": True}
    gate = Policy(PolicyRules.model_validate(rules))
    first = Update("ann", {Part.HEAD: {"weight": np.ones((10, 4), np.float32)}})
    context = GateContext(np.full(10, 100))
    assert gate.release_public(first, context).manifest.tensors[0].shape == (10, 4)
    with pytest.raises(PolicyRefusedError):
        gate.release(first, context)


SCORES = score_names(2)
NAMES = list_scores(SCORES)
OWN = {"loss": 1.0, "personal.accuracy": 0.5, "personal.recall.1": 0.25, "global.accuracy": 0.75}


@pytest.mark.parametrize("secure", ["allowed", "required"])
@pytest.mark.parametrize(
    ("table", "leaving"),
    [
        ({"metrics": []}, []),
        ({"metrics": ["loss", "global.accuracy"]}, ["loss"]),  # what may leave alone may leave in a sum
        ({"metrics": [], "aggregated_metrics": ["personal.accuracy"]}, ["personal.accuracy"]),
        ({"metrics": [], "aggregated_metrics": ["personal.recall", "personal.pm_v"]}, ["personal.recall.1"]),
    ],
)
def test_own_scores_leave_in_a_sum_if_they_are_named(secure: str, table: dict[str, Any], leaving: list[str]) -> None:
    released = policy(secure=secure, **table).release_score_sum(OWN, SCORES)
    assert [NAMES[row] for row in np.flatnonzero(released.flags())] == leaving
    words = released.words(POINT, None)
    held = [NAMES[row] for row in np.flatnonzero(released.layout.named(words)["contributors"])]
    assert held == leaving
    assert policy(metrics=[], aggregated_metrics=["loss"]).release_scores({"loss": 1.0}).scores == {}
