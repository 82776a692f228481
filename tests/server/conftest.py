"""A run of FedAvg with tiny models, driven by hand: the real coordinator, ledger and blobs, no wire, no time."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.schema import CreateSchema, DropSchema

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, parse
from protofed.common.errors import StateError
from protofed.common.payload import Part, Payload, SiteId, Tensors, describe
from protofed.common.protocol.messages import (
    Activity,
    Manifest,
    Progress,
    Receipt,
    Role,
    Scores,
    Signal,
    Task,
    TaskKind,
    Verdict,
)
from protofed.server.rounds.context import RunJob, ServerContext, inline
from protofed.server.rounds.intake.intake import Intake
from protofed.server.rounds.machine.phases import Phase
from protofed.server.rounds.presence import SitePresence
from protofed.server.rounds.run import Run
from protofed.server.storage.blobs import Blobs, MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import UpdateProblem

CLASSES = 3
EVALUATOR = "eva"
TRAINERS = ("ann", "bob", "cyd")


def model(value: float) -> Payload:
    """A model whose weights are all `value`; dyadic values have exact means."""
    body: Tensors = {
        "conv.weight": np.full((2, 2), value, np.float32),
        "bn.batches": np.array([int(min(abs(value), 1e6))], np.int64),
    }
    return {Part.BODY: body, Part.HEAD: {"weight": np.full((CLASSES, 2), value, np.float32)}}


def recipe(run: str = "test", **tables: Any) -> Recipe:
    """Two rounds of FedAvg; `federation={...}` and the like replace single keys of a table."""
    table: dict[str, Any] = {
        "name": run,
        "rounds": 2,
        "classes": CLASSES,
        "input": {"shape": [1, 8, 8]},
        "method": {"name": "fedavg"},
        "model": {"name": "mlp"},
        "federation": {
            "min_sites": 3,
            "quorum": 2,
            "deadline_s": 100.0,
            "score_deadline_s": 100.0,
            "stall_timeout_s": 50.0,
        },
    }
    for key, value in tables.items():
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return parse(table, Recipe, "test")


def announce(payload: Payload) -> tuple[Manifest, bytes]:
    """An upload's manifest and bytes."""
    data = codec.encode(payload)
    return Manifest(describe(payload), len(data), codec.digest(data)), data


@dataclass
class Clock:
    """Moved by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Died(BaseException):
    """The process ended here."""


class Fragile(Ledger):
    """A ledger whose process dies at its n-th write, before it is durable or just after.

    Attributes:
        watched: called at every write, where its process would die.
    """

    Died: ClassVar = Died

    def __init__(self, url: str = "sqlite://") -> None:
        self.writes, self.dies_at, self.durably = 0, 0, False
        self.watched: Callable[[], None] = lambda: None
        super().__init__(url)

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        self.writes += 1
        if not self.durably:
            self._die()
        with super()._write() as connection:
            yield connection
        if self.durably:
            self._die()

    def copy(self) -> Fragile:
        """All that is durable now, of a ledger in memory."""
        other = Fragile()
        with self._engine.connect() as source, other._engine.connect() as target:
            _driver(source).backup(_driver(target))
        return other

    def _die(self) -> None:
        self.watched()
        if self.writes == self.dies_at:
            raise Died


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


@dataclass
class Later:
    """Work on another thread, as the coordinator sees it: done when the test says so."""

    jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)

    def __call__(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))

    def finish(self) -> None:
        job, done = self.jobs.pop(0)
        done(job())


@dataclass
class Lab:
    """A coordinator with what it stands on, and the sites' side of every call."""

    recipe: Recipe
    blobs: Blobs
    ledger: Ledger
    keep_rounds: int = 2
    work: RunJob = inline
    clock: Clock = field(default_factory=Clock)
    told: list[frozenset[SiteId] | None] = field(default_factory=list)
    here: dict[SiteId, Role] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another process takes over the ledger and the blobs; the sites enroll again."""
        self.presence = SitePresence(self.ledger, self.clock)
        context = ServerContext(
            self.ledger,
            self.blobs,
            self.presence,
            self.clock,
            self.work,
            self._notify,
            keep_rounds=self.keep_rounds,
        )
        self.metrics = context.metrics
        run = self.ledger.run(self.recipe.name)
        if run is not None and run.outcome is None and self.ledger.newest(run.run) is not None:
            self.presence.presume()  # as a queue of runs does
        self.run = Run(self.recipe, context)
        self.intake = Intake(self.run, context)
        for site, role in self.here.items():
            self.presence.enroll(site, {role}, daemon(site))

    def enroll(self, *sites: SiteId, role: Role = Role.TRAINER) -> None:
        """Let sites appear."""
        for site in sites:
            self.here[site] = role
            self.presence.enroll(site, {role}, daemon(site))

    def begin(self) -> Lab:
        """All sites are there and two of them have made the same first model, of zeros: round 1 is open."""
        self.gather(EVALUATOR)
        self.first_models()
        return self

    def gather(self, *evaluators: SiteId) -> None:
        """These and all trainers are there, and the run notices."""
        self.enroll(*evaluators, role=Role.EVALUATOR)
        self.enroll(*TRAINERS)
        self.later(0)

    def train(self, value: float) -> None:
        """Every trainer answers with a model of that value."""
        for site in TRAINERS:
            self.push(site, model(value))

    def first_models(self) -> None:
        """Every site that is asked for a first model makes one of zeros."""
        for site in self.makers():
            assert self.push(site, model(0.0)).verdict is Verdict.ACCEPTED

    def makers(self) -> list[SiteId]:
        """The sites that are asked for a first model now."""
        return [site for site in self.here if self.asked(site) is TaskKind.INITIALISE]

    def later(self, seconds: float, alive: tuple[SiteId, ...] = ()) -> None:
        """Time passes; only these sites are heard of before it is noticed."""
        self.clock.now += seconds
        for site in alive:
            self.presence.seen(site, daemon(site))
        self.run.tick()

    model = staticmethod(model)
    announce = staticmethod(announce)

    # What sites do

    def asked(self, site: SiteId) -> TaskKind | None:
        """What the site is asked for now, if anything."""
        answer = self.intake.next_task(site, daemon(site))
        return answer.kind if isinstance(answer, Task) else None

    def task(self, site: SiteId) -> Task:
        """The site's open task; fails if there is none."""
        answer = self.intake.next_task(site, daemon(site))
        assert isinstance(answer, Task), f"{site} has no task: {answer}"
        return answer

    def push(
        self,
        site: SiteId,
        payload: Payload,
        task: Task | None = None,
        metrics: Scores | None = None,
        weight: float | None = None,
    ) -> Receipt:
        """Announce, send and commit an update, as a link does."""
        task = task or self.task(site)
        manifest, data = announce(payload)
        decided = self.intake.begin(site, daemon(site), task.task_id, task.round, task.base_digest, manifest)
        if decided is not None:
            return decided
        found = self.intake.examine(site, task.task_id, manifest, data, task.base_digest)
        if isinstance(found, UpdateProblem):
            return self.intake.refuse(site, task.task_id, manifest, found)
        self.blobs.put(data)
        return self.intake.commit(site, daemon(site), task.task_id, manifest, metrics or {}, weight, found)

    def score(self, site: SiteId, value: float = 0.5, task: Task | None = None) -> None:
        """Report one score: the one that the site's role gives."""
        task = task or self.task(site)
        name = "global.accuracy" if self.here[site] is Role.EVALUATOR else "personal.accuracy"
        self.intake.report_scores(site, daemon(site), task.task_id, {name: value})

    def beat(self, site: SiteId, task_id: str, **fields: Any) -> Signal:
        """A heartbeat."""
        progress = Progress(task_id, **{"activity": Activity.TRAINING, **fields})
        return self.intake.heartbeat(site, daemon(site), progress)

    def round(self, **values: float) -> None:
        """Every site named answers its fit task with a model of that value; then all scores come."""
        for site, value in values.items():
            assert self.push(site, model(value)).verdict is Verdict.ACCEPTED
        for site in self.here:
            if self.asked(site) is TaskKind.SCORE:
                self.score(site)

    # What there is to see

    @property
    def phase(self) -> Phase:
        """Where the run is."""
        return self.run.phase

    @property
    def address(self) -> Digest:
        """The newest state's."""
        assert self.run.published is not None
        return self.run.published.address

    @property
    def value(self) -> float:
        """The newest state's weights, all of which are equal."""
        assert self.run.published is not None
        weights = self.run.published.state[Part.BODY]["conv.weight"]
        assert (weights == weights.flat[0]).all()
        return float(weights.flat[0])

    def has(self, address: Digest) -> bool:
        """Whether a blob is still kept."""
        try:
            return codec.digest(self.blobs.get(address)) == address
        except StateError:
            return False

    def _notify(self, sites: Any) -> None:
        self.told.append(None if sites is None else frozenset(sites))


