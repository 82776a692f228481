"""What ends soon stands out."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.table import Table
from rich.text import Text

from protofed.deploy.certs import table as certs_view

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("left", "shown", "style"),
    [
        (timedelta(days=31), "31", ""),
        (timedelta(days=29, hours=23), "29", "yellow"),
        (timedelta(days=7), "7", "yellow"),
        (timedelta(days=6, hours=23), "6", "bold red"),
        (timedelta(seconds=-1), "expired", "bold red"),
    ],
)
def test_what_ends_soon_stands_out(left: timedelta, shown: str, style: str) -> None:
    row = certs_view.CertRow("site", "a", "f" * 64, NOW - timedelta(days=300), NOW + left)
    table = certs_view.table([row], NOW)
    assert isinstance(table, Table)
    [cell] = (cell for column in table.columns if column.header == "days left" for cell in column.cells)
    assert isinstance(cell, Text)
    assert (cell.plain, str(cell.style)) == (shown, style)


def test_columns_that_say_nothing_are_left_out() -> None:
    row = certs_view.CertRow("site", "a", "f" * 64, NOW - timedelta(days=1), NOW + timedelta(days=1))
    revoked = replace(
        row, revoked="2030-05-01T12:00:00Z: left", roles=("trainer",), not_before=NOW + timedelta(hours=1)
    )
    assert headers(row) == ["party", "name", "fingerprint", "until", "days left"]
    assert headers(replace(row, key_fingerprint="0" * 64)) == ["party", "name", "key", "until", "days left"]
    assert headers(revoked) == ["party", "name", "roles", "fingerprint", "from", "until", "days left", "revoked"]
    assert "protofed certs request" in str(certs_view.table([], NOW))


def headers(row: certs_view.CertRow) -> list[str]:
    table = certs_view.table([row], NOW)
    assert isinstance(table, Table)
    return [str(column.header) for column in table.columns]
