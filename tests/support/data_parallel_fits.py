"""Fits by several processes as one: `torchrun --nproc-per-node 2 -m tests.support.data_parallel_fits FOLDER CASE…`.

Rank 0 writes FOLDER/CASE.npz, what came of it, or FOLDER/CASE.txt, why nothing did; one process alone, as a test is,
makes the same without FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from tests.support.branched import NAME, Branched
from tests.support.half_rounds import parts
from tests.support.method_facts import METHODS, brief
from tests.support.round_contexts import round_context
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.distributed.launch import launched
from protofed.client.distributed.leader import Leader, follow
from protofed.client.distributed.rendezvous import joined_ranks
from protofed.client.method import Declaration, FitContext, client_methods, load, train
from protofed.client.methods.fedavg import FedAvgClient
from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import SplitModel, dump
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules, unlimited
from protofed.client.site import DaemonStatus, PreparedRun, Site, TaskAbortedError, prepare
from protofed.client.state.store import SECRET_BYTES, MemoryStore, SiteState
from protofed.client.training.context import Checkpoints, NoCheckpoints
from protofed.client.training.progress import DiskCheckpoints
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input
from protofed.common.errors import ProtofedError, TaskFailedError
from protofed.common.payload import NOT_ON_THE_WIRE, Array, Exchange, Part, Payload, Update
from protofed.common.plugins import MethodPlugin
from protofed.common.protocol.messages import Assignment, Role, Task, TaskKind
from protofed.server.method import server_methods

ALONE = -1  # a rank that there is not
EXAMPLES = 12  # less what FedFomo holds out 10: batches of 4 leave more than one, which BatchNorm needs
HERE = "tests.support.data_parallel_fits"
TWINS = f"{HERE}:TWIN_METHOD"
PLANS: dict[str, dict[str, Any]] = {
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 1.0, "augmentation": "crop-flip"},
    "single": {"lr": 0.1, "batch_size": 11},  # the last batch is one example: fewer than ranks
    "adam": {"lr": 0.001, "optimizer": "adam", "drop_last": True},
    "whole": {"lr": 0.1, "batch_size": 64, "schedule": "cosine"},
    "by-class": {"lr": 0.1, "sampling": "class-balanced", "loss": "balanced-softmax", "augmentation": "crop-flip"},
}


@dataclass(frozen=True)
class Case:
    """Two rounds of a method at one site.

    Attributes:
        trap: options of `trapped`.
        called_off: before this check of the second round.
        pause_s: of the daemon, before the second round.
        restart: the second round is interrupted after its first epoch, and taken up again.
    """

    method: str = "fedavg"
    plan: Mapping[str, Any] = field(default_factory=lambda: PLANS["momentum"])
    model: str = "plain"
    trap: Mapping[str, Any] = field(default_factory=dict)
    called_off: int | None = None
    pause_s: float = 0.0
    restart: bool = False
    others: bool = False  # the ranks have other data
    secret: bool = False  # batches are drawn of the daemon's secret, which the other ranks have not

    def recipe(self, alone: bool) -> Recipe:
        trap = {**self.trap, "rank": ALONE} if alone and self.trap else self.trap
        return Recipe.model_validate(
            {
                "name": "run",
                "rounds": 2,
                "classes": 3,
                "input": {"shape": [1, 6, 6]},
                "method": {"name": self.method, **(brief(self.method) if self.method in METHODS else {})},
                "model": {"name": f"{HERE}:{self.model}", **trap},
                "plan": {"epochs": 2, "batch_size": 4, "checkpoint": self.restart, **self.plan},
            }
        )


CASES: dict[str, Case] = {
    **{f"{method}-momentum": Case(method, model="normed") for method in METHODS},
    **{f"{method}-single": Case(method, PLANS["single"]) for method in METHODS},
    "fedavg-plain": Case(),
    "twins": Case(TWINS, model="normed"),
    "fedavg-adam": Case(plan=PLANS["adam"]),
    "fedavg-by-class": Case(plan=PLANS["by-class"]),
    "fedprp-whole": Case("fedprp", PLANS["whole"]),
    **{f"{NAME}-{plan}": Case(NAME, PLANS[plan]) for plan in PLANS},
    f"{NAME}-norms": Case(NAME, model="normed"),
    "restart": Case("fedprp", model="normed", restart=True),
    f"{NAME}-restart": Case(NAME, model="normed", restart=True),
    "called-off": Case(called_off=3),
    "fails-forward": Case(model="trapped", trap={"rank": 1, "at": 4, "what": "fail"}),
    "fails-backward": Case(model="trapped", trap={"rank": 1, "at": 4, "what": "fail-backward"}),
    "fails-in-means": Case("fedprp", model="trapped", trap={"rank": 1, "at": 3, "what": "fail", "training": False}),
    "daemon-fails": Case(model="trapped", trap={"rank": 0, "at": 4, "what": "fail"}),
    "nan": Case(model="trapped", trap={"rank": 1, "at": 2, "what": "nan"}),
    "short-forward": Case(model="trapped", trap={"rank": 1, "at": 2, "what": "short"}),
    "short-backward": Case(model="trapped", trap={"rank": 0, "at": 2, "what": "short-backward"}),
    "short-for-ever": Case(model="trapped", trap={"rank": 1, "at": 0, "what": "short"}),
    "secret": Case(secret=True),
    "other-data": Case(others=True),
    "again": Case("fedprp"),  # after all that
    "idle": Case(pause_s=12.0),
}


def plain(input_: Input, classes: int) -> SplitModel:
    torch.manual_seed(3)
    return SplitModel(nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.ReLU()), nn.Linear(7, classes))


def normed(input_: Input, classes: int) -> SplitModel:
    """One with both kinds of batch normalisation."""
    torch.manual_seed(3)
    convolved = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 7))
    return SplitModel(nn.Sequential(*convolved, nn.BatchNorm1d(7, momentum=None)), nn.Linear(7, classes))


def trapped(input_: Input, classes: int, **trap: Any) -> SplitModel:
    """One in which a rank comes to grief."""
    made = plain(input_, classes)
    body = nn.Sequential(*made.body.children(), Trap(**trap)) if isinstance(made.body, nn.Sequential) else made.body
    return SplitModel(body, made.head)


class Trap(nn.Module):
    """At one of its calls on one of the ranks something happens; at 0, at all of them."""

    def __init__(self, rank: int, at: int, what: str, training: bool = True) -> None:
        super().__init__()
        self.here, self.at, self.what, self.when = rank == int(os.environ.get("RANK", "0")), at, what, training
        self.calls = 0

    def forward(self, features: Tensor) -> Tensor:
        if not self.here or self.training is not self.when:
            return features
        self.calls += 1
        if self.at not in (0, self.calls):
            return features
        if self.what.endswith("-backward"):
            features.register_hook(self._happens)  # type: ignore[no-untyped-call]
            return features
        return self._happens(features)

    def _happens(self, features: Tensor) -> Tensor:
        match self.what.removesuffix("-backward"):
            case "nan":
                return features * torch.nan
            case "short":
                raise torch.OutOfMemoryError("no room")
            case _:
                raise ValueError("patient Jane Doe")


def data(input_: Input, other: bool = False) -> SiteData:
    """Eleven examples of two classes of three."""
    draw = torch.Generator().manual_seed(8 if other else 7)
    examples = Examples(torch.rand(EXAMPLES, 1, 6, 6, generator=draw), torch.arange(EXAMPLES) % 2)
    return SiteData(examples, examples, input_, 3)


@dataclass(frozen=True)
class TwinClient:
    """FedAvg drawn towards a copy of the body with other weights, which is trained, too, and kept."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})

    def load_global(self, local: FitContext, received: Payload) -> None:
        FedAvgClient().load_global(local, received)

    def fit(self, local: FitContext, received: Payload) -> Update:
        """The copy in evaluation mode while the model is trained, in training mode while it is trained itself."""
        self.load_global(local, received)
        body, head = local.model.body, local.model.head
        twin = deepcopy(body).eval()
        load(twin, {name: array / 2 for name, array in received[Part.BODY].items()})
        loss = train(local, lambda x, y: cross_entropy(head(z := body(x)), y) + (z - twin(x).detach()).square().mean())
        twin.train()
        train(local, lambda x, y: cross_entropy(head(twin(x)), y), twin.parameters())
        local.client_state[Part.BODY] = dump(twin)
        return local.update({Part.BODY: dump(body), Part.HEAD: dump(head)}, loss=loss.loss)


