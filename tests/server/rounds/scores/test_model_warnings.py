"""What speaks against a model, by histories written by hand: each code fires, and healthy or young runs are quiet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.common.codec import Digest
from protofed.server.rounds.scores.model_warnings import (
    ModelWarning,
    RoundScores,
    RunHistory,
    TrainedRound,
    WarningCode,
    model_warnings,
)

CLASSES = 4
EVALUATOR = "eva"


def scores(*recalls: float, prefix: str = "global", **others: float) -> dict[str, float]:
    """Of a model with these recalls on a test set with as many images of each class."""
    mean = sum(recalls) / len(recalls)
    by_class = {f"recall.{c}": recall for c, recall in enumerate(recalls)}
    named = {"accuracy": mean, "balanced_accuracy": mean} | by_class | others
    return {f"{prefix}.{name}": value for name, value in named.items()}


def history(*by_round: Mapping[str, float], site: str = EVALUATOR, **fields: Any) -> RunHistory:
    """Rounds 1, 2, … of a run of 40 rounds that has ended, scored by one site."""
    scored = [RoundScores(number, {site: values}) for number, values in enumerate(by_round, 1)]
    named = {"classes": CLASSES, "rounds": 40, "ended": True, "global_model": True, "scored": scored}
    return RunHistory(**{**named, **fields})


def codes(found: Sequence[ModelWarning]) -> list[WarningCode]:
    return [warning.code for warning in found]


def climbing(*means: float) -> list[dict[str, float]]:
    """Scores of a model whose recalls are all alike."""
    return [scores(*[mean] * CLASSES) for mean in means]


ONE_CLASS = scores(0.0, 0.0, 1.0, 0.0)


def test_findings_that_are_not_told_apart_are_chance_and_a_fallen_area_is_told() -> None:
    (warning,) = model_warnings(history({"global.auroc": 0.52, "global.brier": 0.2}))
    assert warning.code is WarningCode.CHANCE
    assert "the global model is no better than chance: mean area under the ROC curve 0.52, chance 0.50" in warning.text
    assert warning.numbers == {"auroc": 0.52, "chance": 0.5}
    assert model_warnings(history({"global.auroc": 0.56})) == []
    assert model_warnings(history({"global.auroc": 0.52}, ended=False)) == []  # young
    assert model_warnings(history({"global.mae": 3.0})) == []
    assert model_warnings(history(scores(0.7, 0.6, 0.7, 0.6, auroc=0.52))) == []  # of classes, by balanced accuracy
    (own,) = model_warnings(history({"personal.local.auroc": 0.5}, site="ann"))
    assert (own.code, own.site) == (WarningCode.CHANCE, "ann")
    fallen = history(*({"global.auroc": value} for value in (0.9, 0.8, 0.81, 0.82)))
    (worse,) = model_warnings(fallen)
    assert worse.code is WarningCode.WORSE
    assert "area under the ROC curve 82.0 % in round 4, 90.0 % in round 1" in worse.text


def test_a_model_that_calls_every_image_one_class_is_told_once_by_its_class() -> None:
    (warning,) = model_warnings(history(*climbing(0.26, 0.27), ONE_CLASS, class_names=("akiec", "bcc", "nv", "vasc")))
    assert (warning.code, warning.round, warning.site) == (WarningCode.ONE_CLASS, 3, None)
    assert warning.numbers == {
        "class": 2,
        "recall": 1.0,
        "other_recalls": 0.0,
        "classes_present": 4,
        "balanced_accuracy": 0.25,
        "chance": 0.25,
        "accuracy": 0.25,
    }
    assert "'nv'" in warning.text


def test_a_model_that_calls_nearly_every_image_one_class_is_not_said_to_call_every_one_so() -> None:
    (nearly,) = model_warnings(history(scores(0.03, 0.0, 0.97, 0.0)))
    (every,) = model_warnings(history(ONE_CLASS))
    assert codes([nearly, every]) == [WarningCode.ONE_CLASS] * 2
    assert "nearly every image" in nearly.text
    assert "nearly" not in every.text


OWN = scores(0.5, 0.8, prefix="personal.local")
HEALTHY = scores(0.9, 0.8, 0.9, 0.9)
SAME = scores(0.5, 0.6, 0.5, 0.4)
FINE = {
    "no scores and no updates": history(),
    "it learns": history(*climbing(0.3, 0.5, 0.7, 0.8, 0.85, 0.87, 0.86, 0.88)),
    "a test set of one class": history({"global.balanced_accuracy": 0.5, "global.recall.1": 0.5}),
    "one good round among the last three": history(*climbing(0.7, 0.8, 0.6, 0.66, 0.6)),
    "equal scores of two rounds": history(SAME, SAME),
    "without a fault there is nothing to change": history(*[scores(1.0, 1.0, 1.0, 1.0)] * 6),
    "the median of evaluators": history(scored=[RoundScores(1, {"a": HEALTHY, "b": ONE_CLASS, "c": HEALTHY})]),
    "a site's own may not know others' classes": history(scores(0, 1, 0, 0, prefix="personal"), site="ann"),
    "and change little": history(scores(0.9, 0.8, prefix="personal.local"), *[OWN] * 6, site="ann"),
}


@pytest.mark.parametrize("fine", FINE.values(), ids=FINE)
def test_there_is_nothing_to_warn_of(fine: RunHistory) -> None:
    assert model_warnings(fine) == []


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (history(ONE_CLASS | {"global.recall.all": 1.0}), WarningCode.ONE_CLASS),  # a name of 0.2.0, and of no class
        (history(*climbing(0.25, 0.30), ONE_CLASS), WarningCode.ONE_CLASS),  # it was never good, and does not fall
        (history(SAME, SAME, SAME), WarningCode.UNCHANGED),  # from the start
    ],
)
def test_there_is_one_thing_to_warn_of(found: RunHistory, code: WarningCode) -> None:
    assert codes(model_warnings(found)) == [code]


@pytest.mark.parametrize("recalls", [(0.2, 0.0, 0.9, 0.0), (0.06, 0.0, 0.96, 0.0)])
def test_a_model_at_chance_that_gives_more_than_one_class_is_at_chance(recalls: tuple[float, ...]) -> None:
    (warning,) = model_warnings(history(scores(*recalls)))
    assert (warning.code, warning.numbers["chance"]) == (WarningCode.CHANCE, 0.25)


@pytest.mark.parametrize(
    ("classes", "at_chance", "better"),
    [(2, 0.524, 0.53), (7, 0.171, 0.18), (10, 0.124, 0.126), (100, 0.012, 0.013)],
)
def test_chance_is_one_over_the_classes_and_a_margin(classes: int, at_chance: float, better: float) -> None:
    def judged(value: float) -> list[WarningCode]:
        return codes(model_warnings(history({"global.balanced_accuracy": value}, classes=classes)))

    assert (judged(at_chance), judged(better)) == ([WarningCode.CHANCE], [])


def test_chance_counts_the_classes_that_the_test_set_has_and_other_numbers_stand_beside_it() -> None:
    values = {"global.balanced_accuracy": 0.48, "global.recall.0": 0.6, "global.recall.3": 0.36}
    (warning,) = model_warnings(history(values))
    assert (warning.code, warning.numbers["chance"]) == (WarningCode.CHANCE, 0.5)
    for recalls in [(0.0, 1.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)]:
        (warning,) = model_warnings(history(scores(*recalls, accuracy=0.663, majority=0.661)))
        assert (warning.numbers["accuracy"], warning.numbers["majority"]) == (0.663, 0.661)
    (warning,) = model_warnings(history(scores(0.5, 0.5, 0.0, 0.0, auroc=0.76)))
    assert (warning.code, warning.numbers["auroc"]) == (WarningCode.CHANCE, 0.76)
    assert "0.76" in warning.text


def test_a_young_model_may_be_at_chance_until_a_third_of_the_rounds() -> None:
    going = history(*[ONE_CLASS] * 9, ended=False, rounds=30)
    assert model_warnings(going) == []
    older = replace(going, scored=[*going.scored, RoundScores(10, {EVALUATOR: ONE_CLASS})])
    assert codes(model_warnings(older)) == [WarningCode.ONE_CLASS, WarningCode.UNCHANGED]
    assert codes(model_warnings(replace(going, ended=True))) == [WarningCode.ONE_CLASS, WarningCode.UNCHANGED]


@pytest.mark.parametrize(
    ("rounds", "auroc", "from_round"),
    [(1, 0.0, 5), (20, 0.0, 7), (30, 0.55, 10), (1000, 0.0, 20), (20, 0.75, 14), (1000, 0.75, 50)],
)
def test_the_first_round_that_is_judged(rounds: int, auroc: float, from_round: int) -> None:
    going = history(rounds=rounds, ended=False)
    assert [going.is_young(number, auroc) for number in (from_round - 1, from_round)] == [True, False]


def test_a_model_that_fell_to_chance_diverges_and_one_may_be_worse_than_at_first() -> None:
    found = model_warnings(history(*climbing(0.3, 0.6, 0.55), ONE_CLASS))
    assert codes(found) == [WarningCode.ONE_CLASS, WarningCode.DIVERGING]
    assert (found[1].numbers["best"], found[1].numbers["best_round"]) == pytest.approx((0.6, 2))
    (warning,) = model_warnings(history(*climbing(0.7, 0.8, 0.64, 0.6, 0.62)))
    assert (warning.code, warning.round) == (WarningCode.WORSE, 5)
    assert (warning.numbers["first"], warning.numbers["first_round"]) == pytest.approx((0.7, 1))


def test_a_going_run_is_worse_only_after_three_more_scored_rounds() -> None:
    by_round = climbing(0.7, 0.6, 0.6)
    assert codes(model_warnings(history(*by_round))) == [WarningCode.WORSE]
    late = [RoundScores(10 * n, {EVALUATOR: values}) for n, values in enumerate(by_round, 1)]
    assert model_warnings(history(ended=False, scored=late)) == []


def test_equal_scores_of_five_scored_rounds_say_that_nothing_changes() -> None:
    same = SAME
    (warning,) = model_warnings(history(*climbing(0.3), *[same] * 5))
    assert (warning.code, warning.round) == (WarningCode.UNCHANGED, 6)
    assert warning.numbers == {"since_round": 2, "scored_rounds": 5}
    assert model_warnings(history(*climbing(0.3), *[same] * 4)) == []
    nearly = same | {"global.recall.0": 0.5 + 1e-9}
    assert model_warnings(history(*climbing(0.3), *[same] * 4, nearly)) == []


def test_equal_states_say_that_nothing_changes_where_there_is_a_global_model() -> None:
    trained = [TrainedRound(number, Digest("a" * 64)) for number in (1, 2, 3)]
    (warning,) = model_warnings(history(trained=trained))
    assert (warning.code, warning.round, warning.numbers) == (WarningCode.UNCHANGED, 3, {"since_round": 1})
    assert model_warnings(history(trained=trained, global_model=False)) == []
    assert model_warnings(history(trained=[*trained, TrainedRound(4, Digest("b" * 64))])) == []


@pytest.mark.parametrize(
    ("last", "fires"),
    [
        (TrainedRound(2, None, invited=5, unusable=1), True),  # abandoned
        (TrainedRound(2, None, invited=5, unusable=0), False),
        (TrainedRound(2, Digest("b"), invited=5, unusable=2), False),
        (TrainedRound(2, Digest("b"), invited=4, unusable=2), True),
    ],
)
def test_updates_that_are_not_finite(last: TrainedRound, fires: bool) -> None:
    found = model_warnings(history(trained=[TrainedRound(1, Digest("a"), invited=5), last], ended=False))
    assert codes(found) == ([WarningCode.DIVERGING] if fires else [])
    if fires:
        assert found[0].numbers == {"unusable": last.unusable, "invited": last.invited}


def losing(*losses: float, classes: int = CLASSES) -> list[WarningCode]:
    trained = [TrainedRound(n, Digest(f"{n}"), losses=[loss] * 3) for n, loss in enumerate(losses, 1)]
    return codes(model_warnings(history(trained=trained, classes=classes, ended=False)))


def test_a_loss_or_norms_that_grow_far_beyond_their_start_diverge() -> None:
    assert losing(1.2, 1.0, 9.0, 12.0) == [WarningCode.DIVERGING]
    assert losing(1.2, 1.0, 1.0, 12.0) == []  # one bad round
    assert losing(0.1, 0.2, 0.9, 1.0) == []  # larger than at its start, and still less than a guess
    assert losing(9.0, 12.0, 12.0, 12.0) == []  # a loss of large numbers from the start
    assert losing(1.2, 9.0) == []
    assert losing(0.01, 0.02, 0.1, 0.2, classes=1) == []  # of one output, the floor is that of two classes
    assert losing(0.1, 0.2, 9.0, 12.0, classes=1) == [WarningCode.DIVERGING]

    def judged(*norms: float) -> list[WarningCode]:
        trained = [TrainedRound(n, Digest(f"{n}"), norms=[norm] * 3) for n, norm in enumerate(norms, 1)]
        return codes(model_warnings(history(trained=trained, ended=False)))

    assert judged(1.0, 2.0, 1.5, 30.0, 31.0) == [WarningCode.DIVERGING]
    assert judged(1.0, 2.0, 1.5, 15.0, 31.0) == []
    assert judged(1.0, 2.0, 30.0, 31.0) == []
    assert judged(0.0, 0.0, 0.0, 1.0, 1.0) == []


def test_who_judges_the_global_model_and_who_a_sites_own() -> None:
    one = RoundScores(3, {"ann": scores(0, 1, prefix="global.local"), "bob": scores(0, 1, 0, prefix="global.local")})
    (warning,) = model_warnings(history(scored=[one]))
    assert (warning.code, warning.site, warning.numbers["class"]) == (WarningCode.ONE_CLASS, None, 1)
    good = RoundScores(3, {**one.scores, EVALUATOR: scores(0.9, 0.9, 0.9, 0.9)})
    assert model_warnings(history(scored=[good])) == []
    own = scores(0.0, 1.0, prefix="personal.local")
    (warning,) = model_warnings(history(own, site="ann"))
    assert (warning.code, warning.site) == (WarningCode.ONE_CLASS, "ann")
    assert "ann" in warning.text
    ranks = scores(0.0, 1.0, prefix="personal.local", auroc=0.8)
    assert model_warnings(history(ranks, site="ann")) == []
    guesses = scores(0.0, 1.0, prefix="personal.local", auroc=0.52)
    assert codes(model_warnings(history(guesses, site="ann"))) == [WarningCode.ONE_CLASS]


def test_the_global_model_comes_first_and_the_worst_of_each_first() -> None:
    values = {"zoe": scores(0, 1, prefix="personal.local"), EVALUATOR: ONE_CLASS}
    scored = [RoundScores(number, values) for number in range(1, 6)]
    found = model_warnings(history(scored=scored))
    expected = [(None, WarningCode.ONE_CLASS), (None, WarningCode.UNCHANGED), ("zoe", WarningCode.ONE_CLASS)]
    assert [(warning.site, warning.code) for warning in found] == expected


def test_as_plain_data_the_numbers_stand_beside_the_other_keys() -> None:
    (warning,) = model_warnings(history(scores(0.5, 0.5, 0.0, 0.0)))
    named = {"code": "chance", "round": 1, "site": None, "text": warning.text}
    assert warning.plain() == {**named, **warning.numbers}


share = st.floats(0, 1)
names = st.sampled_from(
    ["accuracy", "balanced_accuracy", "auroc", "recall.0", "recall.1", "recall.3", "local.accuracy", "local.recall.2"]
)
by_name = st.dictionaries(st.builds("{}.{}".format, st.sampled_from(["global", "personal"]), names), share)
number = st.floats(0, 1e9)


@given(
    scored=st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), by_name), max_size=7),
    trained=st.lists(
        st.builds(
            TrainedRound,
            round=st.integers(1, 9),
            state=st.sampled_from([None, Digest("a"), Digest("b")]),
            losses=st.lists(number, max_size=3),
            norms=st.lists(number, max_size=3),
            invited=st.integers(0, 4),
            unusable=st.integers(0, 4),
        ),
        max_size=6,
    ),
    ended=st.booleans(),
)
def test_no_history_is_an_error(scored: list[Any], trained: list[TrainedRound], ended: bool) -> None:
    rounds = [RoundScores(number, values) for number, values in enumerate(scored, 1)]
    for warning in model_warnings(history(scored=rounds, trained=trained, ended=ended)):
        assert warning.text.endswith(".")
        assert all(isinstance(value, int | float) for value in warning.numbers.values())
