"""Read published states and their scores, from a state folder (the server may be running) or over a connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.common import codec
from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import DataError
from protofed.common.payload import Payload, SiteId
from protofed.common.statistics import Spread
from protofed.deploy.run_view import BestSnapshot, RunView
from protofed.deploy.state_folder import open_state
from protofed.server.operator.downloads import published
from protofed.server.operator.run_record import best_of, run_record
from protofed.server.rounds.context import recipe_of

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator


@dataclass(frozen=True)
class PublishedState:
    """A state that a run published.

    Attributes:
        address: its digest in the ledger, checked against the bytes.
        scores: recorded after that round, by site and score name; empty if there are none.
        run: the whole run, now.
        sums: what a secure sum says of the sites' own scores after that round.
    """

    recipe: Recipe
    round: int
    address: Digest
    state: Payload
    scores: Mapping[SiteId, Mapping[str, float]] = field(default_factory=dict)
    run: RunView | None = None
    sums: Mapping[str, Spread] = field(default_factory=dict)


def of_folder(folder: Path, run: str, round: int | None = None) -> PublishedState:
    """Read a state from the folder of a server or of a simulation.

    Args:
        round: None: the newest.

    Raises:
        StateError: the ledger is missing, or the ledger or the state is damaged.
        ConfigError: the folder has no such run, or no longer keeps that state.
    """
    with open_state(folder) as opened:
        name = opened.run(run)
        row = opened.ledger.run(name)
        number, address = published(opened.ledger, opened.blobs, name, round)
        data = opened.blobs.get(address)
        scores = opened.ledger.scores(name, number).get(number, {})
        sums = opened.ledger.score_sums(name, number).get(number, {})
        view = RunView(run_record(opened.ledger, opened.blobs, name))
    assert row is not None  # noqa: S101  (`opened.run` found it)
    return PublishedState(recipe_of(row), number, address, codec.decode(data), scores, view, sums)


def best_in(folder: Path, run: str) -> BestSnapshot | None:
    """The best round of a run in a state folder; None: no round has a score that judges it. Errors as `of_folder`."""
    with open_state(folder) as opened:
        best = best_of(opened.ledger, opened.blobs, opened.run(run))
    return None if best is None else BestSnapshot(**best)


def recipe_in(folder: Path, run: str) -> Recipe:
    """The recipe of a run in a state folder; errors as `of_folder`."""
    with open_state(folder) as opened:
        row = opened.ledger.run(opened.run(run))
    assert row is not None  # noqa: S101  (`opened.run` found it)
    return recipe_of(row)


def of_server(operator: Operator, run: str, round: int | None = None) -> PublishedState:
    """Download a state of a run from a server.

    Args:
        round: None: the newest.

    Raises:
        ConfigError: the server has no such run, or no longer keeps that state.
        DataError: the bytes do not have the digest of the server's ledger.
    """
    number, data = operator.state(run, round)
    view = RunView(operator.run_record(run))
    rows = [row for row in view.attempts if row["round"] == number and row["outcome"] in ("published", "degraded")]
    address = _state_digest(data, rows[-1]["state"] if rows else "", f"the state of round {number}")
    recipe = parse_json(json.dumps(view.recipe), Recipe, f"the recipe of run '{run}'")
    sums = {name: of for name, of in view.spreads.get(number, {}).items() if of.worst is None}
    return PublishedState(recipe, number, address, codec.decode(data), view.scores.get(number, {}), view, sums)


def _state_digest(data: bytes, expected: str, label: str) -> Digest:
    """The digest of the bytes.

    Raises:
        DataError: it is not the expected one.
    """
    if (actual := digest(data)) != expected:
        raise DataError(f"{label} has digest {actual[:16]}…, and the ledger says {expected[:16]}…; nothing is exported")
    return actual
