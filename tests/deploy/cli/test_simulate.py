"""A policy under which no simulated site takes part is refused before the simulation begins."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from protofed.common.errors import PolicyViolationError
from protofed.deploy import shipped
from protofed.deploy.cli.main import app
from protofed.deploy.cli.simulate import check_simulated
from protofed.deploy.simulation.run_tables import RELEASES_ALL


def test_what_a_policy_refuses_is_said_in_one_line_with_what_to_try() -> None:
    found = CliRunner().invoke(app, ["simulate", "digits-fednh", "--policy", "standard"])
    assert isinstance(found.exception, PolicyViolationError)
    for phrase in ("policy standard", "federation.secure = true", "digits-trio"):
        assert phrase in str(found.exception)
    assert "\n" not in str(found.exception)
    assert found.stdout == ""


@pytest.mark.parametrize(("recipe", "policy"), [("digits-trio", "standard"), ("digits-fednh", "open")])
def test_what_a_policy_allows_is_simulated(recipe: str, policy: str) -> None:
    check_simulated(shipped.recipe(recipe), shipped.policy(policy))


def test_the_hint_names_a_run_that_is_allowed() -> None:
    _, _, recipe, option, policy = RELEASES_ALL.rpartition(": ")[2].rstrip(".").split()
    assert option == "--policy"
    check_simulated(shipped.recipe(recipe), shipped.policy(policy))
