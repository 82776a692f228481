"""Everything that only a GPU can show, in under nine minutes and without a network: `python -m tests.gpu`.

A checkout and the libraries of tests/gpu/requirements.txt are enough. Without a GPU it says so and ends well;
`--rehearse` runs every part on the CPU with tiny sizes, which shows that the parts work, and nothing about a GPU.
docs/how-to/gpu.md says how to bring it to a machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.checkout import ROOT

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit code: 0, or 1 if something is wrong, 2 if a library is missing."""
    asked = _parsed(arguments)
    if not asked.rehearse and not torch.cuda.is_available():
        _say(
            "There is no GPU here, as far as PyTorch sees: nothing was checked. `--rehearse` runs all parts on the CPU."
        )
        return 0
    with tempfile.TemporaryDirectory(prefix="protofed-gpu-") as scratch:
        try:
            import tests.gpu.run as run
        except ModuleNotFoundError as error:
            _say(f"{error}: install what {REQUIREMENTS.relative_to(ROOT)} lists, or put its folder on PYTHONPATH")
            return 2
        return run.run(asked, Path(scratch))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else ROOT / "build" / "gpu"
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, with tiny sizes; proves nothing about a GPU"
    )
    parser.add_argument("--out", type=Path, default=out, help="folder of results.json and results.md (%(default)s)")
    parser.add_argument("--data", type=Path, help="CIFAR-10: torchvision's folder, or an .npz ($PROTOFED_DATA)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for all parts together (%(default)s)")
    parser.add_argument("--parts", default="", help="names with commas; all parts, if it is left out")
    parser.add_argument("--seeds", default="0", help="of FedNH and FedAvg, with commas (%(default)s)")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the processes of a part, too
    sys.exit(main())