def daemon(site: SiteId) -> str:
    """The instance of a site's only daemon."""
    return f"daemon-{site}"


class MakeLab(Protocol):
    """Makes a lab; `tables` replace keys of the recipe."""

    def __call__(
        self,
        run: str = "test",
        *,
        blobs: Blobs | None = None,
        ledger: Ledger | None = None,
        keep_rounds: int = 2,
        work: RunJob = inline,
        **tables: Any,
    ) -> Lab:
        """A lab whose sites have not come yet."""


@pytest.fixture
def make() -> MakeLab:
    def make(
        run: str = "test",
        *,
        blobs: Blobs | None = None,
        ledger: Ledger | None = None,
        keep_rounds: int = 2,
        work: RunJob = inline,
        **tables: Any,
    ) -> Lab:
        ledger = Ledger() if ledger is None else ledger
        return Lab(recipe(run, **tables), MemoryBlobs() if blobs is None else blobs, ledger, keep_rounds, work)

    return make


@pytest.fixture
def lab(make: MakeLab) -> Lab:
    """Round 1 of 2 is open for ann, bob and cyd; eva has made the model."""
    return make().begin()


@pytest.fixture
def workshop() -> Later:
    """Another thread, whose jobs end when the test says so."""
    return Later()


@pytest.fixture
def fragile() -> Fragile:
    """A ledger whose process can be made to die."""
    return Fragile()


@pytest.fixture
def clock() -> Clock:
    """Time, moved by hand."""
    return Clock()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A schema of its own in the PostgreSQL that the environment names."""
    given = os.environ.get("PROTOFED_TEST_POSTGRES")
    if not given:
        pytest.skip("needs PostgreSQL: set PROTOFED_TEST_POSTGRES=postgresql+psycopg://USER@HOST/NAME")
    schema, server = f"test_{secrets.token_hex(6)}", create_engine(given)
    with server.begin() as connection:
        connection.execute(CreateSchema(schema))
    url = make_url(given).update_query_dict({"options": f"-csearch_path={schema}"})
    yield url.render_as_string(hide_password=False)
    with server.begin() as connection:
        connection.execute(DropSchema(schema, cascade=True))
    server.dispose()


@pytest.fixture(params=["file", "postgresql"])
def kept_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger that outlives its process."""
    if request.param == "file":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=["memory", "file", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every ledger there is."""
    of: dict[str, str] = {"memory": "sqlite://", "file": f"sqlite:///{tmp_path / 'ledger.sqlite'}"}
    return of.get(request.param) or str(request.getfixturevalue("postgres_url"))
