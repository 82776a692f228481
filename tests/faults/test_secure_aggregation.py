"""Secure aggregation of real daemons over mutual TLS, killed and cut off: the state of a simulation, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from tests.support.invariants import check
from tests.support.processes import Processes, certified, undisturbed

from protofed.client.secure_aggregation.sessions import FOLDER
from protofed.common import failpoint
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import SUM_STEPS, TaskKind
from protofed.deploy import shipped
from protofed.server.storage.rows import RoundRow

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
SITES = tuple(f"site-{number}" for number in range(1, 6))
MakeProcesses = Callable[[Recipe], Processes]


@pytest.fixture
def hospitals(tmp_path: Path) -> Iterator[MakeProcesses]:
    """A folder for a server and daemons that know each other by certificates; none is left running."""
    yield from certified(tmp_path)


def quick(name: str, *changes: str, **rules: float) -> Recipe:
    """A shipped recipe of five sites, in two rounds."""
    known = ("rounds=2", "federation.heartbeat_s=0.2", "federation.secure=true")
    return shipped.recipe(name, [*known, *changes, *(f"federation.{key}={value}" for key, value in rules.items())])


RECIPES = {
    "fednh": partial(quick, "digits-fednh-secure"),
    "cwfedavg": partial(quick, "digits-cwfedavg", 'method.shares="true"'),
}


def started(here: Processes, fails: Mapping[str, str]) -> None:
    here.server(fails=fails.get("server", ""))
    for site in SITES:
        trainer(here, site, fails.get(site, ""))


def trainer(here: Processes, site: str, fails: str = "") -> None:
    here.site(site, f"--partition-index={SITES.index(site)}", fails=fails)


def rounds(here: Processes) -> list[RoundRow]:
    """All attempts, those to make the first model left out."""
    with here.ledger() as ledger:
        return [row for row in ledger.rounds(here.recipe.name) if row.round]


def check_end(here: Processes) -> None:
    """All ended well, with what a simulation gives, and nothing that was acknowledged is lost."""
    assert here.finish(["server", *SITES]) == [0] * 6, here.logs()
    folders = [here.folder / site for site in SITES]
    found = check(here.folder / "server", here.recipe.name, sites=folders, final=undisturbed(here.recipe))
    assert found.published == here.recipe.rounds + 1
    assert min(found.recomputed, found.receipts) >= 3
    assert "Traceback" not in here.logs()
    for folder in folders:
        assert list((folder / FOLDER / here.recipe.name).glob("*.json")) == [], "secrets of a sum that is over"


@pytest.mark.parametrize("method", RECIPES)
def test_row_76_two_dropouts_at_different_steps_give_the_sum_of_a_simulation(
    method: str, hospitals: MakeProcesses
) -> None:
    """One before the numbers: the attempt is abandoned, and opened again. One behind them: the others open the sum."""
    here = hospitals(RECIPES[method](sum_step_s=4.0))
    started(here, {"site-2": "sum-share=kill", "site-4": "sum-agree=kill"})
    here.died("site-2")
    here.wait_for(lambda: rounds(here)[0].abandoned is not None)
    trainer(here, "site-2")
    here.died("site-4")
    here.wait_for(lambda: any(row.state for row in rounds(here)))
    trainer(here, "site-4")
    check_end(here)
    first, second, *_ = rounds(here)
    assert "share of the secure aggregation: 4 of 5 sites, 0 in whole groups, 5 are needed" in str(first.abandoned)
    assert (second.round, second.attempt, second.complete) == (1, 2, True)
    with here.ledger() as ledger:
        tasks = ledger.tasks(here.recipe.name, 1, 2)
    silent = {(row.kind, row.site) for row in tasks if row.task_status != "reported"}
    assert silent == {(TaskKind.AGREE, "site-4")}


def test_row_76_a_site_killed_at_every_step_sends_the_same_again(hospitals: MakeProcesses) -> None:
    here = hospitals(RECIPES["fednh"]())
    here.server()
    deaths = here.die_side_by_side(dict.fromkeys(SITES, iter(failpoint.SUMS)), partial(trainer, here))
    assert sorted(deaths) == sorted(failpoint.SUMS)
    check_end(here)
    assert [(row.round, row.attempt) for row in rounds(here)] == [(1, 1), (2, 1)]  # none was started anew


def test_row_76_a_server_killed_around_every_step_asks_the_same_again(hospitals: MakeProcesses) -> None:
    here = hospitals(RECIPES["fednh"]())
    places = [*(place for _ in SUM_STEPS for place in ("sum-step-closed", "sum-step-asked")), "sum-opened"]
    places += ["state-stored", "round-published"]
    started(here, {"server": f"{places[0]}=kill"})
    here.die_at_each("server", places, lambda fails: here.server(fails=fails))
    check_end(here)
    assert [(row.round, row.attempt) for row in rounds(here)] == [(1, 1), (2, 1)]


def test_row_84_a_server_restored_from_a_backup_sums_again_what_its_sites_have_summed(hospitals: MakeProcesses) -> None:
    """They take part in no attempt twice, and so decline the number that the older ledger gives first."""
    here = hospitals(RECIPES["fednh"]("rounds=4"))
    state, backup = here.folder / "server", here.folder / "backup"
    started(here, {"server": "round-published:2=kill"})  # the first model is the first that is published
    here.died("server")
    shutil.copytree(state, backup)
    here.server(fails="round-published:2=kill")
    here.died("server")
    shutil.rmtree(state)
    backup.rename(state)
    here.server()
    check_end(here)
    assert [(row.round, row.attempt) for row in rounds(here)] == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)]
