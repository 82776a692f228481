"""Windows of the week, in UTC, over midnight, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from protofed.client.policy.schedule import Window, is_open, next_opening


def window(begins: str, until: str, *days: str) -> Window:
    table: dict[str, Any] = {"from": begins, "until": until, **({"days": days} if days else {})}
    return Window.model_validate(table)


def at(text: str) -> datetime:
    """2026-06-01 is a Monday."""
    return datetime.fromisoformat(f"2026-06-{text}").replace(tzinfo=UTC)


WORK, NIGHT = window("08:00", "17:30", "mon", "fri"), window("20:00", "06:00", "fri")
WEEKEND, ALWAYS = window("00:00", "00:00", "sat", "sun"), window("12:00", "12:00")


@pytest.mark.parametrize(
    ("held", "now", "expected"),
    [
        (WORK, "01 08:00", True),
        (WORK, "01 17:29:59", True),
        (WORK, "01 17:30", False),
        (WORK, "01 07:59:59", False),
        (WORK, "02 08:00", False),
        (NIGHT, "05 19:59", False),
        (NIGHT, "05 20:00", True),
        (NIGHT, "06 05:59", True),  # Saturday, of the window that began on Friday
        (NIGHT, "06 06:00", False),
        (NIGHT, "06 20:00", False),
        (NIGHT, "05 05:00", False),  # that of Thursday is not there
        (WEEKEND, "05 23:59", False),
        (WEEKEND, "06 00:00", True),
        (WEEKEND, "07 23:59", True),
        (WEEKEND, "08 00:00", False),
        (ALWAYS, "03 11:59", True),
        (ALWAYS, "03 12:00", True),
    ],
)
def test_a_window_holds_its_beginning_and_not_its_end(held: Window, now: str, expected: bool) -> None:
    assert held.contains(at(now)) is expected
    assert is_open([held], at(now)) is expected


def test_any_window_opens_and_none_is_always() -> None:
    assert is_open([], at("03 03:00"))
    assert is_open([WORK, WEEKEND], at("06 03:00"))
    assert not is_open([WORK, WEEKEND], at("03 03:00"))


@pytest.mark.parametrize(("now", "expected"), [("02 09:00", "05 08:00"), ("05 18:00", "08 08:00")])
def test_a_closed_site_opens_at_the_next_window(now: str, expected: str) -> None:
    assert next_opening([WORK], at(now)) == at(expected)
    assert next_opening([WORK, NIGHT], at(now)) == min(at(expected), NIGHT.next_begin(at(now)))


@pytest.mark.parametrize(
    "table",
    [
        {"from": "20:00"},
        {"until": "20:00"},
        {"from": "25:00", "until": "06:00"},
        {"from": "20:00+02:00", "until": "06:00"},
        {"from": "20:00", "until": "06:00", "days": []},
        {"from": "20:00", "until": "06:00", "days": ["monday"]},
        {"from": "20:00", "until": "06:00", "zone": "CET"},
    ],
)
def test_anything_else_is_no_window(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Window.model_validate(table)


def test_it_reads_as_it_was_meant() -> None:
    assert str(NIGHT) == "fri 20:00 to 06:00"
    assert str(ALWAYS) == "daily 12:00 to 12:00"
    assert str(window("08:00", "09:00", "sun", "mon")) == "mon, sun 08:00 to 09:00"
