"""Where a server's blobs are: in its state folder or, where that has a link, in a folder that other machines see."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from protofed.common.codec import is_digest
from protofed.common.errors import StateError
from protofed.common.storage import files as archive
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.reader import LedgerReader

BLOBS = "blobs"  # of the state folder


def open_blobs(state: Path, elsewhere: Path | None, ledger: LedgerReader, held: ExitStack) -> FolderBlobs:
    """The blobs of this very ledger, which this process alone has until `held` is closed.

    Whoever opens blobs removes those that no row names: with another ledger that would be all of them.

    Args:
        elsewhere: a folder outside of the state folder, which then leads there; None: as it was before.

    Raises:
        StateError: the folder is not there, another server's, or not the one that this ledger's blobs are in.
    """
    folder = state / BLOBS
    if elsewhere is None and not folder.is_symlink():
        return FolderBlobs(folder)
    target = (elsewhere or folder).resolve()
    if not target.is_dir():  # a folder that is made where nothing is mounted would look like lost blobs
        raise StateError(f"the folder of the blobs, {target}, is not there; mount it, or make it")
    held.callback(archive.Lock(target).release)
    if not folder.is_symlink() and any(path.is_file() for path in folder.rglob("*")):
        raise StateError(f"{folder} holds blobs of its own; move what is in it to {target}, or unset `blobs`")
    _check(target, ledger)
    _lead(folder, target)
    return FolderBlobs(folder)


def _lead(folder: Path, target: Path) -> None:
    """Whoever reads a state folder finds the blobs in it, wherever they are."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        _remove_empty(folder)
    folder.symlink_to(target)


def _remove_empty(folder: Path) -> None:
    """Remove a folder of nothing but empty folders: `rmdir` cannot take a file that came in the meantime."""
    try:
        for path in (*(path for path in folder.iterdir() if path.is_dir()), folder):
            path.rmdir()
    except OSError as error:
        raise StateError(f"{folder} is not empty; move what is in it away, or unset `blobs`") from error


def _check(folder: Path, ledger: LedgerReader) -> None:
    """The blobs and the ledger belong together, as far as can be told before the first state."""
    there, named = {path.name for path in folder.iterdir() if is_digest(path.name)}, ledger.named()
    if named and not named & there:
        raise StateError(f"none of the ledger's blobs is in {folder}; is it mounted, and is it this ledger's?")
    if there and not named and not ledger.runs():
        raise StateError(f"{folder} holds {len(there)} blobs, and the ledger knows none; is it another server's?")
