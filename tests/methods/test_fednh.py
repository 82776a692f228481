"""FedNH against its released code's numbers, and one step of each half worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.support.half_rounds import GOLDEN, Linear, LocalOf, refusal
from tests.support.round_contexts import round_context
from torch import nn

from protofed.client.methods.fednh import FedNHClient
from protofed.client.models.split import CosineHead
from protofed.common.config.recipe import Plan
from protofed.common.errors import CodecError
from protofed.common.payload import Part, Payload, Update
from protofed.server.methods.fednh import FedNHServer as Server

NO_STEP = 1e-300  # a learning rate that moves nothing
CASES = {
    "r1_e5": (1, {"epochs": 5, "lr": 0.01, "weight_decay": 1e-5}),
    "r50_e5": (50, {"epochs": 5, "lr": 0.01, "weight_decay": 1e-5}),
    "lr05_wd1e3_e2": (1, {"epochs": 2, "lr": 0.5, "weight_decay": 1e-3}),
}


def sent(body: Any, scale: float, prototypes: Any) -> Payload:
    """What a site receives."""
    rows = np.asarray(prototypes, dtype=np.float64)
    return {
        Part.BODY: {"0.weight": np.asarray(body, dtype=np.float64)},
        Part.HEAD: {"scale": np.asarray(scale, dtype=np.float64)},
        Part.PROTOTYPES: {"mean": rows},
    }


def state(rows: Any) -> Payload:
    """A server's state whose body and scale are not looked at."""
    return sent([[0.0]], 1.0, rows)


