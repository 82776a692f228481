"""What rank 0 tells the others to do, and how they do it: get ready for a run, take part in a fit, end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import structlog
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from protofed.client.agent.failure_codes import FORESEEN
from protofed.client.agent.heartbeat import DaemonStatus
from protofed.client.agent.site import PreparedRun, Site, prepare
from protofed.client.data.site_data import SiteData
from protofed.client.distributed.data_parallel import shared
from protofed.client.distributed.team import ElsewhereError, LostError, Team
from protofed.client.state.store import SiteState
from protofed.client.training.context import Checkpoints, FitContext, NoCheckpoints
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError, FailureReason, TaskFailedError
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Assignment, Task, TaskKind

log = structlog.get_logger()
LOOK_EVERY_S = 0.1  # whether there is something to do: hours may pass, and no collective waits for so long
PREPARE, FIT, END = "prepare", "fit", "end"


@dataclass(frozen=True)
class Call:
    """What all are to do next.

    Attributes:
        facts: the recipe, or the task; JSON.
    """

    what: str
    facts: Mapping[str, Any]


class CallBoard:
    """Where rank 0 writes what is next, and the others look; it is the launcher's and outlives a restart of all ranks.

    Args:
        name: of this start of all ranks alone.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._number = store, name, 0

    def write(self, call: Call) -> None:
        """For all others."""
        self._number += 1
        try:
            self._store.set(self._key(self._number), json.dumps(asdict(call)))
            if self._number > 1 and call.what != END:  # all have read it: they have agreed since on what came of it
                self._store.delete_key(self._key(self._number - 1))
        except RuntimeError as error:
            raise _lost(error) from error

    def calls(self) -> Iterator[Call]:
        """One after the other, as they come, until the end."""
        while True:
            self._number += 1
            try:
                while not self._store.check([self._key(self._number)]):
                    time.sleep(LOOK_EVERY_S)
                call = Call(**json.loads(self._store.get(self._key(self._number))))
            except RuntimeError as error:
                raise _lost(error) from error
            if call.what == END:
                return
            yield call

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"


class Leader:
    """Rank 0: the daemon."""

    def __init__(self, team: Team, board: CallBoard) -> None:
        self._team, self._board = team, board

    def over(self, site: Site) -> Site:
        """The site, whose runs and fits are the work of all ranks."""
        return replace(site, load_data=partial(self.load, site.load_data), fit=self.fit)

    def load(self, own: Callable[[Recipe], SiteData], recipe: Recipe) -> SiteData:
        """The site's data, once all ranks have them.

        Raises:
            DataError, ConfigError: another rank has not, or has others.
        """
        self._board.write(Call(PREPARE, {"recipe": recipe.wire(), "run": recipe.name}))
        try:
            with self._team.together():
                data = own(recipe)
                self._team.give(_digest(data))
        except ElsewhereError as error:
            kind = DataError if error.reason is FailureReason.DATA else ConfigError
            raise kind(f"the run cannot be prepared: {error}") from error
        return data

    def fit(self, run: PreparedRun, task: Task, local: FitContext, received: Payload) -> Update:
        """As `Site.fit`."""
        self._board.write(Call(FIT, {**asdict(task), "kind": task.kind.value}))
        with self._team.together():
            self._team.give(codec.encode(received))
            self._team.give(codec.encode(local.memory))
            return _fit(self._team, run, local, received)

    def end(self) -> None:
        """Let all others end in order."""
        self._board.write(Call(END, {}))


def follow(team: Team, board: CallBoard, site: Site) -> None:
    """Do what rank 0 does, until it lets this process end. Nothing is written, and no server is talked to.

    Args:
        site: with a store in memory; its data and its policy are the daemon's.

    Raises:
        LostError: rank 0 or another rank has gone.
    """
    run: PreparedRun | None = None
    for call in board.calls():
        try:
            with team.together():
                run = _prepare(team, call, site) if call.what == PREPARE else _take_part(team, call, site, run)
        except ElsewhereError as why:
            log.info("all ranks leave the work", why=str(why))
        except Exception as error:  # told to all: the daemon tells the server, by its code
            if isinstance(error, (TaskFailedError, *FORESEEN)):
                log.error("this rank failed", why=str(error))
            else:
                log.exception("this rank failed unforeseen")


def _prepare(team: Team, call: Call, site: Site) -> PreparedRun:
    run = prepare(site, Assignment(call.facts["run"], call.facts["recipe"]))
    if team.give(None) != _digest(run.data):
        raise DataError("the training data here are others than rank 0's: copy the same to every node")
    log.info("ready", run=call.facts["run"], device=str(run.data.device), ranks=team.size)
    return run


def _take_part(team: Team, call: Call, site: Site, run: PreparedRun | None) -> PreparedRun:
    if run is None:
        raise ConfigError("a fit of a run that was not prepared")
    task = Task(**{**call.facts, "kind": TaskKind(call.facts["kind"])})
    received, memory = (codec.decode(team.give(None)) for _ in range(2))
    local = run.fit_context(site.name, task, SiteState(0, memory), DaemonStatus(), NoCheckpoints())
    _fit(team, run, local, received)
    return run


def _fit(team: Team, run: PreparedRun, local: FitContext, received: Payload) -> Update:
    local.ranks, local.checkpoints = team, _Checkpoints(team, local.checkpoints)
    with shared(local.model.body, team):
        return run.method.fit(local, received)


class _Checkpoints:
    """Rank 0's, for all."""

    def __init__(self, team: Team, own: Checkpoints) -> None:
        self._team, self._own = team, own

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """Rank 0's checkpoint, sent to all: tensors of any shapes [...] by name."""
        kept = self._own.read(call)
        data = self._team.give((b"" if kept is None else save(dict(kept))) if self._team.leads else None)
        return load(data) if data else None

    def keep(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of any shapes [...], on rank 0's disk alone."""
        self._own.keep(call, tensors)


def _digest(data: SiteData) -> bytes:
    """Of what is trained on."""
    digest = blake3()
    for tensor in (data.train.images, data.train.labels):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _lost(error: RuntimeError) -> LostError:
    return LostError(f"the launcher does not answer any more: {error}")
