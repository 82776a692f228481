"""A state folder looked at from outside: of a server, also while it runs, of a simulation, or of a comparison's job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protofed.common.codec import Digest, digest
from protofed.common.errors import ConfigError, StateError
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader

INSIDE = (".", "state", "server")  # of `server` and `simulate`; of a job of `compare`; of `demo`


@dataclass(frozen=True)
class KeptBlobs:
    """Blobs of a folder in which nothing is changed, not even what a killed process left there."""

    folder: Path

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address.

        Raises:
            StateError: it is not there (any more), or is no longer what it was.
        """
        try:
            data = (self.folder / address).read_bytes()
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}; it may not be kept any more") from error
        if digest(data) != address:
            raise StateError(f"blob {address} has changed on disk; restore it from a backup")
        return data

    def has(self, address: Digest) -> bool:
        """Whether it is there, sound or not."""
        return (self.folder / address).exists()


@dataclass(frozen=True)
class StateFolder:
    """What there is to read in a state folder."""

    folder: Path
    records: LedgerReader
    blobs: KeptBlobs

    def run(self, named: str | None) -> str:
        """The run that is meant: the one of that name, or the only one.

        Raises:
            ConfigError: there is none, or there are several and none was named.
        """
        names = [row.run for row in self.records.runs()]
        if named in names:
            return named
        if named is None and len(names) == 1:
            return names[0]
        there = ", ".join(names) or "none yet"
        if named is None:
            raise ConfigError(f"{self.folder} holds {len(names)} runs; name one of: {there}")
        raise ConfigError(f"{self.folder} holds no run '{named[:80]}'; expected one of: {there}")


@contextmanager
def open_state(folder: Path) -> Iterator[StateFolder]:
    """Look into a state folder; a server may write in it meanwhile.

    Raises:
        StateError: it is none, or its ledger is damaged.
    """
    found = [folder / inside for inside in INSIDE if (folder / inside / LEDGER_FILE).is_file()]
    if not found:
        raise StateError(
            f"{folder} holds no {LEDGER_FILE}; expected the --state folder of a server or of `simulate`, or a job of "
            "`compare` (a ledger in PostgreSQL is asked through its server: --server)"
        )
    records = LedgerReader(f"sqlite:///{found[0] / LEDGER_FILE}")
    try:
        yield StateFolder(found[0], records, KeptBlobs(found[0] / "blobs"))
    finally:
        records.close()
