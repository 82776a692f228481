"""The tiny networks of the golden files: double precision, from the parameters that a file stores."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from protofed.client.models.split import SplitModel
from protofed.common.payload import Array, Part, Payload


def two_layers() -> SplitModel:
    """PFLlib's: body Linear(5, 4), head Linear(4, 3), no activation in between."""
    return SplitModel(nn.Sequential(nn.Linear(5, 4)), nn.Linear(4, 3)).double()


def stored(golden: Mapping[str, Array], prefix: str) -> Payload:
    """Its parameters by a prefix of the file's names: `init`, `after`, `x_old`."""
    return {
        Part.BODY: {f"0.{name}": golden[f"{prefix}_base_{name}"] for name in ("weight", "bias")},
        Part.HEAD: {name: golden[f"{prefix}_head_{name}"] for name in ("weight", "bias")},
    }


def assert_near(found: Payload, expected: Payload) -> None:
    """Every tensor of the expected parts is as expected, to 1e-9, as the files promise."""
    for part, tensors in expected.items():
        assert found[part].keys() == tensors.keys()
        for name, array in tensors.items():
            np.testing.assert_allclose(found[part][name], array, rtol=0, atol=1e-9, err_msg=f"{part}/{name}")


def tensor(array: Array) -> torch.Tensor:
    """A copy that torch may own."""
    return torch.from_numpy(np.array(array))
