"""A daemon whose fits have noise, killed around the ledger of its budget: never too little is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.faults.conftest import SITES, ProxiedProcesses
from tests.faults.test_processes import died

from protofed.client.state.dp_ledger import FILE, read
from protofed.common import failpoint
from protofed.common.config.recipe import Recipe

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
PLACES = (*failpoint.BUDGET, "fit-done", "staged", "pushed", "settled")
NOISE = {"noise_multiplier": 1.0, "sampling_rate": 0.25}


def test_a_daemon_killed_at_every_place_has_each_fit_in_its_ledger_once(
    processes_of: Callable[[Recipe], ProxiedProcesses], quick_recipe: Callable[..., Recipe]
) -> None:
    plan = {"batch_size": 64, "lr": 0.05, "dp": NOISE}
    here = processes_of(quick_recipe(plan=plan, rounds=len(PLACES)))
    here.server()
    killed, other = SITES
    here.trainer(other)
    here.trainer(killed, fails=f"{PLACES[0]}=kill")
    for place, after in zip(PLACES, [*PLACES[1:], None], strict=True):
        died(here, killed, place)
        started = {spend.round for spend in read(here.folder / killed / FILE).spends}
        with here.ledger() as ledger:
            sent = {row.round for row in ledger.rounds(here.recipe.name) if row.round and row.state}
        assert started >= sent, f"after {place}"
        here.trainer(killed, fails=f"{after}=kill" if after else "")
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    for site in SITES:
        spent = read(here.folder / site / FILE)
        assert [spend.round for spend in spent.spends] == list(range(1, len(PLACES) + 1))
        assert spent.torn == 0
