"""A site sees its own scores whatever its policy lets leave: on its disk, in its log and in its metrics.

Which answers about a model leave a site, by its predictions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tests.support.scripted_server import RULES, AgentHarness, site_data, work
from torch import Tensor

from protofed.client.agent.computation import NoRemoteExecutor, ScoredModel
from protofed.client.agent.scores import MIN_IMAGES, Answers, Scorer, answered, secret_half
from protofed.client.agent.task_tools import BaseModelCache
from protofed.client.data.examples import Examples, no_examples, stratified_sample
from protofed.client.data.site_data import SiteData
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.split import SplitModel
from protofed.client.site import DaemonStatus, PreparedRun
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.client.state.store import MemoryStore
from protofed.client.task import Predictions
from protofed.client.tasks.classification import CLASSES as TASK
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input
from protofed.common.errors import OutOfSpaceError
from protofed.common.protocol.messages import Role, Scores, Task, TaskKind
from protofed.testing.small_recipe import small_recipe

PERSONAL = {"personal.accuracy", "personal.balanced_accuracy", "personal.pm_v", "personal.pm_l"}
NOTHING: dict[str, Any] = {**RULES, "metrics": []}


def test_what_stays_on_the_site_is_kept_logged_and_measured_there(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), rules=NOTHING)
    harness.fit(1)
    harness.score(1)
    with capture_logs() as lines:
        work(harness.agent(), 2)
    assert harness.link.scores == [{}]  # an answer without scores: the server need not wait for its deadline
    assert all(released.metrics == {} for _, released in harness.link.pushed)
    (scored,) = OwnScores(tmp_path / FOLDER).rounds("run")
    families = {name for name in scored.scores if "recall" not in name}
    assert (scored.round, families) == (1, PERSONAL | {"loss"})
    assert "personal.recall.0" in scored.scores
    assert harness.now.own_scores == {name: scored.scores[name] for name in families}
    logged = [line["scores"].keys() for line in lines if line["event"] == "own scores"]
    assert logged == [{"loss"}, PERSONAL]
    before, harness.now = harness.now.own_scores, DaemonStatus()
    harness.restart(tmp_path)
    work(harness.agent(), 1)
    assert harness.now.own_scores == before


def test_an_evaluators_scores_are_not_its_own(tmp_path: Path) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), roles=frozenset({Role.EVALUATOR}))
    harness.score(1)
    work(harness.agent(), 1)
    assert set(harness.link.scores[0]) == {"global.accuracy", "global.balanced_accuracy"}
    assert OwnScores(tmp_path / FOLDER).runs() == []
    assert harness.now.own_scores == {}


@pytest.mark.parametrize("own_test", [False, True])
def test_scores_of_a_trainers_own_held_out_images_are_not_taken_for_others(own_test: bool) -> None:
    harness = AgentHarness(roles=frozenset(Role), load_data=lambda _: replace(site_data(), own_test=own_test))
    harness.fit(1)
    harness.score(1)
    work(harness.agent(), 2)
    assert any(name.startswith("global.") for name in harness.link.scores[0]) != own_test


@pytest.mark.parametrize("damaged", [False, True])
def test_a_disk_that_takes_no_scores_stops_no_scoring(
    damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: OwnScores, run: str, round: int, scores: Scores) -> None:
        raise OutOfSpaceError(f"no space for {run}, {round}, {scores}")

    if damaged:
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / "run.jsonl").write_text("no line")
    else:
        monkeypatch.setattr(OwnScores, "record", full)
    harness = AgentHarness(store=DiskStore(tmp_path))
    harness.fit(1)
    harness.score(1)
    with capture_logs() as lines:
        work(harness.agent(), 2)
    assert (len(harness.link.pushed), len(harness.link.scores), harness.declined()) == (1, 1, [])
    assert [line["event"] for line in lines if line["log_level"] == "warning"]
    assert harness.now.own_scores.keys() == PERSONAL | {"loss"}  # they are in the metrics all the same
    assert not damaged or (tmp_path / FOLDER / "run.jsonl").read_text() == "no line"


INPUT, SECRET, CLASSES = Input(shape=(1, 1, 1)), b"s" * 32, 10
LOCAL, SHARED = "global.local.accuracy", "personal.accuracy"


def examples(labels: Sequence[int]) -> Examples:
    return Examples(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), torch.tensor(labels))


def site(local: Sequence[int], train: Sequence[int] = (0, 1, 2, 3), test: Examples | None = None) -> SiteData:
    return SiteData(examples(train), test or no_examples(INPUT), INPUT, CLASSES, local_test=examples(local))


def recipe(most: int | None = None) -> Recipe:
    evaluation = {} if most is None else {"personal_test_images": most}
    return small_recipe("fedavg", input={"shape": [1, 1, 1]}, evaluation=evaluation)


def named(classes: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), CLASSES).float()


def predictions(classes: Sequence[int], labels: Sequence[int]) -> Predictions:
    return Predictions(named(classes), torch.tensor(labels))


def answers(given: Sequence[int], labels: Sequence[int], *, withheld: bool = False) -> Answers:
    told = {"global.local": predictions(given, labels)}
    return answered(told, site(labels), recipe(), SECRET, withheld=withheld)


@pytest.mark.parametrize(("images", "others"), [(20, 2), (40, 3), (100, 6), (1000, 51)])
def test_a_model_is_constant_that_gives_one_image_and_a_twentieth_another_class(images: int, others: int) -> None:
    assert TASK.is_nearly_constant(named([1] * others + [0] * (images - others)))
    assert not TASK.is_nearly_constant(named([1] * (others + 1) + [0] * (images - others - 1)))
    assert TASK.is_nearly_constant(torch.zeros(50, 3))  # ties
    assert TASK.is_nearly_constant(torch.full((50, 3), torch.nan))


def test_the_site_has_its_score_of_all_images_and_a_sum_that_of_its_own_half() -> None:
    half = secret_half(SECRET, 4000)
    assert abs(float(half.float().mean()) - 0.5) < 0.05
    assert torch.equal(half[:37], secret_half(SECRET, 37))
    agree = (half == secret_half(b"t" * 32, 4000)).float().mean()
    assert abs(float(agree) - 0.5) < 0.05
    labels, half = [n % 4 for n in range(100)], secret_half(SECRET, 100)
    given = [label if in_half else (label + 1) % 4 for label, in_half in zip(labels, half.tolist(), strict=True)]
    found = answers(given, labels)
    assert found.scores[LOCAL] == found.direct[LOCAL] == pytest.approx(float(half.float().mean()))
    assert found.aggregated[LOCAL] == 1.0
    assert not found.withheld


def test_what_a_constant_model_scores_stays_but_for_the_site_itself() -> None:
    found = answers([0] * 100, [n % 4 for n in range(100)])
    assert found.scores[LOCAL] == 0.25
    assert found.direct == {}
    assert LOCAL in found.withheld
    assert found.withheld == found.aggregated.keys()
    labels = [n % 4 for n in range(100)]
    found = answers(labels, labels, withheld=True)  # so does what a model scores of whose fit nothing leaves
    assert not found.direct
    assert found.withheld == found.aggregated.keys()


@pytest.mark.parametrize(
    ("labels", "is_asked"),
    [
        ([n % 4 for n in range(MIN_IMAGES - 1)], False),
        ([n % 4 for n in range(MIN_IMAGES)], True),
        ([0] * 46 + [1] * 4, False),
        ([0] * 45 + [1] * 5, True),
    ],
    ids=["few images", "enough", "nearly one class", "two classes"],
)
@pytest.mark.parametrize("given", ["rightly", "always one class"])
def test_whether_a_score_is_aggregated_follows_from_no_model(labels: list[int], is_asked: bool, given: str) -> None:
    found = answers(labels if given == "rightly" else [0] * len(labels), labels)
    assert (LOCAL in found.aggregated) is is_asked
    assert LOCAL in found.scores


def test_an_own_model_that_learnt_one_class_has_no_aggregated_score() -> None:
    labels = [n % 4 for n in range(100)]
    for train, is_asked in (([0] * 19 + [1], False), ([0] * 9 + [1], True)):
        told = {"personal.local": predictions(labels, labels)}
        found = answered(told, site(labels, train), recipe(), SECRET, withheld=False)
        assert ("personal.local.accuracy" in found.aggregated) is is_asked


def test_a_run_s_sample_of_the_shared_test_set_is_of_the_half_of_the_whole() -> None:
    """A server that offers runs with ever other samples would else see every image."""
    labels = [n % 4 for n in range(400)]
    test, run = examples(labels), recipe(100)
    rows = stratified_sample(test.labels, 100, run.seed)
    in_half = secret_half(SECRET, 400)[rows]
    right = np.where(in_half, test.labels[rows], (test.labels[rows] + 1) % 4)
    told = {"personal": predictions(right.tolist(), test.labels[rows].tolist())}
    found = answered(told, site(labels, test=test), run, SECRET, withheld=False)
    assert found.aggregated[SHARED] == 1.0
    assert found.scores[SHARED] == pytest.approx(float(in_half.float().mean()))


@pytest.mark.parametrize(
    ("roles", "shared_test", "secure", "reports"),
    [
        ({*Role}, False, True, False),
        ({*Role}, True, True, True),
        ({*Role}, False, False, True),
        ({Role.EVALUATOR}, False, True, True),
    ],
    ids=["its own images alone", "a shared test set", "no secure aggregation", "an evaluator alone"],
)
def test_a_site_that_trains_reports_no_evaluators_score_of_its_own_images(
    roles: set[Role], shared_test: bool, secure: bool, reports: bool
) -> None:
    """With recalls of each class, one message says how many images of each its test set has."""
    labels = [n % 4 for n in range(100)]
    federation = {"secure": True, "min_sites": 3} if secure else {}
    recipe = small_recipe("fedavg", input={"shape": [1, 1, 1]}, federation=federation)
    data = site(labels, test=examples(labels) if shared_test else None)
    run = PreparedRun(recipe, FedAvgClient(), cast("SplitModel", None), data, 0)
    owner: Any = SimpleNamespace(name="ann", roles=frozenset(roles), simulated=False, store=MemoryStore())
    scorer = Scorer(owner, DaemonStatus(), cast("BaseModelCache", None), NoRemoteExecutor())
    works = scorer.prefetch(run, Task(TaskKind.SCORE, "run", 1, "t1", Digest("0" * 64), 1, 60.0))
    assert (ScoredModel.GLOBAL in {work.scored for work in works}) is reports
