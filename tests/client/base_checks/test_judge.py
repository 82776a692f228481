"""A site trains and scores only with models that its own build, and what it saw before, allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from tests.support.scripted_server import RULES, RUN, AgentHarness, site_data, work

from protofed.client.agent.agent import Agent
from protofed.client.base_checks import statistics as base_checks
from protofed.client.data.examples import Examples
from protofed.client.models.catalogue import first_model
from protofed.client.models.split import led_by_controls, site_models
from protofed.client.policy.policy import PolicyRefusedError
from protofed.client.state.disk_store import DiskStore
from protofed.common.config.recipe import Recipe
from protofed.common.errors import CodecError, FailureReason, PolicyViolationError
from protofed.common.payload import Array, Part, Payload
from protofed.common.protocol.messages import Role, Task

CHECKED = {**RULES, "limits": {**RULES["limits"], "check_base": True, "max_base_change": 1.0}}
SEEDS_OWN = first_model(Recipe.model_validate(RUN), frozenset())


def scaled(by: float, model: Payload = SEEDS_OWN) -> Payload:
    """Every weight of the body times a number: it moves by `by - 1` of its norm."""
    return {**model, Part.BODY: {name: (array * by).astype(array.dtype) for name, array in model[Part.BODY].items()}}


def harness(**options: Any) -> AgentHarness:
    return AgentHarness(rules=dict(CHECKED), **options)


def declined_by_policy(site: AgentHarness, *tasks: Task) -> bool:
    return site.declined() == [(task.task_id, FailureReason.POLICY) for task in tasks]


def test_a_chosen_first_model_is_refused_by_the_policy_with_layer_check_and_digest() -> None:
    site = harness()
    chosen = site.fit(1, scaled(1.1))
    refused: list[tuple[Task, PolicyViolationError]] = []
    daemon = site.agent()
    daemon._work.tools.on_refusal = lambda task, violation: refused.append((task, violation))
    with structlog.testing.capture_logs() as logs:
        work(daemon, 1)
    assert site.link.pushed == []
    assert declined_by_policy(site, chosen)
    ((task, violation),) = refused
    assert task == chosen
    assert isinstance(violation, PolicyRefusedError)
    assert (violation.rule, violation.part) == ("limits.check_base", Part.BODY)
    assert str(chosen.base_digest) in str(violation)
    assert any("first-model" in str(entry.get("why")) and "body/" in str(entry.get("why")) for entry in logs)
    assert site.store.last_base("run") is None  # what was refused is no measure for the next one


def test_round_one_starts_from_what_the_site_builds_itself_unless_the_policy_leaves_the_check_out() -> None:
    for rules, model in ((CHECKED, SEEDS_OWN), (RULES, scaled(1.1))):
        site = AgentHarness(rules=dict(rules))
        site.fit(1, model)
        work(site.agent(), 1)
        assert len(site.link.pushed) == 1


def test_later_models_move_within_the_bound_from_the_last_one_seen() -> None:
    site = harness()
    daemon = site.agent()
    site.fit(1, SEEDS_OWN)
    site.fit(2, scaled(1.8))
    far = site.fit(3, scaled(4.0))
    near = site.fit(3, scaled(3.5), task_id="again")
    work(daemon, 4)
    assert declined_by_policy(site, far)
    assert [task.task_id for task, _ in site.link.pushed][-1] == near.task_id
    kept = site.store.last_base("run")
    assert kept is not None
    assert kept[0] == 2


@pytest.mark.parametrize(("round", "scale", "fits"), [(4, 3.5, True), (9, 4.5, False)])  # 2.5 norms in three rounds
def test_rounds_that_the_site_missed_widen_the_bound_up_to_three(round: int, scale: float, fits: bool) -> None:
    site = AgentHarness(rules=dict(CHECKED), recipe={**RUN, "rounds": 9})
    site.fit(1, SEEDS_OWN)
    last = site.fit(round, scaled(scale))
    work(site.agent(), 2)
    assert [task.round for task, _ in site.link.pushed] == ([1, round] if fits else [1])
    assert declined_by_policy(site, *([] if fits else [last]))


def test_the_last_model_survives_the_daemon(tmp_path: Path) -> None:
    site = harness(store=DiskStore(tmp_path))
    site.fit(1, SEEDS_OWN)
    site.fit(2, scaled(1.8))
    work(site.agent(), 2)
    site.restart(tmp_path)
    far = site.fit(3, scaled(4.0))
    work(site.agent(), 1)
    assert declined_by_policy(site, far)


def test_a_site_that_joins_later_compares_with_what_it_builds() -> None:
    site = harness()
    daemon = site.agent()
    huge = site.fit(3, scaled(11.0))
    site.fit(3, scaled(9.0), task_id="smaller")
    work(daemon, 2)
    assert declined_by_policy(site, huge)
    assert len(site.link.pushed) == 1


def test_a_model_to_be_scored_is_checked_too() -> None:
    site = harness()
    daemon = site.agent()
    site.fit(1, SEEDS_OWN)
    work(daemon, 1)
    constant = {**SEEDS_OWN, Part.BODY: {name: np.zeros_like(a) for name, a in SEEDS_OWN[Part.BODY].items()}}
    task = site.score(1, constant)
    work(daemon, 1)
    assert declined_by_policy(site, task)
    assert site.link.scores == []


def test_a_base_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    before = base_checks.structure_problem

    def counted(*given: Any) -> Any:
        checked.append(1)
        return before(*given)

    monkeypatch.setattr("protofed.client.base_checks.judge.structure_problem", counted)
    site = harness()
    daemon = site.agent()
    site.fit(1, SEEDS_OWN)
    site.score(1, scaled(1.2))
    site.fit(2, scaled(1.2))
    work(daemon, 3)
    assert (len(site.link.pushed), len(site.link.scores), len(checked)) == (2, 1, 2)


def test_the_first_model_counts_as_such_even_if_it_was_seen_as_another() -> None:
    site = harness()
    daemon: Agent = site.agent()
    site.fit(2, scaled(1.5))
    first = site.fit(1, scaled(1.5), task_id="back")
    work(daemon, 2)
    assert declined_by_policy(site, first)


def test_of_class_models_the_sites_own_mixture_is_checked() -> None:
    site = harness()
    site.fit(1, SEEDS_OWN)
    work(site.agent(), 1)
    stacks = {f"{part}.{name}": np.stack([array] * 2) for part in SEEDS_OWN for name, array in SEEDS_OWN[part].items()}
    wild = {path: stack * 1000 if stack.dtype.kind == "f" else stack for path, stack in stacks.items()}
    classes = int(RUN["classes"])
    mixed = {Part.CLASS_MODELS: {**wild, "factors": np.full((classes, 2), 0.5)}}
    refused = site.fit(2, mixed)
    work(site.agent(), 1)
    assert len(site.link.pushed) == 1
    assert declined_by_policy(site, refused)


def stacked(*models: Payload) -> dict[str, Array]:
    return {
        f"{part}.{name}": np.stack([model[part][name] for model in models])
        for part in (Part.BODY, Part.HEAD)
        for name in SEEDS_OWN[part]
    }


def test_each_of_several_models_is_checked_as_a_fit_may_start_from_it() -> None:
    site = AgentHarness(rules={**CHECKED, "exchange": ["receive"]})
    site.fit(1, {**SEEDS_OWN, Part.SITE_MODELS: stacked(SEEDS_OWN, scaled(1.2))})
    work(site.agent(), 1)
    assert len(site.link.pushed) == 1
    kept = site.store.last_base("run")  # what the next base is compared with
    assert kept is not None
    assert kept[1].keys() == {Part.BODY, Part.HEAD}
    refused = site.fit(2, {**SEEDS_OWN, Part.SITE_MODELS: stacked(SEEDS_OWN, scaled(1000.0))})
    work(site.agent(), 1)
    assert len(site.link.pushed) == 1
    assert declined_by_policy(site, refused)


def test_models_of_other_sites_are_refused_where_the_policy_receives_none() -> None:
    site = harness()
    refused = site.fit(1, {**SEEDS_OWN, Part.SITE_MODELS: stacked(SEEDS_OWN)})
    work(site.agent(), 1)
    assert site.link.pushed == []
    assert declined_by_policy(site, refused)


@pytest.mark.parametrize("part", [Part.CONTROL, Part.CLASS_MODELS])
def test_what_the_method_does_not_use_is_refused_whether_or_not_bases_are_checked(part: Part) -> None:
    """A server could hide a model for this site in it."""
    site = AgentHarness(rules=dict(RULES))
    more = corrected(0.0)[Part.CONTROL] if part is Part.CONTROL else stacked(SEEDS_OWN)
    refused = site.fit(1, {**SEEDS_OWN, part: more})
    work(site.agent(), 1)
    assert site.link.pushed == []
    assert declined_by_policy(site, refused)


def test_models_of_unequal_numbers_and_control_variates_of_another_model_are_none() -> None:
    stacks = stacked(SEEDS_OWN, SEEDS_OWN)
    first = next(iter(stacks))
    with pytest.raises(CodecError):
        site_models({Part.SITE_MODELS: {**stacks, first: stacks[first][:1]}})
    assert len(site_models({Part.SITE_MODELS: {**stacks, "own": np.array(3.0)}})) == 2
    assert site_models(SEEDS_OWN) == []
    base = corrected(1.0)
    path = next(iter(base[Part.CONTROL]))
    for wrong in ({f"{path}x": base[Part.CONTROL][path]}, {path: np.zeros((7, 7))}, {"prototypes.0": np.zeros(3)}):
        with pytest.raises(CodecError, match="control variate"):
            led_by_controls({**base, Part.CONTROL: wrong}, 0.1)


def corrected(share: float, model: Payload = SEEDS_OWN, steps: float = 2 * 3) -> Payload:
    """A base whose control variates alone lead a fit of the harness's site by this share of the body's norm.

    Args:
        steps: of a fit, epochs times batches; with momentum their length.
    """
    controls = {
        f"{part}.{name}": np.asarray(array * (share / (steps * 0.1) if part is Part.BODY else 0.0), array.dtype)
        for part, tensors in model.items()
        for name, array in tensors.items()
    }
    return {**model, Part.CONTROL: controls}


def of_scaffold(**recipe: Any) -> AgentHarness:
    rules = {**CHECKED, "methods": ["scaffold"], "parts": ["body", "head", "control"], "example_count": True}
    return AgentHarness(rules=rules, recipe={**RUN, "method": {"name": "scaffold"}, **recipe})


def test_control_variates_lead_a_fit_no_further_than_a_model_may_move() -> None:
    site = of_scaffold()
    daemon = site.agent()
    site.fit(1, corrected(0.0))
    site.fit(2, corrected(0.9, scaled(1.1)))
    far = site.fit(3, corrected(1.1, scaled(1.1)))
    work(daemon, 3)
    assert [task.round for task, _ in site.link.pushed] == [1, 2]
    assert declined_by_policy(site, far)
    kept = site.store.last_base("run")  # what the next base is compared with
    assert kept is not None
    assert kept[1].keys() == {Part.BODY, Part.HEAD}
    site = of_scaffold()  # before the first round there is nothing to correct
    refused = site.fit(1, corrected(0.01))
    work(site.agent(), 1)
    assert declined_by_policy(site, refused)


@pytest.mark.parametrize(
    ("plan", "steps", "within", "beyond"),
    [
        # The recipe's first rate is for round 1; round 2 moves half as far by the same control variates.
        ({"schedule": "exponential", "lr_decay": 0.5}, 2 * 3, 1.9, 4.4),
        ({"momentum": 0.5}, 1 + 1.5 + 1.75 + 1.875 + 1.9375 + 1.96875, 0.9, 1.1),  # and further with momentum
    ],
    ids=["rate", "momentum"],
)
def test_control_variates_are_measured_by_the_rounds_learning_rate_and_momentum(
    plan: dict[str, Any], steps: float, within: float, beyond: float
) -> None:
    site = of_scaffold(plan={**RUN["plan"], **plan})
    site.fit(1, corrected(0.0))
    site.fit(2, corrected(within, steps=steps))
    far = site.fit(3, corrected(beyond, steps=steps))
    work(site.agent(), 3)
    assert [task.round for task, _ in site.link.pushed] == [1, 2]
    assert declined_by_policy(site, far)


def test_an_evaluator_fits_nothing_that_could_be_led() -> None:
    site = of_scaffold()
    site.roles = frozenset({Role.EVALUATOR})
    data = site_data()
    nothing = Examples(data.train.pixels()[:0], data.train.labels[:0])
    site.load_data = lambda _: replace(data, train=nothing, scores_only=True)
    daemon = site.agent()
    site.score(1, corrected(9.0))
    work(daemon, 1)
    assert site.declined() == []
    kept = site.store.last_base("run")
    assert kept is not None
    assert kept[0] == 1
