"""Every sentence of a model card on its run is bound to the run's record: change a field, and what is told changes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.run_records import BEGAN_AT, ROUND_S, attempt, intervention, run_record, task, warning

from protofed.common.codec import Digest
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.payload import Payload
from protofed.deploy.export.export import _scored
from protofed.deploy.export.kept_states import PublishedState
from protofed.deploy.export.model_card import Choice, card, choice
from protofed.deploy.export.model_folder import ModelFacts, ModelScores, Origin, Spec
from protofed.deploy.run_view import RunView
from protofed.testing.small_recipe import small_recipe

VALUES = {"global.accuracy": 0.75, "global.majority": 0.625, "global.balanced_accuracy": 0.5}
VALUES |= {f"global.recall.{c}": recall for c, recall in enumerate((0.25, 0.5, 0.75))}


def facts(round: int = 2, kind: str = "global", scores: ModelScores | None = None) -> ModelFacts:
    """Of a model of three classes."""
    spec = Spec(
        architecture=NamedOptions(name="mlp"),
        head="own",
        task=NamedOptions(name="classification"),
        predictions="the probabilities",
        input=Input(shape=(1, 8, 8)),
        classes=("nv", "mel", "bcc"),
    )
    origin = Origin(
        kind=kind,
        site="ann" if kind == "personal" else None,
        run="moles",
        round=round,
        method=NamedOptions(name="fedavg"),
        recipe="a" * 64,
        weights="b" * 64,
        protofed="0.2.0",
        at="2027-01-15T08:00:00Z",
    )
    return ModelFacts(model=spec, origin=origin, scores=scores or ModelScores(of="recorded", values=VALUES))


def told(changes: dict[str, Any], round: int = 2) -> str:
    """The card of the run's model after this round, of the changed record."""
    return card(facts(round), ("model.onnx",), None, RunView(run_record(changes)))


def of_input(**changes: Any) -> str:
    """The card of a model whose run had this `[input]`."""
    made = facts()
    spec = made.model.model_copy(update={"input": Input.model_validate({"shape": (1, 8, 8), **changes})})
    return card(made.model_copy(update={"model": spec}), ("model.onnx",), None)


CROP = {"transform": "torchvision/CenterCrop", "size": [9, 7]}
# For each key of `[input]`: other values than the default, and what the card then says.
INPUTS: dict[str, list[tuple[Any, str]]] = {
    "shape": [((1, 6, 9), "images of 9 x 6 pixels only"), ((3, 8, 8), "RGB images only"), ((5, 8, 8), "of 5 channels")],
    "mean": [((0.25,), "mean 0.25")],
    "std": [((0.125,), "deviation 0.125")],
    "fit": [
        ("stretch", "Other sizes are stretched to 8 x 8 pixels"),
        ("crop", "and the middle is taken"),
        ("pad", "with black beside"),
    ],
    "colours": [("convert", "RGB becomes grey")],
    "window": [((40, 400), "Values of -160 to 240, in the file's own units, become 0 to 1")],
    "frames": [
        ("middle", "the one in the middle is the image"),
        ("max", "their maximum is the image"),
        ("mean", "their mean is the image. Grey frames go through step 4 first"),
        ("all", "Each frame is an image"),
        ({"every": 5}, "the frames 1, 6, 11 and so on are images"),
    ],
    "prepare": [
        ([CROP], "5. The transform torchvision/CenterCrop (size = \\[9, 7\\]) is applied.\n6. "),
        ([{"transform": "monai/MedianSmooth"}, CROP], "5. The transform monai/MedianSmooth is applied.\n6. The transf"),
        ([{"transform": "own:a_b"}], r"The transform own:a\_b is applied."),
    ],
}


def test_each_key_that_decides_what_an_image_becomes_is_told() -> None:
    assert INPUTS.keys() == Input.model_fields.keys(), "a new key decides, too"
    plain = of_input()
    for key, changes in INPUTS.items():
        for value, words in changes:
            assert words in of_input(**{key: value}), (key, value)
            assert words not in plain, (key, value)
    for words in ("1. A file of several frames is refused.", "took grey images only", "images of 8 x 8 pixels only"):
        assert words in plain
    assert "Grey is repeated for RGB" in of_input(shape=(3, 8, 8), colours="convert")


def test_what_predict_and_the_snippet_do_beyond_the_run_is_told() -> None:
    assert "It also stretches other sizes" in of_input(fit="stretch")
    assert "It also stretches" not in of_input(fit="crop", colours="convert")
    assert "image.resize((8, 8)" in of_input(frames="all")
    for frames, several in (("all", True), ({"every": 5}, True), ("one", False), ("max", False)):
        assert ("and scores are of single frames: the run has no rule" in of_input(frames=frames)) == several
    for key, value in (("fit", "crop"), ("window", (40, 400)), ("prepare", [CROP])):
        assert "# of 8 x 8 pixels, prepared as above" in of_input(**{key: value})


