"""How rank 0 directs the other ranks, and what these do: prepare a run, take part in a fit, end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import structlog
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from protofed.client.data.site_data import SiteData
from protofed.client.distributed.data_parallel import shared
from protofed.client.distributed.team import OtherRankError, RankLostError, Team
from protofed.client.site import FORESEEN, DaemonStatus, PreparedRun, Site, prepare, trains_to_its_end
from protofed.client.state.store import SiteState
from protofed.client.training.context import Checkpoints, FitContext, NoCheckpoints, generator
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, DataError, FailureReason, TaskFailedError
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Assignment, Task, TaskKind

log = structlog.get_logger()
POLL_S = 0.1  # of the store for the next call: hours may pass between two, longer than a collective waits
PREPARE, FIT, END = "prepare", "fit", "end"


@dataclass(frozen=True)
class Call:
    """What all ranks do next.

    Attributes:
        kind: PREPARE, FIT or END.
        fields: of PREPARE the run's name and recipe, of FIT those of the task; JSON.
    """

    kind: str
    fields: Mapping[str, Any]


class CallBoard:
    """The calls of rank 0 to the other ranks, in the launcher's store, which outlives a restart of all ranks.

    Args:
        name: of this start of all ranks, so that nobody reads the calls of an earlier one.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._number = store, name, 0

    def write(self, call: Call) -> None:
        """Publish the next call; rank 0 only.

        Raises:
            RankLostError: the launcher's store does not answer.
        """
        self._number += 1
        try:
            self._store.set(self._key(self._number), json.dumps(asdict(call)))
            if self._number > 1 and call.kind != END:  # all have read it: since then they have agreed on its outcome
                self._store.delete_key(self._key(self._number - 1))
        except RuntimeError as error:
            raise _lost(error) from error

    def calls(self) -> Iterator[Call]:
        """The calls in order, each as soon as it is published, until END; for all ranks but 0.

        Raises:
            RankLostError: the launcher's store does not answer.
        """
        while True:
            self._number += 1
            try:
                while not self._store.check([self._key(self._number)]):
                    time.sleep(POLL_S)
                call = Call(**json.loads(self._store.get(self._key(self._number))))
            except RuntimeError as error:
                raise _lost(error) from error
            if call.kind == END:
                return
            yield call

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"


class Leader:
    """Rank 0, the daemon: has all ranks prepare its runs and do its fits."""

    def __init__(self, team: Team, board: CallBoard) -> None:
        self._team, self._board = team, board

    def wrap(self, site: Site) -> Site:
        """The site with its `load_data` and `fit` done by all ranks."""
        return replace(site, load_data=partial(self.load, site.load_data), fit=self.fit)

    def load(self, load_data: Callable[[Recipe], SiteData], recipe: Recipe) -> SiteData:
        """The site's data, once all ranks have loaded the same.

        Args:
            load_data: loads the site's data in this process.

        Raises:
            DataError, ConfigError: another rank could not load its data or prepare the run, or its data differ; or the
                run has [plan.dp].
        """
        if recipe.plan.dp is not None:
            raise ConfigError("[plan.dp] is not for several ranks: start this site's daemon in one process")
        self._board.write(Call(PREPARE, {"recipe": recipe.wire(), "run": recipe.name}))
        try:
            with self._team.together():
                data = load_data(recipe)
                self._team.broadcast(data.train.fingerprint())
        except OtherRankError as error:
            kind = DataError if error.reason is FailureReason.DATA else ConfigError
            raise kind(f"the run cannot be prepared: {error}") from error
        return data

    def fit(self, run: PreparedRun, task: Task, local: FitContext, received: Payload) -> Update:
        """As `Site.fit`, with every rank on its share of each batch."""
        self._board.write(Call(FIT, {**asdict(task), "kind": task.kind.value}))
        with self._team.together():
            self._team.broadcast(codec.encode(received))
            self._team.broadcast(codec.encode(local.client_state))
            self._team.broadcast(str(local.rng.initial_seed()).encode())
            return _fit(self._team, run, local, received)

    def end(self) -> None:
        """End the other ranks."""
        self._board.write(Call(END, {}))


def follow(team: Team, board: CallBoard, site: Site) -> None:
    """Carry out rank 0's calls until END; every rank but 0 runs this. It writes no state and calls no server.

    Args:
        site: with a store in memory; its data and its policy are the daemon's.

    Raises:
        RankLostError: rank 0 or another rank has ended or does not answer.
    """
    run: PreparedRun | None = None
    for call in board.calls():
        try:
            with team.together():
                run = _prepare(team, call, site) if call.kind == PREPARE else _take_part(team, call, site, run)
        except OtherRankError as error:
            log.info("all ranks leave the work", why=str(error))
        except Exception as error:  # `together` has sent its code to rank 0, which reports it to the server
            if isinstance(error, (TaskFailedError, *FORESEEN)):
                log.error("this rank failed", why=str(error))
            else:
                log.exception("this rank failed unforeseen")


def _prepare(team: Team, call: Call, site: Site) -> PreparedRun:
    site.refresh_policy()
    cohort = site.policy.rules.limits.min_cohort  # rank 0 alone knows what the server announced, and has checked it
    run = prepare(site, Assignment(call.fields["run"], call.fields["recipe"], min_cohort=cohort))
    if team.broadcast(None) != run.data.train.fingerprint():
        raise DataError("the training data here differ from rank 0's: copy the same to every node")
    log.info("ready", run=call.fields["run"], device=str(run.data.device), ranks=team.size)
    return run


def _take_part(team: Team, call: Call, site: Site, run: PreparedRun | None) -> PreparedRun:
    if run is None:
        raise ConfigError("rank 0 began a fit of a run that this rank has not prepared")
    task = Task(**{**call.fields, "kind": TaskKind(call.fields["kind"])})
    received, client_state = (codec.decode(team.broadcast(None)) for _ in range(2))
    local = run.fit_context(site.name, task, SiteState(0, client_state), DaemonStatus(), NoCheckpoints())
    local.to_its_end = trains_to_its_end(site, run)
    # Rank 0's, which may come from its site's secret: this rank has another.
    local.rng = generator(int(team.broadcast(None)), run.data.device)
    _fit(team, run, local, received)
    return run


def _fit(team: Team, run: PreparedRun, local: FitContext, received: Payload) -> Update:
    local.ranks, local.checkpoints = team, _SharedCheckpoints(team, local.checkpoints)
    with shared(local.model.body, team):
        return run.method.fit(local, received)


class _SharedCheckpoints:
    """Rank 0's checkpoints, read by all ranks."""

    def __init__(self, team: Team, checkpoints: Checkpoints) -> None:
        self._team, self._checkpoints = team, checkpoints

    def read(self, call: int) -> Mapping[str, Tensor] | None:
        """Rank 0's checkpoint, sent to all: tensors of any shapes [...] by name."""
        checkpoint = self._checkpoints.read(call)
        own = b"" if checkpoint is None else save(dict(checkpoint))
        data = self._team.broadcast(own if self._team.leads else None)
        return load(data) if data else None

    def write(self, call: int, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors of any shapes [...], on rank 0's disk alone: the others' are `NoCheckpoints`."""
        self._checkpoints.write(call, tensors)


def _lost(error: RuntimeError) -> RankLostError:
    return RankLostError(f"the launcher's store does not answer any more: {error}")