TWIN_METHOD = MethodPlugin(client=f"{HERE}:TwinClient", server="fedavg", server_options=("weighting",))


class KnownSecret(MemoryStore):
    """Of the daemon, whether it trains alone or leads."""

    def secret(self) -> bytes:
        return b"s" * SECRET_BYTES


def site_of(other: bool = False, secret: bool = False) -> Site:
    own = frozenset({*(f"{HERE}:{name}" for name in ("plain", "normed", "trapped")), TWINS})
    limits = unlimited(set(architectures))
    rules = PolicyRules(
        methods=frozenset({*METHODS, TWINS, NAME}),
        parts=frozenset(Part) - NOT_ON_THE_WIRE,
        exchange=frozenset(Exchange),
        plugins=own,
        limits=limits,
    )
    lax = {
        "class_distribution_estimate": True,
        "min_samples_per_class": 1,
        "min_images_per_unit": 1,
        "example_count": True,
    }
    rules = rules.model_copy(update={**lax, "batch_order": "secret" if secret else "recipe"})
    return Site(
        "ann",
        frozenset({Role.TRAINER}),
        Policy(rules),
        KnownSecret(),
        lambda recipe: data(recipe.input, other),
        lambda recipe: build(recipe.model, recipe.input, recipe.classes, own),
    )