ALONE = [task("ann"), task("bob", task_status="late")]
ABORTED = {"run.status": "aborted", "run.reason": "the wrong labels", "recipe.rounds": 150}
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "as it is": (
        {},
        ["from the updates of 3 sites.", "after round 2; 2 of 2 planned rounds are finished.", "by chance | 0.3333"],
        ["Warning", "not ended", "no site's images left", "skewed", "Excluded"],
    ),
    "fewer rounds": ({"recipe.rounds": 150}, ["2 of 150 planned rounds"], ["2 of 2"]),
    "fewer sites": (
        {"rounds.1": attempt(1, tasks=ALONE), "rounds.2": attempt(2, tasks=ALONE)},
        ["from the updates of 1 site."],
        ["3 sites", "several sites"],
    ),
    "no update": ({"rounds": [attempt(0)]}, ["no site's update is in it", "0 of 2"], ["from the updates"]),
    "aborted": (
        {**ABORTED, "interventions": [intervention("aborted")]},
        ["> **Warning.** The run was aborted by operator 'olga' on 2027-01-15 08:03 UTC: the wrong labels."],
        ["not ended"],
    ),
    "aborted by nobody known": (ABORTED, ["The run was aborted on 2027"], ["by operator"]),
    "failed": ({"run.status": "failed", "run.reason": "the disk"}, ["**Warning.** The run failed on"], ["aborted"]),
    "going on": ({"run.status": "going on", "run.ended_at": None}, ["and the run has not ended"], ["Warning"]),
    "useless": ({"warnings": [warning()]}, ["> **Warning.** The global model names one class"], ["Said of"]),
    "useless later": ({"warnings": [warning(round=7)]}, ["(Said of round 7, this model is of round 2.)"], []),
    "excluded": (
        {
            "interventions": [
                intervention("excluded", site="cyd", reason="no vote"),
                intervention("revoked", site="bob"),
            ]
        },
        ["Excluded or revoked: cyd (excluded, round 2: no vote); bob (certificate revoked, round 2)."],
        [],
    ),
    "excluded before the first round": (
        {"interventions": [intervention("excluded", site="cyd", round=None)]},
        ["Excluded or revoked: cyd (excluded)."],
        ["round None"],
    ),
    "revoked after the run": (
        {"sites.bob.revoked": "stolen", "sites.bob.revoked_at": BEGAN_AT + 9 * ROUND_S},
        [],
        ["stolen"],
    ),
    "very many warnings and exclusions": (
        {
            "warnings": [warning(site=f"site-{n}", text=f"Own model {n} guesses.") for n in range(300)] + [warning()],
            "interventions": [intervention("excluded", site=f"site-{n}") for n in range(300)],
        },
        [
            "> **Warning.** The global model names one class",
            "Own model 2 guesses.",
            "297 more warnings of sites' own models",
            "site-11 (excluded, round 2); 288 more, which",
        ],
        ["Own model 3 guesses", "site-12 "],
    ),
    "a name that is Markdown": (
        {**ABORTED, "run.reason": "<b>x</b> [y](z)\n# t"},
        [r"\<b\>x\</b\> \[y\](z) # t"],
        ["<b>", "\n# t"],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_changed_record_is_told_otherwise(row: str) -> None:
    changes, present, absent = ROWS[row]
    text = told(changes)
    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_warnings_come_first_and_only_what_the_record_says() -> None:
    text = told({"warnings": [warning()]})
    assert text.index("**Warning.**") < text.index("An image classifier") < text.index("accuracy")
    assert text.index("| global.balanced_accuracy |") < text.index("| global.accuracy |")
    assert "| accuracy of always naming the test set's commonest class | 0.6250 |" in text
    alone = attempt(1, outcome="degraded", tasks=ALONE)
    assert "from the updates of 1 site. It is the model after round 1; 2 of 2" in told({"rounds.1": alone}, round=1)
    text = card(facts(kind="personal"), ("model.onnx",), None)
    assert "planned rounds" not in text
    assert "updates of" not in text


def test_scores_are_told_with_chance_and_who_took_them_on_what() -> None:
    two = {"global.balanced_accuracy": 0.5, "global.recall.0": 1.0, "global.recall.2": 0.0}
    values = {**two, "global.local.balanced_accuracy": 0.5, "global.local.recall.0": 1.0}
    text = card(facts(scores=ModelScores(of="recorded", values=values)), ("model.onnx",), None)
    assert "| global.balanced_accuracy by chance | 0.5000 |" in text
    assert "global.local.balanced_accuracy by chance" not in text
    assert "bootstrap" not in text
    ends = {"global.balanced_accuracy@low": 0.4375, "global.balanced_accuracy@high": 0.5625}
    sure = card(facts(scores=ModelScores(of="recorded", values={**values, **ends})), ("model.onnx",), None)
    assert "| global.balanced_accuracy | 0.5000 (0.4375 to 0.5625) |" in sure
    assert "the 95 % bootstrap interval" in sure
    assert "@" not in sure
    none = card(facts(scores=ModelScores(of="recorded", values={"global.accuracy": 0.5})), ("model.onnx",), None)
    assert "by chance" not in none
    own, shared = {"global.local.accuracy": 0.5, "personal.accuracy": 0.5}, {"global.accuracy": 0.5}
    assert of({"eva": shared, "ann": {"loss": 1.0}}) == (
        "recorded in the run after round 2, `global.*` on the test images of eva"
    )
    assert "of eva and fay, the mean of both" in of({"eva": shared, "fay": shared})
    assert "of eva and fay and guy, their median" in of({"eva": shared, "fay": shared, "guy": shared})
    assert of({"ann": own, "bob": own}).endswith("each on test images of its own, their mean; no evaluator scored it")
    assert of({"ann": {"personal.accuracy": 0.5}}) == "none were taken after round 2"


def of(scores: dict[str, dict[str, float]]) -> str:
    """On whose test images the scores were taken."""
    state: Payload = {}
    return _scored(PublishedState(small_recipe("fedavg"), 2, Digest("c" * 64), state, scores)).of


def best(round: int, value: float, score: str = "global.balanced_accuracy") -> dict[str, Any]:
    return {"best": {"round": round, "score": score, "value": value, "kept": round}}


def of_rounds(*values: float) -> list[dict[str, Any]]:
    """Scores of the rounds from 1 on."""
    return [{"round": n, "sites": {"eva": {"global.balanced_accuracy": v}}} for n, v in enumerate(values, 1)]


def why(chosen: Choice, round: int, changes: dict[str, Any]) -> str:
    return choice(RunView(run_record(changes)), round, chosen)


def test_a_chosen_round_is_told_with_its_score_the_newest_rounds_and_that_it_is_optimistic() -> None:
    changes = {**best(1, 0.75), "scores": of_rounds(0.75, 0.5)}
    text = why("best", 1, changes)
    assert text.startswith("It was chosen as the best round by global.balanced_accuracy: 0.7500; the newest")
    assert "newest scored round, 2, has 0.5000. Chosen by this score, it is optimistic" in text
    assert "0.7500; it is the newest. Chosen" in why("best", 1, {**changes, "scores": of_rounds(0.75)})
    assert why("newest", 2, changes) == (
        "It is the newest model that was kept: global.balanced_accuracy 0.5000; the best round, 1, has 0.7500."
    )
    assert why("given", 1, changes).startswith("Its round was chosen by its number: global.balanced_accuracy 0.7500")
    level = {**best(1, 0.5), "scores": of_rounds(0.5, 0.5)}
    assert why("newest", 2, level).endswith("global.balanced_accuracy 0.5000, and no scored round has more.")
    assert why("given", 0, changes).startswith("Its round was chosen by its number: global.balanced_accuracy not taken")
    assert text in card(facts(1), ("model.onnx",), None, RunView(run_record(changes)), "best")


def test_of_an_error_the_round_with_the_least_is_the_best() -> None:
    rounds = [{"round": n, "sites": {"eva": {"global.mae": value}}} for n, value in ((1, 2.0), (2, 3.0))]
    changes = {**best(1, 2.0, "global.mae"), "scores": rounds}
    assert why("newest", 2, changes).endswith("global.mae 3.0000; the best round, 1, has 2.0000.")
    assert why("given", 1, changes).endswith("global.mae 2.0000, and no scored round has less.")


def test_a_small_error_is_not_shown_as_none() -> None:
    values = {"global.mae": 0.0000123, "global.bias": -0.0000456, "global.mae@low": 0.0, "global.mae@high": 2e-5}
    text = card(facts(scores=ModelScores(of="recorded", values=values)), ("model.onnx",), None)
    assert "| global.mae | 1.23e-05" in text
    assert "| global.bias | -4.56e-05 |" in text


def test_a_run_without_the_score_by_one_class_or_stopped_early_says_so() -> None:
    assert why("newest", 2, {"best": None}).endswith("no score judges the run's rounds.")
    assert why("newest", 0, {"best": None}).endswith("Round 0 is before the run's first training.")
    recalls = {
        which: {"round": n, "sites": {"eva": {"global.recall.1": v}}}
        for which, n, v in (("best", 1, 0.75), ("newest", 2, 0.25))
    }
    changes = {**best(1, 0.75, "global.recall.1"), "classes": {"judged_by": "global.recall.1", **recalls}}
    text = why("best", 1, changes)
    assert "best round by global.recall.1: 0.7500; the newest scored round, 2, has 0.2500" in text
    changes = {"recipe.rounds": 150, "run.reason": "stopped early after round 2: x no better since round 1"}
    assert "2 of 150 planned rounds are finished (stopped early after round 2: x no better" in told(changes)
