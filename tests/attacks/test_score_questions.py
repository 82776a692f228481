"""Sums of scores tell a server that chose the models no label count of three sites, which have the shipped policy.

Each attack succeeds first on sites without the rule that stops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.attacks.score_questions import (
    GLOBAL,
    QUESTIONS,
    SITES,
    Asked,
    Rule,
    Server,
    ask,
    by_scores,
    losses,
    recipe,
    without,
)

from protofed.client.agent.scores import secret_half
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.tasks.classification import CLASSES, ClassificationTask
from protofed.common.payload import Array
from protofed.common.protocol.messages import Activity
from protofed.common.protocol.scores import LOSS

CONSTANT = ("always one class", "the same, by logits that hardly differ", "one class of all but a few images")
NEVER = "a good model that never says one class"


@pytest.fixture(scope="module")
def server() -> Server:
    return Server.of(recipe())


@pytest.mark.parametrize("name", CONSTANT)
def test_a_constant_model_is_not_answered_for(name: str, server: Server, tmp_path: Path) -> None:
    with without(*Rule):
        assert ask(server, QUESTIONS[name], tmp_path / "without").wrong.mean() < 4
    assert np.isnan(ask(server, QUESTIONS[name], tmp_path / "with").shares).all()


def test_without_rules_constant_models_give_all_counts(server: Server, tmp_path: Path) -> None:
    with without(*Rule):
        told = ask(server, QUESTIONS[CONSTANT[0]], tmp_path)
    assert told.exact == server.run.classes
    assert told.wrong.max() < 0.1


def test_a_model_that_never_says_a_class_tells_of_the_secret_half_alone(server: Server, tmp_path: Path) -> None:
    with without(Rule.HALF):
        assert ask(server, QUESTIONS[NEVER], tmp_path / "whole").wrong.mean() < 1.5
    halves = ask(server, QUESTIONS[NEVER], tmp_path / "half")
    assert np.isfinite(halves.shares).all()
    assert halves.wrong.mean() > 2


def relabelled(data: SiteData, secret: bytes) -> SiteData:
    """With other images and labels in the places of its own test set that are not in the secret half."""
    assert data.local_test is not None
    images, labels = (tensor.clone() for tensor in (data.local_test.pixels(), data.local_test.labels))
    rest = (~secret_half(secret, len(labels))).nonzero().flatten()
    images[rest] = data.train.pixels()[: len(rest)]
    labels[rest] = data.train.labels[: len(rest)]
    return replace(data, local_test=Examples(images, labels))


def test_no_question_is_answered_by_what_is_not_in_the_half(server: Server, tmp_path: Path) -> None:
    """Neither by a score nor by its absence: so rounds and models without number count no more than the half."""
    bases = [server.good, *(model(c) for c in range(3) for model in (server.never_says, server.says_nearly))]
    one = Asked(tmp_path / "one", server.run)
    secrets = [agent._site.store.secret() for _, agent in one.sites.values()]
    other = [relabelled(data, secret) for data, secret in zip(one.held, secrets, strict=True)]

    def answers(folder: str, held: Sequence[SiteData]) -> Array:
        asked = Asked(tmp_path / folder, server.run, held=held)
        asked.trained(1, server.first)
        return by_scores(asked, bases)

    found = answers("half", one.held)
    assert np.isfinite(found).any()
    assert np.isnan(found).any()
    np.testing.assert_array_equal(found, answers("other half", other))
    with without(*Rule):
        assert (answers("whole", one.held) != answers("other whole", other)).all()


def test_which_site_withholds_is_not_seen(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it read the sum of the two others: of a question that two withhold it would be the third's answer."""
    asked = Asked(tmp_path, server.run)
    halves = [
        int(secret_half(agent._site.store.secret(), len(data.local_test or ())).sum())
        for (_, agent), data in zip(asked.sites.values(), asked.held, strict=True)
    ]
    assert len({*halves}) == SITES
    monkeypatch.setattr(ClassificationTask, "is_nearly_constant", lambda _, outputs: len(outputs) == halves[1])
    asked.trained(1, server.first)
    assert GLOBAL not in asked.scored(1, server.good)
    assert asked.counts[GLOBAL] == SITES
    uploads = [made.link.pushed for made, _ in asked.sites.values()]
    assert len({tuple((task.kind, released.manifest.tensors) for task, released in sent) for sent in uploads}) == 1
    assert not any(beat.activity is Activity.FAILED for made, _ in asked.sites.values() for beat in made.link.beats)


def test_scores_come_back_with_a_model_that_sees(server: Server, tmp_path: Path) -> None:
    asked = Asked(tmp_path, server.run)
    asked.trained(1, server.first)
    assert GLOBAL not in asked.scored(1, server.says(0))
    assert asked.scored(2, server.good)[GLOBAL].mean > 0.9


def test_of_a_fit_that_is_withheld_no_score_leaves(server: Server, tmp_path: Path) -> None:
    """Of a model that the site's images decide about a server got the scores, though not the update."""
    limits = {"site-1": {"min_contrast": 1.0}}
    own = {"personal.accuracy", "personal.balanced_accuracy", "personal.local.accuracy"}
    with without(Rule.CONSTANT):
        for name, changed in (("all", {}), ("one", limits)):
            asked = Asked(tmp_path / name, server.run, limits=changed)
            asked.trained(1, server.first)
            assert asked.scored(1, server.good).keys() == {GLOBAL, *(own if name == "all" else ())}
            assert all(asked.counts[score] == SITES for score in own)


def test_the_training_loss_is_in_no_sum(server: Server, tmp_path: Path) -> None:
    """Of bases that deny one class each it tells the shares of what three sites train on."""
    asked = Asked(tmp_path / "aggregated", server.run, aggregated={LOSS})
    asked.trained(1, server.first)
    found, shares = losses(server, asked)
    assert np.corrcoef(found, shares)[0, 1] > 0.8
    asked = Asked(tmp_path / "standard", server.run)
    asked.trained(1, server.first)
    assert np.isnan(losses(server, asked)[0]).all()
    assert asked.counts[LOSS] == 0


@pytest.mark.parametrize("images", [20, 100, 1000])
def test_a_model_that_singles_one_image_out_is_constant(images: int) -> None:
    logits = torch.zeros(images, 3)
    logits[:, 1] = 1.0
    logits[0, 2] = 2.0
    assert CLASSES.is_nearly_constant(logits)
