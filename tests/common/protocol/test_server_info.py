"""What a server says of itself, as it travels."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from protofed.common.protocol.server_info import REGISTERED, ServerInfo, read_server_info

NOON = datetime(2030, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("status", [REGISTERED, "revoked", ""])
def test_it_is_read_as_it_was_said(status: str) -> None:
    said = ServerInfo(NOON, "0.1.0", 1, status, ("trainer", "evaluator") if status else ())
    assert read_server_info(dict(said.metadata())) == said


def test_it_is_plain_metadata_with_the_time_in_utc() -> None:
    east = timezone(timedelta(hours=2))
    assert ServerInfo(NOON.astimezone(east), "0.1.0", 1).metadata() == (
        ("protofed-time", "2030-05-01T12:00:00Z"),
        ("protofed-version", "0.1.0"),
        ("protofed-protocol", "1"),
    )


@pytest.mark.parametrize(
    "change",
    [{"protofed-time": "noon"}, {"protofed-protocol": "one"}, {"protofed-time": ""}, {"protofed-protocol": ""}],
)
def test_what_cannot_be_understood_is_no_greeting(change: dict[str, str]) -> None:
    said: dict[str, str | bytes] = {**dict(ServerInfo(NOON, "0.1.0", 1).metadata()), **change}
    assert read_server_info(said) is None
    assert read_server_info({}) is None


def test_a_text_without_end_is_cut() -> None:
    said = read_server_info({**dict(ServerInfo(NOON, "9" * 5000, 1).metadata())})
    assert said is not None
    assert len(said.software) == 80
