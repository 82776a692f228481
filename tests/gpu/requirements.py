"""What protofed needs beside a bare PyTorch, pinned: `python -m tests.gpu.requirements > tests/gpu/requirements.txt`.

From pyproject.toml's dependencies and the extra `client`, with all that these need in turn, in the versions of
constraints.txt. A test compares, so that the file cannot rot.
"""

from __future__ import annotations

import sys
import tomllib

from packaging.utils import canonicalize_name
from tests.checkout import ROOT
from tests.support.installed_needs import closure

EXTRA = "client"
# What a machine for PyTorch has, of its own versions, or these bring along; a second copy of a library with compiled
# parts would disturb it.
PRESENT = ("torch", "jinja2", "torchvision", "numpy", "scikit-learn", "scipy", "matplotlib", "pillow")
HEADER = """\
# What `python -m tests.gpu` needs beside PyTorch, torchvision, NumPy, scikit-learn and matplotlib, on Linux with
# Python 3.12; docs/how-to/gpu.md. Renew: .venv/bin/python -m tests.gpu.requirements > tests/gpu/requirements.txt
"""
_THERE = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
}


def lines() -> list[str]:
    """One `name==version` a library, sorted."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    pins = _pins()
    return [f"{name}=={pins[name]}" for name in closure(asked, _THERE, PRESENT)]


def _pins() -> dict[str, str]:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in pinned if "==" in line and not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in pairs}


def text() -> str:
    """The file."""
    return HEADER + "".join(f"{line}\n" for line in lines())


if __name__ == "__main__":
    sys.stdout.write(text())
