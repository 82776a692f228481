"""Checkpoints: a fit that is killed after an epoch and goes on in another process gives an undisturbed one's bytes.

With deterministic algorithms. Two undisturbed fits tell whether this device is deterministic at all: if they differ,
the resumed one may be as far from them as they are from each other, and the finding says so.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from safetensors.torch import load_file
from tests.gpu.fits import difference
from tests.gpu.plan import Proof, judged
from tests.gpu.processes import ended, started
from tests.gpu.report import Finding, Found, Status
from torch import Tensor, cat

from protofed.client.training.progress import FOLDER
from protofed.common.failpoint import VARIABLE

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS's condition for deterministic results
KILLED = {VARIABLE: "epoch-done:2=kill"}  # of three: the checkpoint of the second is there
RESULT, WARNINGS = "result.safetensors", "warnings.txt"
FACTOR = 4.0  # times the difference of two undisturbed fits, on a device that is not deterministic


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    folders = [proof.scratch / "fits" / name for name in ("one", "two", "killed")]
    with ExitStack() as running:
        fits = [
            running.enter_context(started("killed_fit", folder, proof.device, environment={**ENVIRONMENT, **extra}))
            for folder, extra in zip(folders, ({}, {}, KILLED), strict=True)
        ]
        ends = [ended(fit, proof.left) for fit in fits]
    yield judged("ends of two fits, and of one killed after its second epoch", ends, [0, 0, -signal.SIGKILL])
    yield judged("checkpoints that it left", len(list((folders[2] / FOLDER).glob("*.safetensors"))), 1)
    with started("killed_fit", folders[2], proof.device, environment=ENVIRONMENT) as fit:
        yield judged("another process goes on: its end", ended(fit, proof.left), 0)
    results = [load_file(folder / RESULT) for folder in folders]
    yield judged("epochs that the second process trained", int(results[2].pop("epochs")), 1)
    one, two, resumed = (_vector(result) for result in results)
    yield compared(resumed.equal(one), difference(resumed, one), difference(two, one))
    warned = (folders[0] / WARNINGS).read_text(encoding="utf-8").splitlines()
    yield Finding("operations without a deterministic algorithm", "; ".join(warned)[:300] or "none")


def compared(same: bool, resumed: float, undisturbed: float) -> Finding:
    """The finding on weights, momentum and all that a fit gives.

    Args:
        same: the resumed fit's bytes are those of an undisturbed one.
        resumed: the relative difference of the resumed fit from an undisturbed one.
        undisturbed: that of two undisturbed ones.
    """
    what, numbers = "weights and loss of the resumed fit", {"resumed": resumed, "undisturbed": undisturbed}
    if same:
        return Finding(what, "the same bytes as those of the undisturbed one", "the same bytes", numbers=numbers)
    found = f"differ by {resumed:.2g}, two undisturbed fits by {undisturbed:.2g}"
    expected = "the same bytes" if undisturbed == 0 else f"not further than {FACTOR:g} times two undisturbed ones"
    status = Status.PASSED if 0 < resumed <= FACTOR * undisturbed else Status.FAILED
    return Finding(what, found, expected, status, numbers)


def _vector(result: dict[str, Tensor]) -> Tensor:
    result.pop("epochs", None)
    return cat([result[name].double().flatten() for name in sorted(result)])


def result_of(folder: Path) -> Path:
    """The file in which a fit leaves its weights [...] by name, its loss [] and how many epochs it trained []."""
    return folder / RESULT
