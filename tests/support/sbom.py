"""`make sbom`: CycloneDX lists of what this environment has: what the server alone needs, and everything.

No network is needed: the server's list is made of an environment that has the metadata of its libraries, and no code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path

from tests.checkout import ROOT
from tests.support.installed_needs import closure

OPTIONS = ("--output-reproducible", "--validate")


def write_lists(server: Path, full: Path, root: Path = ROOT) -> None:
    """Write both lists.

    Args:
        root: whose pyproject.toml names and versions what the lists are of.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "server"
        venv.create(environment, with_pip=False)
        (packages,) = environment.glob("lib/python*/site-packages")
        for name in closure(_read_dependencies(root)):
            described = Path(str(metadata.distribution(name).locate_file(""))) / _metadata_folder(name)
            (packages / described.name).symlink_to(described)
        _list(environment / "bin/python", server, root)
    _list(Path(sys.executable), full, root)


def _read_dependencies(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies: list[str] = project["dependencies"]
    return dependencies


def _metadata_folder(name: str) -> str:
    """The .dist-info folder of an installed library, as its own list of files has it."""
    files = metadata.files(name) or []
    return next(path.parts[0] for path in files if path.name == "METADATA" and path.parts[0].endswith(".dist-info"))


def _list(python: Path, to: Path, root: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", root / "pyproject.toml")
    subprocess.run([*command, *OPTIONS, "-o", to, python], check=True)


if __name__ == "__main__":
    write_lists(ROOT / "sbom/server.cdx.json", ROOT / "sbom/full.cdx.json")
