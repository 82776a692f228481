"""Reads the states that a run keeps: published ones of a server or a state folder, and those of a site.

Read-only: the server and the daemon may be running.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.client.policy.approval import FOLDER, Approvals
from protofed.client.state.disk_store import DOWNLOADS_FOLDER
from protofed.client.transport.audit import FILE as AUDIT
from protofed.common import codec
from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import CodecError, ConfigError, DataError, StateError, short
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import Assignment
from protofed.common.protocol.scores import Spread
from protofed.common.storage.journal import HalfLineError, records, segments
from protofed.deploy.audit.reader import LogReader, Message
from protofed.deploy.run_view import BestSnapshot, RunView
from protofed.deploy.state_folder import open_state
from protofed.server.operator.downloads import published
from protofed.server.operator.run_record import find_best, run_record
from protofed.server.rounds.context import read_recipe

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator


@dataclass(frozen=True)
class PublishedState:
    """A state that a run published.

    Attributes:
        address: its digest in the ledger, checked against the bytes.
        scores: recorded after that round, by site and score name; empty if there are none.
        run: the whole run, now.
        sums: what a secure aggregation says of the sites' own scores after that round.
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
    return PublishedState(read_recipe(row), number, address, codec.decode(data), scores, view, sums)


def best_in(folder: Path, run: str) -> BestSnapshot | None:
    """The best round of a run in a state folder; None: no round has a score that judges it. Errors as `of_folder`."""
    with open_state(folder) as opened:
        best = find_best(opened.ledger, opened.blobs, opened.run(run))
    return None if best is None else BestSnapshot(**best)


def recipe_in(folder: Path, run: str) -> Recipe:
    """The recipe of a run in a state folder; errors as `of_folder`."""
    with open_state(folder) as opened:
        row = opened.ledger.run(opened.run(run))
    assert row is not None  # noqa: S101  (`opened.run` found it)
    return read_recipe(row)


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


@dataclass(frozen=True)
class KeptRound:
    """What a site keeps of one accepted round.

    Attributes:
        started_from: digest of the model that the site trained from in that round.
        client_state: what the method carries from round to round at this site.
        personal: BODY and HEAD as the training left them.
    """

    site: SiteId
    round: int
    started_from: Digest
    client_state: Payload
    personal: Payload


@dataclass(frozen=True)
class Base:
    """A model that the site was sent; `round` is the round of its state."""

    address: Digest
    round: int
    payload: Payload


def kept(folder: Path, run: str, round: int | None = None) -> KeptRound:
    """Read what a site keeps of a run after a round: of the newest of its own rounds until then.

    Args:
        round: None: the newest.

    Raises:
        ConfigError: the site keeps nothing of that run, or nothing as old as that round.
        StateError, DataError: a file is damaged.
    """
    rounds = _rounds(folder, run)
    if not rounds:
        runs = ", ".join(sorted({path.parent.parent.name for path in folder.glob("*/*/receipt.json")})) or "none"
        raise ConfigError(f"the site of {folder} keeps no model of run '{short(run)}'; it has those of runs: {runs}")
    until = [number for number in rounds if round is None or number <= round]
    if not until:
        raise no_such_round(folder, run, round)
    number = max(until)
    round_folder = rounds[number]
    facts = _facts(round_folder / "task.json")
    client_state, personal = (_read(round_folder / f"{name}.safetensors") for name in ("client_state", "personal"))
    return KeptRound(
        str(facts["update"]["site"]), number, Digest(str(facts["task"]["base_digest"])), client_state, personal
    )


def no_such_round(folder: Path, run: str, round: int | None) -> ConfigError:
    """The error that a site keeps no model of its own of that round."""
    numbers = ", ".join(map(str, sorted(_rounds(folder, run))))
    return ConfigError(f"the site of {folder} keeps no model of round {round}; it has those of rounds {numbers}")


def _rounds(folder: Path, run: str) -> dict[int, Path]:
    """The folders of the rounds that a site keeps, by number."""
    receipts = (folder / run).glob("*/receipt.json")
    return {int(path.parent.name): path.parent for path in receipts if path.parent.name.isdigit()}


def newest_base(folder: Path, run: str, kept_round: KeptRound) -> Base:
    """The newest model of a run that the site was sent and still has, found through its audit log.

    Raises:
        ConfigError: the site no longer has one.
        StateError: the file's digest differs.
    """
    address, scored = _last_fetched(folder, run)
    path = folder / DOWNLOADS_FOLDER / (address or "none")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{folder} no longer has the newest model of run '{short(run)}' that the server sent to the site. "
            "Give the server's state with --state, or let the daemon take part again"
        ) from error
    if digest(data) != address:
        raise StateError(f"{path} is damaged: its digest differs; let the site's daemon fetch it again")
    # A model fetched for training is the previous round's state; one fetched after training is this round's.
    round_of_base = kept_round.round - 1 if address == kept_round.started_from else kept_round.round
    return Base(address, round_of_base if scored is None else scored, _decoded(path, data))


def offered_recipe(folder: Path, run: str) -> Recipe:
    """The recipe that the server offered to the site as this run.

    Raises:
        ConfigError: the server offered none, or this version cannot use it.
    """
    from protofed.client.site import read_recipe

    offer = Approvals(folder / FOLDER).offer(run)
    return read_recipe(Assignment(offer.run, offer.recipe))


def _last_fetched(folder: Path, run: str) -> tuple[Digest | None, int | None]:
    """The digest of the run's model that was downloaded last, and the round as which the site scored it."""
    newest: Digest | None = None
    scored: int | None = None
    if not segments(folder / AUDIT):  # simulated sites keep no audit log
        return None, None
    try:
        for entry in map(LogReader().read, records(folder / AUDIT)):
            match entry:
                case Message(call="GetChunk", run=of, fields={"digest": fetched}) if of == run and fetched != newest:
                    newest, scored = Digest(fetched), None
                case Message(call="ReportScores", run=of, round=number) if of == run:
                    scored = number
    except HalfLineError:  # the daemon is writing the last line
        pass
    return newest, scored


def _facts(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        table["task"]["base_digest"], table["update"]["site"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} cannot be read ({error}); restore it from a backup") from error
    return dict(table)


def _read(path: Path) -> Payload:
    try:
        return _decoded(path, path.read_bytes())
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; restore it from a backup") from error


def _decoded(path: Path, data: bytes) -> Payload:
    try:
        return codec.decode(data)
    except CodecError as error:
        raise DataError(f"{path} is damaged: {error}; restore it from a backup") from error
