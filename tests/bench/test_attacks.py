"""Attacks find what is put there for them, on numbers made by hand, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.bench import attacks
from tests.bench.attack_views import Scores, Seen
from tests.bench.leakage import COLUMNS, Outcome, cells, every_attack, markdown
from tests.bench.leakage_runs import Case, attacked
from tests.bench.leakage_scores import (
    Found,
    Victim,
    auc,
    auc_between,
    correlation,
    steps_told,
    strongest,
    told_to_a_batch,
    tried,
    without_means,
)

from protofed.client.training.progress import sgd_length
from protofed.common.config.recipe import Plan
from protofed.common.payload import Array, Part, Payload, unit
from protofed.deploy import shipped

CLASSES, WIDTH = 6, 32
SHARES = np.array([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])
HAS = SHARES > 0


def draw(seed: int, *shape: int) -> Scores:
    return np.random.default_rng(seed).normal(size=shape)


def seen(
    sent: Payload,
    received: Payload,
    others: Sequence[dict[str, Array]] = (),
    after: Scores | None = None,
    before: Scores | None = None,
    noise: tuple[Scores, Scores] | None = None,
) -> Seen:
    """One update; without examples, the attacker's are noise that training did not touch."""
    labels = np.repeat(np.arange(CLASSES), 5)
    still = draw(99, len(labels), WIDTH)
    after, before = still if after is None else after, still if before is None else before
    return Seen(
        CLASSES,
        sent,
        received,
        others,
        after,
        before,
        labels[:, None] == np.arange(CLASSES),
        *(noise or (still, still)),
    )


def scored(attack: attacks.Attack, update: Seen) -> Scores:
    found = attack(update)
    assert found is not None
    return found


def rows(matrix: Scores, classes: Sequence[int] = range(CLASSES)) -> dict[Part, dict[str, Array]]:
    return {Part.PROTOTYPES: {str(c): matrix[c] for c in classes}}


# How good an attack is


def test_the_area_is_how_often_a_pair_with_the_class_is_ahead() -> None:
    truth = np.array([True, True, False, False])
    for scores, area in (([4, 3, 2, 1], 1.0), ([1, 2, 3, 4], 0.0), ([1, 1, 1, 1], 0.5), ([3, 1, 2, 0], 0.75)):
        assert auc(np.array(scores, float), truth) == area
    assert auc(np.array([-5.0, -7.0, np.nan, np.nan]), truth) == 1.0
    with pytest.raises(ValueError, match="with and without"):
        auc(np.zeros(4), np.ones(4, bool))


def test_correlation_is_one_for_a_line_and_nothing_for_a_constant() -> None:
    assert correlation(3 * SHARES + 1, SHARES) == pytest.approx(1)
    assert correlation(np.ones(CLASSES), SHARES) == 0
    assert correlation(np.where(HAS, SHARES, np.nan), SHARES) > 0.9


def test_between_sites_what_is_common_at_all_of_them_counts_for_nothing() -> None:
    groups = [np.array([True, True, False, False]), np.array([False, False, True, True])]
    truth = np.array([True, False, True, False])
    assert auc_between(np.array([4.0, 3.0, 2.0, 1.0]), truth, groups) == 1.0
    assert auc_between(np.array([4.0, 4.0, 1.0, 1.0]), truth, groups) == 0.5
    assert auc_between(np.array([3.0, 4.0, 2.0, 1.0]), truth, groups) == 0.5
    assert without_means(np.array([4.0, 2.0, 9.0, 9.0]), groups).tolist() == [1.0, -1.0, 0.0, 0.0]


# What is sent by class


def test_rows_that_are_sent_and_flags_say_which_classes_there_are() -> None:
    flags = {Part.CLASS_PRESENCE: {"present": HAS.astype(np.float32)}}
    gradients = {Part.CLASS_GRADIENTS: {str(c): draw(c, CLASSES, WIDTH + 1) for c in (0, 1, 2)}}
    for sent in (rows(draw(0, CLASSES, WIDTH), [0, 1, 2]), flags, gradients):
        found = scored(attacks.presence, seen(sent, {}))
        assert found.tolist() == HAS.tolist()


