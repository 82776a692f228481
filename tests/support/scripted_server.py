"""A site and its server by hand: what the server hands out, and what of the site reaches it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from protofed.client.agent.agent import Agent, Site
from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import architectures, build
from protofed.client.models.split import SplitModel, dump
from protofed.client.policy.policy import Policy, Released, ReleasedScores
from protofed.client.policy.rules import PolicyRules, unlimited
from protofed.client.site import DaemonStatus, no_checkpoints
from protofed.client.state import store as state_store
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore, Store
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import (
    Activity,
    Assignment,
    Finished,
    PauseReason,
    Progress,
    Receipt,
    Role,
    Signal,
    Task,
    TaskKind,
    Verdict,
    Wait,
)

RUN: dict[str, Any] = {
    "name": "run",
    "rounds": 3,
    "classes": 3,
    "input": {"shape": [1, 2, 2]},
    "method": {"name": "fedavg"},
    "model": {"name": "mlp", "hidden": [4]},
    "plan": {"epochs": 2, "batch_size": 4, "lr": 0.1},
    "federation": {"heartbeat_s": 0.125},
}
RULES: dict[str, Any] = {
    "partners": "first-use",
    "methods": ["fedavg", "fednh", "solo"],
    "parts": ["body", "head", "prototypes"],
    "min_samples_per_class": 1,
    "metrics": [
        "loss",
        "global.accuracy",
        "global.balanced_accuracy",
        "personal.accuracy",
        "personal.balanced_accuracy",
        "personal.pm_v",
        "personal.pm_l",
    ],
    "min_images_per_unit": 1,
    "limits": unlimited(set(architectures)).model_dump(),  # `RUN` is as small as can be
}


@dataclass
class ScriptedServer:
    """A link to a server by hand: hands out `tasks`, accepts what comes, and fails where `failing` says so."""

    recipe: str
    run: str = "run"
    preprocessing_digest: str = ""
    min_cohort: int = 1
    tasks: deque[Task | Wait | Finished] = field(default_factory=deque)
    blobs: dict[str, bytes] = field(default_factory=dict)
    failing: dict[str, list[Exception]] = field(default_factory=dict)  # call -> raised one after the other
    before_push: Callable[[Task], None] = lambda _: None
    verdict: Verdict = Verdict.ACCEPTED
    calls: Counter[str] = field(default_factory=Counter)
    tried: list[tuple[Task, Released]] = field(default_factory=list)
    pushed: list[tuple[Task, Released]] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    beats: list[Progress] = field(default_factory=list)
    pause_reasons: list[PauseReason] = field(default_factory=list)  # one for each call of enroll

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.failing.get(name):
            raise self.failing[name].pop(0)

    def enroll(self, pause_reason: PauseReason = PauseReason.NONE, wait_s: float = 0.0) -> Assignment | Finished:
        self._called("enroll")
        self.pause_reasons.append(pause_reason)
        return Assignment(
            self.run, self.recipe, preprocessing_digest=self.preprocessing_digest, min_cohort=self.min_cohort
        )

    def next_task(self, run: str, wait_s: float) -> Task | Wait | Finished:
        self._called("next_task")
        return self.tasks.popleft() if self.tasks else Wait(1.0)

    def fetch(self, task: Task) -> bytes:
        self._called("fetch")
        return self.blobs[str(task.base_digest)]

    def push(self, task: Task, released: Released) -> Receipt:
        self.before_push(task)
        self.tried.append((task, released))
        self._called("push")
        self.pushed.append((task, released))
        return Receipt(self.verdict, "", released.manifest.digest, "seal")

    def report(self, task: Task, released: ReleasedScores) -> None:
        self._called("report")
        self.scores.append(dict(released.scores))

    def beat(self, run: str, progress: Progress) -> Signal:
        self.beats.append(progress)
        return Signal.CONTINUE


def give_secret(folder: Path, byte: bytes = b"s") -> None:
    """Make a site's secret known: two sites with the same one draw the same batches."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / state_store.SECRET_FILE).write_bytes(byte * state_store.SECRET_BYTES)


