"""Windows of the week, in UTC, over midnight, too; and what each score discloses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.score_names import families

from protofed.client.policy.rules import (
    Window,
    discloses,
    is_open,
    is_own,
    next_opening,
    on_own_images,
    tells_of_classes,
)
from protofed.common.protocol.messages import Role


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
        (WORK, "02 08:00", False),
        (NIGHT, "05 19:59", False),
        (NIGHT, "05 20:00", True),
        (NIGHT, "06 05:59", True),  # Saturday, of the window that began on Friday
        (NIGHT, "06 06:00", False),
        (NIGHT, "05 05:00", False),  # that of Thursday is not there
        (WEEKEND, "06 00:00", True),
        (WEEKEND, "08 00:00", False),
        (ALWAYS, "03 11:59", True),
        (ALWAYS, "03 12:00", True),
    ],
)
def test_a_window_holds_its_beginning_and_not_its_end(held: Window, now: str, expected: bool) -> None:
    assert held.contains(at(now)) is expected
    assert is_open([held], at(now)) is expected


def test_any_window_opens_and_reads_as_it_was_meant() -> None:
    assert is_open([], at("03 03:00"))
    assert is_open([WORK, WEEKEND], at("06 03:00"))
    assert not is_open([WORK, WEEKEND], at("03 03:00"))
    for now, expected in (("02 09:00", "05 08:00"), ("05 18:00", "08 08:00")):
        assert next_opening([WORK], at(now)) == at(expected)
        assert next_opening([WORK, NIGHT], at(now)) == min(at(expected), NIGHT.next_begin(at(now)))
    assert str(NIGHT) == "fri 20:00 to 06:00"
    assert str(ALWAYS) == "daily 12:00 to 12:00"
    assert str(window("08:00", "09:00", "sun", "mon")) == "mon, sun 08:00 to 09:00"


@pytest.mark.parametrize(
    "table",
    [
        {"from": "20:00"},
        {"from": "20:00+02:00", "until": "06:00"},
        {"from": "20:00", "until": "06:00", "days": []},
        {"from": "20:00", "until": "06:00", "zone": "CET"},
    ],
)
def test_anything_else_is_no_window(table: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Window.model_validate(table)


# Every score says what it discloses, and those of a site's own data are told from an evaluator's


NOTHING = discloses("global.accuracy")


@pytest.mark.parametrize(
    "name", sorted({"loss", *families(), *families("multi-label"), *families("regression", range=(0, 1))})
)
def test_exactly_scores_of_the_sites_own_disclose_something_of_it(name: str) -> None:
    assert is_own(name) == (not name.startswith("global.") or name.startswith("global.local."))
    assert tells_of_classes(name) == (is_own(name) and name != "loss")
    assert (discloses(name) == NOTHING) == (not is_own(name))
    assert discloses(name).endswith(".")


def test_a_score_of_a_class_discloses_what_its_family_does_and_a_plugins_own_number_is_the_sites() -> None:
    assert discloses("personal.local.recall.3") == discloses("personal.local.recall") != discloses("personal.recall")
    assert is_own("personal.recall.3")
    assert not is_own("global.recall.3")
    assert is_own("train.drift")
    assert discloses("train.drift") != NOTHING


def test_a_score_of_another_package_is_not_said_to_tell_what_ours_do() -> None:
    """Nor that it tells nothing."""
    for name in ("personal.kappa", "personal.local.kappa", "global.local.kappa"):
        assert "Only its author knows" in discloses(name)
    assert discloses("global.kappa") == NOTHING


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_scores_of_other_tasks_tell_of_findings_or_numbers(task: str) -> None:
    options, word = ({"range": (0, 1)}, "number") if task == "regression" else ({}, "finding")
    for name in filter(is_own, families(task, **options)):
        assert word in discloses(name), name


@pytest.mark.parametrize("roles", [{Role.TRAINER}, {Role.EVALUATOR}, set(Role)])
def test_an_evaluators_scores_are_on_a_sites_own_images_only_if_it_trains_too(roles: set[Role]) -> None:
    found = on_own_images(roles, {"global.accuracy", "global.majority", "global.local.accuracy", "loss"})
    assert found == (["global.accuracy", "global.majority"] if len(roles) == 2 else [])
