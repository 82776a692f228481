"""What a site keeps of a run, looked at from outside: nothing in its folder is changed, its daemon may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protofed.client.privacy.approval import FOLDER, Approvals
from protofed.client.state.disk_store import DOWNLOADS_FOLDER
from protofed.client.transport.audit import FILE as AUDIT
from protofed.common import codec
from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import CodecError, ConfigError, DataError, StateError, short
from protofed.common.payload import Payload, SiteId
from protofed.common.protocol.messages import Assignment
from protofed.common.storage.journal import HalfLineError, records


@dataclass(frozen=True)
class KeptRound:
    """What a site holds after one of its rounds that counted.

    Attributes:
        started_from: digest of the model that it was sent for that round's training.
        personal: BODY and HEAD as the training left them.
    """

    site: SiteId
    round: int
    started_from: Digest
    memory: Payload
    personal: Payload


@dataclass(frozen=True)
class Base:
    """A model that the site was sent; `round` is that of the state that it was made of."""

    address: Digest
    round: int
    payload: Payload


def kept(folder: Path, run: str, round: int | None = None) -> KeptRound:
    """What a site keeps of a round (None: the newest) of a run.

    Raises:
        ConfigError: it keeps nothing of it.
        StateError: what it keeps is damaged.
    """
    rounds = {
        int(path.parent.name): path.parent
        for path in (folder / run).glob("*/receipt.json")
        if path.parent.name.isdigit()
    }
    if not rounds:
        runs = ", ".join(sorted({path.parent.parent.name for path in folder.glob("*/*/receipt.json")})) or "none"
        raise ConfigError(f"the site of {folder} keeps no model of run '{short(run)}'; it has those of runs: {runs}")
    number = max(rounds) if round is None else round
    if number not in rounds:
        there = ", ".join(map(str, sorted(rounds)))
        raise ConfigError(f"the site of {folder} keeps no model of round {number}; it has those of rounds {there}")
    here = rounds[number]
    facts = _facts(here / "task.json")
    memory, personal = (_read(here / f"{name}.safetensors") for name in ("memory", "personal"))
    return KeptRound(str(facts["update"]["site"]), number, Digest(str(facts["task"]["base_digest"])), memory, personal)


def newest_base(folder: Path, run: str, held: KeptRound) -> Base:
    """The newest model of a run that the site was sent and still has, by its own audit log.

    Raises:
        ConfigError: it has none any more.
    """
    address, scored = _last_fetched(folder, run)
    path = folder / DOWNLOADS_FOLDER / (address or "none")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the site of {folder} does not have the model any more that it was sent last of run '{short(run)}'; "
            "give the server's state with --state, or let its daemon take part again"
        ) from error
    if digest(data) != address:
        raise StateError(f"{path} is damaged: its digest differs; let the site's daemon fetch it again")
    after = held.round - 1 if address == held.started_from else held.round
    return Base(address, after if scored is None else scored, _decoded(path, data))


def offered_recipe(folder: Path, run: str) -> Recipe:
    """The recipe that the server offered to the site as this run.

    Raises:
        ConfigError: it offered none, or one that cannot be used.
    """
    from protofed.client.agent.site import read_recipe

    offer = Approvals(folder / FOLDER).offer(run)
    return read_recipe(Assignment(offer.run, offer.recipe))


def _last_fetched(folder: Path, run: str) -> tuple[Digest | None, int | None]:
    """Of the run's models the one that was asked for last; and the round that it was scored for since, if it was."""
    newest: Digest | None = None
    scored: int | None = None
    if not (folder / AUDIT).exists():  # a simulated site's
        return None, None
    try:
        for record in records(folder / AUDIT):
            said = record.facts.get("facts")
            if not isinstance(said, Mapping) or said.get("run") != run:
                continue
            if record.facts.get("call") == "GetChunk" and said.get("digest") != newest:
                newest, scored = Digest(str(said.get("digest"))), None
            elif record.facts.get("call") == "ReportScores":
                scored = int(str(said.get("round")))
    except HalfLineError:  # the daemon is writing just now
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
