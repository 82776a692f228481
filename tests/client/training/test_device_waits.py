"""No step of training asks the device for a value: on a GPU it would wait for all work that is queued there.

Counted on the CPU: operators whose result depends on values, so that a GPU's would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.round_contexts import round_context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.models.split import dump
from protofed.client.training.context import FitContext
from protofed.client.training.evaluation import predict
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part, Payload
from protofed.server.method import server_methods
from protofed.testing.small_recipe import small_recipe

BATCH, CLASSES = 4, 10
WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, within its `with` block, the operators that wait for their input's values."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.count += name in WAITING or (name in ("index", "index_put", "index_put_") and _has_mask(args[1]))
        return func(*args, **(kwargs or {}))


def _has_mask(indices: list[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def waits(work: Callable[[], object]) -> int:
    counted = Waits()  # type: ignore[no-untyped-call]
    with counted:
        work()
    return counted.count


@pytest.mark.parametrize(
    "work",
    [
        lambda x, mask: x[mask],
        lambda x, _: bool((x > 1).any()),
        lambda x, _: x.sum().item(),
        lambda x, mask: x.masked_select(mask),
        lambda x, _: x.unique(),
        lambda x, _: x.nonzero(),
        lambda x, mask: x.clone().requires_grad_()[mask].sum().backward(),
    ],
)
def test_what_waits_is_counted(work: Callable[[Tensor, Tensor], object]) -> None:
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, True])
    assert waits(lambda: work(x, mask)) >= 1
    assert waits(lambda: x.masked_fill(mask, 0.0)[torch.tensor([1, 2])].sum()) == 0


def site(recipe: Recipe, round: int, batches: int) -> FitContext:
    """A site of so many batches of all classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(batches * BATCH) % CLASSES
    images = torch.randint(0, 256, (len(labels), 1, 8, 8), dtype=torch.uint8, generator=generator)
    examples = Examples(images, labels)
    data = SiteData(examples, examples, recipe.input, CLASSES)
    model = device_model(recipe, torch.device("cpu"), frozenset())
    return FitContext("ann", round, recipe.rounds, model, data, CLASSES, recipe.plan, generator, {})


def broadcast(recipe: Recipe) -> Payload:
    """What a site gets in round 2: prototypes of all classes, where the method has some."""
    server, first = server_methods.build(recipe.method.name, {}), site(recipe, 1, batches=5)
    state = server.init({Part.BODY: dump(first.model.body), Part.HEAD: dump(first.model.head)}, round_context(CLASSES))
    update = client_methods.build(recipe.method.name, {}).fit(first, server.broadcast(state, "ann"))
    return server.broadcast(server.aggregate(state, [update], round_context()), "ann")


@pytest.mark.parametrize("method", sorted(client_methods))
@pytest.mark.parametrize(
    "plan",
    [{}, {"augmentation": "crop-flip-rotate"}, {"loss": "balanced-softmax", "sampling": "class-balanced"}],
    ids=lambda plan: "-".join(plan.values()) or "none",
)
def test_a_fit_waits_as_often_whatever_the_number_of_its_batches(method: str, plan: dict[str, str]) -> None:
    recipe = small_recipe(method, plan={"batch_size": BATCH, "max_grad_norm": 1.0, "momentum": 0.9, **plan})
    received = broadcast(recipe)
    half = client_methods.build(method, {})
    few, many = (waits(partial(half.fit, site(recipe, 2, batches), received)) for batches in (5, 20))
    assert few == many
    assert few > 0, "an epoch's loss is asked for at least"


def test_scoring_waits_as_often_whatever_the_number_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small_recipe("fedavg")
    local = site(recipe, 1, batches=20)
    monkeypatch.setattr(SiteData, "scoring_batch", 80)
    few = waits(partial(predict, local.model, local.data))
    monkeypatch.setattr(SiteData, "scoring_batch", 8)
    assert few == waits(partial(predict, local.model, local.data))
