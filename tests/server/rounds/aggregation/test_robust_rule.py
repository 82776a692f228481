"""Robust rules in a run: what the method aggregates, who is rejected, what is refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.server.conftest import TRAINERS, Fragile, Lab, recipe
from tests.support.aggregate_digests import METHODS, first_model, made_up
from tests.support.round_contexts import round_context

from protofed.common import codec
from protofed.common.errors import ConfigError
from protofed.common.payload import Array, Part, Payload, Update, describe
from protofed.common.protocol.messages import Manifest, Role, Verdict
from protofed.server.method import sent, server_methods
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.aggregation.robust_rule import (
    CLIPPED,
    KEPT_ROW,
    RobustRule,
    check_robust,
    kept_classes,
    needed,
)
from protofed.server.rounds.context import build_method
from protofed.server.rounds.intake.intake import examined
from protofed.server.rounds.machine import phases
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RejectionCode

if TYPE_CHECKING:
    from tests.server.conftest import MakeLab

OFF = {"outlier_factor": None, "max_relative_norm": 1e9}  # the other screen of norms
FIVE = {"ann": 1.0, "bob": 1.5, "cyd": 1.75, "dan": 2.0, "eve": -30.0}
KRUM = {"robust": "krum", "min_sites": 5, "quorum": 5, **OFF}


def robust(rule: str, **federation: Any) -> dict[str, Any]:
    return {"federation": {"robust": rule, "quorum": 3, **OFF, **federation}}


# By hand


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("none", 104.0 / 3),
        ("clip", 10.0 / 3),  # the median norm is that of 3; of 100, what is twice as long is left
        ("median", 3.0),
        ("trimmed", 3.0),
        ("geometric-median", 3.0),
    ],
)
def test_what_becomes_of_one_huge_update(make: MakeLab, rule: str, value: float) -> None:
    lab = make(**robust(rule)).begin()
    lab.round(ann=1.0, bob=100.0, cyd=3.0)
    assert lab.value == pytest.approx(value, abs=1e-3)
    assert [row.rejected for row in lab.ledger.updates("test", 1)] == [None] * 3
    assert lab.ledger.rounds("test")[1].statistics == ({CLIPPED: 1.0} if rule == "clip" else {})


def test_a_median_counts_no_examples(make: MakeLab) -> None:
    lab = make(method={"name": "fedavg", "weighting": "examples"}, **robust("median")).begin()
    for site, value, weight in (("ann", 1.0, 100.0), ("bob", 2.0, 100.0), ("cyd", 8.0, 400.0)):
        lab.push(site, lab.model(value), weight=weight)
    assert lab.value == 2.0


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed", "geometric-median"])
def test_row_74_updates_in_any_order_give_the_same_bytes(make: MakeLab, rule: str) -> None:
    values = {"ann": 1.3, "bob": 7.7, "cyd": 3.1}
    labs = []
    for order in (TRAINERS, TRAINERS[::-1]):
        lab = make(**robust(rule)).begin()
        lab.round(**{site: values[site] for site in order})
        labs.append(lab)
    assert labs[0].address == labs[1].address


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed", "geometric-median", "krum"])
def test_what_a_rule_published_is_verified(make: MakeLab, tmp_path: Path, rule: str) -> None:
    lab = five(make(blobs=FolderBlobs(tmp_path), keep_rounds=9, **robust(rule, min_sites=5, quorum=5)))
    lab.round(**FIVE)
    row = lab.ledger.rounds("test")[1]
    assert verify_round(lab.ledger, lab.blobs, "test", 1, 1).finding is VerificationResult.SAME
    assert row.state == lab.address


# Krum


def five(lab: Lab) -> Lab:
    """Round 1 is open, for five sites."""
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.enroll(*FIVE)
    lab.later(0)
    lab.first_models()
    return lab


def test_krum_sets_the_farthest_aside_and_nobody_where_nobody_stands_out(make: MakeLab) -> None:
    with pytest.raises(ConfigError, match=r"federation\.robust"):
        make(federation={"robust": "krum"})
    lab = five(make(federation={**KRUM, "required_sites": ["eve"]}))  # it counts for the quorum and as a required site
    lab.round(**FIVE)
    assert lab.value == 1.5625
    (aside,) = (row for row in lab.ledger.updates("test", 1) if row.rejected is not None)
    assert (aside.task.site, aside.code) == ("eve", RejectionCode.ROBUST)
    (task,) = (task for task in lab.ledger.tasks("test", 1) if task.task_status == "rejected")
    assert (task.site, task.reason) == ("eve", aside.rejected)
    assert (lab.ledger.rounds("test")[1].complete, lab.ledger.rounds("test")[1].abandoned) == (False, None)
    lab = five(make(federation=KRUM))
    lab.round(**{**FIVE, "eve": 2.25})
    assert lab.value == np.float32(1.7)
    assert lab.ledger.rounds("test")[1].complete is True


def test_with_fewer_updates_than_krum_needs_the_attempt_is_abandoned(make: MakeLab, tmp_path: Path) -> None:
    lab = five(make(blobs=FolderBlobs(tmp_path), federation=KRUM))
    for site, value in list(FIVE.items())[:4]:
        lab.push(site, lab.model(value))
    path = tmp_path / lab.ledger.updates("test", 1)[0].digest
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    lab.push("eve", lab.model(2.0))
    assert lab.value == 0.0
    assert isinstance(lab.phase, phases.Idle)


@pytest.mark.parametrize("durably", [False, True], ids=["before", "after"])
def test_row_71_a_server_killed_at_any_write_of_a_round_leaves_out_the_same_sites(
    make: MakeLab, fragile: Fragile, durably: bool
) -> None:
    """Two of seven are left out: a server that has recorded one of them dies, and the next one finds the other."""
    seven = {**FIVE, "fay": 1.25, "gus": -31.0}
    rules = {**KRUM, "max_bad_sites": 2, "min_sites": 7, "quorum": 7}

    def opened(lab: Lab) -> Lab:
        lab.enroll(*seven)
        lab.later(0)
        lab.first_models()
        for site, value in list(seven.items())[:-1]:
            lab.push(site, lab.model(value))
        return lab

    reference = opened(make(federation=rules))
    reference.push("gus", reference.model(seven["gus"]))
    assert {row.task.site for row in reference.ledger.updates("test", 1) if row.rejected} == {"eve", "gus"}
    lab = opened(make(ledger=fragile, federation=rules))
    left: list[tuple[Ledger, Any]] = []
    fragile.durably, fragile.watched = durably, lambda: left.append((fragile.copy(), lab.blobs))
    lab.push("gus", lab.model(seven["gus"]))
    fragile.watched = lambda: None
    assert len(left) >= 4
    for ledger, blobs in left:
        again = make(ledger=ledger, blobs=blobs, federation=rules)
        again.enroll(*seven)
        again.later(0)
        if again.asked("gus") is not None and isinstance(again.phase, phases.Collecting):
            assert again.push("gus", again.model(seven["gus"])).verdict is Verdict.ACCEPTED
        assert again.address == reference.address
        assert {row.task.site for row in ledger.updates("test", 1) if row.rejected} == {"eve", "gus"}


# Rows of classes, and other parts


def vector(*values: float) -> Array:
    return np.array(values, np.float32)


def of_site(site: str, body: float, rows: dict[str, Array]) -> Update:
    return Update(site, {Part.BODY: {"w": vector(body)}, Part.PROTOTYPES: rows})


STATE: Payload = {
    Part.BODY: {"w": vector(0.0)},
    Part.HEAD: {"weight": np.zeros((3, 2), np.float32)},
    Part.PROTOTYPES: {"0": vector(9.0, 9.0), "1": vector(9.0, 9.0)},
}


def next_of(method: str, rule: str, updates: list[Update], bad: int = 1) -> tuple[Payload, dict[str, float]]:
    half = server_methods.build(method, {"prototype_momentum": 0.0} if method == "fedprp" else {})
    asked = recipe(method={"name": method}, federation={"robust": rule})
    ruled = RobustRule.of(asked, half)
    assert ruled is not None
    made = ruled.made(STATE, updates, [None] * len(updates))
    return half.aggregate(STATE, made.updates, round_context()), dict(made.statistics)


def test_a_class_of_three_contributors_gets_the_row_in_the_middle_and_one_of_two_keeps_its_own() -> None:
    east, west = vector(1.0, 0.0), vector(-5.0, 0.0)
    updates = [
        of_site("ann", 1.0, {"0": east, "1": east}),
        of_site("bob", 2.0, {"0": east, "1": west}),
        of_site("cyd", 3.0, {"0": west}),
    ]
    state, statistics = next_of("fedprp", "median", updates)
    assert np.allclose(state[Part.PROTOTYPES]["0"], east, atol=1e-4)
    assert state[Part.PROTOTYPES]["1"].tolist() == [9.0, 9.0]
    assert statistics == {f"{KEPT_ROW}1": 2.0}
    assert kept_classes(statistics) == [1]
    assert state[Part.BODY]["w"].tolist() == [2.0]


def test_clipping_bounds_the_length_of_a_row_and_not_its_direction() -> None:
    updates = [
        of_site("ann", 1.0, {"0": vector(1.0, 0.0)}),
        of_site("bob", 1.0, {"0": vector(1.0, 0.0)}),
        of_site("cyd", 1.0, {"0": vector(0.0, -60.0)}),
    ]
    state, statistics = next_of("fedprp", "clip", updates)
    assert np.allclose(state[Part.PROTOTYPES]["0"], vector(2 / 3, -2 / 3))
    assert statistics == {CLIPPED: 0.0}


def test_a_number_of_steps_is_bounded_as_the_move_that_it_multiplies() -> None:
    def update(site: str, steps: float) -> Update:
        model: Payload = {Part.BODY: {"w": vector(1.0)}, Part.HEAD: {"weight": np.zeros((3, 2), np.float32)}}
        return Update(site, {**model, Part.STEPS: {"steps": np.array(steps, np.float32)}})

    state, _ = next_of("fednova", "clip", [update("ann", 3.0), update("bob", 3.0), update("cyd", 1e6)])
    assert state[Part.BODY]["w"].tolist() == [4.0]  # a mean step of 1, (3 + 3 + 6) / 3 times
    state, _ = next_of("fednova", "clip", [update("ann", 3.0), update("bob", 3.0), update("cyd", -1e6)])
    assert state[Part.BODY]["w"].tolist() == [2.0]


def test_a_move_is_taken_from_where_its_site_began() -> None:
    """IFCA's sites begin with the model that they chose, far from the first one."""
    half = server_methods.build("ifca", {"clusters": 2})
    other = {path: np.full((1, *array.shape), 100.0, np.float32) for path, array in PATHS.items()}
    state: Payload = {**{part: STATE[part] for part in (Part.BODY, Part.HEAD)}, Part.SITE_MODELS: other}

    def update(site: str, chosen: int, by: float) -> Update:
        start = 100.0 * chosen
        model: Payload = {
            Part.BODY: {"w": vector(start + by)},
            Part.HEAD: {"weight": np.full((3, 2), start, np.float32)},
            Part.CHOICE: {"one-hot": np.eye(2, dtype=np.float32)[chosen]},
        }
        return Update(site, model)

    rule = RobustRule("clip", 1, half)
    updates = [update("ann", 0, 1.0), update("bob", 1, 1.0), update("cyd", 1, -60.0)]
    new = half.aggregate(state, rule.made(state, updates, [None] * 3).updates, round_context())
    assert new[Part.BODY]["w"].tolist() == [1.0]
    assert new[Part.SITE_MODELS]["body.w"].tolist() == [[99.5]]


