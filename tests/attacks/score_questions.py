"""Label counts from sums of scores: a model is a question, and a server chooses which model is scored.

Three sites under the shipped policy, with all steps of each sum. The share of right answers of a model that always says
class c is the share of c; so it is for each class that a good model is kept from naming.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.attacks.hostile_server import as_payload, honest_model, public_of, recipe_like, sites_of
from tests.attacks.policies import policy_of
from tests.support.partners import confirm, listed
from tests.support.scripted_server import AgentHarness, give_secret
from tests.support.sum_server import SumServer, steps_of

from protofed.client.agent import scores
from protofed.client.agent.agent import Agent
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import load
from protofed.client.secure_aggregation.partners import open_membership
from protofed.client.state.disk_store import DiskStore
from protofed.client.tasks.classification import ClassificationTask
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload
from protofed.common.protocol.messages import SumOf, Task, TaskKind
from protofed.common.protocol.scores import LOSS, Spread
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.keys import SumContext, Vector

SITES = 3
BIAS = 8.0  # norms of the head; ten are refused
SMALL = 0.3  # of the good model's head: its answers are the same
FEW = 0.02  # share of images that a nearly constant model gives another class
EPOCHS, RATE = 100, 0.05  # of the server's own training, on images of its own
GLOBAL = "global.local.accuracy"
PLAN: dict[str, Any] = {"lr": 0.1, "epochs": 4, "batch_size": 16, "momentum": 0.0, "weight_decay": 0.0}
FEDERATION = {"secure": True, "min_sites": SITES, "quorum": 1.0}
OF_UPDATE, OF_SCORES = (Vector.VALUES,), (Vector.CONTRIBUTORS, Vector.VALUES)


def recipe() -> Recipe:
    """A run of three sites with test sets of their own."""
    made = recipe_like("digits-fedavg", plan=PLAN, federation=FEDERATION, rounds=1000)
    assert made.data is not None
    parts = made.data.partition.model_copy(update={"sites": SITES, "beta": 1.0})
    data = made.data.model_copy(update={"partition": parts, "test_fraction": None, "local_test_fraction": 0.5})
    return made.model_copy(update={"data": data})


class Asked:
    """The daemons of three sites, and a server that asks them.

    `limits` are of single sites; `aggregated` is what all policies let into sums; `held` are the sites' data.
    """

    def __init__(
        self,
        folder: Path,
        run: Recipe,
        secret: int = 0,
        limits: Mapping[str, Mapping[str, Any]] | None = None,
        aggregated: Collection[str] | None = None,
        held: Sequence[SiteData] = (),
    ) -> None:
        self.run, self.held = run, list(held) or list(sites_of(run))
        self.names = run.score_names()
        self.counts: dict[str, int] = {}  # of sites that have each score of the newest sum, as the server counts them
        self._tasks = 0
        self.sites: dict[str, tuple[AgentHarness, Agent]] = {}
        for number, data in enumerate(self.held):
            name, site_folder = f"site-{number}", folder / str(number)
            give_secret(site_folder, bytes([SITES * secret + number]))
            rules = policy_of("standard", run).rules.model_dump()
            rules["limits"] |= (limits or {}).get(name, {})
            rules["aggregated_metrics"] = rules["aggregated_metrics"] if aggregated is None else aggregated
            self.sites[name] = self._daemon(site_folder, name, data, rules)
        folders = {f"site-{number}": folder / str(number) for number in range(len(self.held))}
        for site_folder in folders.values():
            confirm(site_folder, listed(folders))

    def _daemon(self, folder: Path, name: str, data: SiteData, rules: dict[str, Any]) -> tuple[AgentHarness, Agent]:
        made = AgentHarness(DiskStore(folder), json.loads(self.run.wire()), rules, load_data=lambda _: data, name=name)
        made.link.run, made.link.min_cohort = self.run.name, SITES
        agent = made.agent()
        agent._work.sums.membership = open_membership(folder, name, lambda: None)
        return made, agent

    def trained(self, round: int, base: Payload) -> Array | None:
        """The sum of a round's updates; None: a site declined."""
        return self._summed(TaskKind.FIT, SumOf.UPDATE, round, base, OF_UPDATE)

    def scored(self, round: int, base: Payload) -> dict[str, Spread]:
        """What the sum of the scores of a model says; empty: a site declined, or nothing can be read."""
        total = self._summed(TaskKind.SCORE_SUM, SumOf.SCORES, round, base, OF_SCORES)
        return {} if total is None else score_sums.opened(self.names, total)

    def _summed(
        self, kind: TaskKind, sum_of: SumOf, round: int, base: Payload, vectors: tuple[Vector, ...]
    ) -> Array | None:
        data = codec.encode(base)
        at = self.run.name, round, round, sum_of, self.run.fingerprint(), codec.digest(data)
        server = SumServer(SumContext(*at, vectors), (tuple(self.sites),))
        for step in (kind, *steps_of(server.context)):
            for site in self.sites:
                blob = data if step is kind else server.blob(step, site)
                if (upload := self._upload(site, step, round, sum_of, blob)) is None:
                    return None
                server.take(step, site, upload)
        if sum_of is SumOf.SCORES:
            self.counts = dict(zip(score_sums.list_scores(self.names), server.counts().tolist(), strict=True))
        return server.total()

    def _upload(self, site: str, kind: TaskKind, round: int, sum_of: SumOf, blob: bytes) -> bytes | None:
        made, agent = self.sites[site]
        self._tasks += 1
        digest = codec.digest(blob)
        made.link.blobs[str(digest)] = blob
        made.link.tasks.append(
            Task(kind, self.run.name, round, f"t{self._tasks}", digest, len(blob), 60.0, round, sum_of)
        )
        before = len(made.link.pushed)
        while made.link.tasks:
            agent.step(0.0)
        pushed = made.link.pushed[before:]
        return pushed[-1][1].data if pushed else None


