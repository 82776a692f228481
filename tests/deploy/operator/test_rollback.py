"""What a coordinator is told of a roll-back is what sites' policies make of it."""

from __future__ import annotations

import tomllib

import pytest

from protofed.deploy import shipped
from protofed.deploy.operator.rollback import STANDARD, STRICT


@pytest.mark.parametrize(("policy", "most"), [("standard", STANDARD), ("strict", STRICT)])
def test_the_limits_told_are_those_of_the_shipped_policies(policy: str, most: int) -> None:
    rules = tomllib.loads(shipped.files("policies")[policy].read_text("utf-8"))
    assert rules["limits"]["max_rollback_rounds"] == most