@contextmanager
def method_of_tests() -> Iterator[None]:
    """Within the `with` block a recipe may name `Branched`, which is no method of protofed; its server is FedAvg's."""
    client, server = client_methods.build, server_methods.build

    def client_half(name: str, *given: Any) -> Any:
        return Branched() if name == NAME else client(name, *given)

    def server_half(name: str, *given: Any) -> Any:
        return server("fedavg" if name == NAME else name, *given)

    with patch.object(client_methods, "build", client_half), patch.object(server_methods, "build", server_half):
        yield


@method_of_tests()
def outcome(case: Case, site: Site, alone: bool, folder: Path | None = None) -> dict[str, Array]:
    """All that comes of the second round, by name."""
    recipe = case.recipe(alone)
    run = prepare(site, Assignment("run", recipe.wire()))
    server = server_methods.build(case.method, {}, site.policy.rules.plugins)
    state = server.init(parts(run.model), round_context(3))
    update, client_state = _fitted(site, run, 1, server.broadcast(state, "ann"), {})
    received = server.broadcast(server.aggregate(state, [update], round_context()), "ann")
    time.sleep(case.pause_s)
    if case.restart and folder is not None:
        kept = DiskCheckpoints(folder / "kept", _task(2))
        for check in (_raising(4, InterruptedError("as if the process had ended")), lambda: None):
            try:
                update, client_state = _fitted(site, run, 2, received, client_state, check, kept)
            except InterruptedError:
                assert list((folder / "kept").iterdir())
    else:
        check = _raising(case.called_off, TaskAbortedError())
        update, client_state = _fitted(site, run, 2, received, client_state, check)
    payloads = {"sent": update.payload, "kept": client_state, "model": parts(run.model)}
    made = {f"{of}/{p}/{n}": a for of, payload in payloads.items() for p, ts in payload.items() for n, a in ts.items()}
    return made | {"loss": np.array(update.metrics["loss"])}


def _fitted(
    site: Site,
    run: PreparedRun,
    round: int,
    received: Payload,
    client_state: Payload,
    check: Callable[[], None] = lambda: None,
    kept: Checkpoints | None = None,
) -> tuple[Update, Payload]:
    task, now = _task(round), DaemonStatus()
    now.check = check  # type: ignore[method-assign]
    local = run.fit_context("ann", task, SiteState(0, client_state), now, kept or NoCheckpoints())
    return site.fit(run, task, local, received), local.client_state


def _task(round: int) -> Task:
    return Task(TaskKind.FIT, "run", round, f"n{round}", None, 0, 60.0)


def _raising(at: int | None, error: Exception) -> Callable[[], None]:
    left = [at]

    def check() -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise error

    return check


@method_of_tests()
def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    launch = launched(os.environ)
    assert launch is not None
    longest = timedelta(seconds=10 if names == ["idle"] else 300)
    with joined_ranks(launch, torch.device("cpu"), longest) as (team, board):
        if launch.rank:
            follow(team, board, site_of(other="other-data" in names))
            return
        with ExitStack() as ends:
            leader = Leader(team, board)
            ends.callback(leader.end)
            for name in names:
                site = leader.wrap(site_of(secret=CASES[name].secret))
                try:
                    arrays: dict[str, Any] = outcome(CASES[name], site, False, folder)
                    np.savez(folder / f"{name}.npz", **arrays)
                except (ProtofedError, TaskAbortedError, ValueError) as error:
                    reason = error.reason if isinstance(error, TaskFailedError) else "-"
                    (folder / f"{name}.txt").write_text(f"{type(error).__name__} {reason} {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
