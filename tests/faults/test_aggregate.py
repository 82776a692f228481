"""What may go wrong between the last update and the new state: rows 67, 68 and 71 to 74 of the fault table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.faults.conftest import take_turns
from tests.server.conftest import TRAINERS, Died, Fragile, Lab, Later
from tests.server.conftest import recipe as small
from tests.support.aggregate_digests import METHODS, first_model, made_up
from tests.support.operator_lab import OperatorLab

from protofed.client.policy.policy import Released
from protofed.client.transport.link import Link
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Payload, Update
from protofed.common.protocol.messages import Receipt, Role, Task, TaskKind, Verdict
from protofed.deploy.simulation.simulation import Simulation, build_agents, everything, simulation
from protofed.deploy.simulation.sites import DirectLink
from protofed.server.operator.run_record import Overview, overview
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.aggregation.aggregation import WEIGHT_CAP
from protofed.server.rounds.machine import phases
from protofed.server.storage.blobs import FolderBlobs, MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.verdicts import RefusalCode, RoundOutcome
from protofed.testing.live_server import LiveServer, links

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Row 67: one of five sites changes what it trained before it leaves

ATTACKED = "site-2"
Attack = Callable[["NDArray[np.float32]", "NDArray[np.float32]"], "NDArray[np.float32]"]  # (base, update)
ATTACKS: dict[str, Attack] = {
    "sixty times": lambda base, update: base + (update - base) * np.float32(60),
    "a hundredth more": lambda base, update: base + (update - base) * np.float32(1.01),
    "turned round": lambda base, update: base - (update - base),
    "none": lambda base, _: base,
}
DETECTED = "sixty times"


class Hostile:
    """The link of a site whose update is changed on its way out; all else is `link`'s."""

    def __init__(self, link: Link, recipe: Recipe, attack: Attack) -> None:
        self._link, self._recipe, self._attack = link, recipe, attack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def push(self, task: Task, released: Released) -> Receipt:
        """Hand in something else."""
        if task.base_digest is None:
            return self._link.push(task, released)
        base, update = codec.decode(self._link.fetch(task)), codec.decode(released.data)
        changed: Payload = {
            part: {name: self._changed(base[part][name], array) for name, array in tensors.items()}
            for part, tensors in update.items()
        }
        made = Update(ATTACKED, changed, released.metrics, released.weight)
        return self._link.push(task, everything(self._recipe).release(made))

    def _changed(self, base: NDArray[np.float32], array: NDArray[np.float32]) -> NDArray[np.float32]:
        return self._attack(base, array).astype(array.dtype) if array.dtype.kind == "f" else array


@pytest.fixture(scope="module")
def five(recipe_of: Callable[..., Recipe]) -> Recipe:
    """Five sites that train on the digits."""
    data = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 5, "beta": 1.0}}
    rules = {"min_sites": 5, "quorum": 3, "score_every": 0, "score_personal_every": 0}
    return recipe_of("fedavg", rounds=4, data=data, federation=rules, plan={"epochs": 2, "batch_size": 32, "lr": 0.1})


def played(recipe: Recipe, attack: Attack | None) -> tuple[Overview, dict[str, int]]:
    """How the run went, and how many updates of each site were rejected."""
    with simulation(recipe) as running:
        play_against(running, recipe, attack)
        seen = overview(running.ledger, recipe.name)
        assert seen is not None
        aside = [task.site for task in running.ledger.tasks(recipe.name) if task.task_status == "rejected"]
        return seen, {site: aside.count(site) for site in aside}


def play_against(running: Simulation, recipe: Recipe, attack: Attack | None) -> None:
    """Run a simulation to its end; one site's updates are changed on their way out."""
    connect = partial(DirectLink, running.runs, running.blobs)
    replace(running, agents=build_agents(recipe, hostile(connect, recipe, attack))).go()


def hostile(
    connect: Callable[[str, frozenset[Role]], Link], recipe: Recipe, attack: Attack | None
) -> Callable[[str, frozenset[Role]], Link]:
    """Links of which one site's changes its updates."""

    def changed(site: str, roles: frozenset[Role]) -> Link:
        link = connect(site, roles)
        return link if attack is None or site != ATTACKED else cast("Link", Hostile(link, recipe, attack))

    return changed


def accuracy(seen: Overview) -> float:
    """Of the final model."""
    assert (seen.phase, seen.scored_round) == ("completed", seen.round)
    return seen.scores["global.accuracy"].mean


