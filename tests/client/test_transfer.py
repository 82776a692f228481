"""A payload's way from a device and back, done on the CPU: one copy for all tensors of a dtype."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protofed.client.device import page_locked
from protofed.client.models import split
from protofed.client.models.split import to_arrays, to_tensors
from protofed.common.payload import Tensors


def tensors() -> dict[str, Tensor]:
    """Two dtypes, a scalar, an empty tensor, images' layout, a part of another tensor."""
    draw = torch.Generator().manual_seed(0)
    return {
        "conv": torch.randn(4, 3, 2, 2, generator=draw).to(memory_format=torch.channels_last),
        "steps": torch.tensor(7),
        "scale": torch.tensor(2.5),
        "turned": torch.randn(3, 5, generator=draw).T,
        "part": torch.arange(12)[3:9:2],
        "none": torch.empty(0, 4),
        "trained": nn.Parameter(torch.randn(3, generator=draw)),
    }


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The memory that copies went through."""
    made: list[Tensor] = []

    def recorded(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        made.append(page_locked(shape, dtype))
        return made[-1]

    monkeypatch.setattr(split, "page_locked", recorded)
    return made


def same(arrays: Tensors, expected: dict[str, Tensor]) -> None:
    assert list(arrays) == list(expected)
    for name, array in arrays.items():
        other = expected[name].detach().numpy()
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(array, other)


def test_arrays_are_contiguous_copies_in_their_order(stages: list[Tensor]) -> None:
    given = tensors()
    arrays = to_arrays(given)
    same(arrays, given)
    assert [stage.dtype for stage in stages] == [torch.float32, torch.int64], "one copy for all of a dtype"
    for array in arrays.values():
        assert array.flags.c_contiguous
        assert array.flags.owndata, "page-locked memory is given back"


def test_tensors_take_the_arrays_in_place(stages: list[Tensor]) -> None:
    given, targets = tensors(), {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    arrays = to_arrays(given)
    for array in arrays.values():
        array.flags.writeable = False  # as of a received payload
    stages.clear()
    strides = {name: tensor.stride() for name, tensor in targets.items()}
    to_tensors({**arrays, "another": np.ones(2)}, targets)
    same(to_arrays(targets), given)
    assert {name: tensor.stride() for name, tensor in targets.items()} == strides
    assert [stage.numel() for stage in stages[:2]] == [48 + 1 + 15 + 0 + 3, 1 + 3]


def test_numbers_are_cast_as_pytorch_casts_them() -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    to_tensors({"a": np.array([1.00390625, 3.0])}, {"a": target})
    assert target.tolist() == [1.0, 3.0]


def test_nothing_is_nothing() -> None:
    assert to_arrays({}) == {}
    to_tensors({}, {})


def test_a_model_on_another_device_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta: a device with shapes and no numbers."""
    model, asked = nn.Linear(2, 3, device="meta"), list[list[str]]()

    def arrays_of(state: dict[str, Tensor]) -> Tensors:
        asked.append(list(state))
        return {name: np.zeros(tensor.shape, np.float32) for name, tensor in state.items()}

    monkeypatch.setattr(split, "to_arrays", arrays_of)
    monkeypatch.setattr(split, "to_tensors", lambda _, targets: asked.append(list(targets)))
    split.load(model, split.dump(model))
    assert asked == [["weight", "bias"]] * 2
