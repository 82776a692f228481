"""When to try again, in the metadata of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from protofed.common.protocol.pushback import KEY, LONGEST_S, retry_after_s, retry_metadata


@pytest.mark.parametrize(("seconds", "read"), [(0.0, 0.0), (0.0001, 0.001), (1.5, 1.5), (-3.0, 0.0), (1e9, LONGEST_S)])
def test_seconds_are_read_as_they_were_written(seconds: float, read: float) -> None:
    assert retry_after_s(retry_metadata(seconds)) == read


def test_what_is_not_known_is_not_said() -> None:
    assert retry_metadata(None) == ()
    assert retry_after_s(None) == retry_after_s(()) == retry_after_s((("other", "5000"),)) == 0.0


@pytest.mark.parametrize("value", ["", "-1", "1.5", "soon", "٣", b"1000", "9" * 13, "1e3"])
def test_what_is_no_number_of_milliseconds_is_not_waited_for(value: Any) -> None:
    assert retry_after_s(((KEY, value),)) == 0.0


def test_nobody_waits_longer_than_a_minute() -> None:
    assert retry_after_s(((KEY, "999999999999"),)) == LONGEST_S == 60.0
