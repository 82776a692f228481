"""What `protofed compare` is asked for on the command line is what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from protofed.common.config.recipe import Recipe
from protofed.deploy.cli.main import app
from protofed.deploy.experiments import compare as experiments
from protofed.deploy.experiments.compare import CompareRequest

ASKED = CompareRequest(Path("here"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], CompareRequest]]:
    """Names of recipes and the request of each comparison, none of which runs."""
    requests: list[tuple[list[str], CompareRequest]] = []

    def compare(recipes: Sequence[Recipe], request: CompareRequest, page: Any = None) -> None:
        assert page is not None
        requests.append(([recipe.name for recipe in recipes], request))

    monkeypatch.setattr(experiments, "compare", compare)
    return requests


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ((), {}),
        (("--against", "digits-fednh"), {"against": "digits-fednh"}),
        (("--reach", "global.accuracy=0.8"), {"reach": "global.accuracy=0.8"}),
        (("--keep-old",), {"keep_old": True}),
        (("--tune", "plan.lr=0.01,0.1"), {"grid": {"plan.lr": [0.01, 0.1]}}),
        (
            ("--tune", "plan.lr=1,2", "--tune-by", "personal.pm_v,loss"),
            {"grid": {"plan.lr": [1, 2]}, "tune_by": ["personal.pm_v", "loss"]},
        ),
        (("--seeds", "0,2", "--rounds", "3"), {"seeds": [0, 2], "rounds": 3}),
        (("--jobs", "4", "--workers", "2", "--device", "auto"), {"at_once": 4, "workers": 2, "device": "auto"}),
        (("--format", "csv", "--metric", "loss"), {"format": "csv", "metrics": ["loss"]}),
        (("--ray", "auto", "--gpus-per-job", "0.5"), {"ray": "auto", "gpus_per_job": 0.5}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_each_option_is_its_field_of_the_request(
    words: tuple[str, ...], fields: dict[str, Any], asked: list[tuple[list[str], CompareRequest]]
) -> None:
    result = CliRunner().invoke(app, ["compare", "digits-fedavg", "digits-fednh", "--out", "here", *words])
    assert result.exit_code == 0, result.output
    ((recipes, request),) = asked
    assert recipes == ["digits-fedavg", "digits-fednh"]
    assert replace(request, command="", grid=dict(request.grid), tune_by=list(request.tune_by)) == replace(
        ASKED, **{"grid": {}, "tune_by": [], **fields}
    )
