"""When to try again, in the metadata of an answer; what a server says of itself, as it travels."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from protofed.common.protocol.call_metadata import (
    LONGEST_S,
    REGISTERED,
    RETRY_KEY,
    ServerInfo,
    read_server_info,
    retry_after_s,
    retry_metadata,
)


@pytest.mark.parametrize(("seconds", "read"), [(0.0, 0.0), (0.0001, 0.001), (1.5, 1.5), (-3.0, 0.0), (1e9, LONGEST_S)])
def test_seconds_are_read_as_they_were_written(seconds: float, read: float) -> None:
    assert retry_after_s(retry_metadata(seconds)) == read
    assert retry_after_s(((RETRY_KEY, "999999999999"),)) == LONGEST_S == 60.0


def test_what_is_not_known_is_not_said() -> None:
    assert retry_metadata(None) == ()
    assert retry_after_s(None) == retry_after_s(()) == retry_after_s((("other", "5000"),)) == 0.0


@pytest.mark.parametrize("value", ["", "-1", "1.5", "soon", "٣", b"1000", "9" * 13, "1e3"])
def test_what_is_no_number_of_milliseconds_is_not_waited_for(value: Any) -> None:
    assert retry_after_s(((RETRY_KEY, value),)) == 0.0


NOON = datetime(2030, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("status", [REGISTERED, "revoked", ""])
def test_it_is_read_as_it_was_said(status: str) -> None:
    said = ServerInfo(NOON, "0.1.0", 1, status, ("trainer", "evaluator") if status else ())
    assert read_server_info(dict(said.metadata())) == said
    long = read_server_info({**dict(ServerInfo(NOON, "9" * 5000, 1).metadata())})
    assert long is not None
    assert len(long.software) == 80


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
