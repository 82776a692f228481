"""Of every method, all that it has can be exported, and predicts what the run's scores say. A new one joins unasked.

`make slow` has all of them, `make test` those of the mission.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.finished_runs import FinishedRun, finished_run, right_answers

from protofed.client.method import client_methods
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.deploy.export import kept_states
from protofed.deploy.export.export import ExportRequest, export
from protofed.deploy.export.model_folder import ModelFacts
from protofed.server.method import server_methods

MISSION = ("cwfedavg", "fedavg", "fednh", "fedproc", "fedprp")
METHODS = sorted(client_methods)
GLOBAL = [name for name in METHODS if server_methods.get(name).global_model]
BY_CLASS = [name for name in METHODS if hasattr(server_methods.get(name), "class_model")]
SITE = "site-1"
RUNTIMES: tuple[Literal["torch", "onnx"], ...] = ("torch", "onnx")
Exported = Callable[..., tuple[FinishedRun, ModelFacts]]
# No site has all classes, and the site is not in every round: its memory and the newest model are of different ones.
DATA = {
    "source": "digits",
    "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.1, "min_examples": 20, "min_classes": 2},
}
FEDERATION = {"min_sites": 3, "participation": 0.6, "quorum": 1.0, "heartbeat_s": 0.1}


def _soonest(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in MISSION else pytest.mark.slow) for name in names]


@pytest.fixture
def exported(recipe_of: Callable[..., Recipe], tmp_path: Path) -> Exported:
    """Of a method a model of this kind, in both formats, in the test's folder."""

    def make(which: str, kind: str, round: int | None = None, **changes: Any) -> tuple[FinishedRun, ModelFacts]:
        table: dict[str, Any] = {"model": {"name": "mlp", "hidden": [16]}, "data": DATA, "federation": FEDERATION}
        recipe = recipe_of(which, rounds=4, **{**table, **changes})
        done = finished_run(recipe.model_dump_json())
        request = ExportRequest(done.run, kind, tmp_path, state=done.state, site_state=done.site(SITE), recipe=recipe)
        return done, export(replace(request, round=round)).facts

    return make


def check(folder: Path, done: FinishedRun, recorded: float) -> None:
    """Both files predict with this accuracy, image by image the same."""
    by_torch, by_onnx = (right_answers(folder, done.test, runtime) for runtime in RUNTIMES)
    assert by_torch.mean() == pytest.approx(recorded, abs=1e-9)
    assert (by_torch == by_onnx).all()


@pytest.mark.parametrize("method", _soonest(GLOBAL))
def test_the_global_model_predicts_what_the_evaluator_scored(method: str, exported: Exported, tmp_path: Path) -> None:
    done, facts = exported(method, "global")
    recorded = done.scores["evaluator"]["global.accuracy"]
    check(tmp_path, done, recorded)
    assert facts.scores.values["global.accuracy"] == recorded
    if method in MISSION:
        assert facts.model.head == {"fednh": "cosine", "fedprp": "nearest"}.get(method, "own")


@pytest.mark.parametrize("method", _soonest(METHODS))
def test_a_sites_own_model_predicts_what_the_site_scored(method: str, exported: Exported, tmp_path: Path) -> None:
    done, _ = exported(method, "personal")
    check(tmp_path, done, done.scores[SITE]["personal.accuracy"])


@pytest.mark.parametrize("method", BY_CLASS)
def test_a_class_model_is_what_the_server_half_makes_of_the_state(
    method: str, exported: Exported, tmp_path: Path
) -> None:
    """Nobody scores it in a run."""
    done, facts = exported(method, "class:0")
    half: Any = server_methods.build(method, {})
    state = kept_states.of_folder(done.state, done.run).state
    assert facts.origin.weights == codec.digest(codec.encode(half.class_model(state, 0)))
    by_torch, by_onnx = (right_answers(tmp_path, done.test, runtime) for runtime in RUNTIMES)
    assert (by_torch == by_onnx).all()


@pytest.mark.parametrize("method", ["fedper", "fedproto", "cwfedavg"])
def test_of_an_earlier_round_the_site_has_what_it_kept_then(method: str, exported: Exported, tmp_path: Path) -> None:
    """Its newest round is another than the newest model's: a head of then, a body of later would be nobody's model."""
    done, facts = exported(method, "personal", round=2)
    assert facts.origin.round == 2
    check(tmp_path, done, facts.scores.values["personal.accuracy"])


def test_what_a_site_makes_of_its_own_data_is_made_of_them(exported: Exported, tmp_path: Path) -> None:
    """Under secure aggregation cwFedAVG's sites mix all class models by their true shares, as cwfedavg-private's do."""
    method, secure = {"name": "cwfedavg", "shares": "true"}, {"min_sites": 3, "quorum": 1.0, "secure": True}
    done, facts = exported("cwfedavg", "personal", method=method, federation=secure, name="aggregated")
    check(tmp_path, done, facts.scores.values["personal.accuracy"])
