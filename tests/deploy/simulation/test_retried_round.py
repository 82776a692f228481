"""A simulation in memory computes what one in folders does, also where an attempt at a round is abandoned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from protofed.common.payload import SiteId
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import simulation
from protofed.server.rounds.aggregation import aggregation

ABANDONED = 2  # the round whose first attempt is


@pytest.mark.parametrize("recipe", ["digits-fedper", "digits-scaffold"])
def test_sites_begin_a_round_again_where_its_first_attempt_did(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedPer keeps its heads, SCAFFOLD its control variates: after the first attempt they have moved already."""
    known = shipped.recipe(recipe, ["rounds=3", "data.partition.sites=3", "federation.min_sites=3", "plan.epochs=1"])

    def states(folder: Path | None) -> list[tuple[int, int, str | None]]:
        asked: list[float] = []

        def outliers(norms: Mapping[SiteId, float], _factor: float | None) -> dict[SiteId, str]:
            asked.append(len(norms))
            return dict.fromkeys(norms, "a test says so") if len(asked) == ABANDONED else {}

        monkeypatch.setattr(aggregation, "outliers", outliers)
        with simulation(known, folder) as running:
            running.go()
            return [(row.round, row.attempt, row.state) for row in running.ledger.rounds(known.name)]

    in_memory = states(None)
    assert [row[:2] for row in in_memory] == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)]
    assert in_memory == states(tmp_path)
