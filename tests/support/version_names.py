"""`make version`: the version of pyproject.toml, wherever an image, a wheel or the chart is named."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version
from tests.checkout import ROOT

PLACES = ("README.md", "deploy", "docs")
PROJECT, CHART = Path("pyproject.toml"), Path("deploy/helm/protofed/Chart.yaml")
_NUMBERS = r"[0-9]+\.[0-9]+\.[0-9]+"
# A version between what stands before and after it. Others stay, such as those of a page that tells what once was.
_NAMED = tuple(
    re.compile(rf"(?P<before>{before})(?P<version>{_NUMBERS}(?:\.dev[0-9]+)?)(?P<after>{after})", re.MULTILINE)
    for before, after in (
        ("protofed-(?:server|client):", ""),
        ("protofed-", r"-py3-none-any\.whl"),
        ("^ARG VERSION=", "$"),
        ('^appVersion: "', '"$'),
        ("protofed ", ", Python"),  # what a doctor says
        ("server ", ", protocol"),
    )
)
_OF_PROJECT = re.compile(r'(?P<before>^version = ")[^"]+(?P<after>"$)', re.MULTILINE)
_OF_CHART = re.compile("(?P<before>^version: ).+(?P<after>$)", re.MULTILINE)  # Helm wants a semantic version


def read_version(root: Path = ROOT) -> Version:
    """The version of pyproject.toml."""
    return Version(tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))["project"]["version"])


def write_version(version: Version, root: Path = ROOT) -> None:
    """Write it into pyproject.toml and wherever it is named."""
    _rewrite(root / PROJECT, _OF_PROJECT, str(version))
    write_names(version, root)


def write_names(version: Version, root: Path = ROOT) -> None:
    """Write it wherever it is named."""
    for path in _texts(root):
        for pattern in _NAMED:
            _rewrite(path, pattern, str(version))
    _rewrite(root / CHART, _OF_CHART, semantic(version))


def find_names(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Each version that is named, with its file."""
    for path in _texts(root):
        text = path.read_text(encoding="utf-8")
        for pattern in _NAMED:
            yield from ((str(path.relative_to(root)), found["version"]) for found in pattern.finditer(text))


def semantic(version: Version) -> str:
    """As semver.org has it: 0.4.0.dev0 is 0.4.0-dev0."""
    return str(version).replace(".dev", "-dev")


def _texts(root: Path) -> list[Path]:
    """Files that git knows and that have numbers like a version's."""
    command = ("git", "grep", "-lzIE", _NUMBERS, "--", *PLACES)
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in found.stdout.split("\0") if name]


def _rewrite(path: Path, pattern: re.Pattern[str], version: str) -> None:
    text = path.read_text(encoding="utf-8")
    new = pattern.sub(rf"\g<before>{version}\g<after>", text)
    if new != text:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    write_names(read_version())
