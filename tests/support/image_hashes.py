"""`make constraints`: deploy/docker/hashes.txt, the hashes of the wheels that the images' build may install.

pip names the wheels, for each machine, and for a new and an old C library: their wheels may differ. Only the package
index is asked, because wheels that lie on this machine may have other hashes.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from packaging.utils import canonicalize_name
from tests.support.dockerfile import DOCKER, ROOT

# What deploy/docker/README.md names.
EXTRAS = "client,dicom,export,histology,mlflow,monai,nifti,postgres,report,tensorboard"
MACHINES = ("x86_64", "aarch64")
GLIBC = (41, 28)  # Debian 13's 2.41 and RHEL 8's 2.28
HEADER = "# Wheels of the images' build, for Linux and CPython 3.11, of the package index. Renew: make constraints\n"
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")


def lines() -> list[str]:
    """One `name==version --hash=…` a package, sorted."""
    hashes: dict[str, set[str]] = {}
    for machine in MACHINES:
        for glibc in GLIBC:
            for pin, digest in _found(machine, glibc):
                hashes.setdefault(pin, set()).add(f"--hash=sha256:{digest}")
    return [" ".join((pin, *sorted(digests))) for pin, digests in sorted(hashes.items())]


def _found(machine: str, glibc: int) -> list[tuple[str, str]]:
    """Each wheel that pip would install there: `name==version` and the SHA-256."""
    # The best first, as pip itself orders them there.
    platforms = [f"manylinux_2_{minor}" for minor in range(glibc, 16, -1)] + ["manylinux2014"]
    there = ["--target=unused", "--only-binary=:all:", *(f"--platform={one}_{machine}" for one in platforms)]
    pins = [f"--constraint={path}" for path in (ROOT / "constraints.txt", DOCKER / "tools.txt")]
    requirements = runpy.run_path(str(DOCKER / "build.py"))["requirements"](ROOT / "pyproject.toml", EXTRAS)
    environment = {name: value for name, value in os.environ.items() if name not in LOCAL}
    with tempfile.NamedTemporaryFile() as report:
        options = ("--quiet", "--disable-pip-version-check", "--dry-run", f"--report={report.name}")
        command = [sys.executable, "-m", "pip", "install", *options, *there, "--python-version=3.11", *pins]
        command += [f"--requirement={DOCKER / 'tools.txt'}", *requirements]
        subprocess.run(command, check=True, env={**environment, "PIP_CONFIG_FILE": os.devnull})
        packages = json.load(report)["install"]
    return [(_pin(one["metadata"]), one["download_info"]["archive_info"]["hashes"]["sha256"]) for one in packages]


def _pin(metadata: Mapping[str, str]) -> str:
    return f"{canonicalize_name(metadata['name'])}=={metadata['version']}"


if __name__ == "__main__":
    sys.stdout.write(HEADER + "".join(f"{line}\n" for line in lines()))
