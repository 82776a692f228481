"""`make constraints`: deploy/docker/hashes.txt, the hashes of the wheels that the images' build may install.

pip names the wheels, as it does in the build: for each machine, and for a new and an old C library, whose wheels may
differ. Only the package index is asked: wheels that lie on this machine have other hashes.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from tests.support.dockerfile import DOCKER, ROOT

EXTRAS = "client,dicom,export,mlflow,postgres,report,tensorboard"  # what deploy/docker/README.md names
MACHINES = ("x86_64", "aarch64")
GLIBC = (41, 28)  # Debian 13's 2.41 and RHEL 8's 2.28
OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
HEADER = "# Wheels of the images' build, for Linux and CPython 3.11, of the package index. Renew: make constraints\n"
PINS = [f"--constraint={path}" for path in (ROOT / "constraints.txt", DOCKER / "tools.txt")]


def lines() -> list[str]:
    """One `name==version --hash=…` a package, sorted."""
    hashes: dict[str, set[str]] = {}
    resolved = [*_found(*PINS, f"--requirement={DOCKER / 'tools.txt'}", *_requirements())]
    for machine in MACHINES:
        for glibc in GLIBC:
            for pin, digest in _found("--no-deps", "--target=unused", *_platforms(machine, glibc), *resolved).items():
                hashes.setdefault(pin, set()).add(f"--hash=sha256:{digest}")
    return [" ".join((pin, *sorted(digests))) for pin, digests in sorted(hashes.items())]


def _requirements() -> list[str]:
    build = runpy.run_path(str(DOCKER / "build.py"))
    return list(build["requirements"](ROOT / "pyproject.toml", EXTRAS))


def _platforms(machine: str, glibc: int) -> list[str]:
    """What a machine with this C library takes, the best first, as pip orders it there."""
    names = [name for minor in range(glibc, 4, -1) for name in (f"manylinux_2_{minor}", OLD_NAMES.get(minor)) if name]
    return ["--implementation=cp", "--python-version=3.11", *(f"--platform={name}_{machine}" for name in names)]


def _found(*arguments: str) -> dict[str, str]:
    """The SHA-256 of the wheel that pip would install, by `name==version`."""
    options = ("--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--disable-pip-version-check")
    local = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
    environment = {name: value for name, value in os.environ.items() if name not in local}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", *options, f"--report={report}", *arguments]
        subprocess.run(command, check=True, env={**environment, "PIP_CONFIG_FILE": os.devnull})
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {_pin(package["metadata"]): _digest(package["download_info"]) for package in packages}


def _pin(metadata: dict[str, Any]) -> str:
    return f"{canonicalize_name(metadata['name'])}=={metadata['version']}"


def _digest(download: dict[str, Any]) -> str:
    return str(download["archive_info"]["hashes"]["sha256"])


if __name__ == "__main__":
    sys.stdout.write(HEADER + "".join(f"{line}\n" for line in lines()))