def test_rows_that_agree_with_other_sites_are_of_the_class() -> None:
    real = unit(draw(1, CLASSES, WIDTH))
    sent = np.where(HAS[:, None], real, unit(draw(2, CLASSES, WIDTH)))
    others = [{str(c): row for c, row in enumerate(real + 0.05 * draw(3, CLASSES, WIDTH))}]
    found = scored(attacks.row_agreement, seen(rows(sent), {}, others))
    assert auc(found, HAS) == 1


# The model


def test_a_step_of_training_writes_the_shares_into_the_bias() -> None:
    """Of zeros, on a batch with the site's shares: the bias goes up by lr * (share - 1 / C)."""
    zeros = {"weight": np.zeros((CLASSES, WIDTH)), "bias": np.zeros(CLASSES)}
    after = {"weight": zeros["weight"], "bias": 0.1 * (SHARES - 1 / CLASSES)}
    found = scored(attacks.head_gradient, seen({Part.HEAD: after}, {Part.HEAD: zeros}))
    assert correlation(found, SHARES) == pytest.approx(1)


def test_a_control_variate_went_down_by_the_frequencies_less_what_was_predicted() -> None:
    received = {Part.CONTROL: {"head.bias": np.full(CLASSES, 0.3)}}
    sent = {Part.CONTROL: {"head.bias": 0.3 + np.full(CLASSES, 1 / CLASSES) - SHARES}}
    found = scored(attacks.control_gradient, seen(sent, received))
    assert correlation(found, SHARES) == pytest.approx(1)
    assert attacks.control_gradient(seen({Part.CONTROL: {}}, {})) is None


PLAN = Plan(epochs=2, batch_size=32, lr=0.1, momentum=0.9)


def test_steps_are_told_by_their_length_and_by_how_far_the_model_went_beside_its_mean_step() -> None:
    told = {Part.STEPS: {"steps": np.array(sgd_length(14, PLAN.momentum), np.float32)}}
    assert steps_told(seen(told, {}), PLAN, 0.1) == 14
    x, step = draw(0, CLASSES, WIDTH).astype(np.float32), draw(1, CLASSES, WIDTH).astype(np.float32)
    length = np.float32(sgd_length(14, PLAN.momentum) * 0.1)
    sent = {Part.HEAD: {"weight": x - length * step}, Part.CONTROL: {"head.weight": step}}
    assert steps_told(seen(sent, {Part.HEAD: {"weight": x}}), PLAN, 0.1) == 14
    assert steps_told(seen({Part.HEAD: {"weight": x}}, {}), PLAN, 0.1) is None


@pytest.mark.parametrize(("examples", "right"), [(192, 0), (193, 1), (224, 1), (225, 0)])
def test_a_number_of_examples_is_told_to_a_batch(examples: int, right: int) -> None:
    length = {Part.STEPS: {"steps": np.array(sgd_length(14, PLAN.momentum), np.float32)}}
    victims = [Victim([seen(length, {})], np.array([examples - 5, 5]))]
    assert told_to_a_batch(victims, PLAN) == (right, 1)


@pytest.mark.parametrize("name", ["digits-scaffold", "digits-fednova"])
def test_each_sites_number_of_examples_is_told(name: str) -> None:
    victims, _ = attacked(Case(name), seed=0, rounds=1)
    assert told_to_a_batch(victims, shipped.recipe(name).plan) == (5, 5)


def test_a_body_alone_tells_the_shares_through_the_head_that_it_was_trained_for() -> None:
    draw = np.random.default_rng(0)
    weight, biases = draw.normal(size=(CLASSES, 2 * CLASSES)), np.zeros(2 * CLASSES)
    moved = biases - (np.full(CLASSES, 1 / CLASSES) - SHARES) @ weight  # one step from predictions that are all alike
    received = {Part.HEAD: {"weight": weight}, Part.BODY: {"0.weight": weight.T, "0.bias": biases}}
    found = scored(attacks.feature_gradient, seen({Part.BODY: {"0.weight": weight.T, "0.bias": moved}}, received))
    assert correlation(found, SHARES) > 0.999
    assert attacks.feature_gradient(seen({Part.BODY: {"0.bias": moved}}, {Part.BODY: received[Part.BODY]})) is None


