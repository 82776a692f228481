"""deploy/docker: what of a checkout gets to the builder."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from tests.support.dockerfile import ROOT, STAGES


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path from the builder: the last line that fits it, or a folder above it, counts."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(re.fullmatch(glob(pattern), above) for above in upwards(path)):
            verdict = not line.startswith("!")
    return verdict


def upwards(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def glob(pattern: str) -> str:
    """As a regular expression: ** is any number of folders, * stays within one, [...] is one of these letters."""
    known = {"**/": "(?:[^/]+/)*", "*": "[^/]*"}
    pieces = re.split(r"(\*\*/|\*|\[[^]]*\])", pattern)
    return "".join(known.get(one, one if one.startswith("[") else re.escape(one)) for one in pieces)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".env",
        "deploy/.env",
        "runs/demo/site-1/state",
        "protofed-server/ledger.sqlite",
        "ca/key.pem",
        "identity/key.pem",
        "deploy/docker/identity/key.pem",
        "deploy/protofed/deploy/next-key.pem",
        "deploy/docker/server.key",
        "tests/deploy/docker/test_images.py",
        "data/train/0.png",
        "sbom/full.cdx.json",
        "server/protofed/server/__pycache__/engine.cpython-311.pyc",
        "common/protofed/.mypy_cache/x.json",
    ],
)
def test_what_never_reaches_the_builder(path: str) -> None:
    assert ignored(path)


def test_all_that_is_installed_reaches_it() -> None:
    copied = [source for stage in ("tools", "wheel") for rest in STAGES[stage].said("COPY") for source in sources(rest)]
    for source in copied:
        assert (ROOT / source).exists(), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    wheel = packages["targets"]["wheel"]
    for folder in (*wheel["packages"], *wheel["force-include"]):
        assert any(folder == source or folder.startswith(f"{source}/") for source in copied), folder
        found = [ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*")
        files = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
        assert files
        assert not [path for path in files if ignored(str(path.relative_to(ROOT)))]
    for given in ("deploy/docker/ca.pem", "wheelhouse/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl"):
        assert not ignored(given), "what the build arguments name"


def sources(copy: str) -> list[str]:
    """The defaults of what a COPY takes from the context."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in copy.split()[:-1] if not word.startswith("--")]