@dataclass(frozen=True)
class Told:
    """What a server says of the three test sets together."""

    shares: Array  # the mean share of each class over the sites, [C]; NaN where nothing can be read
    truth: Array  # likewise, as it is
    images: int  # of all three

    @property
    def exact(self) -> int:
        """Classes whose number of images is told."""
        return int((self.wrong < 0.5).sum())

    @property
    def wrong(self) -> Array:
        """By how many images each class is missed, [C]."""
        return np.asarray(np.abs(self.shares - self.truth) * self.images)


class Rule(StrEnum):
    """What sites keep to, each of which can be taken away."""

    CONSTANT = "no answer of a constant model"
    HALF = "a secret half"


@contextmanager
def without(*rules: Rule) -> Iterator[None]:
    """Sites as they would be without these rules."""
    with ExitStack() as stack:
        if Rule.CONSTANT in rules:
            stack.enter_context(patch.object(ClassificationTask, "is_nearly_constant", lambda *_: False))
        if Rule.HALF in rules:
            whole = patch.object(scores, "secret_half", lambda _, images: torch.ones(images, dtype=torch.bool))
            stack.enter_context(whole)
        yield


@dataclass(frozen=True)
class Server:
    """What it has: a run, a model that it has trained on images of its own, and how far it may bias a head."""

    run: Recipe
    first: Payload
    good: Payload
    most: float

    @classmethod
    def of(cls, run: Recipe) -> Server:
        """The good model's head is small, so that no logit is beyond a bias."""
        first, good = as_payload(honest_model(run)), good_model(run)
        good = {**good, Part.HEAD: {name: np.float32(SMALL) * tensor for name, tensor in good[Part.HEAD].items()}}
        return cls(run, first, good, BIAS * float(np.linalg.norm(first[Part.HEAD]["weight"])))

    def says(self, c: int) -> Payload:
        return biased(self.first, c, self.most)

    def says_faintly(self, c: int) -> Payload:
        """Always class c, by logits that hardly differ."""
        head = {name: np.float32(0.01) * tensor for name, tensor in self.first[Part.HEAD].items()}
        return biased({**self.first, Part.HEAD: head}, c, 0.05 * self.most)

    def says_nearly(self, c: int) -> Payload:
        """Class c of all but the few images that it takes most surely for another."""
        others = self._logits[self._labels != c]
        margin = np.delete(others, c, axis=1).max(axis=1) - others[:, c]
        return biased(self.good, c, float(np.quantile(margin, 1 - FEW)))

    def denies(self, c: int) -> Payload:
        """Never class c, by a model that has learnt nothing: its loss is large on that class alone."""
        return biased(self.first, c, -self.most)

    def never_says(self, c: int) -> Payload:
        """Of the images of class c alone it is wrong, where the good model is right."""
        return biased(self.good, c, -self.most)

    @property
    def _logits(self) -> Array:
        return logits(self.run, self.good)

    @property
    def _labels(self) -> Array:
        return np.asarray(public_of(self.run).test.labels.numpy())