PATHS = {"body.w": vector(0.0), "head.weight": np.zeros((3, 2), np.float32)}

# Every method

EIGHT = tuple(f"site-{number}" for number in range(8))


def state_and_updates(method: str) -> tuple[Payload, list[Update]]:
    half = server_methods.build(method, {})
    state = half.init(first_model(5, 6), round_context(5))
    expected = half.expects(state)
    return state, [Update(site, made_up(site, expected), {}, 10.0) for site in EIGHT]


@pytest.mark.parametrize("name", ["clip", "median", "trimmed", "krum", "geometric-median"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_gets_updates_of_the_form_that_it_expects(method: str, name: Any) -> None:
    asked = recipe(method={"name": method}, federation={"robust": name, "min_sites": 8, "quorum": 8})
    half, (state, updates) = build_method(asked), state_and_updates(method)
    try:
        check_robust(asked, half)
    except ConfigError:
        return
    rule = RobustRule.of(asked, half)
    assert rule is not None
    rejected = rule.rejected(state, updates) if rule.chooses else {}
    kept = [update for update in updates if update.site not in rejected]
    made = list(rule.made(state, kept, [None] * len(kept)).updates)
    expected = half.expects(state)
    for update in made:
        specs = set(describe(update.payload))
        assert set(expected.required) <= specs <= {*expected.required, *expected.optional}
    new = half.aggregate(state, made, round_context(5))
    assert codec.first_not_finite(new) is None


@pytest.mark.parametrize("method", METHODS)
def test_the_norm_in_the_ledger_clips_as_one_that_is_taken_anew(method: str) -> None:
    state, updates = state_and_updates(method)
    rule = RobustRule("clip", 1, server_methods.build(method, {}))
    norms = [examined_norm(rule, state, update) for update in updates]
    lengths = [rule._length(state, update, norm) for update, norm in zip(updates, norms, strict=True)]
    assert lengths == pytest.approx([rule._length(state, update, None) for update in updates])


def examined_norm(rule: RobustRule, state: Payload, update: Update) -> float:
    """As the intake takes it."""
    data = codec.encode(update.payload)
    manifest = Manifest(describe(update.payload), len(data), codec.digest(data))
    start = getattr(rule.method, "start", None)
    base = start(state, update.site, update.payload) if start else sent(rule.method, state, update.site)
    found = examined(data, manifest, base, 1e9)
    assert isinstance(found, float)
    return found


# What is refused


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        ({"name": "fednh"}, []),
        ({"name": "fedproto"}, ["krum"]),  # it sends no model
        ({"name": "fednh", "prototypes": "similarity"}, ["geometric-median", "median", "trimmed"]),
        ({"name": "cwfedavg"}, ["geometric-median", "median", "trimmed"]),
        ({"name": "ifca"}, ["geometric-median", "median", "trimmed"]),
        ({"name": "fedic"}, ["geometric-median", "median", "trimmed"]),
    ],
    ids=str,
)
def test_a_rule_without_a_meaning_for_the_method_is_refused(method: dict[str, Any], refused: list[str]) -> None:
    found = set()
    for rule in ("none", "clip", "median", "trimmed", "krum", "geometric-median"):
        asked = recipe(method=method, federation={"robust": rule, "min_sites": 5, "quorum": 5})
        try:
            check_robust(asked, build_method(asked))
        except ConfigError:
            found.add(rule)
    assert sorted(found) == refused


