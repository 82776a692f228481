"""Test support for methods and tasks outside protofed: the suites that each of them must pass. Needs pytest.

```python
from protofed.testing.conformance import MethodConformance

class TestMine(MethodConformance):
    name = "mine"
    recipe_file = Path(__file__).parents[1] / "recipes" / "digits-mine.toml"
```

```python
from protofed.testing.task_conformance import TaskConformance

class TestGrades(TaskConformance):
    recipe_file = Path(__file__).parents[1] / "recipes" / "digits-grades.toml"
    labels = np.array([0, 1, 2, 3, 4])  # of images, of all kinds
    wrong_labels = np.array([-1, 5])  # that no image may have
    learnt = 0.7  # of the score that judges the recipe's rounds
```
"""

import pytest

# pytest shows the values of a failed assert only in test files and in modules that are registered before their import.
pytest.register_assert_rewrite("protofed.testing.conformance", "protofed.testing.task_conformance")