def constant(server: Server, asked: Asked) -> Array:
    """Shares [C], by a model for each class that always says it."""
    return by_scores(asked, [server.says(c) for c in range(server.run.classes)])


def faint(server: Server, asked: Asked) -> Array:
    """Likewise, by logits that hardly differ."""
    return by_scores(asked, [server.says_faintly(c) for c in range(server.run.classes)])


def nearly_constant(server: Server, asked: Asked) -> Array:
    """Likewise, by models that say another class of a few images."""
    return by_scores(asked, [server.says_nearly(c) for c in range(server.run.classes)])


def never(server: Server, asked: Asked) -> Array:
    """Shares [C], by what the good model loses that never says the class."""
    right, *kept = by_scores(asked, [server.good, *(server.never_says(c) for c in range(server.run.classes))])
    return np.asarray(right - np.array(kept))


QUESTIONS: Mapping[str, Callable[[Server, Asked], Array]] = {
    "always one class": constant,
    "the same, by logits that hardly differ": faint,
    "one class of all but a few images": nearly_constant,
    "a good model that never says one class": never,
}


def losses(server: Server, asked: Asked) -> tuple[Array, Array]:
    """Of fits whose base denies one class each, [C]; and the mean share of each class in what the sites train on."""
    found = []
    for c in range(server.run.classes):
        asked.trained(c + 2, server.denies(c))  # round 1 was of the first model
        found.append(_read(asked.scored(c + 2, server.denies(c)), LOSS))
    return np.array(found), np.mean([data.label_frequencies().numpy() for data in asked.held], axis=0)


def by_scores(asked: Asked, bases: Sequence[Payload]) -> Array:
    """Of the global model on the sites' own test sets, the score of each base [B]; NaN: none can be read."""
    return np.array([_read(asked.scored(n, base), GLOBAL) for n, base in enumerate(bases, start=1)])


def ask(server: Server, question: Callable[[Server, Asked], Array], folder: Path, secret: int = 0) -> Told:
    """Ask sites that have started with the run."""
    asked = Asked(folder, server.run, secret)
    asked.trained(1, server.first)
    return told(asked, question(server, asked))


def told(asked: Asked, shares: Array) -> Told:
    """Beside the truth."""
    counts = np.stack([_counts(data) for data in asked.held])
    return Told(shares, (counts / counts.sum(axis=1, keepdims=True)).mean(axis=0), int(counts.sum()))


def _read(found: Mapping[str, Spread], name: str) -> float:
    return found[name].mean if name in found else math.nan


def _counts(data: SiteData) -> Array:
    assert data.local_test is not None
    return np.bincount(data.local_test.labels.numpy(), minlength=data.classes)


def good_model(run: Recipe) -> Payload:
    """A model that the server has trained on images of its own, from the run's first one."""
    model, mine = honest_model(run), public_of(run).test
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    images = mine.normalised(run.input)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), mine.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return as_payload(model)


def biased(model: Payload, c: int, size: float) -> Payload:
    """The model with so much more in the bias of class c."""
    head = {name: np.array(tensor) for name, tensor in model[Part.HEAD].items()}
    head["bias"][c] += size
    return {**model, Part.HEAD: head}


def logits(run: Recipe, model: Payload) -> Array:
    """Of the server's own images, [N, C]."""
    split = honest_model(run)
    load(split.body, model[Part.BODY])
    load(split.head, model[Part.HEAD])
    with torch.no_grad():
        return np.asarray(split.eval()(public_of(run).test.normalised(run.input)).double().numpy())
