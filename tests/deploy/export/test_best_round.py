"""Exports by round: the best one, the newest one, or one of a number."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import called

from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.deploy.operator.connection import Operator
from protofed.deploy.simulation.simulation import simulation
from protofed.deploy.state_folder import open_state

RUN, SCORE = "chosen", "global.balanced_accuracy"
Says = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def state(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulation of six rounds whose first one is the best: its score was changed before the others came."""
    folder = tmp_path_factory.mktemp("state")
    recipe = recipe_of("fedavg", rounds=6).model_copy(update={"name": RUN})
    with simulation(recipe, folder) as started:
        started.go(
            until=lambda: bool(started.ledger.scores(RUN, 1)) and started.ledger.newest(RUN, scored=True) is not None
        )
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
        assert ledger.execute("UPDATE scores SET value = 1.0 WHERE round = 1 AND name = ?", [SCORE]).rowcount
    with simulation(recipe, folder) as continued:
        continued.go()
    return folder


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str]) -> Says:
    return partial(called, capfd)


def export(protofed: Says, state: Path, out: Path, *more: object) -> dict[str, Any]:
    order = ("export", RUN, "--model", "global", "--state", state, "--out", out, "--format", "safetensors")
    code, said, err = protofed(*order, "--json", *more)
    assert code == 0, err
    return dict(json.loads(said))


def test_the_best_round_is_exported_though_it_is_old(protofed: Says, state: Path, tmp_path: Path) -> None:
    made = export(protofed, state, tmp_path / "best", "--round", "best")
    assert made["origin"]["round"] == 1
    assert made["scores"]["values"][SCORE] == 1.0
    assert "chosen by global.balanced_accuracy" in made["scores"]["of"]
    card = (tmp_path / "best" / "MODEL_CARD.md").read_text()
    assert made["choice"].startswith(f"It was chosen as the best round by {SCORE}: 1.0000; the newest scored round, 6")
    assert made["choice"] in card
    with open_state(state) as opened:
        (row,) = [row for row in opened.ledger.rounds(RUN) if row.round == 1]
    assert made["origin"]["state"] == row.state


@pytest.mark.parametrize(("more", "round"), [((), 6), (("--round", "newest"), 6), (("--round", "5"), 5)])
def test_another_round_is_told_beside_the_best(
    more: tuple[str, ...], round: int, protofed: Says, state: Path, tmp_path: Path
) -> None:
    made = export(protofed, state, tmp_path / "model", *more)
    assert made["origin"]["round"] == round
    assert made["choice"].endswith("the best round, 1, has 1.0000.")
    assert "chosen by" not in made["scores"]["of"]


def test_a_round_that_is_not_kept_or_none_and_a_sites_best_are_refused(
    protofed: Says, state: Path, tmp_path: Path
) -> None:
    order = ("export", RUN, "--model", "global", "--state", state, "--out", tmp_path / "m")
    code, _, err = protofed(*order, "--round", 2)
    assert (code, "keeps no state of round 2" in err) == (78, True)
    code, _, err = protofed(*order, "--round", "latest")
    assert (code, "expected a number, best or newest" in err) == (78, True)
    site = state / "sites" / "site-1"
    code, _, err = protofed(*order, "--model", "personal", "--site-state", site, "--round", "best")
    assert (code, "Ask the coordinator" in err) == (78, True)


def test_without_scores_it_is_said_why_there_is_no_best_round(
    protofed: Says, recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = recipe_of("fedavg", rounds=1).model_copy(update={"name": RUN})
    with simulation(recipe, tmp_path / "s") as running:
        running.go(until=lambda: any(row.state for row in running.ledger.rounds(RUN)))
    order = ("export", RUN, "--model", "global", "--state", tmp_path / "s", "--out", tmp_path / "m")
    code, _, err = protofed(*order, "--round", "best")
    assert (code, "no best round" in err, "federation.best_by" in err) == (78, True, True)


def test_the_best_round_comes_over_the_network_too(
    protofed: Says, state: Path, live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe = recipe_of("fedavg", rounds=6).model_copy(update={"name": RUN})
    server = live_server(recipe, state)
    order = ("export", RUN, "--model", "global", "--server", server.address, "--identity=none", "--out", tmp_path / "m")
    code, said, err = protofed(*order, "--format", "safetensors", "--round", "best", "--json")
    assert code == 0, err
    assert json.loads(said)["origin"]["round"] == 1
    with Operator(server.address, NO_TLS) as operator:
        found = {row.round: operator.verify(RUN, row).finding for row in operator.show(RUN).rounds if row.state}
    # 0: what round 1 was made from, which is the first model that sites sent, byte for byte.
    assert found == {0: "same", 1: "same", 2: "not-kept", 3: "not-kept", 4: "same", 5: "same", 6: "same"}
