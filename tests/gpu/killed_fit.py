"""One fit in a process of its own, which the failpoint of its environment may kill: `… killed_fit FOLDER DEVICE`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.gpu.checkpoints import WARNINGS, result_of
from tests.gpu.fits import examples, fit_context, loss_of
from torch import nn

from protofed.client.training.loop import train
from protofed.client.training.progress import on_disk
from protofed.common import failpoint
from protofed.common.protocol.messages import Task, TaskKind

TASK = Task(TaskKind.FIT, "gpu", 1, "n1", None, 0, 60.0)


def main(folder: Path, device: torch.device) -> None:
    """Fit, or go on with a fit, and write what it gave."""
    failpoint.arm(os.environ.get(failpoint.VARIABLE))
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder.mkdir(parents=True, exist_ok=True)
    count = 24 if device.type == "cpu" else 1024
    batch = 8 if device.type == "cpu" else 64
    plan: dict[str, Any] = {"epochs": 3, "batch_size": batch, "augmentation": "crop-flip", "checkpoint": True}
    local = fit_context(device, examples(count), **plan)
    # Dropout draws from the device's own generator, whose state belongs to a checkpoint.
    local.model.head = nn.Sequential(nn.Dropout(0.3), local.model.head)
    local.model.to(device)
    with warnings.catch_warnings(record=True) as caught, on_disk(folder, TASK) as local.checkpoints:
        warnings.simplefilter("always")
        loss = train(local, loss_of(local)).loss
    said = {str(warning.message).splitlines()[0] for warning in caught if "deterministic" in str(warning.message)}
    (folder / WARNINGS).write_text("\n".join(sorted(said)), encoding="utf-8")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in local.model.state_dict().items()}
    epochs = round(local.throughput.examples / count)
    numbers = {"loss": torch.tensor(loss, dtype=torch.float64), "epochs": torch.tensor(epochs)}
    save_file({**weights, **numbers}, result_of(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
