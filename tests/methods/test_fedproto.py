"""FedProto: the release's aggregation, and a step by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.half_rounds import GOLDEN, LocalOf, model
from tests.support.round_contexts import round_context

from protofed.client.methods.fedproto import FedProtoClient
from protofed.client.methods.solo import SoloClient
from protofed.common.payload import Part, Payload, Update, same_tensors
from protofed.server.methods.fedproto import FedProtoServer

FIRST = model()


def test_the_releases_aggregation() -> None:
    with np.load(GOLDEN / "fedproto_aggregate.npz") as golden:
        classes = golden["num_classes"].item()
        state: Payload = {Part.HEAD: {"weight": np.zeros((classes, 4)), "bias": np.zeros(classes)}, Part.BODY: {}}
        updates = []
        for site in range(3):
            names = {c: f"client{site}_class{c}_proto" for c in range(classes)}
            rows = {str(c): golden[name] for c, name in names.items() if name in golden}
            for c in rows:
                of_class = golden[f"client{site}_class{c}_embeddings"]
                np.testing.assert_allclose(of_class.mean(0), rows[c], atol=1e-9)
            updates.append(Update(str(site), {Part.PROTOTYPES: rows}))
        made = FedProtoServer().aggregate(state, updates, round_context())[Part.PROTOTYPES]
        assert sorted(made) == ["0", "1", "2"]
        for c, row in made.items():
            np.testing.assert_allclose(row, golden[f"global_class{c}"], atol=1e-9)


def test_a_class_that_nobody_holds_keeps_its_prototype() -> None:
    state = {**FIRST, Part.PROTOTYPES: {"0": np.array([1.0]), "1": np.array([2.0])}}
    made = FedProtoServer().aggregate(
        state, [Update("ann", {Part.PROTOTYPES: {"1": np.array([4.0])}})], round_context()
    )
    assert {c: row.item() for c, row in made[Part.PROTOTYPES].items()} == {"0": 1.0, "1": 4.0}
    assert same_tensors({Part.BODY: made[Part.BODY]}, {Part.BODY: FIRST[Part.BODY]})


def test_a_step_by_hand(tiny: LocalOf) -> None:
    """X = 2 of class 0, z = 2, P_0 = 5, lambda .5, lr .1: d/dw of .5 (z - 5)^2 is .5 * 2 (2 - 5) 2 = -6.

    The head is zeros, so the cross-entropy does not move the body: w = 1 + .6, and the class mean that leaves is 3.2.
    """
    local = tiny([[2.0]], [0], lr=0.1)
    sent = FedProtoClient(lam=0.5).fit(local, {**FIRST, Part.PROTOTYPES: {"0": np.array([5.0])}}).payload
    assert sent.keys() == FedProtoClient.sends
    np.testing.assert_allclose(local.client_state[Part.BODY]["0.weight"], [[1.6]], atol=1e-14)
    assert {c: row.item() for c, row in sent[Part.PROTOTYPES].items()} == {"0": pytest.approx(3.2)}


def test_without_prototypes_or_lambda_it_trains_alone(tiny: LocalOf) -> None:
    proto, without, alone = (tiny([[2.0], [1.0]], [0, 1], lr=0.1, epochs=2) for _ in range(3))
    FedProtoClient().fit(proto, FIRST)
    FedProtoClient(lam=0).fit(without, {**FIRST, Part.PROTOTYPES: {"0": np.array([5.0])}})
    SoloClient().fit(alone, FIRST)
    assert same_tensors(proto.client_state, alone.client_state)
    assert same_tensors(without.client_state, alone.client_state)


def test_a_site_predicts_the_nearest_global_prototype(tiny: LocalOf) -> None:
    local = tiny([[2.0]], [0])
    rows = {"0": np.array([-5.0]), "1": np.array([3.0])}
    FedProtoClient().load_global(local, {**FIRST, Part.PROTOTYPES: rows})
    (images, _), *_ = local.data.ordered(local.data.train, 1)
    np.testing.assert_allclose(local.model(images).numpy(force=True), [[-7.0, -1.0]])


def test_a_class_of_few_images_stays(tiny: LocalOf) -> None:
    local = tiny([[2.0], [1.0], [1.0]], [0, 1, 1])
    assert FedProtoClient(min_samples_per_class=2).fit(local, FIRST).payload[Part.PROTOTYPES].keys() == {"1"}