def site_data() -> SiteData:
    """Twelve examples of classes 0 and 1; the test set has class 2, too."""
    draw = torch.Generator().manual_seed(7)
    train = Examples(torch.rand(12, 1, 2, 2, generator=draw), torch.arange(12) % 2)
    test = Examples(torch.rand(9, 1, 2, 2, generator=draw), torch.arange(9) % 3)
    return SiteData(train, test, Recipe.model_validate(RUN).input, 3)


@dataclass
class AgentHarness:
    """One site and its server."""

    store: Store = field(default_factory=MemoryStore)
    recipe: dict[str, Any] = field(default_factory=lambda: dict(RUN))
    rules: dict[str, Any] = field(default_factory=lambda: dict(RULES))
    roles: frozenset[Role] = frozenset({Role.TRAINER})
    name: str = "ann"
    now: DaemonStatus = field(default_factory=DaemonStatus)
    load_data: Callable[[Recipe], SiteData] = lambda _: site_data()
    wrap: Callable[[SplitModel], SplitModel] = lambda model: model
    checkpoints: Any = no_checkpoints
    pinned: str | None = None
    pauses: list[float] = field(default_factory=list)  # that the daemon made

    def __post_init__(self) -> None:
        self.link = ScriptedServer(Recipe.model_validate(self.recipe).wire())

    def agent(self) -> Agent:
        """A daemon that has just been started."""
        policy = Policy(PolicyRules.model_validate(self.rules))

        def model(recipe: Recipe) -> SplitModel:
            return self.wrap(build(recipe.model, recipe.input, recipe.classes, policy.rules.plugins))

        own = (self.store, self.load_data, model, self.checkpoints, self.pinned)
        site = Site(self.name, self.roles, policy, *own)
        return Agent(site, self.link, self.now, self.pauses.append)

    def restart(self, folder: Path) -> None:
        """The daemon and its store have died; the store is opened again."""
        assert isinstance(self.store, DiskStore)
        self.store.close()
        self.store = DiskStore(folder)

    def offer(self, kind: TaskKind, round: int, base: Payload | None = None, task_id: str = "") -> Task:
        """Queue a task; its base can be fetched."""
        data = None if base is None else codec.encode(base)
        digest = None if data is None else codec.digest(data)
        if data is not None:
            self.link.blobs[str(digest)] = data
        task = Task(kind, self.link.run, round, task_id or f"n-{kind}-{round}", digest, len(data or b""), 60.0)
        self.link.tasks.append(task)
        return task

    def fit(self, round: int = 1, base: Payload | None = None, task_id: str = "") -> Task:
        """Queue a fit from the common model."""
        return self.offer(TaskKind.FIT, round, base or first_model(), task_id)

    def score(self, round: int, base: Payload | None = None) -> Task:
        """Queue a scoring of the common model."""
        return self.offer(TaskKind.SCORE, round, base or first_model())

    def counting_loads(self) -> list[str]:
        """Names of the runs that data are loaded for from now on."""
        loads: list[str] = []

        def load(recipe: Recipe) -> SiteData:
            loads.append(recipe.name)
            return site_data()

        self.load_data = load
        return loads

    def declined(self) -> list[tuple[str, FailureReason | None]]:
        """Nonce and reason of all tasks that were declined."""
        assert all(beat.activity is Activity.FAILED for beat in self.link.beats)
        return [(beat.task_id, beat.failure) for beat in self.link.beats]


def first_model(seed: int = 5, **model: Any) -> Payload:
    """The common model of `RUN`."""
    torch.manual_seed(seed)
    recipe = Recipe.model_validate({**RUN, "model": {**RUN["model"], **model}})
    made = build(recipe.model, recipe.input, recipe.classes)
    return {Part.BODY: dump(made.body), Part.HEAD: dump(made.head)}


def work(daemon: Agent, steps: int) -> None:
    for _ in range(steps):
        daemon.step(0.0)
