"""A recipe is read whole or refused with the key that is wrong and what was expected there.

Schedules worked out, and what a round costs in noisy mechanisms.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protofed.common.config import data as partitions
from protofed.common.config.recipe import (
    DpCost,
    DpPlan,
    Federation,
    Plan,
    Recipe,
    parse,
    parse_json,
    read_recipe,
    read_toml,
)
from protofed.common.config.tables import Input
from protofed.common.config.toml_files import read_table
from protofed.common.errors import ConfigError

ROOT = Path(__file__).parents[3]
BASE = """
name = "base"
rounds = 7
classes = 10
input = { shape = [1, 8, 8] }
method = { name = "fednh", prototype_momentum = 0.5 }
model = { name = "mlp", hidden = [3] }
[data]
source = "digits"
partition = { kind = "dirichlet", sites = 5, beta = 0.3 }
"""


def table(**changes: Any) -> dict[str, Any]:
    """A sound recipe with `section__key` replaced, or left out where the value is `...`."""
    recipe: dict[str, Any] = {
        "name": "r-1",
        "rounds": 3,
        "classes": 10,
        "input": {"shape": [1, 8, 8]},
        "method": {"name": "fednh", "prototype_momentum": 0.5},
        "model": {"name": "digits-cnn"},
        "plan": {},
        "federation": {},
        "data": {"source": "digits", "partition": {"kind": "dirichlet", "sites": 5, "beta": 0.3}},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        inner = recipe
        for section in sections:
            inner = inner[section]
        if value is ...:
            del inner[key]
        else:
            inner[key] = value
    return recipe


def sound(**changes: Any) -> Recipe:
    return parse(table(**changes), Recipe, "a.toml")


def test_a_recipe_is_read_with_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(BASE)
    recipe: Any = read_toml(tmp_path / "r.toml", Recipe)
    assert (recipe.name, recipe.rounds, recipe.classes, recipe.seed) == ("base", 7, 10, 0)
    assert (recipe.method.options, recipe.model.options) == ({"prototype_momentum": 0.5}, {"hidden": [3]})
    assert recipe.federation == Federation()
    assert recipe.data.partition == partitions.Dirichlet(kind="dirichlet", sites=5, beta=0.3)
    for table in (recipe, recipe.plan):
        with pytest.raises(ValidationError):
            table.seed = 9


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_ours_can_be_read(path: Path) -> None:
    recipe = read_recipe(path)
    assert parse_json(recipe.wire(), Recipe, "wire").fingerprint() == recipe.fingerprint()


UNKNOWN = [("round", "rounds"), ("input__shap", "shape"), ("data__partition__bta", "beta")]


@pytest.mark.parametrize(("key", "near"), UNKNOWN)
def test_an_unknown_key_is_named_with_its_place_and_the_nearest_known_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        sound(**{key: 1})
    assert str(error.value) == f"a.toml: unknown key '{key.replace('__', '.')}': did you mean '{near}'?"
    with pytest.raises(ConfigError, match=r"a\.toml.*'zzzzzz'"):
        sound(zzzzzz=1)


@pytest.mark.parametrize("key", ["name", "input", "input__shape", "method__name", "model"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        sound(**{key: ...})
    assert str(error.value) == f"a.toml: '{key.replace('__', '.')}' is missing; add it"


NAN, INF = float("nan"), float("inf")  # JSON could tell neither to the sites
PLAN: dict[str, list[Any]] = {"epochs": [0], "batch_size": [-1], "lr": [0.0, "fast", NAN], "momentum": [1.0]}
PLAN |= {"weight_decay": [-1e-9], "optimizer": ["sdg"], "lr_decay": [0.0, 1.5], "lr_steps": [[0.5, 1.0]]}
PLAN |= {"warmup_rounds": [-1], "loss": ["focal"], "tau": [0], "sampling": ["even"], "buffers": ["global"]}
PLAN |= {"max_grad_norm": [0], "augmentation": ["flip"]}
FEDERATION: dict[str, list[Any]] = {"min_sites": [0], "participation": [0.0, 1.01], "over_selection": [0.99]}
FEDERATION |= {"deadline_s": [0, INF], "grace": [1.1], "stall_timeout_s": [0], "max_attempts": [0]}
FEDERATION |= {"score_every": [-1], "heartbeat_s": [0]}
DATA: dict[str, list[Any]] = {"source": ["imagenet"], "long_tail": [0], "merge_test_into_train": ["both"]}
DATA |= {"local_test": ["balanced"], "local_test_fraction": [0.0, 1.0], "validation_fraction": [0.0, 1.0]}
DATA |= {"seed": [-1, 2**32]}  # NumPy's legacy generator has no such seed
WRONG: dict[str, dict[str, list[Any]]] = {
    "": {"name": ["Capitals", "x" * 65, "line\n", 7], "rounds": [0, 2.5], "classes": [1], "seed": ["x"]},
    "input__": {"shape": [[1, 8], [1, 8, 8, 8]], "mean": ["grey", [NAN]], "std": [[0.0]]},
    "method__": {"name": [3]},
    "plan__": PLAN,
    "federation__": FEDERATION,
    "data__": DATA,
    "data__partition__": {"sites": [0], "beta": [0], "min_examples": [0]},
}
VALUES = [(f"{table}{key}", value) for table, keys in WRONG.items() for key, values in keys.items() for value in values]


@pytest.mark.parametrize(("key", "value"), VALUES, ids=[f"{key}={value!r:.20}" for key, value in VALUES])
def test_a_value_out_of_range_or_of_another_type_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        sound(**{key: value})
    said = str(error.value)
    assert said.startswith("a.toml: ")
    assert key.split("__")[0] in said
    assert key.split("__")[-1] in said
    assert "\n" not in said


def test_one_is_a_count_and_one_point_zero_is_a_share() -> None:
    count, share = (sound(federation__quorum=quorum).federation.quorum for quorum in (1, 1.0))
    assert isinstance(count, int)
    assert isinstance(share, float)
    again = parse_json(sound(federation__quorum=1.0).wire(), Recipe, "wire").federation.quorum
    assert isinstance(again, float)


INPUTS = [([3, 8, 8], [0.5, 0.5], [0.5]), ([3, 8, 8], [0.5], [0.5] * 4), ([0, 8, 8], [0.5], [0.5])]


@pytest.mark.parametrize(("shape", "mean", "std"), INPUTS)
def test_an_input_has_one_mean_or_one_a_channel(shape: list[int], mean: list[float], std: list[float]) -> None:
    with pytest.raises(ConfigError, match="one value or one a channel"):
        sound(input={"shape": shape, "mean": mean, "std": std})
    assert Input(shape=(3, 8, 8), mean=(0.1, 0.2, 0.3)).std == (0.5,)


PARTITIONS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [  # what is said, and what is so by default
    (partitions.Whole, {"kind": "whole"}, {}),
    (partitions.Shards, {"kind": "shards", "sites": 2, "shards": 3}, {}),
    (partitions.ColumnPartition, {"kind": "column"}, {}),
    (partitions.PfllibDirichlet, {"kind": "pfllib-dirichlet", "sites": 2, "beta": 0.1}, {"min_examples": 1}),
    (partitions.NiidBenchDirichlet, {"kind": "niid-bench-dirichlet", "sites": 2, "beta": 0.1}, {"min_examples": 10}),
    (partitions.CreffDirichlet, {"kind": "creff-dirichlet", "sites": 20, "beta": 0.4}, {}),
    (partitions.Pathological, {"kind": "pathological", "sites": 2, "classes_each": 3}, {"balanced": False}),
]


@pytest.mark.parametrize(("expected", "said", "default"), PARTITIONS)
def test_a_partition_is_chosen_by_its_kind(expected: Any, said: dict[str, Any], default: dict[str, Any]) -> None:
    data: Any = sound(data__partition=said).data
    assert data.partition == expected(**said, **default)


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ({"kind": "dirichlett", "sites": 2, "beta": 1.0}, "'dirichlet'"),
        ({"sites": 2}, "kind"),
        ({"kind": "shards", "sites": 2}, "'data.partition.shards' is missing"),
        ({"kind": "whole", "sites": 2}, "unknown key 'data.partition.sites'"),
        ({"kind": "pathological", "sites": 2, "classes_each": 0}, "data.partition.classes_each = 0"),
        ({"kind": "creff-dirichlet", "sites": 2, "beta": 1, "min_examples": 2}, "unknown key"),
        ("whole", "data.partition"),
    ],
)
def test_a_partition_of_the_wrong_kind_is_refused(partition: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        sound(data__partition=partition)
    assert said in str(error.value)
    assert str(error.value).startswith("a.toml: ")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"local_test": "by-class", "local_test_fraction": 0.25}, "expected local_test or .*, not both"),
        ({"merge_test_into_train": True}, "expected local_test_fraction beside it"),
        ({"merge_test_into_train": True, "local_test": "by-class"}, "expected local_test_fraction beside it"),
        ({"merge_test_into_train": True, "local_test_fraction": 0.25, "test_fraction": 0.3}, "remove test_fraction"),
        ({"validation_fraction": 0.2, "local_test_fraction": 0.25}, "both hold out training images; remove one"),
    ],
)
def test_a_test_set_comes_from_one_place(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^a\.toml: data = .*{said}"):
        sound(data={"source": "digits", **keys})


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('extends = "nowhere.toml"\n')
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml"):
        read_toml(tmp_path / "nowhere.toml", Recipe)
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml"):
        read_recipe(tmp_path / "r.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        read_table(tmp_path)


@pytest.mark.parametrize(
    "text",
    [b"name = ", b"\xff\xfe", b"{}", b"name = 'a'\nname = 'b'\n", b"a = " + 5000 * b"9", b"a = " + 5000 * b"["],
    ids=lambda text: repr(text[:10]),
)
def test_no_toml(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"r\.toml is not TOML"):
        read_toml(tmp_path / "r.toml", Recipe)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"name": 1', "NaN"])
def test_a_recipe_off_the_wire_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^wire: "):
        parse_json(text, Recipe, "wire")


def test_what_goes_to_sites_names_no_data_and_no_path() -> None:
    recipe = sound(data__root="/home/secret", data__source="npz")
    assert "secret" not in recipe.wire()
    assert "dirichlet" not in recipe.wire()
    assert parse_json(recipe.wire(), Recipe, "wire") == recipe.model_copy(update={"data": None})


def test_equal_runs_have_equal_fingerprints_wherever_their_data_are() -> None:
    assert sound().fingerprint() == sound(data__root="/elsewhere").fingerprint()
    assert sound().fingerprint() == parse(dict(reversed(table().items())), Recipe, "b.toml").fingerprint()
    assert sound(plan={}).fingerprint() == sound(plan={"epochs": 1}).fingerprint()  # the default, said


DIFFERENT: dict[str, Any] = {"name": "r-2", "seed": 1, "rounds": 4, "classes": 11, "input__shape": [3, 8, 8]}
DIFFERENT |= {"model__name": "other"}
DIFFERENT |= {"method__prototype_momentum": 0.6, "method__scale": 2.0, "plan__lr": 0.02, "plan__warmup_rounds": 3}
DIFFERENT |= {"plan__loss": "balanced-softmax", "plan__sampling": "class-balanced", "plan__buffers": "local"}


def test_different_runs_have_different_fingerprints_and_all_of_it_reaches_the_wire() -> None:
    changed: list[dict[str, Any]] = [{}, {"federation__quorum": 1.0}, {"federation__quorum": 1}]
    runs = [sound(**keys) for keys in (*changed, *({key: value} for key, value in DIFFERENT.items()))]
    assert len({run.fingerprint() for run in runs}) == len(runs)
    for run in runs:
        assert parse_json(run.wire(), Recipe, "wire") == run.model_copy(update={"data": None})


def test_a_sample_of_test_images_has_one_of_each_class_and_changes_the_fingerprint() -> None:
    with pytest.raises(ConfigError, match=r"personal_test_images = 9: expected at least 10, one image of each class"):
        sound(evaluation={"personal_test_images": 9})
    asked = sound(evaluation={"personal_test_images": 10, "probabilities": True})
    assert parse_json(asked.wire(), Recipe, "wire").evaluation == asked.evaluation
    assert asked.evaluation.switched_on == {"probabilities"}
    assert asked.fingerprint() != sound(evaluation={"probabilities": True}).fingerprint()


def test_parsing_leaves_the_table_as_it_was() -> None:
    parse(given := table(), Recipe, "a.toml")
    assert given == table()


def extending(folder: Path, *, base: str, text: str) -> Recipe:
    (folder / "base.toml").write_text(base)
    (folder / "r.toml").write_text(f'extends = "base.toml"\n{text}')
    return read_recipe(folder / "r.toml")


def test_an_extending_recipe_says_only_what_differs_and_is_checked_whole(tmp_path: Path) -> None:
    recipe = extending(tmp_path, base=BASE, text='name = "r"\nrounds = 3\n[method]\nscale = 2.0\n[plan]\nlr = 0.5\n')
    assert (recipe.name, recipe.rounds, recipe.classes, recipe.plan.lr) == ("r", 3, 10, 0.5)
    assert recipe.method.options == {"prototype_momentum": 0.5, "scale": 2.0}
    (tmp_path / "root.toml").write_text(BASE)
    recipe = extending(tmp_path, base='extends = "root.toml"\nrounds = 4\n', text='name = "r"\n')
    assert (recipe.name, recipe.rounds, recipe.classes) == ("r", 4, 10)
    with pytest.raises(ConfigError, match=r"r\.toml.*'round'"):
        extending(tmp_path, base=BASE, text="round = 3\n")


def test_another_method_or_partition_takes_no_options_of_the_former_one(tmp_path: Path) -> None:
    text = '[method]\nname = "fedavg"\n[data]\nseed = 3\npartition = { kind = "shards", sites = 5, shards = 2 }\n'
    recipe = extending(tmp_path, base=BASE, text=text)
    assert recipe.method.options == {}
    assert recipe.data is not None
    assert (recipe.data.source, recipe.data.seed) == ("digits", 3)
    assert recipe.data.partition == partitions.Shards(kind="shards", sites=5, shards=2)


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="extends 8 files"):
        extending(tmp_path, base='extends = "r.toml"\n', text="")


@pytest.mark.parametrize("evaluation", [{"class_order": [0, 1]}, {"class_order": [0] * 10}])
def test_an_order_of_classes_names_each_once(evaluation: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(BASE)
    table = {**read_table(tmp_path / "r.toml"), "evaluation": evaluation}
    with pytest.raises(ConfigError, match="expected each of 0 to 9 once"):
        parse(table, Recipe, "r.toml")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("global.balanced", "did you mean 'global.balanced_accuracy'?"),
        ("loss", "expected a score that can judge a round"),
        ("global.ece", "expected a score that can judge a round"),
        ("global.auroc", "evaluation.probabilities = true"),
        ("global.few", "evaluation.frequency_groups = true"),
        ("global.recall.10", "'global.recall.0' to '.9'"),
        ("personal.pm_v.1", "expected 'personal.pm_v'"),
    ],
)
def test_a_score_that_can_judge_no_round_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"federation.best_by = '{name}'")) as error:
        sound(federation__best_by=name)
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["global.balanced_accuracy", "global.recall.9", "personal.pm_l"])
def test_a_score_that_a_run_has_may_judge_its_rounds(name: str) -> None:
    assert sound(federation__best_by=name).federation.best_by == name
    assert sound(federation__best_by="global.auroc", evaluation={"probabilities": True}).evaluation.probabilities


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"min_improvement": 0.1}, "federation.patience"),
        ({"patience": 3, "score_every": 0}, "federation.score_every"),
        ({"patience": 3, "best_by": "global.accuracy", "score_every": 0, "score_personal_every": 1}, "score_every"),
        ({"patience": 3, "best_by": "personal.pm_v", "score_personal_every": 0}, "score_personal_every"),
        ({"patience": 0}, "patience = 0"),
        ({"patience": 1, "min_improvement": 1.5}, "min_improvement = 1.5"),
        ({"patience": 1, "min_improvement": 1.5, "best_by": "global.accuracy"}, "min_improvement = 1.5"),
    ],
)
def test_patience_without_what_it_needs_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        sound(federation=keys)
    assert sound(federation={"patience": 3, "score_every": 0, "score_personal_every": 2}).federation.patience == 3


SHARED = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "shared_by": 3}
AGGREGATED = {"secure": True, "min_sites": 3}


def test_noise_that_is_shared_is_that_of_one_step() -> None:
    dp = sound(plan={"dp": SHARED}, federation=AGGREGATED).plan.dp
    assert dp is not None
    assert [dp.steps(epochs) for epochs in (0, 1)] == [0, 1]
    assert dp.model_copy(update={"shared_by": None}).steps(1) == 10


UNSHARED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({}, {"secure": False}, "federation.secure"), ({}, {"sum_group": 1}, "federation.sum_group")),
    *(({"epochs": 2}, {}, "plan.epochs"), ({"optimizer": "adam"}, {}, "plan.optimizer")),
    *(({"lr": 1e-12}, {}, "steps of 2^-40"), ({"lr": 1e6}, {}, "plan.dp")),
    ({"dp": {**SHARED, "shared_by": 4}}, {}, "plan.dp.shared_by"),
    ({"max_grad_norm": 1.0}, {}, "plan.max_grad_norm"),
]


@pytest.mark.parametrize(("plan", "federation", "named"), UNSHARED)
def test_noise_cannot_be_shared_where_no_sum_has_it(
    plan: dict[str, Any], federation: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        sound(plan={"dp": SHARED, **plan}, federation={**AGGREGATED, **federation})


@pytest.mark.parametrize(
    ("keys", "needed"),
    [({"tau": 2.0}, 'plan.loss = "logit-adjustment"'), ({"lr_steps": [0.1]}, 'plan.schedule = "step"')],
)
def test_a_key_of_the_plan_that_nothing_uses_is_refused(keys: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        sound(plan=keys)


def test_a_rate_falls_after_the_rounds_whose_share_is_named_whatever_a_product_of_floats_is() -> None:
    plan = Plan(schedule="step", lr=1.0, lr_decay=0.5, lr_steps=(0.55, 0.07))
    assert 0.55 * 100 > 55
    assert 0.07 * 100 > 7
    assert [plan.learning_rate(number, 100) for number in (1, 7, 8, 55, 56, 100)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [plan.learning_rate(number, 3) for number in (1, 2, 3)] == [1, 0.5, 0.25]  # .21 and 1.65 rounds


@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 30])
@pytest.mark.parametrize("schedule", ["constant", "exponential", "step", "cosine"])
def test_the_lowest_rate_is_that_of_no_other_round(schedule: Any, warmup: int) -> None:
    for decay in (1.0, 0.9, 0.01):
        plan = Plan(schedule=schedule, lr=0.4, lr_decay=decay, warmup_rounds=warmup)
        rates = [plan.learning_rate(number, 10) for number in range(1, 11)]
        assert plan.lowest_rate(10) == min(rates)
        assert max(rates) <= 0.4
        after = rates[max(warmup, 1) - 1 :]
        assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"), [(1, 1.0, 1), (2, 0.1, 20), (1, 0.3, 3), (1, 0.06, 17), (0, 0.5, 0), (3, 0.4, 8)]
)
def test_a_call_takes_as_many_steps_as_epochs_over_the_rate(epochs: int, rate: float, steps: int) -> None:
    assert DpPlan(noise_multiplier=1.0, sampling_rate=rate).steps(epochs) == steps


def test_a_rounds_steps_are_those_of_its_calls() -> None:
    assert DpCost(epochs=(5, 2), class_releases=2).steps(DpPlan(noise_multiplier=1.0, sampling_rate=0.1)) == 70
    rate = DpPlan(noise_multiplier=1.0, sampling_rate=0.3)
    assert DpCost(epochs=()).steps(rate) == 0
    assert DpCost(epochs=(1, 1)).steps(rate) == 6  # each for itself: not round(2 / 0.3) = 7
    assert Plan().dp is None


NO_PLAN: dict[str, list[float | None]] = {"noise_multiplier": [0.0, None], "sampling_rate": [0.0, 1.1, None]}
NO_PLAN |= {"max_unit_norm": [0.0], "class_noise_multiplier": [0.0], "min_noisy_count": [-1.0]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NO_PLAN.items() for value in values])
def test_a_plan_without_noise_or_rate_is_no_plan(key: str, value: float | None) -> None:
    table = {"noise_multiplier": 1.0, "sampling_rate": 0.1, key: value}
    with pytest.raises(ValidationError):
        Plan.model_validate({"dp": {name: number for name, number in table.items() if number is not None}})