@pytest.fixture(scope="module")
def clean(five: Recipe) -> float:
    """The accuracy where nobody attacks."""
    seen, aside = played(five, None)
    assert (seen.degraded, aside) == (0, {})
    return accuracy(seen)


def test_row_67_an_update_far_from_the_others_is_rejected_and_the_model_is_as_good(five: Recipe, clean: float) -> None:
    seen, aside = played(five, ATTACKS[DETECTED])
    assert aside == {ATTACKED: five.rounds}
    assert seen.degraded == five.rounds
    assert accuracy(seen) > clean - 0.1


def test_row_67_without_that_rule_the_other_sites_cannot_go_on_from_the_model(five: Recipe) -> None:
    rules = five.federation.model_copy(update={"outlier_factor": None, "max_relative_norm": 1e9})

    def thousand_times(base: NDArray[np.float32], update: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(base + (update - base) * np.float32(1e3), np.float32)

    seen, aside = played(five.model_copy(update={"federation": rules}), thousand_times)
    assert (seen.failed, aside) == (True, {})
    assert "sites cannot do the task: site-" in seen.phase
    assert "(last reason: numeric)" in seen.phase


@contextmanager
def in_a_simulation(recipe: Recipe, _: Path) -> Iterator[Ledger]:
    """Play the run in a simulation, with one site whose updates are scaled."""
    with simulation(recipe) as running:
        play_against(running, recipe, ATTACKS[DETECTED])
        yield running.ledger


@contextmanager
def over_grpc(recipe: Recipe, folder: Path) -> Iterator[Ledger]:
    """Likewise against a server on this machine."""
    server = LiveServer(recipe, folder / "server")
    try:
        with links(server.address) as connect:
            take_turns(build_agents(recipe, hostile(connect, recipe, ATTACKS[DETECTED])))
        yield server.ledger
    finally:
        server.stop()


@pytest.mark.timeout(120)  # a simulation's clock stands still: a site that was asked again and again would hang it
@pytest.mark.parametrize("play", [in_a_simulation, over_grpc], ids=["simulation", "grpc"])
def test_row_67_a_site_whose_update_is_refused_is_not_waited_for(
    five: Recipe, play: Callable[[Recipe, Path], AbstractContextManager[Ledger]], tmp_path: Path
) -> None:
    """The quorum is there without it; the deadline, ten minutes, is not waited for."""
    rules = five.federation.model_copy(update={"max_relative_norm": 2.0})
    recipe = five.model_copy(update={"federation": rules})
    with play(recipe, tmp_path) as ledger:
        run = ledger.run(recipe.name)
        assert run is not None
        assert run.outcome is RoundOutcome.COMPLETED
        for number in range(1, recipe.rounds + 1):
            refused = [row for row in ledger.updates(recipe.name, number) if row.verdict is Verdict.REFUSED]
            assert [(row.task.site, row.code) for row in refused] == [(ATTACKED, RefusalCode.NORM)]  # asked once
            fits = [task for task in ledger.tasks(recipe.name, number) if task.kind is TaskKind.FIT]
            assert [task.site for task in fits if task.task_status == "failed"] == [ATTACKED]
            assert len([task for task in fits if task.task_status == "reported"]) == 4


HARM = {"a hundredth more": 0.03, "none": 0.3, "turned round": 0.6}  # of the accuracy, at most; chance is 0.1


@pytest.mark.parametrize("name", HARM)
def test_row_67_changes_within_the_cohorts_norms_are_not_detected(five: Recipe, clean: float, name: str) -> None:
    """A norm says nothing of a direction: against these there are robust aggregations (row 75)."""
    seen, aside = played(five, ATTACKS[name])
    assert aside == {}
    assert accuracy(seen) > clean - HARM[name]


# Row 68


def played_by_hand(lab: Lab, weights: dict[str, float | None]) -> Digest:
    """The state after a round in which each site hands in another value; and these example counts."""
    lab.begin()
    for value, (site, weight) in enumerate(weights.items(), start=1):
        assert lab.push(site, lab.model(float(value)), weight=weight).verdict is Verdict.ACCEPTED
    return lab.address


def test_row_68_where_examples_do_not_count_a_jump_of_their_number_changes_nothing() -> None:
    honest, jumping = (Lab(small(), MemoryBlobs(), Ledger()) for _ in range(2))
    same = played_by_hand(honest, {"ann": 100.0, "bob": 100.0, "cyd": 100.0})
    assert played_by_hand(jumping, {"ann": 100.0, "bob": 10_000.0, "cyd": None}) == same


@pytest.mark.parametrize("claim", [600.0, 9_800.0, 9e15])
def test_row_68_where_they_count_a_claim_of_any_size_is_capped_and_stays_in_the_ledger(claim: float) -> None:
    lab = counting()
    with capture_logs() as logs:
        played_by_hand(lab, {"ann": claim, "bob": 100.0, "cyd": 100.0})
    assert lab.value == np.float32((4 * 1.0 + 2.0 + 3.0) / 6)  # four times the median of 100
    assert [row.weight for row in lab.ledger.updates("test", 1)] == [claim, 100.0, 100.0]
    (line,) = [entry for entry in logs if entry["event"] == "example count capped"]
    assert (line["site"], line["claimed"], line["counted"]) == ("ann", claim, 400.0)
    assert lab.ledger.rounds("test")[1].statistics[WEIGHT_CAP] == 400.0
    assert verify_round(lab.ledger, lab.blobs, "test", 1, 1).finding is VerificationResult.SAME


def counting() -> Lab:
    """Where examples count."""
    return Lab(small(method={"name": "fedavg", "weighting": "examples"}), MemoryBlobs(), Ledger())


def test_row_68_a_count_below_the_cap_counts_as_it_is() -> None:
    lab = counting()
    with capture_logs() as logs:
        played_by_hand(lab, {"ann": 100.0, "bob": 100.0, "cyd": 400.0})
    assert lab.value == 2.5
    assert not [entry for entry in logs if entry["event"] == "example count capped"]


@pytest.mark.parametrize("weight", [None, -1.0, 0.0, float("nan"), 2.0**63])
def test_row_68_where_they_count_one_that_is_none_is_invalid(weight: float | None) -> None:
    lab = counting().begin()
    assert lab.push("ann", lab.model(1.0), weight=weight).verdict is Verdict.REFUSED
    assert [row.code for row in lab.ledger.updates("test", 1)] == [RefusalCode.COUNT]
    assert lab.push("ann", lab.model(1.0), weight=5.0).verdict is Verdict.ACCEPTED


# Row 71


def aggregating(ledger: Ledger, workshop: Later) -> Lab:
    """Round 1's updates are there, and their aggregation is under way on another thread."""
    lab = Lab(small(rounds=3), MemoryBlobs(), ledger, work=workshop)
    lab.enroll(*TRAINERS)
    lab.later(0)
    lab.first_models()
    workshop.finish()
    for site, value in zip(TRAINERS, (1.0, 2.0, 6.0), strict=True):
        lab.push(site, lab.model(value))
    return lab


@pytest.mark.parametrize("dies", ["before the aggregation", "after the aggregation", "before the row", "after the row"])
def test_row_71_a_server_that_dies_in_an_aggregation_gives_the_same_state(dies: str) -> None:
    undisturbed = aggregating(Ledger(), steady := Later())
    steady.finish()
    ledger, workshop = Fragile(), Later()
    lab = aggregating(ledger, workshop)
    job, done = workshop.jobs.pop(0)
    if dies != "before the aggregation":
        result = job()
    if dies.endswith("the row"):
        ledger.dies_at, ledger.durably = ledger.writes + 1, dies == "after the row"
        with pytest.raises(Died):
            done(result)
    lab.restart()
    lab.later(0.0)
    if workshop.jobs:
        workshop.finish()
    assert lab.address == undisturbed.address
    assert lab.value == 3.0
    assert [(row.round, row.attempt, row.state is not None) for row in ledger.rounds("test")][:2] == [
        (0, 1, True),
        (1, 1, True),
    ]


# Row 72


def rot(folder: Path, address: Digest) -> None:
    """One bit."""
    path = folder / address
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def on_disk(tmp_path: Path) -> Callable[..., Lab]:
    return lambda **rules: Lab(small(federation=rules), FolderBlobs(tmp_path), Ledger()).begin()


def test_row_72_an_update_that_rotted_is_left_out_with_an_alarm(on_disk: Callable[..., Lab], tmp_path: Path) -> None:
    lab = on_disk()
    rot(tmp_path, lab.push("bob", lab.model(50.0)).digest)
    lab.push("ann", lab.model(1.0))
    with capture_logs() as logs:
        lab.push("cyd", lab.model(3.0))
    assert lab.value == 2.0
    (alarm,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert (alarm["event"], alarm["site"]) == ("update rejected", "bob")
    assert "has changed on disk" in alarm["why"]
    assert [(row.state is not None, row.complete) for row in lab.ledger.rounds("test")] == [(True, True), (True, False)]


def test_row_72_if_too_few_are_left_the_round_is_abandoned_and_the_state_stays(
    on_disk: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = on_disk(quorum=3)
    rot(tmp_path, lab.push("bob", lab.model(5.0)).digest)
    before = lab.address
    for site in ("ann", "cyd"):
        lab.push(site, lab.model(1.0))
    assert lab.address == before
    row = lab.ledger.rounds("test")[1]
    assert row.abandoned is not None
    assert row.abandoned.startswith("2 updates left, quorum 3 (bob: blob ")
    lab.later(10.0)
    lab.round(ann=1.0, bob=2.0, cyd=3.0)
    assert lab.value == 2.0


def test_row_72_a_state_that_rotted_stops_the_run_at_the_next_start(
    on_disk: Callable[..., Lab], tmp_path: Path
) -> None:
    lab = on_disk()
    rot(tmp_path, lab.address)
    with capture_logs() as logs:
        lab = OperatorLab(lab.recipe, lab.blobs, lab.ledger)
    assert lab.statuses() == {"test": "failed"}
    (alarm,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert "has changed on disk; restore it from a backup" in alarm["why"]
    assert "exc_info" not in alarm  # a fault that was foreseen has a remedy, and no traceback
    row = lab.ledger.run("test")
    assert row is not None
    assert "has changed on disk" in (row.reason or "")


# Row 73


def test_row_73_below_quorum_at_the_deadline_the_round_is_tried_again_and_at_last_fails(
    on_disk: Callable[..., Lab],
) -> None:
    lab = on_disk(max_attempts=3)
    before = lab.address
    for attempt in (1, 2, 3):
        assert isinstance(lab.phase, phases.Collecting)
        assert lab.phase.attempt == attempt
        assert lab.push("ann", lab.model(float(attempt))).verdict is Verdict.ACCEPTED
        lab.later(100.0, alive=TRAINERS)
        lab.later(0.0, alive=TRAINERS)
        assert lab.address == before
    abandoned = [row.abandoned for row in lab.ledger.rounds("test")[1:]]
    assert abandoned == ["1 update at the deadline, quorum 2"] * 3
    reason = "round 1 was abandoned 3 times: 1 update at the deadline, quorum 2"
    assert lab.phase == phases.FinishedPhase(reason, RoundOutcome.FAILED)


# Row 74


@pytest.mark.parametrize("method", METHODS)
def test_row_74_the_order_of_arrival_does_not_show_in_the_state(method: str) -> None:
    orders = [TRAINERS, TRAINERS[::-1], TRAINERS[1:] + TRAINERS[:1]]
    assert len({arrived(method, order) for order in orders}) == 1


def arrived(method: str, order: Sequence[str]) -> Digest:
    """The state after two rounds in which the updates came in this order."""
    lab = Lab(small(method={"name": method}, rounds=3), MemoryBlobs(), Ledger())
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.enroll(*TRAINERS)
    lab.later(0)
    for site in lab.makers():
        lab.push(site, first_model(3, 8))
    for _ in range(2):
        for site in order:
            row = lab.run.invitations.of(site)
            assert row is not None
            update = made_up(site, lab.intake.expected(row))
            assert lab.push(site, update, weight=10.0).verdict is Verdict.ACCEPTED
        if lab.asked("eva") is TaskKind.REFINE:
            row = lab.run.invitations.of("eva")
            assert row is not None
            refined = made_up("eva", lab.intake.expected(row))
            assert lab.push("eva", refined).verdict is Verdict.ACCEPTED
        for site in lab.here:
            if lab.asked(site) == "score":
                lab.score(site)
    assert [row.state is not None for row in lab.ledger.rounds("test")[:3]] == [True] * 3
    return lab.address


def test_row_74_the_number_of_threads_does_not_show_in_the_state() -> None:
    one, eight = (on_threads(number) for number in (1, 8))
    assert sorted(one) == METHODS
    assert one == eight


def on_threads(number: int) -> dict[str, Digest]:
    """The states of large aggregations in a process whose linear algebra has so many threads."""
    told = {f"{name}_NUM_THREADS": str(number) for name in ("OMP", "OPENBLAS", "MKL")}
    command = [sys.executable, "-m", "tests.support.aggregate_digests"]
    out = subprocess.run(
        command, env={**os.environ, **told}, check=True, capture_output=True, cwd=Path(__file__).parents[2]
    )
    found: dict[str, Digest] = json.loads(out.stdout)
    return found
