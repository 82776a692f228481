"""Under a policy without `example_count`, neither heartbeats nor updates depend on how many examples a site has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import build
from protofed.client.models.split import dump
from protofed.client.site import DaemonStatus
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload
from protofed.common.protocol import wire
from protofed.common.protocol.messages import Progress
from protofed.protos.v1 import federation_pb2 as pb

OWN = """
from torch import nn
from protofed.client.models.split import SplitModel

def normalised(input, classes):
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, classes))
"""
NAME = "site_normalised:normalised"
COUNTER = "2.num_batches_tracked"
BATCH, EPOCHS = 4, 3
COUNTS = [8, 12, 40]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The site's module with a model that normalises batches."""
    (tmp_path / "site_normalised.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("site_normalised", None)


@dataclass
class Watched(DaemonStatus):
    """Remembers what a heartbeat would have said before and after each batch."""

    said: list[Progress] = field(default_factory=list)

    def check(self) -> None:
        self.said.append(self.progress(0))
        super().check()
        self.said.append(self.progress(0))


def site_data(examples: int) -> SiteData:
    draw = torch.Generator().manual_seed(examples)
    train = Examples(torch.rand(examples, 1, 2, 2, generator=draw), torch.arange(examples) % 3)
    return SiteData(train, train, Recipe.model_validate(RUN).input, 3)


def trained(examples: int, **rules: Any) -> AgentHarness:
    """A site that has trained for one round and has sent its update."""
    recipe = {**RUN, "model": {"name": NAME}, "plan": {"epochs": EPOCHS, "batch_size": BATCH, "lr": 0.1}}
    harness = AgentHarness(
        recipe=recipe,
        rules={**RULES, "plugins": [NAME], **rules},
        now=Watched(),
        load_data=lambda _: site_data(examples),
    )
    choice = Recipe.model_validate(recipe)
    model = build(choice.model, choice.input, choice.classes, frozenset({NAME}))
    harness.fit(1, {Part.BODY: dump(model.body), Part.HEAD: dump(model.head)})
    harness.agent().step(0.0)
    return harness


def sent(harness: AgentHarness) -> Payload:
    ((_, released),) = harness.link.pushed
    return codec.decode(released.data)


def heartbeats(harness: AgentHarness) -> set[bytes]:
    """All that there is to be said of this round, as on the wire."""
    assert isinstance(harness.now, Watched)
    messages = (pb.HeartbeatRequest(run="run", **wire.pack_progress(progress)) for progress in harness.now.said)
    return {message.SerializeToString(deterministic=True) for message in messages}


def test_heartbeats_say_the_same_whatever_the_number_of_batches() -> None:
    harnesses = [trained(examples) for examples in COUNTS]
    batches = [len(harness.now.said) // 2 for harness in harnesses]  # type: ignore[attr-defined]
    assert batches == [EPOCHS * examples // BATCH for examples in COUNTS]  # there was something to tell
    few, *more = (heartbeats(harness) for harness in harnesses)
    assert len(few) == EPOCHS + 1  # each epoch, and the first one before its first batch was done
    assert all(said == few for said in more)


def test_batch_normalisations_counter_is_the_same_whatever_the_number_of_batches() -> None:
    harnesses = [trained(examples) for examples in COUNTS]
    assert [sent(harness)[Part.BODY][COUNTER].tolist() for harness in harnesses] == [0, 0, 0]
    whole = [{name: t for name, t in sent(harness)[Part.BODY].items() if t.dtype.kind != "f"} for harness in harnesses]
    assert [list(numbers) for numbers in whole] == [[COUNTER]] * 3  # no other whole number is sent at all
    first, *others = (harness.link.pushed[0][1] for harness in harnesses)
    for other in others:
        assert astuple(other.manifest)[:2] == astuple(first.manifest)[:2]  # tensors and size
        assert other.weight is None
        assert set(other.metrics) == {"loss"}


@pytest.mark.parametrize("examples", COUNTS)
def test_the_sites_own_model_keeps_its_counter_which_leaves_where_the_number_of_examples_may(examples: int) -> None:
    harness, batches = trained(examples, example_count=True), EPOCHS * examples // BATCH
    personal = harness.store.last_counted("run", 2).personal
    assert personal is not None
    assert personal[Part.BODY][COUNTER] == sent(harness)[Part.BODY][COUNTER] == batches
    assert harness.link.pushed[0][1].weight == examples


def test_weights_do_not_depend_on_the_counter() -> None:
    """What a site trains from a counter of zero is what it trains from any other."""
    recipe = Recipe.model_validate({**RUN, "model": {"name": NAME}})
    updates = []
    for counter in (0, 1234):
        harness = AgentHarness(recipe=recipe.model_dump(), rules={**RULES, "plugins": [NAME], "batch_order": "recipe"})
        torch.manual_seed(3)
        model = build(recipe.model, recipe.input, recipe.classes, frozenset({NAME}))
        body = {**dump(model.body), COUNTER: np.array(counter)}
        harness.fit(1, {Part.BODY: body, Part.HEAD: dump(model.head)})
        harness.agent().step(0.0)
        updates.append(harness.link.pushed[0][1].manifest.digest)
    assert updates[0] == updates[1]