@pytest.mark.parametrize(
    ("rule", "bad", "least"),
    [("clip", 1, 1), ("median", 1, 3), ("geometric-median", 1, 3), ("trimmed", 2, 5), ("krum", 1, 5), ("krum", 3, 9)],
)
def test_a_rule_that_may_get_too_few_updates_is_refused(rule: Any, bad: int, least: int) -> None:
    assert needed(rule, bad) == least
    table = {"robust": rule, "min_sites": least, **({} if bad == 1 else {"max_bad_sites": bad})}
    enough = recipe(federation={**table, "quorum": least})
    check_robust(enough, build_method(enough))
    if least > 1:
        few = recipe(federation={**table, "quorum": least - 1})
        with pytest.raises(ConfigError, match=f"needs {least} updates"):
            check_robust(few, build_method(few))


@pytest.mark.parametrize(
    ("federation", "key"),
    [
        ({"secure": True, "robust": "clip", "quorum": 3}, "robust"),
        ({"robust": "median", "max_bad_sites": 2}, "max_bad_sites"),
        ({"max_bad_sites": 2}, "max_bad_sites"),
        ({"robust": "average"}, "robust"),
        ({"robust": "krum", "max_bad_sites": 0}, "max_bad_sites"),
    ],
)
def test_what_a_recipe_cannot_say_together(federation: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        recipe(federation=federation)
