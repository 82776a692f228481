"""A site's mixture of class models, by hand; and what a server may have sent instead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protofed.client.models.split import mixed, mixture
from protofed.common.errors import CodecError
from protofed.common.payload import Array, Part, Payload

P = torch.tensor([0.25, 0.75])


def models(**changes: Array) -> dict[str, Array]:
    """Two class models of two rows: the first class is row 0, the second one half of each."""
    weight = np.array([[4.0, 0.0], [0.0, 8.0]], np.float32)
    made = {"head.weight": weight, "body.seen": np.array([3, 5]), "factors": np.array([[1.0, 0.0], [0.5, 0.5]])}
    return {**made, **changes}


def test_the_mixture_is_by_the_sites_shares() -> None:
    mixed = mixture(models(), P)  # rows weigh 0.25 + 0.75 / 2, and 0.75 / 2
    np.testing.assert_allclose(mixed[Part.HEAD]["weight"], [0.625 * 4, 0.375 * 8])
    assert mixed[Part.HEAD]["weight"].dtype == np.float32
    assert mixed[Part.BODY]["seen"] == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"factors": np.ones((3, 2))},
        {"factors": np.ones(2)},
        {"head.weight": np.ones((3, 2), np.float32)},
        {"head.weight": np.array(1.0)},
        {"prototypes.0": np.ones((2, 2))},
        {"head": np.ones(3)},
    ],
    ids=str,
)
def test_other_tensors_are_refused(wrong: dict[str, Array]) -> None:
    with pytest.raises(CodecError):
        mixture(models(**wrong), P)
    with pytest.raises(CodecError, match="without factors"):
        mixture({"head.weight": np.ones((2, 2))}, P)


def single(value: float) -> Payload:
    body = {"w": np.full(2, value, np.float32), "seen": np.array(int(value))}
    return {Part.BODY: body, Part.HEAD: {"scale": np.array(value, np.float32)}}


def test_several_models_are_mixed_by_any_weights() -> None:
    made = mixed([single(1.0), single(4.0)], [2.0, -0.25])
    assert made[Part.BODY]["w"].tolist() == [1.0, 1.0]
    assert made[Part.HEAD]["scale"].shape == ()
    assert {array.dtype.name for array in (made[Part.BODY]["w"], made[Part.HEAD]["scale"])} == {"float32"}
    assert made[Part.BODY]["seen"] == 1


def test_with_all_weight_on_one_model_it_is_that_one() -> None:
    own = single(0.1)
    made = mixed([own, single(1e30)], np.array([1.0, 0.0]))
    assert made[Part.BODY]["w"].tolist() == own[Part.BODY]["w"].tolist()


def test_models_of_different_shapes_are_not_mixed() -> None:
    for wrong in ({"w": np.zeros(3, np.float32), "seen": np.array(1)}, {"seen": np.array(1)}):
        with pytest.raises(CodecError):
            mixed([single(1.0), {**single(1.0), Part.BODY: wrong}], [0.5, 0.5])
