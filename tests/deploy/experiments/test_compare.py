"""`compare` from its recipes to its files, with jobs that a stand-in computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.deploy.experiments.code_digest import CodeDigest, digest_code
from protofed.deploy.experiments.compare import CompareRequest, compare
from protofed.deploy.experiments.curves import Curves
from protofed.deploy.experiments.experiment import ExperimentJob, Result
from protofed.deploy.experiments.table import Comparison

Recipes = Callable[..., Recipe]


def finished(job: ExperimentJob) -> Result:
    result = job.result()
    assert result is not None
    return result


def table(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "table.json").read_text())
    return read


def of_other_code(job: ExperimentJob, module: str) -> None:
    """Make a finished job one that other code has computed."""
    result = finished(job)
    code = digest_code(result.recipe)
    edited = CodeDigest(modules={**code.modules, module: "0"}, libraries=code.libraries)
    job.write_result(result.model_copy(update={"code": edited}))


def test_a_job_that_other_code_computed_is_run_again(
    recipe_of: Recipes, tmp_path: Path, stand_in: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    request = CompareRequest(tmp_path / "out", seeds=[0, 1])
    recipes = [recipe_of("fedavg"), recipe_of("fednh")]
    compare(recipes, request)
    everything, stand_in.ran = stand_in.ran, []
    compare(recipes, request)
    assert (len(everything), stand_in.ran) == (4, [])
    job = ExperimentJob.claimed(tmp_path / "out" / "small-fednh-seed1")
    of_other_code(job, "protofed.client.methods.fednh")
    capfd.readouterr()
    compare(recipes, replace(request, keep_old=True))
    told = capfd.readouterr().err
    assert stand_in.ran == []
    assert "1 of 4 jobs are kept" in told
    assert "protofed.client.methods.fednh" in told
    assert table(request.out)["other_code"] == {"small-fednh": [1]}
    compare(recipes, request)
    told = capfd.readouterr().err
    assert stand_in.ran == ["small-fednh-seed1"]
    assert "1 of 4 jobs are run again" in told
    assert "protofed.client.methods.fednh" in told
    assert table(request.out)["other_code"] == {}
    assert {"result.json", "result-before-1.json"} <= {path.name for path in job.folder.iterdir()}


def test_jobs_of_other_code_are_run_again_and_it_is_said_once(
    recipe_of: Recipes, tmp_path: Path, stand_in: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    request = CompareRequest(tmp_path / "out", seeds=[0, 1, 2])
    compare([recipe_of("fedavg")], request)
    for seed in (0, 1, 2):
        job = ExperimentJob.claimed(tmp_path / "out" / f"small-fedavg-seed{seed}")
        job.write_result(finished(job).model_copy(update={"code": CodeDigest(modules={}, libraries={})}))
    capfd.readouterr()
    stand_in.ran = []
    compare([recipe_of("fedavg")], request)
    assert len(stand_in.ran) == 3
    assert capfd.readouterr().err.count("run again") == 1


def test_what_a_score_takes_is_shown_as_it_was_asked_for_or_is_asked_now(
    recipe_of: Recipes, tmp_path: Path, stand_in: Any
) -> None:
    """The stand-in's accuracy is 0.5 after one round."""
    out = tmp_path / "out"
    compare([recipe_of("fedavg")], CompareRequest(out, reach="global.accuracy=0.5"))
    compare([], CompareRequest(out))
    values = table(out)["rows"][0]["values"]
    assert values["rounds to 50 %"]["seeds"] == {"0": 1}
    compare([], CompareRequest(out, reach="global.accuracy=0.6"))
    headers = {header for header in table(out)["columns"] if header.startswith("rounds to")}
    assert headers == {"rounds to 60 %"}
    assert "rounds to 60 %" not in table(out)["rows"][0]["values"]  # never reached


def test_the_page_names_what_computes_and_shows_the_same(recipe_of: Recipes, tmp_path: Path, stand_in: Any) -> None:
    commands: list[str] = []

    def page(_: Comparison, __: Sequence[Curves], command: str) -> str:
        commands.append(command)
        return "<p>"

    recipes = [recipe_of("fedavg"), recipe_of("fednh")]
    asked = CompareRequest(tmp_path / "out", reach="global.accuracy=0.3", command="protofed compare a b")
    compare(recipes, asked, page)
    compare(
        [], CompareRequest(tmp_path / "out", against="small-fednh", metrics=["loss"], command="protofed compare"), page
    )
    assert commands == [
        "protofed compare a b --reach global.accuracy=0.3",
        "protofed compare a b --against small-fednh --reach global.accuracy=0.3 --metric loss",
    ]
    assert (tmp_path / "out" / "page.html").read_text() == "<p>"


def test_what_other_code_left_unfinished_is_never_kept(recipe_of: Recipes, tmp_path: Path, stand_in: Any) -> None:
    request = CompareRequest(tmp_path / "out", keep_old=True)
    compare([recipe_of("fedavg")], request)
    job = ExperimentJob.claimed(tmp_path / "out" / "small-fedavg-seed0")
    (job.folder / "result.json").unlink()
    (job.folder / "code.json").write_text(CodeDigest(modules={}, libraries={}).model_dump_json())
    (job.state / "of the other code").touch()
    compare([recipe_of("fedavg")], request)
    assert stand_in.ran == ["small-fedavg-seed0"] * 2
    assert list(job.state.iterdir()) == []
    assert [path.name for path in (job.folder / "state-before-1").iterdir()] == ["of the other code"]


def test_a_score_of_a_plug_ins_task_is_a_metric(
    recipe_of: Recipes, tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives a recipe has allowed its plug-ins, and `compare` asks the task for its scores before any job."""
    monkeypatch.setattr(plugins, "_allowed", set())
    own = {"task": {"name": "tests.client.tasks.own_task:Gauge"}, "classes": 1, "class_names": ("value",)}
    recipe = Recipe.model_validate({**recipe_of("fedavg").model_dump(mode="json"), **own})
    with pytest.raises(ConfigError, match=r"did you mean 'global\.near'"):
        compare([recipe], CompareRequest(tmp_path / "out", metrics=["global.nearer"]))
    assert stand_in.ran == []
