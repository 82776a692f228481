"""Test support for methods outside protofed: the suite that every method must pass. Needs pytest.

from protofed.testing.conformance import MethodConformance

class TestMine(MethodConformance):
name = "mine"
recipe_file = Path(__file__).parents[1] / "recipes" / "digits-mine.toml"
"""

import pytest

# pytest shows the values of a failed assert only in test files and in modules that are registered before their import.
pytest.register_assert_rewrite("protofed.testing.conformance")
