"""The gate fails closed, names the rule that refused, and is the only way out."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.method_facts import SENDING
from tests.support.score_names import families, score_names

from protofed.client.method import client_methods
from protofed.client.policy.policy import (
    GateContext,
    Policy,
    PolicyRefusedError,
    Released,
    ReleasedScores,
    ReleasedTelemetry,
)
from protofed.client.policy.rules import PolicyRules
from protofed.client.policy.update_checks import TELLS_STEPS
from protofed.common import codec
from protofed.common.config.recipe import Federation, Plan, Recipe
from protofed.common.config.toml_files import read_table
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.payload import Exchange, Part, Tensors, Update, describe, same_tensors
from protofed.common.protocol.messages import Telemetry
from protofed.common.secure_aggregation.linear_form import read_form
from protofed.deploy import shipped

VALID = 'methods = ["fedavg"]\nparts = ["body", "head"]\nmetrics = ["loss"]\n'
BUDGET = 'dp = { epsilon = 8.0, delta = 1e-5, unit = "patient" }\n'
MEANINGLESS = [("8.0", "0"), ("1e-5", "0.5"), ("1e-5", "0"), ("patient", "site"), ("epsilon", "sigma")]
BODY: Tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "order": np.array([1, 0], dtype=np.int64)}


def policy(**rules: Any) -> Policy:
    table = {"methods": ["fedavg"], "parts": ["body", "head"], "metrics": ["loss"], **rules}
    return Policy(PolicyRules.model_validate(table))


def update(**fields: Any) -> Update:
    known = {"payload": {Part.BODY: BODY}, "metrics": {"loss": 0.5, "secret": 1.0}, "weight": 42.0, **fields}
    return Update("ann", **known)


def read(path: Path, text: str) -> Policy:
    path.write_text(text)
    return Policy.read(path)


def test_without_a_file_that_may_be_read_there_is_no_participation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(PolicyViolationError, match=r"no policy at .*policies standard.*--policy"):
            Policy.read(path)

    def denied(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ConfigError, match=r"policy\.toml: Permission denied"):
        Policy.read(tmp_path / "policy.toml")


def test_a_file_is_read(tmp_path: Path) -> None:
    rules = read(tmp_path / "policy.toml", VALID).rules
    assert rules == PolicyRules(
        methods=frozenset({"fedavg"}), parts=frozenset({Part.BODY, Part.HEAD}), metrics=frozenset({"loss"})
    )
    assert (rules.example_count, rules.plugins) == (False, frozenset())  # what is not said is not allowed
    assert rules.telemetry == frozenset()
    assert (rules.class_distribution_estimate, sorted(rules.dtypes)) == (False, ["float32", "int64"])
    assert (rules.min_samples_per_class, rules.hide_class_presence, rules.batch_order) == (10, False, "secret")
    assert (rules.approval, rules.schedule) == ("automatic", ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VALID + "example_counts = true", "unknown key 'example_counts': did you mean 'example_count'?"),
        (VALID.replace('"body"', '"bodies"'), "bodies.*'body', 'head', "),
        (VALID.replace("parts", "# parts"), "'parts' is missing"),
        (VALID + "max_update_mb = 0", "max_update_mb = 0: .*greater than 0"),
        (VALID + 'dtypes = ["float16"]', "float16.*'float32', 'float64' or 'int64'"),
        (VALID + "min_samples_per_class = 0", "min_samples_per_class = 0: .*greater than or equal to 1"),
        (VALID + 'approval = "never"', "approval = 'never': .*'automatic' or 'manual'"),
        (VALID + 'schedule = [{ from = "20:00" }]', "'schedule.0.until' is missing"),
        (VALID + 'schedule = [{ from = "20:00", until = "6 am" }]', r"schedule\.0\.until = '6 am'"),
        (VALID + 'telemetry = ["samples"]', "telemetry.0 = 'samples': .*'gpu_memory_bytes', 'disk_free_bytes', "),
        (VALID + '[limits]\ntransforms = ["monai/RandFlp"]', r"limits\.transforms.*did you mean 'monai/RandFlip'"),
        *[(VALID + BUDGET.replace(*change), r"dp\.") for change in MEANINGLESS],
        ("", "'methods' is missing"),
        ("methods = [", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_understood_allows_nothing(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read(tmp_path / "policy.toml", text)
    assert str(tmp_path / "policy.toml") in str(refused.value)


def test_a_run_is_refused_by_the_rule_that_does_not_name_it() -> None:
    both = frozenset({Part.BODY, Part.HEAD})
    policy().admit("fedavg", both, exchanges=frozenset())
    policy().admit("fedavg", frozenset(), exchanges=frozenset())
    with pytest.raises(PolicyViolationError, match=r"'fednh'.*\(methods"):
        policy().admit("fednh", both, exchanges=frozenset())
    with pytest.raises(PolicyRefusedError) as found:
        policy().admit("fedavg", both | {Part.PROTOTYPES}, exchanges=frozenset())
    assert (found.value.rule, found.value.part) == ("parts", Part.PROTOTYPES)


def test_what_is_released_is_the_update_and_no_more() -> None:
    released = policy().release(update())
    assert same_tensors(codec.decode(released.data), {Part.BODY: BODY})
    assert released.manifest.tensors == describe({Part.BODY: BODY})
    assert (released.manifest.total_bytes, released.manifest.digest) == (
        len(released.data),
        codec.digest(released.data),
    )
    assert released.metrics == {"loss": 0.5}
    assert released.weight is None
    assert "data" not in repr(released), "it does not print its numbers"
    assert codec.decode(policy(parts=[]).release(update(payload={})).data) == {}


def test_metrics_scores_and_telemetry_stay_unless_they_are_named() -> None:
    for metrics in ([], ["los", "Loss", "loss.x"]):
        assert policy(metrics=metrics).release(update()).metrics == {}
    scores = {"personal.pm_v": 0.5, "global.accuracy": 0.25}
    assert policy(metrics=["global.accuracy"]).release_scores(scores).scores == {"global.accuracy": 0.25}
    assert policy(metrics=[]).release_scores(scores).scores == {}
    assert policy().release_telemetry(MEASURED).numbers == {}
    named = policy(telemetry=["step_seconds", "disk_free_bytes", "gpu_memory_bytes"])  # the last was not measured
    assert dict(named.release_telemetry(MEASURED).numbers) == {"disk_free_bytes": 5e8, "step_seconds": 0.25}
    everything = policy(telemetry=list(Telemetry))
    assert everything.release_telemetry(MEASURED | {"samples": 100.0}).numbers == MEASURED


def test_the_size_is_that_of_all_the_bytes() -> None:
    size = len(policy().release(update()).data)
    policy(max_update_mb=size / 1e6).release(update())
    with pytest.raises(PolicyViolationError, match="max_update_mb"):
        policy(max_update_mb=(size - 1) / 1e6).release(update())


def test_nothing_else_makes_what_is_released() -> None:
    one, scores = policy().release(update()), policy(metrics=["loss"]).release_scores({"loss": 0.5})
    fields = (one.manifest, one.data, one.metrics, one.weight)
    for gate in ((), (object(),), (None,), (True,)):
        with pytest.raises(PolicyViolationError, match=r"only through Policy\.release"):
            Released(*fields, *gate)
        with pytest.raises(PolicyViolationError, match=r"only through Policy\.release_scores"):
            ReleasedScores({"secret": 1.0}, *gate)
        with pytest.raises(PolicyViolationError, match=r"only through Policy\.release_telemetry"):
            ReleasedTelemetry({"step_seconds": 1.0}, *gate)
    changes: list[tuple[Any, dict[str, Any]]] = [(one, {"weight": 42.0}), (scores, {"scores": {"secret": 1.0}})]
    for made, change in [*changes, (policy().release_telemetry({}), {"numbers": {"step_seconds": 1.0}})]:
        with pytest.raises(PolicyViolationError, match=r"only through Policy\.release"):
            dataclasses.replace(made, **change)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.weight = 42.0  # type: ignore[misc]


ENOUGH = GateContext(np.full(10, 1000))  # of each class
EVERYTHING = {
    part: {"0" if part is Part.PROTOTYPES else "w": np.ones(3, np.float32)}
    for part in (Part.BODY, Part.HEAD, Part.PROTOTYPES)
}


def shipped_policy(name: str) -> Policy:
    return Policy.read(shipped.folder("policies") / f"{name}.toml")


def test_every_shipped_policy_says_every_key() -> None:
    assert {path.stem for path in shipped.folder("policies").glob("*.toml")} == {"standard", "strict", "open"}
    for name in ("strict", "standard", "open"):
        path = shipped.folder("policies") / f"{name}.toml"
        assert read_table(path).keys() | {"dp"} == PolicyRules.model_fields.keys()
        assert "\n# dp = {" in path.read_text()  # none of them has one, and TOML has no word for that


# Methods that make the coordinator estimate a site's class distribution, and scores of a site's own data or model.
ESTIMATING = {name for name in client_methods if Part.CLASS_SHARES in client_methods.build(name, {}).sends}
SCALARS = {"loss", *families()}
OWN = {name for name in SCALARS if not name.startswith("global.") or name.startswith("global.local.")}


def test_only_the_open_policy_lets_a_class_distribution_be_estimated() -> None:
    for name in ("strict", "standard", "open"):
        policy = shipped_policy(name)
        assert bool(policy.rules.metrics & OWN) == (name == "open")  # scores by which a site tells of itself
        for method in ESTIMATING:
            sends = client_methods.build(method, {}).sends
            if name == "open":
                policy.admit(method, sends, exchanges=frozenset())
            else:
                with pytest.raises(PolicyViolationError):
                    policy.admit(method, sends, exchanges=frozenset())


def test_no_policy_file_names_a_part_of_simulations_or_sums_and_a_robust_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no message can carry part 'label-distribution'"):
        read(tmp_path / "policy.toml", VALID.replace('"body"', '"label-distribution"'))
    rule = 'secure = "SECURE"\n[limits]\nrobust = ["clip", "krum"]\n'
    with pytest.raises(ConfigError, match=r"limits\.robust"):
        read(tmp_path / "policy.toml", VALID + rule.replace("SECURE", "required"))
    allowed = read(tmp_path / "policy.toml", VALID + rule.replace("SECURE", "allowed"))
    assert allowed.rules.limits.robust == {"clip", "krum"}


@pytest.mark.parametrize(
    "name", ["loss", "personal.pm_v", "personal.local.balanced_accuracy", "global.local.recall", "global.local.ece"]
)
def test_no_policy_file_sums_scores_that_answer_about_the_site_s_own_classes(tmp_path: Path, name: str) -> None:
    """Of a model that always says one class, 1 in so many as the site has, or 0: a sum of three tells who has what."""
    with pytest.raises(ConfigError, match=f"aggregated_metrics: '{name}'"):
        read(tmp_path / "policy.toml", f'aggregated_metrics = ["personal.accuracy", "{name}"]\n{VALID}')
    read(tmp_path / "policy.toml", f'aggregated_metrics = ["personal.accuracy", "personal.local.accuracy"]\n{VALID}')


# What has a row a class leaves in sums alone, and the true shares of classes in no other way.
WITH_SUMS = sorted(shipped_policy("standard").rules.methods.intersection(SENDING))
assert len(WITH_SUMS) > 10


def test_the_standard_policy_lets_an_evaluators_scores_out_and_nothing_trained() -> None:
    standard = shipped_policy("standard")
    scalars = dict.fromkeys(SCALARS - OWN, 0.5)
    withheld = dict.fromkeys([*OWN, "personal.local.recall.3", "label.counts"], 3.0)
    with pytest.raises(PolicyRefusedError, match="only in a secure aggregation"):
        standard.release(update(payload={Part.BODY: EVERYTHING[Part.BODY]}), ENOUGH)
    released = standard.release(update(payload={}, metrics={**scalars, **withheld}), ENOUGH)
    assert released.metrics == scalars
    assert standard.release_scores({**scalars, **withheld}).scores == scalars
    assert released.weight is None
    assert standard.rules.plugins == frozenset()


@pytest.mark.parametrize("method", WITH_SUMS)
def test_under_the_standard_policy_updates_leave_in_sums_alone(method: str) -> None:
    standard, built = shipped_policy("standard"), client_methods.build(method, {})
    standard.admit(method, built.sends, read_form(built, method), exchanges=frozenset())
    with pytest.raises(PolicyRefusedError, match=r"federation\.secure = true") as refused:
        standard.admit(method, built.sends, exchanges=frozenset())
    assert refused.value.rule == "secure"
    standard.admit("solo", client_methods.build("solo", {}).sends, exchanges=frozenset())  # which sends no update


TELLING = ("personal.pm_v", "personal.accuracy", "personal.local.accuracy", "global.local.accuracy", "train.pairs")


@pytest.mark.parametrize("score", TELLING)
def test_a_policy_that_hides_classes_and_names_a_score_that_tells_them_is_refused(tmp_path: Path, score: str) -> None:
    hides = VALID.replace('"loss"', f'"global.accuracy", "{score}"') + "hide_class_presence = "
    with pytest.raises(ConfigError, match=rf"metrics: '{re.escape(score)}'.*hide_class_presence"):
        read(tmp_path / "policy.toml", f"{hides}true\n")
    assert score in read(tmp_path / "policy.toml", f"{hides}false\n").rules.metrics
    others = VALID.replace('"loss"', '"global.accuracy", "global.recall"')  # of an evaluator
    assert read(tmp_path / "policy.toml", f"{others}hide_class_presence = true\n").rules.hide_class_presence


def test_under_the_strict_policy_a_site_takes_part_in_secure_aggregation_alone_and_tells_no_number() -> None:
    strict = shipped_policy("strict")
    assert strict.release_scores(dict.fromkeys(SCALARS, 0.5)).scores == {}
    assert strict.rules.plugins == frozenset()
    assert not strict.rules.example_count
    for method in SENDING:
        with pytest.raises(PolicyRefusedError) as refused:
            strict.admit(method, client_methods.build(method, {}).sends, exchanges=frozenset())
        assert refused.value.rule == ("secure" if method in strict.rules.methods else "methods")
    fednh = client_methods.build("fednh", {})
    strict.admit("fednh", fednh.sends, read_form(fednh, "fednh"), exchanges=frozenset())
    for payload in (EVERYTHING, {Part.BODY: EVERYTHING[Part.BODY]}):
        with pytest.raises(PolicyRefusedError):
            strict.release(update(payload=payload), ENOUGH)


def test_a_head_with_a_row_a_class_is_no_head_for_a_site_that_hides_its_classes() -> None:
    hides, shows = policy(hide_class_presence=True), policy()
    scalars = {"scale": np.array(3.0, np.float32), "shift": np.ones(1, np.float32)}
    hides.admit_head(scalars, 10)
    for tensor in (np.ones((10, 4)), np.ones((4, 10)), np.ones(10)):
        shows.admit_head({"weight": tensor}, 10)
        with pytest.raises(PolicyRefusedError) as refused:
            hides.admit_head({**scalars, "weight": tensor}, 10)
        assert (refused.value.rule, refused.value.tensor) == ("hide_class_presence", "head/weight")
        assert "ask for a run with federation.secure = true" in str(refused.value)


MEASURED = {"disk_free_bytes": 5e8, "step_seconds": 0.25, "policy_refusals": 0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_number_that_the_server_would_refuse_stays(bad: float) -> None:
    both = {"step_seconds": bad, "disk_free_bytes": 1.0}
    assert policy(telemetry=list(both)).release_telemetry(both).numbers == {"disk_free_bytes": 1.0}


def test_a_stricter_policy_is_stricter_in_everything() -> None:
    strict, standard, open_ = (shipped_policy(name).rules for name in ("strict", "standard", "open"))
    for one, other in ((strict, standard), (standard, open_)):
        assert one.methods <= other.methods
        assert one.parts <= other.parts
        assert one.metrics <= other.metrics
        assert one.telemetry <= other.telemetry
        assert one.min_samples_per_class > other.min_samples_per_class
        assert one.min_images_per_unit > other.min_images_per_unit
        assert one.hide_class_presence >= other.hide_class_presence
        assert one.class_distribution_estimate <= other.class_distribution_estimate
    assert [rules.batch_order for rules in (strict, standard, open_)] == ["secret", "secret", "recipe"]
    assert (strict.hide_class_presence, standard.hide_class_presence, open_.hide_class_presence) == (True, False, False)


@pytest.mark.parametrize(
    ("part", "changes", "rule"),
    [
        (Part.CLASS_SHARES, {}, "class_distribution_estimate"),
        (Part.PROTOTYPES, {"hide_class_presence": True}, "hide_class_presence"),
        (Part.CLASS_PRESENCE, {"hide_class_presence": True}, "hide_class_presence"),
        (Part.CLASS_SHARES, {"class_distribution_estimate": True, "hide_class_presence": True}, "hide_class_presence"),
    ],
)
def test_a_run_that_is_about_classes_is_refused_before_it_begins(part: Part, changes: Any, rule: str) -> None:
    with pytest.raises(PolicyRefusedError) as refused:
        policy(parts=[part], **changes).admit("fedavg", frozenset({part}), exchanges=frozenset())
    assert (refused.value.rule, refused.value.part) == (rule, part)


# A privacy budget

DP = {"epsilon": 8.0, "delta": 1e-5, "unit": "patient"}
NOISY_PLAN = {"dp": {"noise_multiplier": 1.5, "sampling_rate": 0.1}}
OWN_SCORES = dict.fromkeys(["loss", "personal.accuracy", "global.local.accuracy", "train.x"], 0.5)
SCORES_OF_ALL = OWN_SCORES | {"global.accuracy": 1}


def recipe(**changes: Any) -> Recipe:
    return shipped.recipe("digits-fedavg").model_copy(update=changes)


@pytest.mark.parametrize("rules", [{"dp": DP}, {}], ids=["a budget", "a recipe with noise"])
def test_no_number_of_the_sites_own_leaves_beside_noise(rules: dict[str, Any]) -> None:
    gate = policy(metrics=list(SCORES_OF_ALL), aggregated_metrics=list(SCORES_OF_ALL), **rules)
    noisy = not rules
    assert gate.release_scores(SCORES_OF_ALL, noisy=noisy).scores == {"global.accuracy": 1}
    released = gate.release(update(metrics=SCORES_OF_ALL), GateContext(np.full(10, 100), noisy=noisy))
    assert released.metrics == {"global.accuracy": 1}
    assert not gate.release_score_sum(SCORES_OF_ALL, score_names(10), noisy=noisy).flags().any()


def test_no_count_leaves_beside_noise_whatever_the_policy_says() -> None:
    gate = policy(example_count=True)
    assert gate.release(update(), GateContext(np.full(10, 100))).weight == 42.0
    assert gate.release(update(), GateContext(np.full(10, 100), noisy=True)).weight is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("example_count = true", "example_count"),
        ('telemetry = ["step_seconds"]', "step_seconds"),
        ('telemetry = ["gpu_memory_bytes"]', "gpu_memory_bytes"),
    ],
)
def test_a_budget_and_what_undoes_it_are_no_policy(tmp_path: Path, text: str, named: str) -> None:
    table = '[dp]\nepsilon = 8.0\ndelta = 1e-5\nunit = "patient"\n'
    with pytest.raises(ConfigError, match=named):
        read(tmp_path / "policy.toml", f"{VALID}{text}\n{table}")
    assert read(tmp_path / "policy.toml", f"{VALID}{text}\n").rules.dp is None
    assert (budget := read(tmp_path / "policy.toml", VALID + table).rules.dp) is not None
    assert (budget.epsilon, budget.delta, budget.unit) == (8.0, 1e-5, "patient")


def test_a_budget_refuses_runs_without_noise_and_a_patients_one_without_groups() -> None:
    quiet, noisy = recipe(), recipe(plan=Plan.model_validate(NOISY_PLAN))
    policy().admit_noise(quiet)
    policy(dp=DP).admit_noise(noisy)
    for unit, grouped in (("patient", True), ("image", False), ("image", True)):
        policy(dp={**DP, "unit": unit}).admit_noise(noisy, grouped=grouped)
    for run, grouped in ((quiet, True), (noisy, False)):
        with pytest.raises(PolicyRefusedError) as refused:
            policy(dp=DP).admit_noise(run, grouped=grouped)
        assert refused.value.rule == "dp"


@pytest.mark.parametrize(
    ("shared_by", "group", "colluders", "enough"),
    [(2, 3, 1, True), (3, 3, 1, False), (3, 3, 0, True), (3, 5, 2, True), (3, 5, 3, False)],
)
def test_a_sum_s_noise_is_that_of_enough_sites_that_keep_to_the_rules(
    shared_by: int, group: int, colluders: int, enough: bool
) -> None:
    plan = Plan.model_validate({"dp": {**NOISY_PLAN["dp"], "shared_by": shared_by}})
    federation = Federation.model_validate({"secure": True, "sum_group": group, "min_sites": 5})
    run = recipe(plan=plan, federation=federation)
    gate = policy(dp={**DP, "colluders": colluders})
    if enough:
        gate.admit_noise(run)
        return
    with pytest.raises(PolicyRefusedError) as refused:
        gate.admit_noise(run)
    assert refused.value.rule == "dp"


# What a method moves between single sites, and what it tells besides its numbers


COUNTING = sorted(name for name in client_methods if client_methods.build(name, {}).sends & TELLS_STEPS)


@pytest.mark.parametrize("missing", sorted(Exchange))
def test_a_method_that_moves_models_between_sites_needs_a_rule_for_each_way(missing: Exchange) -> None:
    both = frozenset(Exchange)
    policy(exchange=sorted(both)).admit("fedavg", frozenset({Part.BODY}), exchanges=both)
    with pytest.raises(PolicyRefusedError, match=rf"no '{missing}' in exchange") as refused:
        policy(exchange=sorted(both - {missing})).admit("fedavg", frozenset({Part.BODY}), exchanges=both)
    assert refused.value.rule == "exchange"


@pytest.mark.parametrize(("name", "allowed"), [("strict", set()), ("standard", set()), ("open", set(Exchange))])
def test_only_the_open_policy_lets_models_move_between_single_sites(name: str, allowed: set[Exchange]) -> None:
    assert shipped_policy(name).rules.exchange == allowed


@pytest.mark.parametrize("method", COUNTING)
def test_what_tells_the_number_of_steps_leaves_in_no_sum_either(method: str) -> None:
    built, lax = client_methods.build(method, {}), {"methods": frozenset({method}), "parts": frozenset(Part)}
    standard = shipped_policy("standard")
    for count in (False, True):
        site = Policy(standard.rules.model_copy(update={**lax, "example_count": count}))
        with nullcontext() if count else pytest.raises(PolicyRefusedError, match="example_count"):
            site.admit(method, built.sends, read_form(built, method), exchanges=frozenset())
