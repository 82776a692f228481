"""Reads a state folder of a server (also a running one), of a simulation, or of a job of `compare`; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protofed.common.codec import Digest, digest
from protofed.common.errors import ConfigError, StateError
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader

SUBFOLDERS = (".", "state", "server")  # that hold the ledger: of `server` and `simulate`; of `compare`; of `demo`


@dataclass(frozen=True)
class ReadOnlyBlobs:
    """The blobs of a folder. Unlike `FolderBlobs` it removes no leftovers, for a server may be writing them."""

    folder: Path

    def get(self, address: Digest) -> bytes:
        """A blob's bytes, checked against its address, the digest.

        Raises:
            StateError: it is missing, or it has changed on disk.
        """
        try:
            data = (self.folder / address).read_bytes()
        except OSError as error:
            raise StateError(f"blob {address} cannot be read: {error.strerror}; it may not be kept any more") from error
        if digest(data) != address:
            raise StateError(f"blob {address} has changed on disk; restore it from a backup")
        return data

    def has(self, address: Digest) -> bool:
        """Whether the blob exists; its content is not checked."""
        return (self.folder / address).exists()


@dataclass(frozen=True)
class StateFolder:
    """An open state folder."""

    folder: Path
    ledger: LedgerReader
    blobs: ReadOnlyBlobs

    def run(self, name: str | None) -> str:
        """The name of an existing run: `name`, or that of the only run if it is None.

        Raises:
            ConfigError: there is no such run, or there are several and none was named.
        """
        names = [row.run for row in self.ledger.runs()]
        if name in names:
            return name
        if name is None and len(names) == 1:
            return names[0]
        names_text = ", ".join(names) or "none yet"
        if name is None:
            raise ConfigError(f"{self.folder} holds {len(names)} runs; name one of: {names_text}")
        raise ConfigError(f"{self.folder} holds no run '{name[:80]}'; expected one of: {names_text}")


@contextmanager
def open_state(folder: Path) -> Iterator[StateFolder]:
    """Open a state folder for reading; a server may write in it meanwhile.

    Raises:
        StateError: it is not a state folder, or its ledger is damaged.
    """
    candidates = [folder / name for name in SUBFOLDERS if (folder / name / LEDGER_FILE).is_file()]
    if not candidates:
        raise StateError(
            f"{folder} holds no {LEDGER_FILE}; expected the --state folder of a server or of `simulate`, or a job of "
            "`compare`. If the ledger is in PostgreSQL, ask the server: --server"
        )
    ledger = LedgerReader(f"sqlite:///{candidates[0] / LEDGER_FILE}")
    try:
        yield StateFolder(candidates[0], ledger, ReadOnlyBlobs(candidates[0] / "blobs"))
    finally:
        ledger.close()
