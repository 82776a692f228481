"""The steps of the images' build: an environment in /opt/protofed, without pip, and its list of components (SBOM).

The Dockerfile calls each step by its name, as `build.py STEP ARGUMENT…`; pip runs from /tools, which no image has.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

TOOLS, ENVIRONMENT, SHARE = Path("/tools/bin"), Path("/opt/protofed"), Path("/usr/share/protofed")
PINS = ("constraints.txt", "tools.txt")
ACCELERATORS = ("cpu", "cuda")
CPU_WITH_CUDA = (
    "note: this is a PyTorch with CUDA in an image for CPUs: it works, and takes gigabytes. "
    "TORCH_INDEX_URL (or the wheelhouse) with a CPU build makes the image small."
)
CUDA_WITHOUT = "ACCELERATOR=cuda: this PyTorch has no CUDA; leave TORCH_INDEX_URL empty or give one with CUDA builds"


def torch(accelerator: str, index: str) -> None:
    """Install PyTorch alone if it comes from its own index. Its dependencies come later, from the usual index.

    hashes.txt lacks such builds, so pip installs them without a hash.
    """
    if accelerator not in ACCELERATORS:
        sys.exit(f"ACCELERATOR={accelerator}: expected {' or '.join(ACCELERATORS)}")
    _environment()
    if index:
        _pip("install", "--no-compile", "--no-deps", f"--index-url={index}", "torch", "torchvision")


def dependencies(extras: str) -> None:
    """Install what protofed needs with these extras: a layer of its own, for protofed's code changes more often.

    Constraints with hashes make pip check every wheel.
    """
    _environment()
    _pip("install", "--no-compile", "--constraint=hashes.txt", *requirements(Path("pyproject.toml"), extras))


def requirements(project: Path, extras: str) -> list[str]:
    """The requirements of pyproject.toml for the base install and for extras, which are separated by commas."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = table["optional-dependencies"]
    names = [name for name in extras.split(",") if name]
    if unknown := [name for name in names if name not in optional]:
        sys.exit(f"extras: there is no {', '.join(unknown)}; expected some of {', '.join(optional)}")
    return sorted({*table["dependencies"], *(line for name in names for line in optional[name])})


def accelerator(requested: str) -> None:
    """Check that PyTorch is a build for the requested accelerator: `cuda` without CUDA fails, the reverse is a note."""
    code = (ENVIRONMENT / "bin/python", "-c", "import torch; print(torch.version.cuda or '')")
    cuda = subprocess.run(code, check=True, capture_output=True).stdout.strip()  # noqa: S603  (this file's own)
    if requested == "cuda" and not cuda:
        sys.exit(CUDA_WITHOUT)
    if requested == "cpu" and cuda:
        _say(CPU_WITH_CUDA)


def finish(wheel: str) -> None:
    """Install protofed itself, check that all versions fit and are pinned, compile all modules, and write the SBOM."""
    _pip("install", "--no-compile", "--no-deps", wheel)
    _pip("check")
    if loose := unpinned(ENVIRONMENT, *map(Path, PINS)):
        sys.exit(f"{' and '.join(PINS)} lack {', '.join(loose)}: every version in an image must be one that was tested")
    _compile()
    SHARE.mkdir(parents=True, exist_ok=True)
    listing = ("environment", "--pyproject=pyproject.toml", "--output-reproducible", "--validate")
    _run(TOOLS / "cyclonedx-py", *listing, "-o", SHARE / "sbom.cdx.json", ENVIRONMENT)


def unpinned(environment: Path, *constraints: Path) -> list[str]:
    """Installed packages, as `name==version`, that no constraint pins to this version; `+cpu` and such are ignored."""
    lines = [line.strip() for path in constraints for line in path.read_text(encoding="utf-8").splitlines()]
    pinned = {(_plain(name), version) for name, _, version in (line.partition("==") for line in lines)}
    packages = distributions(path=[str(path) for path in environment.glob("lib/python*/site-packages")])
    installed = {(_plain(package.name), package.version.partition("+")[0]) for package in packages}
    return sorted(f"{name}=={version}" for name, version in installed - pinned if name != "protofed")


def _plain(name: str) -> str:
    """A distribution's name as PEP 503 normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _environment() -> None:
    if not ENVIRONMENT.exists():
        _run(sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT)


def _compile() -> None:
    """Compile all modules, for an image may run with a read-only root."""
    # unchecked-hash: Python does not compare .pyc files with their sources, whose times change as layers are copied.
    # check=False: some packages bring files for later versions of Python, which do not compile.
    options = ("-m", "compileall", "-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", ENVIRONMENT / "lib")
    subprocess.run([ENVIRONMENT / "bin/python", *options], check=False)  # noqa: S603  (this file's own)


def _pip(*arguments: str) -> None:
    _run(TOOLS / "pip", "--python", ENVIRONMENT, *arguments)


def _run(*command: str | Path) -> None:
    """Run a command with its output shown; a failure ends the build."""
    subprocess.run(command, check=True)  # noqa: S603  (the commands are this file's)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


STEPS: dict[str, Callable[..., None]] = {step.__name__: step for step in (torch, dependencies, accelerator, finish)}

if __name__ == "__main__":
    STEPS[sys.argv[1]](*sys.argv[2:])