def update(rows: dict[int, Any], body: float = 0.0, scale: float = 1.0, weight: float | None = None) -> Update:
    """A site's update with these class means."""
    means = {str(c): np.asarray(row, dtype=np.float64) for c, row in rows.items()}
    payload = {**sent([[body]], scale, []), Part.PROTOTYPES: means}
    return Update("ann", payload, weight=weight)


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_released_codes(case: str, local_of: LocalOf, linear: Linear) -> None:
    golden, (number, differing) = np.load(GOLDEN / "fednh_client_training.npz"), CASES[case]
    size, decay = int(golden["batch_size"]), {"schedule": "exponential", "lr_decay": 0.99}
    plan = {"batch_size": size, **decay, "momentum": 0.9, "max_grad_norm": 10}
    body, model = golden["lin_weight_init"], linear(0 * golden["lin_weight_init"], 6, nn.ReLU())
    local = local_of(model, golden["X"], golden["y"], 6, round=number, rounds=200, **plan, **differing)
    made = FedNHClient().fit(local, sent(body, float(golden["scaling_init"]), golden["W"])).payload
    np.testing.assert_allclose(made[Part.BODY]["0.weight"], golden[f"{case}_lin_weight"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(made[Part.HEAD]["scale"], golden[f"{case}_scaling"][0], rtol=0, atol=1e-9)


def test_the_loss_that_is_sent_is_the_mean_of_the_released_codes_epochs(local_of: LocalOf, linear: Linear) -> None:
    golden = np.load(GOLDEN / "fednh_client_training.npz")
    plan = Plan(epochs=5, batch_size=6, lr=0.01, weight_decay=1e-5, momentum=0.9, max_grad_norm=10)
    body = golden["lin_weight_init"]
    local = local_of(linear(body, 6, nn.ReLU()), golden["X"], golden["y"], 6, **plan.model_dump())
    made = FedNHClient().fit(local, sent(body, 5.0, golden["W"]))
    assert made.metrics == {"loss": pytest.approx(golden["r1_e5_epoch_losses"].mean(), rel=1e-6)}


def test_prototypes_are_the_released_ones_without_their_counts(local_of: LocalOf, linear: Linear) -> None:
    golden = np.load(GOLDEN / "fednh_client_prototypes.npz")
    local = local_of(linear(np.eye(5), 6), golden["features_unit"], golden["y"], 6, lr=NO_STEP)
    made = FedNHClient().fit(local, sent(np.eye(5), 4.0, golden["W"])).payload[Part.PROTOTYPES]
    assert made.keys() == {"0", "1", "2", "4"}  # classes 3 and 5 are nowhere at this site
    for name, row in made.items():
        count = golden["count_by_class_full"][int(name)]
        expected = golden["scaled_prototype"][int(name)] / count
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-9, err_msg=name)
        assert np.linalg.norm(row) == pytest.approx(1, abs=1e-12)  # its length tells nothing


def test_one_step_by_hand(local_of: LocalOf, linear: Linear) -> None:
    """X = (3, 4) of class 0, body I, prototypes I, s = 1, lr = 1: z = (3, 4), r = (.6, .8) = logits.

    p = softmax(.6, .8)_1; dL/dlogits = (-p, p); dL/ds = -.6 p + .8 p = .2 p;
    dL/dz = ((-p, p) - .2 p r) / 5 = p (-.224, .168); dL/dbody = dL/dz x^T.
    """
    p = 1 / (1 + math.exp(-0.2))  # 0.549834
    local = local_of(linear(np.eye(2), 2), [[3.0, 4.0]], [0], 2, lr=1.0)
    made = FedNHClient().fit(local, sent(np.eye(2), 1.0, np.eye(2)))
    body = [[1 + 0.672 * p, 0.896 * p], [-0.504 * p, 1 - 0.672 * p]]
    np.testing.assert_allclose(made.payload[Part.BODY]["0.weight"], body, atol=1e-12)
    assert made.payload[Part.HEAD]["scale"] == pytest.approx(1 - 0.2 * p, abs=1e-12)  # 0.890033
    assert made.metrics["loss"] == pytest.approx(math.log(1 + math.exp(0.2)), abs=1e-6)
    z = np.array([3 + 5.6 * p, 4 - 4.2 * p])  # the new body's feature of x: prototypes come after training
    assert made.payload[Part.PROTOTYPES].keys() == {"0"}
    np.testing.assert_allclose(made.payload[Part.PROTOTYPES]["0"], z / np.linalg.norm(z), atol=1e-12)


def test_a_prototype_is_the_unit_mean_of_unit_features(local_of: LocalOf, linear: Linear) -> None:
    features = [[3.0, 4.0], [10.0, 0.0], [0.0, 2.0]]  # unit: (.6, .8), (1, 0); (0, 1)
    local = local_of(linear(np.eye(2), 2), features, [0, 0, 1], 2, lr=NO_STEP)
    made = FedNHClient().fit(local, sent(np.eye(2), 1.0, np.eye(2))).payload[Part.PROTOTYPES]
    np.testing.assert_allclose(made["0"], np.array([1.6, 0.8]) / math.hypot(1.6, 0.8), atol=1e-12)
    np.testing.assert_allclose(made["1"], [0, 1], atol=1e-12)


@pytest.mark.parametrize(("at_least", "classes"), [(1, {"0", "1", "2"}), (2, {"0", "2"}), (3, {"2"}), (4, set())])
def test_a_class_with_fewer_examples_than_asked_for_has_no_prototype(
    at_least: int, classes: set[str], local_of: LocalOf, linear: Linear
) -> None:
    features, labels = [[3.0, 4.0], [10.0, 0.0], [0.0, 2.0], [1.0, 0.0], [2.0, 1.0], [0.0, 1.0]], [0, 0, 1, 2, 2, 2]
    made = [
        FedNHClient(min_samples_per_class=least)
        .fit(local_of(linear(np.eye(2), 4), features, labels, 4, lr=0.1), sent(np.eye(2), 1.0, np.eye(4, 2)))
        .payload
        for least in (1, at_least)
    ]
    every, some = (payload[Part.PROTOTYPES] for payload in made)
    assert some.keys() == classes
    for name in classes:  # and nothing else is another
        np.testing.assert_array_equal(some[name], every[name])
    np.testing.assert_array_equal(made[1][Part.BODY]["0.weight"], made[0][Part.BODY]["0.weight"])


def test_a_fixed_scale_is_neither_trained_nor_sent(local_of: LocalOf, linear: Linear) -> None:
    local = local_of(linear(np.eye(2), 2), [[3.0, 4.0]], [0], 2, lr=1.0, weight_decay=0.5)
    made = FedNHClient(fixed_scale=True).fit(local, sent(np.eye(2), 30.0, np.eye(2)))
    assert made.payload.keys() == {Part.BODY, Part.PROTOTYPES}
    assert local.model.head.state_dict()["scale"].item() == 30.0
    new = Server(fixed_scale=True).aggregate(sent(np.eye(2), 30.0, np.eye(2)), [made], round_context())
    assert new[Part.HEAD]["scale"] == 30.0


@pytest.mark.parametrize("fixed", [False, True])
def test_what_one_half_sends_the_other_expects(fixed: bool, local_of: LocalOf, linear: Linear) -> None:
    received = sent(np.eye(2), 1.0, np.eye(2))
    local = local_of(linear(np.eye(2), 2), [[3.0, 4.0]], [1], 2, lr=0.1)
    made = FedNHClient(fixed_scale=fixed).fit(local, received).payload
    assert made.keys() <= FedNHClient.sends
    assert refusal(made, Server(fixed_scale=fixed).expects(received)) == ""
    other = refusal(made, Server(fixed_scale=not fixed).expects(received))
    assert other == ("head/scale is missing (1 in all)" if fixed else "head/scale is not part of this method's update")


def test_the_personal_model_keeps_the_prototypes_that_were_received(local_of: LocalOf, linear: Linear) -> None:
    old = [[0.6, 0.8], [-0.8, 0.6]]
    local = local_of(linear(np.eye(2), 2), [[3.0, -4.0], [1.0, 0.0]], [0, 1], 2, lr=0.5)
    made = FedNHClient().fit(local, sent(np.eye(2), 2.0, old)).payload
    assert isinstance(local.model.head, CosineHead)
    np.testing.assert_array_equal(local.model.head.prototypes, old)
    np.testing.assert_array_equal(local.model.head.scale.detach(), made[Part.HEAD]["scale"])
    assert not np.allclose(made[Part.PROTOTYPES]["0"], old[0])
    assert made[Part.HEAD].keys() == {"scale"}  # the prototypes do not go back as a head


def test_install_replaces_whatever_was_there(local_of: LocalOf, linear: Linear) -> None:
    local = local_of(linear(np.ones((2, 2)), 2), [[3.0, 4.0]], [0], 2)
    for scale in (5.0, 7.0):  # a linear head at first, then the head of another round
        FedNHClient().load_global(local, sent(np.eye(2), scale, np.eye(2)[::-1]))
        logits = local.model(local.data.features)  # type: ignore[attr-defined]
        np.testing.assert_allclose(logits.detach(), [[scale * 0.8, scale * 0.6]], atol=1e-12)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (sent(np.eye(2), 1.0, np.eye(3)), r"prototypes is \(3, 3\): the model expects \(2, 2\)"),
        (sent(np.eye(2), 1.0, np.ones((2, 5))), r"prototypes is \(2, 5\): the model expects \(2, 2\)"),
        (sent(np.eye(2), 1.0, np.ones(2)), r"prototypes is \(2,\)"),
        ({**sent(np.eye(2), 1.0, np.eye(2)), Part.HEAD: {"scale": np.ones(2)}}, r"scale is \(2,\)"),
        (sent(np.eye(3), 1.0, np.eye(2)), r"0.weight is \(3, 3\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(received: Payload, message: str, local_of: LocalOf, linear: Linear) -> None:
    local = local_of(linear(np.eye(2), 2), [[3.0, 4.0]], [0], 2)
    for _ in range(2):  # before and after a good model was installed
        with pytest.raises(CodecError, match=message):
            FedNHClient().load_global(local, received)
        FedNHClient().load_global(local, sent(np.eye(2), 1.0, np.eye(2)))


@pytest.mark.parametrize("means", ["mu_unit", "mu_raw"])  # the length of a mean has no say
def test_the_server_gives_the_count_free_prototypes(means: str) -> None:
    golden = np.load(GOLDEN / "fednh_countfree_numpy.npz")
    updates = [
        update({int(c): rows[c] for c in np.flatnonzero(present)}, weight=1.0 + site)
        for site, (rows, present) in enumerate(zip(golden[means], golden["present"], strict=True))
    ]
    half = Server(prototype_momentum=float(golden["rho"]))
    new = half.aggregate(state(golden["W_old"]), updates, round_context())[Part.PROTOTYPES]["mean"]
    for expected in ("W_uniform_holders", "W_secure_sum"):
        np.testing.assert_allclose(new, golden[expected], rtol=0, atol=1e-9)
    assert not golden["present"][:, 2].any()
    # To the bit; the reference divides by the norm of rho W once more, which moves a row by at most a rounding error.
    np.testing.assert_array_equal(new[2], golden["W_old"][2])


@pytest.mark.parametrize(
    ("prototypes", "means", "hidden", "expected"),
    [
        ("similarity", "mu_unit", False, "W_exp_similarity"),
        ("similarity", "mu_raw", False, "W_exp_similarity"),
        ("uniform", "mu_unit", True, "W_presence_hidden"),
        ("literal", "mu_raw", False, "W_paper_literal"),
    ],
)
def test_the_servers_other_ways_to_weigh_sites(prototypes: Any, means: str, hidden: bool, expected: str) -> None:
    golden = np.load(GOLDEN / "fednh_countfree_numpy.npz")
    old, rho = golden["W_old"], float(golden["rho"])
    updates = [
        update({c: rows[c] if present[c] else old[c] for c in range(len(old)) if present[c] or hidden})
        for rows, present in zip(golden[means], golden["present"], strict=True)
    ]
    half = Server(prototype_momentum=rho, prototypes=prototypes)
    new = half.aggregate(state(old), updates, round_context())[Part.PROTOTYPES]["mean"]
    np.testing.assert_allclose(new, golden[expected], rtol=0, atol=1e-9)


def test_confident_means_are_the_released_codes(local_of: LocalOf, linear: Linear) -> None:
    golden = np.load(GOLDEN / "fednh_client_prototypes.npz")
    local = local_of(linear(np.eye(5), 6), golden["features_unit"], golden["y"], 6, lr=NO_STEP)
    received = sent(np.eye(5), float(golden["scaling"]), golden["W"])
    made = FedNHClient(means="confident").fit(local, received).payload[Part.PROTOTYPES]
    assert made.keys() == {"0", "1", "2", "4"}
    for name, row in made.items():
        np.testing.assert_allclose(row, golden["adv_prototype"][int(name)], rtol=0, atol=1e-9, err_msg=name)


def test_literal_means_keep_their_length(local_of: LocalOf, linear: Linear) -> None:
    local = local_of(linear(np.eye(2), 2), [[3.0, 0.0], [0.0, 5.0]], [0, 0], 2, lr=NO_STEP)
    made = FedNHClient(prototypes="literal").fit(local, sent(np.eye(2), 1.0, np.eye(2))).payload[Part.PROTOTYPES]
    np.testing.assert_allclose(made["0"], [0.5, 0.5], atol=1e-12)


def test_the_servers_step_by_hand() -> None:
    """Rho = 1/2; class 0: unit((0, 1) + (.6, .8)) = (1, 3) / sqrt(10); class 1 from one site; class 2 from nobody."""
    old = [[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]]
    first = update({0: [0.0, 1.0]}, body=1.0, scale=2.0, weight=1000.0)
    second = update({0: [0.6, 0.8], 1: [0.0, -0.001]}, body=2.0, scale=5.0, weight=1.0)
    new = Server(prototype_momentum=0.75).aggregate(state(old), iter([first, second]), round_context())
    row = np.array([0.75 + 0.25 / math.sqrt(10), 0.75 / math.sqrt(10)])
    np.testing.assert_allclose(new[Part.PROTOTYPES]["mean"][0], row / np.linalg.norm(row), atol=1e-12)
    np.testing.assert_allclose(new[Part.PROTOTYPES]["mean"][1], [0, 1], atol=1e-12)  # .75 - .25, then unit
    np.testing.assert_array_equal(new[Part.PROTOTYPES]["mean"][2], old[2])
    np.testing.assert_array_equal(new[Part.BODY]["0.weight"], [[1.5]])  # uniform, whatever counts are disclosed
    assert new[Part.HEAD]["scale"] == 3.5


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, [0.0, 1.0]), (1.0, [1.0, 0.0])])
def test_smoothing_is_the_share_of_the_old(smoothing: float, expected: list[float]) -> None:
    new = Server(prototype_momentum=smoothing).aggregate(
        state([[1.0, 0.0]]), [update({0: [0.0, 7.0]})], round_context()
    )
    np.testing.assert_allclose(new[Part.PROTOTYPES]["mean"], [expected], atol=1e-12)


