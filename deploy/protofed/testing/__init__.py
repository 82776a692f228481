"""What the tests of a method outside protofed need: the suite that every method passes. It needs pytest.

from protofed.testing.conformance import MethodConformance

class TestFedProx(MethodConformance):
name = "fedprox"
recipe_file = Path(__file__).parents[1] / "recipes" / "digits-fedprox.toml"
"""

import pytest

pytest.register_assert_rewrite("protofed.testing.conformance")  # asserts show values, though it is no test file