def test_a_row_that_stays_where_it_was_is_that_of_a_class_that_no_example_has() -> None:
    weight = draw(1, CLASSES, WIDTH)
    sent = {Part.HEAD: {"weight": weight + HAS[:, None] * draw(2, CLASSES, WIDTH)}}
    found = scored(attacks.head_movement, seen(sent, {Part.HEAD: {"weight": weight}}))
    assert auc(found, HAS) == 1.0
    assert attacks.head_movement(seen({}, {})) is None


def test_a_mixture_of_known_heads_is_taken_apart() -> None:
    heads = {"weight": draw(1, CLASSES, CLASSES, WIDTH), "bias": draw(2, CLASSES, CLASSES)}
    sent = {name: np.tensordot(SHARES, stack, 1) for name, stack in heads.items()}
    found = attacks.head_mixture(seen({Part.HEAD: sent}, {Part.CLASS_MODELS: heads}))
    assert found == pytest.approx(SHARES, abs=1e-6)


def test_norms_of_the_head_s_rows() -> None:
    weight = unit(draw(1, CLASSES, WIDTH)) * (1 + SHARES[:, None])
    found = attacks.head_norms(seen({Part.HEAD: {"weight": weight}}, {}))
    assert found == pytest.approx(1 + SHARES)


def gradients_of(features: Scores, labels: Sequence[int], classifier: Scores) -> dict[str, Scores]:
    """Of the cross-entropy by class, [CLASSES, WIDTH + 1], as sites with these features [N, WIDTH] send them."""
    found = {}
    for c in sorted(set(labels)):
        inputs = np.column_stack([own := features[np.array(labels) == c], np.ones(len(own))])
        grown = np.exp(inputs @ classifier.T)
        errors = grown / grown.sum(axis=1, keepdims=True) - np.eye(CLASSES)[c]
        found[str(c)] = errors.T @ inputs / len(own)
    return found


def test_a_head_s_step_is_taken_apart_into_gradients_by_class() -> None:
    labels = [0] * 5 + [1] * 3 + [2] * 2  # SHARES
    head = {"weight": draw(1, CLASSES, WIDTH), "bias": draw(2, CLASSES)}
    gradients = gradients_of(draw(3, len(labels), WIDTH), labels, np.column_stack([head["weight"], head["bias"]]))
    step = 0.1 * sum(SHARES[int(c)] * gradient for c, gradient in gradients.items())
    sent = {"weight": head["weight"] - step[:, :-1], "bias": head["bias"] - step[:, -1]}
    found = attacks.gradient_mixture(seen({Part.HEAD: sent, Part.CLASS_GRADIENTS: gradients}, {Part.HEAD: head}))
    assert found == pytest.approx(SHARES, abs=1e-9)
    assert attacks.gradient_mixture(seen({Part.HEAD: sent}, {Part.HEAD: head})) is None


def test_features_come_back_from_a_gradient_by_class() -> None:
    features, nothing = draw(3, 4, WIDTH), np.zeros((CLASSES, WIDTH + 1))
    found = attacks.mean_features({Part.CLASS_GRADIENTS: gradients_of(features, [0, 0, 0, 2], nothing)})
    assert found.keys() == {0, 2}
    np.testing.assert_allclose(found[0], features[:3].mean(axis=0))
    np.testing.assert_allclose(found[2], features[3])
    sure = np.column_stack([np.outer(np.eye(CLASSES)[0], features[:2].sum(axis=0)), np.zeros(CLASSES)])
    (one,) = attacks.mean_features({Part.CLASS_GRADIENTS: gradients_of(features[:3], [0] * 3, sure)}).values()
    np.testing.assert_allclose(one, features[2], atol=0.1)  # the only one that this classifier gets wrong


