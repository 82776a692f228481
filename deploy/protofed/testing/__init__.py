"""Test support for methods outside protofed: the suite that every method must pass. Needs pytest.

from protofed.testing.conformance import MethodConformance

class TestFedProx(MethodConformance):
name = "fedprox"
recipe_file = Path(__file__).parents[1] / "recipes" / "digits-fedprox.toml"
"""

import pytest

pytest.register_assert_rewrite(
    "protofed.testing.conformance"
)  # pytest rewrites asserts to show values only in test files and registered modules
