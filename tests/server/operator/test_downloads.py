"""Run records and states in pieces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from protofed.common import codec
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.server.operator import downloads
from protofed.server.operator.downloads import Downloads, published
from protofed.server.operator.run_record import run_record
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.verdicts import RoundOutcome

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

PIECE = 200


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that a small document has several of."""
    monkeypatch.setattr(downloads, "CHUNK_BYTES", PIECE)


@pytest.mark.usefixtures("small")
def test_the_pieces_are_one_run_record_though_the_run_goes_on(lab: Lab) -> None:
    desk = Downloads(lab.ledger, lab.blobs)
    expected = run_record(lab.ledger, lab.blobs, "test")
    first = desk.run_record("test")
    assert len(first.data) == PIECE < first.total
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    data = first.data
    while len(data) < first.total:
        piece = desk.run_record("test", len(data), first.digest)
        assert (piece.total, piece.digest) == (first.total, first.digest)
        data += piece.data
    assert codec.digest(data) == first.digest
    assert json.loads(gzip.decompress(data)) == expected
    assert desk.run_record("test").digest != first.digest
    assert len({downloads.compressed(lab.ledger, lab.blobs, "test") for _ in range(2)}) == 1


@pytest.mark.usefixtures("small")
def test_a_run_record_that_is_not_kept_has_to_be_asked_for_anew(lab: Lab) -> None:
    desk = Downloads(lab.ledger, lab.blobs)
    first = desk.run_record("test")
    for number in range(downloads.MAX_KEPT):
        lab.ledger.end_run("test", f"reason {number}", RoundOutcome.ABORTED)
        desk.run_record("test")
    for offset, address in ((PIECE, first.digest), (PIECE, ""), (0, "0" * 64)):
        with pytest.raises(ConfigError, match="from its beginning"):
            desk.run_record("test", offset, address)


def test_a_state_comes_in_pieces_of_two_mebibytes(make: MakeLab, tmp_path: Path) -> None:
    lab = make(blobs=FolderBlobs(tmp_path)).begin()
    large = lab.blobs.put(np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5))
    lab.ledger.publish("test", 1, 1, large, complete=True, task_status="late", silent={})
    desk = Downloads(lab.ledger, lab.blobs)
    pieces = [desk.state("test", None, offset) for offset in (0, CHUNK_BYTES, 2 * CHUNK_BYTES)]
    assert b"".join(piece.data for piece in pieces) == lab.blobs.get(large)
    assert {(piece.total, piece.digest, piece.round) for piece in pieces} == {(2 * CHUNK_BYTES + 5, large, 1)}
    assert desk.state("test", 1, 7).data == lab.blobs.get(large)[7 : 7 + CHUNK_BYTES]
    assert desk.state("test", 0).round == 0


def test_a_state_that_is_not_there_is_an_error_that_names_those_that_are(lab: Lab, make: MakeLab) -> None:
    assert published(lab.ledger, lab.blobs, "test") == (0, lab.address)
    with pytest.raises(ConfigError, match="no state of round 7, but those of rounds 0"):
        published(lab.ledger, lab.blobs, "test", 7)
    with pytest.raises(ConfigError, match="no run 'other'"):
        published(lab.ledger, lab.blobs, "other")
    waiting = make()
    with pytest.raises(ConfigError, match="has published no model yet"):
        published(waiting.ledger, waiting.blobs, "test")
    first = lab.address
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    lab.blobs.discard(first)  # it was pruned
    assert published(lab.ledger, lab.blobs, "test") == (1, lab.address)
    with pytest.raises(ConfigError, match="but those of rounds 1"):
        published(lab.ledger, lab.blobs, "test", 0)
