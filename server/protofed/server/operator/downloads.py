"""What an operator fetches in pieces: the run record of a run, and the states that it published."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, short
from protofed.common.protocol.messages import CHUNK_BYTES
from protofed.server.operator.run_record import BlobReader, run_record
from protofed.server.storage.blobs import Blobs, FolderBlobs
from protofed.server.storage.reader import LedgerReader

KEPT = 4  # run records of more than one piece, the newest; each is a few MB


@dataclass(frozen=True)
class DownloadChunk:
    """One piece; `total` and `digest` are those of the whole document, `round` is a state's."""

    data: bytes
    total: int
    digest: Digest
    round: int = 0


class Downloads:
    """Reads only; its methods take as long as a disk does and may be called on any threads at once."""

    def __init__(self, records: LedgerReader, blobs: Blobs) -> None:
        self._records, self._blobs = records, blobs
        self._lock = threading.Lock()
        self._kept: dict[Digest, bytes] = {}  # run records whose next pieces may be asked for, the newest last
        self._sizes: dict[Digest, int] = {}  # of states that were found sound

    def run_record(self, run: str, offset: int = 0, address: str = "") -> DownloadChunk:
        """2 MiB of a run's run record, which is JSON under gzip, from `offset` on.

        Args:
            address: of the document whose first piece was received; empty: one that is made now.

        Raises:
            ConfigError: there is no such run, or no such document any more.
        """
        with self._lock:
            data = self._kept.get(Digest(address))
        if data is None and (address or offset):
            raise ConfigError(
                f"this run record of run '{short(run)}' is not kept any more; ask for it from the beginning"
            )
        if data is None:
            data = compressed(self._records, self._blobs, run)
            address = codec.digest(data)
            self._keep(Digest(address), data)
        return DownloadChunk(data[offset : offset + CHUNK_BYTES], len(data), Digest(address))

    def state(self, run: str, round: int | None = None, offset: int = 0) -> DownloadChunk:
        """2 MiB of a state from `offset` on; a blob is checked against its address with its first piece.

        Raises:
            ConfigError: as `published`.
            StateError: its blob is damaged.
        """
        number, address = published(self._records, self._blobs, run, round)
        size = self._sizes.get(address)
        if offset == 0 or size is None:
            data = self._blobs.get(address)
            size = self._sizes[address] = len(data)
            return DownloadChunk(data[offset : offset + CHUNK_BYTES], size, address, number)
        return DownloadChunk(self._chunk(address, offset), size, address, number)

    def _chunk(self, address: Digest, offset: int) -> bytes:
        if isinstance(self._blobs, FolderBlobs) and offset % CHUNK_BYTES == 0:
            return self._blobs.chunk(address, offset // CHUNK_BYTES)
        return self._blobs.get(address)[offset : offset + CHUNK_BYTES]

    def _keep(self, address: Digest, data: bytes) -> None:
        if len(data) <= CHUNK_BYTES:
            return
        with self._lock:
            self._kept[address] = data
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]


def compressed(records: LedgerReader, blobs: BlobReader, run: str) -> bytes:
    """A run record as it travels; equal run records are equal bytes."""
    return gzip.compress(json.dumps(run_record(records, blobs, run)).encode(), mtime=0)


def published(records: LedgerReader, blobs: BlobReader, run: str, round: int | None = None) -> tuple[int, Digest]:
    """The round and the address of a state that a run published and that is still kept.

    Args:
        round: None: the newest.

    Raises:
        ConfigError: there is no such run, or no such state any more; the text says which there are.
    """
    rows = records.rounds(run)
    if not rows and records.run(run) is None:
        raise ConfigError(f"there is no run '{short(run)}'; `protofed runs list` has all of them")
    states = {row.round: row.state for row in rows if row.state is not None}
    for number in sorted(states, reverse=True) if round is None else (round,):  # one look at the disk, as a rule
        if number in states and blobs.has(states[number]):
            return number, states[number]
    if not (kept := [number for number in sorted(states) if blobs.has(states[number])]):
        raise ConfigError(f"run '{short(run)}' has published no model yet; expected one that has had a round")
    there = ", ".join(map(str, kept[-10:]))
    raise ConfigError(f"run '{short(run)}' holds no state of round {round}; kept are those of {there}: keep_rounds")
