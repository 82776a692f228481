"""The steps of the images' build stages: an environment in /opt/protofed, without pip, and its list of components."""

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
    """PyTorch alone, where it comes from an index of its own."""
    if accelerator not in ACCELERATORS:
        sys.exit(f"ACCELERATOR={accelerator}: expected {' or '.join(ACCELERATORS)}")
    _environment()
    if index:
        _pip("install", "--no-compile", "--no-deps", f"--index-url={index}", "torch", "torchvision")


def dependencies(extras: str) -> None:
    """What protofed needs with these extras, before protofed itself: its code changes more often."""
    _environment()
    _pip("install", "--no-compile", *requirements(Path("pyproject.toml"), extras))


def requirements(project: Path, extras: str) -> list[str]:
    """The base install's and those of the extras, which are separated by commas."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = table["optional-dependencies"]
    names = [name for name in extras.split(",") if name]
    if unknown := [name for name in names if name not in optional]:
        sys.exit(f"extras: there is no {', '.join(unknown)}; expected some of {', '.join(optional)}")
    return sorted({*table["dependencies"], *(line for name in names for line in optional[name])})


def accelerator(wanted: str) -> None:
    """Whether PyTorch is of the kind that was asked for."""
    code = (ENVIRONMENT / "bin/python", "-c", "import torch; print(torch.version.cuda or '')")
    cuda = subprocess.run(code, check=True, capture_output=True).stdout.strip()  # noqa: S603  (this file's own)
    if wanted == "cuda" and not cuda:
        sys.exit(CUDA_WITHOUT)
    if wanted == "cpu" and cuda:
        _say(CPU_WITH_CUDA)


def finish(wheel: str) -> None:
    """Protofed itself; all of it fits together, is precompiled and is listed."""
    _pip("install", "--no-compile", "--no-deps", wheel)
    _pip("check")
    if loose := unpinned(ENVIRONMENT, *map(Path, PINS)):
        sys.exit(f"{' and '.join(PINS)} lack {', '.join(loose)}: every version in an image is one that was tested")
    _compile()
    SHARE.mkdir(parents=True, exist_ok=True)
    listing = ("environment", "--pyproject=pyproject.toml", "--output-reproducible", "--validate")
    _run(TOOLS / "cyclonedx-py", *listing, "-o", SHARE / "sbom.cdx.json", ENVIRONMENT)


def unpinned(environment: Path, *constraints: Path) -> list[str]:
    """What is installed in another version than the constraints', or without one; builds (+cpu) count as the same."""
    lines = [line.strip() for path in constraints for line in path.read_text(encoding="utf-8").splitlines()]
    known = {(_plain(name), version) for name, _, version in (line.partition("==") for line in lines)}
    there = distributions(path=[str(path) for path in environment.glob("lib/python*/site-packages")])
    installed = {(_plain(one.name), one.version.partition("+")[0]) for one in there}
    return sorted(f"{name}=={version}" for name, version in installed - known if name != "protofed")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _environment() -> None:
    if not ENVIRONMENT.exists():
        _run(sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT)


def _compile() -> None:
    """All modules, for a root that may be read-only; what they were made from is looked at no more, as copies have
    other times. Some packages bring files for later versions of Python: those cannot be.
    """
    how = ("-m", "compileall", "-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", ENVIRONMENT / "lib")
    subprocess.run([ENVIRONMENT / "bin/python", *how], check=False)  # noqa: S603  (this file's own)


def _pip(*arguments: str) -> None:
    _run(TOOLS / "pip", "--python", ENVIRONMENT, *arguments)


def _run(*command: str | Path) -> None:
    """Its output is shown; its failure ends the build."""
    subprocess.run(command, check=True)  # noqa: S603  (the commands are this file's)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


STEPS: dict[str, Callable[..., None]] = {step.__name__: step for step in (torch, dependencies, accelerator, finish)}

if __name__ == "__main__":
    STEPS[sys.argv[1]](*sys.argv[2:])