def test_means_that_cancel_out_leave_the_prototype() -> None:
    updates = [update({0: [0.0, 1.0]}), update({0: [0.0, -1.0]})]
    new = Server().aggregate(state([[0.6, 0.8]]), updates, round_context())
    np.testing.assert_allclose(new[Part.PROTOTYPES]["mean"], [[0.6, 0.8]], atol=1e-15)


@pytest.mark.parametrize(("separation", "distance"), [("maxsep", math.sqrt(8 / 3)), ("orthogonal", math.sqrt(2))])
def test_first_prototypes_are_separated_unit_vectors_of_the_seed(separation: Any, distance: float) -> None:
    model: Payload = {Part.BODY: {"w": np.ones(3, np.float32)}, Part.HEAD: {"weight": np.ones((4, 6), np.float32)}}
    first, again, other = (
        Server(prototype_init=separation, prototype_seed=seed, scale=20.0).init(model, round_context(4))
        for seed in (0, 0, 1)
    )
    rows = first[Part.PROTOTYPES]["mean"]
    assert rows.dtype == first[Part.HEAD]["scale"].dtype == np.float32
    assert rows.shape == (4, 6)
    assert first[Part.HEAD] == {"scale": 20.0}
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    gaps = np.linalg.norm(rows[:, None] - rows[None], axis=-1)[~np.eye(4, dtype=bool)]
    np.testing.assert_allclose(gaps, distance, atol=1e-6)
    np.testing.assert_array_equal(again[Part.PROTOTYPES]["mean"], rows)
    assert not np.allclose(other[Part.PROTOTYPES]["mean"], rows)
    unseeded = Server(prototype_init=separation).init(model, round_context(4, seed=1))
    np.testing.assert_array_equal(unseeded[Part.PROTOTYPES]["mean"], other[Part.PROTOTYPES]["mean"])
    negative = Server(prototype_init=separation, prototype_seed=-1).init(model, round_context(4))
    assert not np.allclose(negative[Part.PROTOTYPES]["mean"], rows)
    assert unseeded[Part.HEAD] == {"scale": 20.0}
    assert first[Part.BODY] == model[Part.BODY]
