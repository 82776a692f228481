"""Documents that operators download in chunks: a run's record, and the states that it published."""

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

MAX_KEPT = 4  # run records of more than one chunk, the newest; each is a few MB


@dataclass(frozen=True)
class DownloadChunk:
    """One chunk; `total` (bytes) and `digest` are those of the whole document, `round` is a state's."""

    data: bytes
    total: int
    digest: Digest
    round: int = 0


class Downloads:
    """Reads ledger and blobs; its methods block on the disk and may run on several threads at once."""

    def __init__(self, records: LedgerReader, blobs: Blobs) -> None:
        self._records, self._blobs = records, blobs
        self._lock = threading.Lock()
        # A run's record changes with every round: later chunks come from the very bytes that the first one began.
        self._kept: dict[Digest, bytes] = {}  # the newest last
        self._sizes: dict[Digest, int] = {}  # bytes of states whose digest was checked

    def run_record(self, run: str, offset: int = 0, address: str = "") -> DownloadChunk:
        """A chunk of at most 2 MiB of a run's record (gzipped JSON), from byte `offset` on.

        Args:
            address: digest of the document whose first chunk was received; empty: make a new document.

        Raises:
            ConfigError: there is no such run, or that document is no longer in memory.
        """
        with self._lock:
            data = self._kept.get(Digest(address))
        if data is None and (address or offset):
            raise ConfigError(f"this record of run '{short(run)}' is no longer kept; fetch it again from its beginning")
        if data is None:
            data = compressed(self._records, self._blobs, run)
            address = codec.digest(data)
            self._keep(Digest(address), data)
        return DownloadChunk(data[offset : offset + CHUNK_BYTES], len(data), Digest(address))

    def state(self, run: str, round: int | None = None, offset: int = 0) -> DownloadChunk:
        """A chunk of at most 2 MiB of a published state, from byte `offset` on.

        The blob is read whole and checked against its digest with the first chunk; later chunks are read alone.

        Args:
            round: None: the newest that is kept.

        Raises:
            ConfigError: as `published`.
            StateError: the blob is damaged.
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
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]


def compressed(records: LedgerReader, blobs: BlobReader, run: str) -> bytes:
    """A run's record as it is sent; equal records give equal bytes, so gzip's header has no time."""
    return gzip.compress(json.dumps(run_record(records, blobs, run)).encode(), mtime=0)


def published(records: LedgerReader, blobs: BlobReader, run: str, round: int | None = None) -> tuple[int, Digest]:
    """Round and digest of a state that a run published and whose blob is still kept.

    Args:
        round: None: the newest.

    Raises:
        ConfigError: there is no such run, or that state is not kept; the text lists the rounds that are.
    """
    rows = records.rounds(run)
    if not rows and records.run(run) is None:
        raise ConfigError(f"there is no run '{short(run)}'; `protofed runs show` has all of them")
    states = {row.round: row.state for row in rows if row.state is not None}
    for number in sorted(states, reverse=True) if round is None else (round,):  # newest first: one `has`, as a rule
        if number in states and blobs.has(states[number]):
            return number, states[number]
    if not (available := [number for number in sorted(states) if blobs.has(states[number])]):
        raise ConfigError(f"run '{short(run)}' has published no model yet; expected one that has had a round")
    kept_rounds = ", ".join(map(str, available[-10:]))
    raise ConfigError(
        f"run '{short(run)}' keeps no state of round {round}, but those of rounds {kept_rounds}; see keep_rounds"
    )
