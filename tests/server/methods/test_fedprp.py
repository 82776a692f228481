"""FedPRP's server half: body and prototypes by hand and by the reference, and what it remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.support.round_contexts import round_context

from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.fedprp import FedPRPServer as Server

GOLDEN = Path(__file__).parents[2] / "golden"
MODEL: Payload = {
    Part.BODY: {"0.weight": np.array([[1.0, 0.0], [0.5, 1.0]])},
    Part.HEAD: {"weight": np.array([[0.5, 0.0], [0.0, 0.25], [-0.1, 0.1]]), "bias": np.array([0.0, 0.1, 0.2])},
}


def body_and(rows: dict[int, Any], value: float = 0.0, weight: float | None = None) -> Update:
    prototypes = {str(c): np.asarray(row, dtype=np.float64) for c, row in rows.items()}
    return Update("ann", {Part.BODY: {"0.weight": np.full((2, 2), value)}, Part.PROTOTYPES: prototypes}, weight=weight)


def test_the_servers_prototypes_are_the_reference() -> None:
    golden = np.load(GOLDEN / "fedprp_paper_server_ema_numpy.npz")
    old = {str(c): golden["global_old"][c] for c in np.flatnonzero(golden["global_old_present"])}
    updates = [
        body_and({int(c): rows[c] for c in np.flatnonzero(present)}, weight=1.0 + k)
        for k, (rows, present) in enumerate(zip(golden["local_protos"], golden["local_present"], strict=True))
    ]
    state = {**MODEL, Part.PROTOTYPES: old}
    new = Server(prototype_momentum=1 - float(golden["beta"])).aggregate(state, iter(updates), round_context())[
        Part.PROTOTYPES
    ]
    assert sorted(new) == [str(c) for c in np.flatnonzero(golden["global_new_present"])]
    for name, row in new.items():
        np.testing.assert_allclose(row, golden["global_new"][int(name)], rtol=0, atol=1e-9, err_msg=name)
    assert "3" not in old  # first appearance: the mean alone
    np.testing.assert_array_equal(new["2"], old["2"])  # nobody holds it: bit for bit


def test_the_servers_step_by_hand() -> None:
    """Beta = 1/4; class 0: (1 + 3) / 2 = 2, .25 * 2 + .75 * 10 = 8; class 1 is new; class 2 stays."""
    old = {**MODEL, Part.PROTOTYPES: {"0": np.array([10.0, 0.0]), "2": np.array([0.3, 0.1])}}
    updates = [body_and({0: [1.0, 4.0]}, 1.0, weight=1000.0), body_and({0: [3.0, 0.0], 1: [7.0, 7.0]}, 4.0, weight=1.0)]
    new = Server(prototype_momentum=0.75).aggregate(old, iter(updates), round_context())
    assert {name: row.tolist() for name, row in new[Part.PROTOTYPES].items()} == {
        "0": [8.0, 0.5],
        "1": [7.0, 7.0],
        "2": [0.3, 0.1],
    }
    assert new[Part.BODY]["0.weight"].tolist() == [[2.5, 2.5]] * 2  # uniform, whatever counts are disclosed
    assert new[Part.HEAD] is MODEL[Part.HEAD]  # where every private head begins, in all rounds


def test_the_last_means_can_be_all() -> None:
    new = Server(prototype_momentum=0.0).aggregate(
        {**MODEL, Part.PROTOTYPES: {"0": np.ones(2)}}, [body_and({0: [5.0, 6.0]})], round_context()
    )
    assert new[Part.PROTOTYPES]["0"].tolist() == [5.0, 6.0]


def test_the_first_state_has_no_prototypes_and_is_sent_as_it_is() -> None:
    state = Server().init(MODEL, round_context(3))
    assert same_tensors(state, MODEL)
    assert Server().broadcast(state, "ann") is state
    assert Server.global_model
