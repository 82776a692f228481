"""The certificates of a ledger in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protofed.common.payload import SiteId
from protofed.server.storage.memory_scores import contradiction
from protofed.server.storage.rows import CertificateRow


class MemoryCertificates:
    """By fingerprint, in the order in which they were registered."""

    def __init__(self) -> None:
        self._rows: dict[str, CertificateRow] = {}

    def rows(self) -> list[CertificateRow]:
        """See `LedgerReader.certificates`."""
        return list(self._rows.values())

    def revoked(self) -> dict[SiteId, tuple[float, str]]:
        """See `LedgerReader.revoked`."""
        of_sites = [row for row in self._rows.values() if row.party == "site"]
        valid = {row.name for row in of_sites if row.revoked_at is None}
        gone = [(row.revoked_at, row) for row in of_sites if row.revoked_at is not None and row.name not in valid]
        return {row.name: (at, row.reason or "") for at, row in sorted(gone, key=lambda pair: pair[0])}

    def register(self, row: CertificateRow) -> None:
        """See `Ledger.register`."""
        if row.fingerprint in self._rows:
            raise contradiction(f"certificate {row.fingerprint}")
        self._rows[row.fingerprint] = row

    def renew(self, row: CertificateRow, **values: Any) -> None:
        """Replace values of a certificate, if it is known."""
        if (known := self._rows.get(row.fingerprint)) is not None:
            self._rows[row.fingerprint] = replace(known, **values)
