"""What a dossier says of models: how alike the classes' prototypes are, and the norms that sites sent by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ProtofedError
from protofed.common.payload import Array, Part, Payload, Tensors
from protofed.common.tensors import unit
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow

MOST_CLASSES = 256  # of more, a matrix of all pairs is neither read nor drawn
DECIMALS = 4


class BlobReader(Protocol):
    """Blobs as a reader sees them."""

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""


def similarity(rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Cosines between the classes' prototypes [C, C] in the newest state that is kept, with its round.

    A class without a prototype has None in its row and column; without any prototypes `cosines` is empty.
    """
    for row in reversed(rounds):
        if row.state is None or row.rolled_back or (state := _read(blobs, row.state)) is None:
            continue
        rows = _rows(state.get(Part.PROTOTYPES, {}), classes)
        return {"round": row.round, "cosines": [] if rows is None else _listed(cosines(rows))}
    return {"round": None, "cosines": []}


def norms(records: LedgerReader, rounds: Sequence[RoundRow], blobs: BlobReader, classes: int) -> dict[str, Any]:
    """Euclidean norms by class, {site: [C]}, of the newest round whose updates are kept: of the rows of the head that
    sites sent, or else of their prototypes; a class that a site sent nothing of has None.
    """
    for row in reversed(rounds):
        if row.round == 0 or row.rolled_back:
            continue
        used = [update for update in records.updates(row.run, row.round, row.attempt) if update.counts]
        found = {update.task.site: payload for update in used if (payload := _read(blobs, update.digest)) is not None}
        if found:
            return {"round": row.round, **_of_sites(found, classes)}
    return {"round": None, "part": "", "sites": {}}


def cosines(rows: Array) -> Array:
    """Of all pairs of rows, [C, D] -> [C, C]; NaN with a row that is NaN or zero: it has no direction."""
    directions = unit(np.asarray(rows, dtype=float))
    directions[~np.any(directions, axis=1)] = np.nan
    return np.asarray(directions @ directions.T)


def _of_sites(payloads: Mapping[str, Payload], classes: int) -> dict[str, Any]:
    """Of the first part that says something of classes."""
    for part, read in ((Part.HEAD, _head), (Part.PROTOTYPES, _rows)):
        rows = {site: read(payload.get(part, {}), classes) for site, payload in payloads.items()}
        told = {site: _listed(np.linalg.norm(found, axis=1)) for site, found in rows.items() if found is not None}
        if told:
            return {"part": str(part), "sites": told}
    return {"part": "", "sites": {}}


def _head(tensors: Tensors, classes: int) -> Array | None:
    """The last matrix with a row a class, [C, D]; None: there is none."""
    found = [tensors[name] for name in sorted(tensors) if tensors[name].ndim == 2 and len(tensors[name]) == classes]
    return found[-1].astype(float) if found and classes <= MOST_CLASSES else None


def _rows(tensors: Tensors, classes: int) -> Array | None:
    """Prototypes [C, D], NaN where a class has none: they come as one matrix, or by class; None: there are none."""
    if classes > MOST_CLASSES:
        return None
    if "mean" in tensors:
        return tensors["mean"].astype(float)
    known = {int(name): row for name, row in tensors.items() if name.isdecimal() and int(name) < classes}
    if not known:
        return None
    rows = np.full((classes, next(iter(known.values())).size), np.nan)
    for c, row in known.items():
        rows[c] = row.reshape(-1)
    return rows


def _read(blobs: BlobReader, address: Digest) -> Payload | None:
    """None: it is not kept any more, or not sound."""
    if not blobs.has(address):
        return None
    try:
        return codec.decode(blobs.get(address))
    except ProtofedError:
        return None


def _listed(values: Array) -> Any:
    """As nested lists, rounded, with None for what is no number."""
    if values.ndim > 1:
        return [_listed(row) for row in values]
    return [round(float(value), DECIMALS) if np.isfinite(value) else None for value in values]
