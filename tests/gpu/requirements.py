"""What protofed needs beside a bare PyTorch, pinned: `python -m tests.gpu.requirements > tests/gpu/requirements.txt`.

From pyproject.toml's dependencies and the extra `client`, with all that these need in turn, in the versions of
constraints.txt. A test compares, so that the file cannot rot.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.checkout import ROOT

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
    return [f"{name}=={pins[name]}" for name in sorted(_closure(_applying(asked, ())))]


def _closure(roots: Iterable[tuple[str, frozenset[str]]]) -> set[str]:
    """The names of these libraries, given with their extras, and of all that they need in turn; but for `PRESENT`."""
    waiting, seen = list(roots), set[tuple[str, frozenset[str]]]()
    while waiting:
        name, extras = found = waiting.pop()
        if found not in seen and name not in PRESENT:
            seen.add(found)
            waiting += _applying(metadata.requires(name) or (), extras)
    return {name for name, _ in seen}


def _applying(requirements: Iterable[str], extras: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """The requirements that apply on the other machine, by name, with the extras that they ask for."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**_THERE, "extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def _pins() -> dict[str, str]:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in pinned if "==" in line and not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in pairs}


def text() -> str:
    """The file."""
    return HEADER + "".join(f"{line}\n" for line in lines())


if __name__ == "__main__":
    sys.stdout.write(text())
