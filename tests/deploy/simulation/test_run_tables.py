"""What the tables of simulations say of their numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from protofed.common.config.recipe import Recipe
from protofed.common.protocol.scores import Spread
from protofed.deploy.simulation.run_tables import (
    KEEPS_OWN,
    RELEASES_ALL,
    progress_table,
    scores_table,
    simulate_with_progress,
)
from protofed.server.operator.run_record import Overview

RecipeOf = Callable[..., Recipe]


def test_a_table_tells_of_a_sample_and_has_dashes_for_what_is_not_there(recipe_of: RecipeOf) -> None:
    sampled, whole = recipe_of("fedavg", evaluation={"personal_test_images": 2000}), recipe_of("fednh")
    assert str(scores_table([sampled, whole], {}, "scores").caption).endswith(
        " Own models: on a stratified sample, at most 2,000 images, of the test set."
    )
    assert "sample" not in str(scores_table([whole], {}, "scores").caption)
    recipe = recipe_of("fedavg")
    started = Overview(
        run=recipe.name,
        began=True,
        round=1,
        phase="training 0/3",
        invited=3,
        reported=0,
        received=0,
        sent=0,
        seconds=1.0,
        scores={},
        scored_round=0,
        degraded=0,
        attempts=1,
        abandoned=0,
        rolled_back=0,
        ended=False,
        failed=False,
    )
    shown = printed(progress_table([recipe], {recipe.name: started}, "runs"))
    assert "0/3" in shown
    assert shown.count("–") == 3
    view = replace(started, scores={"personal.pm_v": Spread(0.912, 0.034, 0.87, 3)})
    table = printed(scores_table([recipe], {recipe.name: view}, "scores"))
    assert "91.2 ± 3.4" in table
    assert table.count("–") == 4
    assert "*" not in table
    view = replace(started, scores={"personal.pm_v": Spread(0.912, None, None, 3)})
    table = printed(scores_table([recipe], {recipe.name: view}, "scores"))
    assert "91.2 *" in table
    assert table.count("–") == 5
    assert "*: a mean over sites, from a secure aggregation" in " ".join(table.split())


DP = {"noise_multiplier": 1.0, "max_unit_norm": 1.0, "sampling_rate": 0.25}


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_simulation_with_noise_says_that_own_scores_stay_and_a_sum_changes_nothing_of_that(
    recipe_of: RecipeOf, capsys: pytest.CaptureFixture[str], noisy: bool, secure: bool
) -> None:
    plan = {"batch_size": 16, "lr": 0.1, **({"dp": DP} if noisy else {})}
    federation = {"min_sites": 3, "quorum": 1.0, "secure": secure}
    simulate_with_progress(recipe_of("fedavg", rounds=1, plan=plan, federation=federation), None, "cpu")
    shown = " ".join(capsys.readouterr().out.split())
    assert (KEEPS_OWN in shown) is noisy
    assert (RELEASES_ALL in shown) is (not noisy and not secure)


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_is_what_the_command_prints_and_json_has_its_place(
    recipe_of: RecipeOf, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("fedavg", rounds=1)
    for as_json in (False, True):
        simulate_with_progress(recipe, None, "cpu", as_json=as_json)
        printed_, said = capsys.readouterr()
        assert ("PM(V)" in printed_, "PM(V)" in said) == (not as_json, as_json)
        assert printed_ == "" or not as_json
