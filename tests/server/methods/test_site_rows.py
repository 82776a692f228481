"""Each site keeps its row, and what a state says does not depend on how its tensors are ordered."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.half_rounds import model

from protofed.common import codec
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.mixtures import row
from protofed.server.methods.site_rows import distance, index_rows, pick_model, row_numbers, with_newest, with_rows


@pytest.mark.parametrize("part", [Part.PRIVATE, Part.SITE_MODELS])
def test_new_sites_get_the_next_rows_in_their_order_and_all_others_keep_their_models(part: Part) -> None:
    state = with_newest(model(), [Update("cyd", model(body=3.0)), Update("dan", model(body=4.0))], part)
    state = with_newest(state, [Update(site, model(body=body)) for site, body in (("ann", 1.0), ("dan", 5.0))], part)
    assert index_rows(state) == {"cyd": 0, "dan": 1, "ann": 2}
    assert state[part]["body.0.weight"].ravel().tolist() == [3.0, 5.0, 1.0]
    assert same_tensors({Part.BODY: state[Part.BODY]}, {Part.BODY: model()[Part.BODY]})
    assert part is Part.PRIVATE or not any(site in name for name in state[part] for site in ("ann", "cyd", "dan"))


@pytest.mark.parametrize("replaced", [{}, {0: 5.0}, {1: 5.0, 3: 7.0}], ids=str)
def test_rows_are_replaced_and_added(replaced: dict[int, float]) -> None:
    stack = with_rows({}, model(), {n: model(body=float(n)) for n in range(3)})
    new = with_rows(stack, model(), {n: model(body=value) for n, value in replaced.items()})
    expected = {0: 0.0, 1: 1.0, 2: 2.0} | replaced
    assert len(new["body.0.weight"]) == len(expected)
    for number, value in expected.items():
        assert same_tensors(row(new, number), model(body=value))
    assert stack["body.0.weight"].ravel().tolist() == [0.0, 1.0, 2.0]  # the old state is as it was


def test_dtypes_stay() -> None:
    mixed: Payload = {
        Part.BODY: {"seen": np.array(3), "w": np.zeros(2, np.float32)},
        Part.HEAD: {"weight": np.zeros((2, 2))},
    }
    stack = with_rows({}, mixed, {0: mixed})
    assert {name: array.dtype.name for name, array in stack.items()} == {
        "body.seen": "int64",
        "body.w": "float32",
        "head.weight": "float64",
    }
    assert same_tensors(row({**stack, **row_numbers({"ann": 0})}, 0), mixed)


def test_a_site_without_a_row_has_the_states_model_and_rows_come_in_their_order_from_a_blob_too() -> None:
    stack = with_rows({}, model(), {0: model(body=5.0)})
    state = {**model(), Part.PRIVATE: {**stack, **row_numbers({"ann": 0})}}
    assert same_tensors(pick_model(state, "ann"), model(body=5.0))
    assert same_tensors(pick_model(state, "bob"), model())
    state = {Part.PRIVATE: {**row_numbers({"zoe": 0, "ann": 1, "bob": 2}), "body.x": np.zeros(3)}}
    assert list(index_rows(codec.decode(codec.encode(state)))) == ["zoe", "ann", "bob"]


def test_buffers_are_no_distance() -> None:
    def other(mean: float) -> Payload:
        return {**model(), Part.BODY: {"0.weight": np.array([[mean]]), "1.running_mean": np.array([mean])}}

    assert distance(other(1.0), other(4.0)) == 3.0
