"""Before a server begins: whether its ledger still holds all that was promised, and blobs that nobody names."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

import structlog

from protofed.common.errors import StateError
from protofed.common.protocol.messages import Verdict
from protofed.common.storage.journal import Fact, HalfLineError, Journal, Record, records
from protofed.server.storage.blobs import FolderBlobs
from protofed.server.storage.ledger import AUDIT
from protofed.server.storage.reader import LedgerReader

log = structlog.get_logger()
ADOPTED = "adopted"  # promises that only the ledger had: of a process that died in between
GIVEN_UP = "given-up"  # promises that were lost, and that the operator goes on without
A_LINE = 10_000  # promises in one record
TOLD = 5  # of the promises that are missing


class LostPromisesError(StateError):
    """The ledger lacks what was confirmed to sites.

    Attributes:
        lost: seals and digests.
        told: the first of them in words.
    """

    def __init__(self, message: str, lost: list[str], first: str) -> None:
        super().__init__(message)
        self.lost, self.told = lost, first


def open_journal(path: Path, ledger: LedgerReader, *, give_up: bool) -> Journal:
    """The journal of a ledger, when each holds what the other does.

    Args:
        give_up: go on without what the ledger has lost.

    Raises:
        StateError: the journal was tampered with, or the ledger lacks what it promised.
    """
    journal = Journal(path)  # before it is read: half a last line is cut off
    sealed = ledger.sealed()
    try:
        promised = check_promises(path, sealed)
    except LostPromisesError as error:
        if not give_up:
            raise
        log.error("going on without what the ledger has lost", promises=len(error.lost), first=error.told)
        _note(journal, GIVEN_UP, error.lost)
        promised = _promised(path)
    if adopted := sorted(sealed - promised.keys()):
        log.warning(
            "the journal lacked promises that the ledger has; a few are usual after the server was killed; if there "
            "are many, see the runbook on a journal that was changed",
            promises=len(adopted),
        )
    _note(journal, ADOPTED, adopted)
    return journal


def check_promises(path: Path, sealed: Set[str]) -> dict[str, str]:
    """What the journal has promised, by seal or digest, in words; nothing is written.

    Args:
        kept: what the ledger has, as of `LedgerReader.sealed`.

    Raises:
        LostPromisesError: the ledger lacks a promise.
        StateError: the journal was tampered with.
    """
    promised = _promised(path)
    if lost := sorted(promised.keys() - sealed):
        first = "; ".join(promised[seal] for seal in lost[:TOLD])
        more = f"; and {len(lost) - TOLD} more" if len(lost) > TOLD else ""
        raise LostPromisesError(
            f"the ledger has lost {len(lost)} of the promises in {path.name}: {first}{more}. It is older than the "
            "journal, or its last writes are gone: restore the newest backup, or start once with --recover",
            lost,
            first,
        )
    return promised


def compare_audit(journal: Path, newest: int) -> None:
    """Say it where an audit log lacks records that the journal has seen (`Ledger.note_audit`).

    Args:
        newest: number of the log's last record; 0: there is none.
    """
    counts = [record.facts["records"] for record in records(journal) if record.event == AUDIT]
    if counts and isinstance(counts[-1], int) and newest < counts[-1]:
        log.error(
            "the audit log was cut or removed while no server used it: the journal has seen more records",
            counted=newest,
            needed=counts[-1],
        )


def sweep_orphans(blobs: FolderBlobs, ledger: LedgerReader) -> int:
    """Remove the blobs that no row needs: a process died between a blob and its row, or before it had discarded one."""
    named = ledger.named()
    orphans = [address for address in blobs.addresses() if address not in named]
    for address in orphans:
        blobs.discard(address)
    if orphans:
        log.info("blobs that nobody needs were removed", blobs=len(orphans))
    return len(orphans)


def _note(journal: Journal, event: str, promises: list[str]) -> None:
    for start in range(0, len(promises), A_LINE):
        listed: list[Fact] = [*promises[start : start + A_LINE]]
        journal.append(event, promises=listed)


def _promised(path: Path) -> dict[str, str]:
    """What the journal says must be there, by seal or digest, in words."""
    promised: dict[str, str] = {}
    for record in _whole(path):
        match record.event:
            case "verdict" if record.facts["verdict"] == Verdict.ACCEPTED:
                promised[str(record.facts["record_hash"])] = f"the update of {record.facts['site']} in {_where(record)}"
            case "published":
                promised[str(record.facts["state"])] = f"the state of {_where(record)}"
            case "certificate-revoked":
                promised[str(record.facts["fingerprint"])] = f"the revocation of {record.facts['name']}'s certificate"
            case "adopted":
                promised |= dict.fromkeys(_listed(record), f"what record {record.seq} names")
            case "given-up":
                for seal in _listed(record):
                    promised.pop(seal, None)
    return promised


def _whole(path: Path) -> Iterator[Record]:
    """All records; half a last line, which a killed server leaves, has promised nothing."""
    with suppress(HalfLineError):
        yield from records(path)


def _where(record: Record) -> str:
    return f"round {record.facts['round']} of run {record.facts['run']}"


def _listed(record: Record) -> list[str]:
    promises = record.facts["promises"]
    return [str(seal) for seal in promises] if isinstance(promises, list) else []