def test_noise_shows_what_a_model_has_learnt_to_say() -> None:
    old = unit(np.eye(CLASSES, WIDTH))
    towards = draw(5, 40, WIDTH) + 4 * SHARES @ old
    update = seen({Part.BODY: {}}, {Part.PROTOTYPES: {"mean": old}}, noise=(towards, draw(5, 40, WIDTH)))
    found = scored(attacks.noise_prior, update)
    assert auc(found, HAS) == 1


# With examples


def test_rows_that_are_what_the_body_makes_of_a_class_are_real() -> None:
    labels = np.repeat(np.arange(CLASSES), 5)
    means = unit(draw(1, CLASSES, WIDTH))
    after = means[labels] + 0.05 * draw(2, len(labels), WIDTH)
    sent = np.where(HAS[:, None], means, unit(draw(3, CLASSES, WIDTH)))
    found = scored(attacks.public_rows, seen(rows(sent), {}, after=after))
    assert auc(found, HAS) == 1


def test_a_model_knows_its_own_classes_better_than_before_and_says_them_more_often() -> None:
    labels, old = np.repeat(np.arange(CLASSES), 5), unit(np.eye(CLASSES, WIDTH))
    before = 0.2 * old[labels] + 0.1 * draw(1, len(labels), WIDTH)
    own = HAS[labels][:, None]
    after = np.where(own, old[labels], 0.5 * old[0] + 0.5 * old[1]) + 0.05 * draw(2, len(labels), WIDTH)
    update = seen({Part.BODY: {}}, {Part.PROTOTYPES: {"mean": old}}, after=after, before=before)
    for attack in (attacks.public_recall, attacks.public_prior, attacks.public_spread):
        found = scored(attack, update)
        assert auc(found, HAS) > 0.85, attack.__name__


def test_an_attack_without_anything_to_work_on_says_nothing() -> None:
    bare = seen({Part.BODY: {}}, {Part.BODY: {}})
    everything = {**attacks.BY_CLASS, **attacks.MODEL, **attacks.WITH_DATA}
    said = {name for name, attack in everything.items() if attack(bare) is not None}
    assert said == {"public spread"}  # it needs the body alone
    assert not tried(attacks.BY_CLASS, [Victim([bare], np.array([1, 0, 0, 0, 0, 0]))])


# The table


def test_a_cell_names_the_strongest_attack() -> None:
    found = [Found("weak", "round 1", 0.6, 0.9), Found("strong", "all rounds", 0.8, 0.1)]
    case = Case("digits-fednh", {"example_count": True, "min_samples_per_class": 10})
    outcome = Outcome(case, found, [], found[:1], {"personal.pm_v": 0.5})
    row = cells(outcome)
    assert row[:4] == ["fednh", "example_count, min_samples_per_class = 10", "0.80 strong, all rounds", "–"]
    assert row[5:7] == ["0.90 weak, round 1", "0.90 weak, round 1"]
    assert row[7:] == ["0.50 weak, round 1", "0.00 weak, round 1", "–", "–", "50.0"]
    assert cells(replace(outcome, examples=(4, 5)))[9] == "4 of 5"
    assert f"| {' | '.join(row)} |\n" in markdown(COLUMNS, [row])
    assert every_attack([outcome]).count("\n") == 5
    assert strongest([], "auc") is None


def test_a_simulation_is_seen_as_its_server_sees_it() -> None:
    victims, scores = attacked(Case("digits-fednh"), seed=0, rounds=1)
    assert 0 < scores["personal.pm_v"] <= 1
    assert [len(victim.seen) for victim in victims] == [1] * 5
    for victim in victims:
        rows_sent = victim.seen[0].sent[Part.PROTOTYPES]
        assert set(rows_sent) == {str(c) for c in np.flatnonzero(victim.counts)}
        assert len(victim.seen[0].others) == 4
    assert tried({"what is sent": attacks.presence}, victims)[0].auc == 1
