"""Server and daemons killed again and again at random instants; the run ends as if nothing had happened."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.invariants import check, serves
from tests.support.processes import Processes, undisturbed

from protofed.common.config.recipe import Recipe

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

SEED = 83
ROUNDS = 40
SERVER_KILLS = 20
CLIENT_KILLS = 40
LAST_ROUNDS = 10  # in which nobody is killed any more: undisturbed, they take seconds
# Before each kill. On average shorter than a process takes to start: a run ahead of the plan stands still until the
# plan has caught up, and cannot end before its last kill.
LONGEST_PAUSE_S = 0.3
PATIENCE_S = 600.0
SITES = ("site-1", "site-2", "site-3")
# FedNH's sites keep a memory from round to round: a round that counted twice or not at all would show in the digest.
METHOD = "fednh"
PLAN = {"epochs": 3, "batch_size": 16, "lr": 0.02, "momentum": 0.9, "checkpoint": True}
RULES = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.2, "score_every": 0}


class Chaos:
    """Kills live processes, and starts each again at once."""

    def __init__(self, here: Processes, seed: int) -> None:
        self._here, self._chance = here, random.Random(seed)  # noqa: S311  (no secret)
        self.kills: dict[str, int] = {}
        victims = ["server"] * SERVER_KILLS + ["client"] * CLIENT_KILLS
        self._chance.shuffle(victims)
        self._victims = victims

    def start(self, name: str) -> None:
        """Start a process, as it was started before."""
        if name == "server":
            self._here.server()
        else:
            self._here.site(name, f"--partition-index={SITES.index(name)}")

    def rage(self) -> None:
        """Kill by the plan: its kills are spread evenly over the rounds, at random instants within each."""
        for number, victim in enumerate(self._victims):
            first = 1 + number * (ROUNDS - LAST_ROUNDS) // len(self._victims)
            self._here.wait_for(partial(self._has_started, first), PATIENCE_S)
            time.sleep(self._chance.uniform(0, LONGEST_PAUSE_S))
            self._kill("server" if victim == "server" else self._chance.choice(SITES))

    def _kill(self, name: str) -> None:
        assert self._here.running[name].poll() is None, f"{name} ended by itself\n{self._here.logs()}"
        self._here.kill(name)
        self.kills[name] = self.kills.get(name, 0) + 1
        self.start(name)

    def _has_started(self, number: int) -> bool:
        return bool(rounds := self._here.attempts()) and rounds[-1][0] >= number


def test_row_83_a_run_survives_kills_of_server_and_daemons_at_random_instants(
    tmp_path: Path, recipe_of: Callable[..., Recipe]
) -> None:
    """Whatever was killed, and whenever: every round counts once, and the last model is the quiet run's."""
    recipe = recipe_of(METHOD, plan=PLAN, federation=RULES, rounds=ROUNDS)
    final, began = undisturbed(recipe), time.monotonic()
    here = Processes.of(tmp_path, recipe)
    chaos = Chaos(here, SEED)
    try:
        for name in ("server", *SITES):
            chaos.start(name)
        chaos.rage()
        serves(here.address)
        assert here.until_done({name: partial(chaos.start, name) for name in here.running}, PATIENCE_S) == 0
    finally:
        here.end()
    print(f"{chaos.kills} kills in {time.monotonic() - began:.0f} s")  # noqa: T201
    assert (chaos.kills.pop("server"), sum(chaos.kills.values())) == (SERVER_KILLS, CLIENT_KILLS)
    found = check(tmp_path / "server", recipe.name, sites=[tmp_path / site for site in SITES], final=final)
    assert (found.published, found.updates) == (ROUNDS + 1, len(SITES) * ROUNDS + 2)
    with here.ledger() as ledger:
        assert all(row.complete for row in ledger.rounds(recipe.name))
    assert "Traceback" not in "".join(log.read_text() for log in tmp_path.glob("*.log"))
