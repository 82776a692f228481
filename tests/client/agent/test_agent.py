"""The daemon's loop against a server by hand: what is handed in, what is declined and what never leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, site_data, work
from torch import nn

from protofed.client.agent.agent import EXCLUDED_PAUSE_S, INCIDENT_PAUSE_S
from protofed.client.data.examples import Examples, no_examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.split import SplitModel
from protofed.client.site import DaemonStatus
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import MemoryStore, SiteState
from protofed.client.task import Predictions
from protofed.client.training import evaluation
from protofed.client.training.evaluation import predict
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import (
    CodecError,
    ExcludedError,
    FailureReason,
    FencedError,
    IncidentError,
    NotEnrolledError,
    OutOfSpaceError,
    OverQuotaError,
    ProtocolError,
    RevokedError,
    StateError,
    UnavailableError,
)
from protofed.common.payload import Part, Payload, same_tensors
from protofed.common.protocol.messages import Activity, Finished, Progress, Role, Task, TaskKind, Verdict, Wait
from protofed.common.storage import files

# The first model


def test_the_first_model_is_the_seeds_whoever_makes_it() -> None:
    made = []
    for name, seed in (("ann", 0), ("bob", 0), ("ann", 1)):
        harness = AgentHarness(name=name, recipe={**RUN, "seed": seed})
        daemon = harness.agent()
        daemon.step(0.0)
        task = harness.offer(TaskKind.INITIALISE, 0)
        before = torch.get_rng_state()
        daemon.step(0.0)
        assert torch.equal(torch.get_rng_state(), before)  # it moves no other random number
        ((pushed, released),) = harness.link.pushed
        assert pushed == task
        assert harness.store.unsettled("run") == []
        made.append(released)
    assert made[0].data == made[1].data != made[2].data
    assert {spec.part for spec in made[0].manifest.tensors} == {Part.BODY, Part.HEAD}
    assert (made[0].metrics, made[0].weight) == ({}, None)


# Fits and their outcomes


def test_a_fit_is_on_the_sites_disk_before_it_is_pushed() -> None:
    harness = AgentHarness()
    task = harness.fit(1)

    def staged(pushed: Task) -> None:
        assert [held for held, _ in harness.store.unsettled("run")] == [pushed] == [task]
        assert harness.store.last_counted("run", 9) == SiteState()

    harness.link.before_push = staged
    assert harness.agent().step(0.0) == task
    ((_, released),) = harness.link.pushed
    held = harness.store.last_counted("run", 9)
    assert held.personal is not None
    assert same_tensors(held.personal, codec.decode(released.data))  # FedAvg sends what it keeps
    assert released.metrics.keys() == {"loss"}
    assert harness.store.unsettled("run") == []
    assert harness.declined() == []


def test_a_fit_is_repeatable_and_differs_by_site_and_round() -> None:
    made = {}
    for key in (("ann", 1, "a"), ("ann", 1, "b"), ("bob", 1, "a"), ("ann", 2, "a")):
        harness = AgentHarness(name=key[0], rules={**RULES, "batch_order": "recipe"})
        harness.fit(key[1], task_id=key[2])
        harness.agent().step(0.0)
        made[key] = harness.link.pushed[0][1].data
    assert made["ann", 1, "a"] == made["ann", 1, "b"]
    assert len(set(made.values())) == 3


def test_memory_of_the_last_round_that_counted_is_the_next_ones_start() -> None:
    harness = AgentHarness(recipe={**RUN, "method": {"name": "solo"}})
    daemon = harness.agent()
    seen: list[float] = []
    for number, verdict in ((1, Verdict.ACCEPTED), (2, Verdict.LATE), (3, Verdict.ACCEPTED)):
        harness.link.verdict = verdict
        harness.fit(number)
        daemon.step(0.0)
        seen.append(harness.store.last_counted("run", 9).round)
    assert seen == [1, 1, 3]
    assert [codec.decode(released.data) for _, released in harness.link.pushed] == [{}, {}, {}]


def test_a_link_that_dies_in_a_push_is_mended_with_the_same_bytes() -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    harness.link.failing["push"] = [NotEnrolledError("restarted")]
    daemon = harness.agent()
    assert daemon.step(0.0) == Wait(0.0)
    assert harness.link.calls == {"enroll": 1, "next_task": 1, "fetch": 1, "push": 1}
    assert daemon.step(0.0) == Wait(1.0)  # handed in before anything else is asked for
    assert harness.link.calls == {"enroll": 2, "next_task": 2, "fetch": 1, "push": 2}
    (first, lost), (second, kept) = harness.link.tried
    assert first.task_id == second.task_id == task.task_id
    assert (lost.data, lost.metrics) == (kept.data, kept.metrics)
    assert harness.store.last_counted("run", 2).round == 1
    assert harness.declined() == []


@pytest.fixture
def restarted(tmp_path: Path) -> AgentHarness:
    """A site that has trained, lost the connection in its push, and started again."""
    harness = AgentHarness(store=DiskStore(tmp_path), rules={**RULES, "example_count": True})
    harness.fit(1)
    harness.link.failing["push"] = [UnavailableError("the connection was closed")]
    with pytest.raises(UnavailableError):
        harness.agent().step(0.0)
    harness.restart(tmp_path)
    return harness


def test_a_restarted_daemon_hands_in_what_has_no_receipt(restarted: AgentHarness) -> None:
    assert restarted.agent().step(0.0) == Wait(1.0)
    (task, lost), (again, kept) = restarted.link.tried
    assert again == task
    assert (lost.data, lost.metrics, lost.weight) == (kept.data, kept.metrics, kept.weight)
    assert kept.weight == 12.0
    assert restarted.link.calls["fetch"] == 1  # it was not trained again
    assert restarted.store.last_counted("run", 2).round == 1


def test_what_is_handed_in_late_is_forgotten_if_the_round_is_closed(restarted: AgentHarness) -> None:
    restarted.link.verdict = Verdict.LATE
    restarted.agent().step(0.0)
    assert (restarted.store.last_counted("run", 9), restarted.store.unsettled("run")) == (SiteState(), [])


def test_what_is_handed_in_late_passes_the_policy_of_today(restarted: AgentHarness) -> None:
    restarted.rules["max_update_mb"] = 1e-6
    restarted.agent().step(0.0)
    assert restarted.link.pushed == []
    assert [reason for _, reason in restarted.declined()] == [FailureReason.POLICY]


def test_a_base_is_fetched_once() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    harness.fit(1)
    harness.fit(2)
    harness.score(2)
    harness.fit(3, base=first_model(seed=6))
    for fetches in (1, 1, 1, 2):
        daemon.step(0.0)
        assert harness.link.calls["fetch"] == fetches
    assert harness.declined() == []


def test_what_the_server_did_not_take_is_handed_in_again_without_training() -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    harness.link.failing["push"] = [OverQuotaError("too many uploads")]
    daemon = harness.agent()
    daemon.step(0.0)
    harness.now.check = never  # type: ignore[method-assign]
    harness.link.tasks.append(task)
    daemon.step(0.0)
    (_, first), (again, second) = harness.link.tried
    assert (again, first.data) == (task, second.data)
    assert harness.store.last_counted("run", 2).round == 1
    assert (harness.store.unsettled("run"), harness.declined()) == ([], [])


def never() -> None:
    raise AssertionError("it trains")


# What is declined: the server learns a reason code, and the daemon lives


def test_a_task_that_the_server_takes_back_ends_nothing() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    harness.fit(1)
    harness.link.failing["push"] = [ProtocolError("no such task")]
    daemon.step(0.0)
    last = harness.fit(2)
    daemon.step(0.0)
    assert [task for task, _ in harness.link.pushed] == [last]
    assert harness.declined() == []


@pytest.mark.parametrize(
    "rules", [{"methods": ["fednh"]}, {"parts": ["body", "prototypes"]}, {"hide_class_presence": True}]
)
def test_a_run_that_the_policy_does_not_name_is_declined(rules: dict[str, Any]) -> None:
    harness = AgentHarness(rules={**RULES, **rules}, load_data=not_to_be_loaded)
    tasks = [harness.offer(TaskKind.INITIALISE, 0), harness.fit(1), harness.score(1)]
    work(harness.agent(), 3)
    assert harness.declined() == [(task.task_id, FailureReason.POLICY) for task in tasks]
    assert harness.link.calls == {"enroll": 1, "next_task": 3}  # nothing fetched, nothing pushed, nothing reported


def test_an_update_that_the_policy_refuses_does_not_leave() -> None:
    harness = AgentHarness(rules={**RULES, "max_update_mb": 1e-6})
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert harness.declined() == [(task.task_id, FailureReason.POLICY)]
    assert harness.link.calls["push"] == 0
    assert (harness.store.last_counted("run", 9), harness.store.unsettled("run")) == (SiteState(), [])


def scoring_only(recipe: Recipe) -> SiteData:
    return SiteData.for_scoring(site_data().test, recipe.input, recipe.classes)


def confused(model: SplitModel) -> SplitModel:
    model.register_forward_hook(lambda _model, _x, logits: logits * float("nan"))
    return model


def broken(error: Exception) -> Callable[[SplitModel], SplitModel]:
    def wrap(model: SplitModel) -> SplitModel:
        def fail(*_: Any) -> None:
            raise error

        model.register_forward_pre_hook(fail)
        return model

    return wrap


ONLY_EVALUATES = frozenset({Role.EVALUATOR})
NO_MEMORY = torch.OutOfMemoryError("simulated")


class FullDisk(MemoryStore):
    def stage(self, task: Task, outcome: Any) -> None:
        raise StateError("cannot write: no space left on device")


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"load_data": scoring_only}, TaskKind.FIT, FailureReason.DATA),
        ({"wrap": broken(NO_MEMORY)}, TaskKind.FIT, FailureReason.OUT_OF_MEMORY),
        ({"wrap": broken(NO_MEMORY), "roles": ONLY_EVALUATES}, TaskKind.SCORE, FailureReason.OUT_OF_MEMORY),
        ({"wrap": broken(torch.AcceleratorError("simulated"))}, TaskKind.FIT, FailureReason.DEVICE),
        ({"wrap": broken(ValueError("one value per channel"))}, TaskKind.FIT, FailureReason.INTERNAL),
        ({"wrap": broken(KeyError("of mine")), "roles": frozenset(Role)}, TaskKind.SCORE, FailureReason.INTERNAL),
        ({"wrap": confused}, TaskKind.FIT, FailureReason.NUMERIC),
        ({"store": FullDisk()}, TaskKind.FIT, FailureReason.DISK),
    ],
)
def test_a_task_that_cannot_be_done_is_declined(changes: dict[str, Any], kind: TaskKind, reason: FailureReason) -> None:
    harness = AgentHarness(**changes)
    first, second = (harness.offer(kind, number, first_model()) for number in (1, 2))
    work(harness.agent(), 2)
    assert harness.declined() == [(first.task_id, reason), (second.task_id, reason)]
    assert harness.link.calls["push"] == harness.link.calls["report"] == 0
    assert harness.store.last_counted("run", 9) == SiteState()


def fednh(**parts: Any) -> Payload:
    """A state of FedNH, with changes; None: the part is not there."""
    state = {
        Part.BODY: first_model()[Part.BODY],
        Part.HEAD: {"scale": np.array(2.0, dtype=np.float32)},
        Part.PROTOTYPES: {"mean": np.eye(3, 4, dtype=np.float32)},
    } | {Part(name): tensors for name, tensors in parts.items()}
    return {part: tensors for part, tensors in state.items() if tensors is not None}


@pytest.mark.parametrize("kind", [TaskKind.FIT, TaskKind.SCORE])
@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("fedavg", {}),
        ("fedavg", first_model(hidden=[5])),
        ("fedavg", {Part.BODY: first_model()[Part.BODY]}),
        ("fedavg", {Part.HEAD: first_model()[Part.HEAD]}),
        ("solo", {Part.BODY: first_model()[Part.BODY]}),
        ("fednh", first_model()),
        ("fednh", fednh(prototypes=None)),
        ("fednh", fednh(prototypes={"means": np.eye(3, 4, dtype=np.float32)})),
        ("fednh", fednh(prototypes={"mean": np.eye(3, 5, dtype=np.float32)})),
        ("fednh", fednh(head={"scale": np.ones(2, np.float32)})),
    ],
)
def test_a_model_that_does_not_fit_is_declined(method: str, base: Payload, kind: TaskKind) -> None:
    harness = AgentHarness(recipe={**RUN, "method": {"name": method}}, roles=frozenset(Role))
    task = harness.offer(kind, 1, base)
    fine = harness.offer(kind, 2, fednh() if method == "fednh" else first_model())
    work(harness.agent(), 2)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED)]
    done = [pushed.task_id for pushed, _ in harness.link.pushed] if kind is TaskKind.FIT else harness.link.scores
    assert len(done) == 1
    assert fine.task_id not in dict(harness.declined())


@pytest.mark.parametrize("failure", ["garbage", "damaged"])
def test_bytes_that_are_no_model_are_declined(failure: str) -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    if failure == "garbage":
        harness.link.blobs[str(task.base_digest)] = b"\x80\x04garbage"
    else:
        harness.link.failing["fetch"] = [CodecError("arrived damaged 3 times")]
    harness.agent().step(0.0)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED)]


def not_to_be_loaded(_: Recipe) -> SiteData:
    raise AssertionError("data of a refused run are not touched")


# Tasks that are called off, and what the heartbeat sees


def test_a_task_called_off_leaves_nothing_behind() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    harness.fit(1)
    off = harness.fit(2)
    last = harness.fit(3)
    harness.now.aborted_task_id = off.task_id
    work(daemon, 3)
    assert [task.task_id for task, _ in harness.link.tried] == ["n-fit-1", last.task_id]
    assert harness.declined() == []
    assert (harness.store.unsettled("run"), harness.store.last_counted("run", 3).round) == ([], 1)
    assert harness.store.last_counted("run", 4).round == 3


@pytest.fixture
def full_for_receipts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk that takes no receipt while this list has something in it."""
    full, write = [True], files.write

    def written(path: Path, data: bytes) -> None:
        if full and path.name == "receipt.json":
            raise OutOfSpaceError(f"cannot write {path}: No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write", written)
    return full


def test_a_round_that_counted_on_a_full_disk_is_not_trained_past(tmp_path: Path, full_for_receipts: list[bool]) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path), recipe={**RUN, "method": {"name": "solo"}})
    daemon, first, second = harness.agent(), harness.fit(1), harness.fit(2)
    work(daemon, 2)
    assert harness.declined() == [(first.task_id, FailureReason.DISK), (second.task_id, FailureReason.DISK)]
    assert [task for task, _ in harness.link.pushed] == [first]  # the server counted it
    full_for_receipts.clear()
    third = harness.fit(2, task_id="again")
    work(daemon, 1)
    assert [task for task, _ in harness.link.pushed] == [first, third]
    assert harness.store.last_counted("run", 2).round == 1
    assert harness.store.unsettled("run") == []


def test_a_receipt_that_no_disk_took_goes_with_its_update(tmp_path: Path, full_for_receipts: list[bool]) -> None:
    harness = AgentHarness(store=DiskStore(tmp_path))
    daemon = harness.agent()
    harness.fit(1)
    work(daemon, 1)
    full_for_receipts.clear()
    harness.store.abandon("run")  # the site left the run, and has come back
    harness.fit(2)
    work(daemon, 1)
    assert harness.store.settled("run") == {"n-fit-2"}
    assert harness.store.last_counted("run", 2).round == 0


class Watched(DaemonStatus):
    """Remembers what a heartbeat would have said between batches."""

    seen: list[Progress]

    def check(self) -> None:
        super().check()
        self.seen.append(self.progress(77))


def test_a_heartbeat_sees_how_far_training_is() -> None:
    harness = AgentHarness(now=Watched())
    harness.now.seen = []  # type: ignore[attr-defined]
    task = harness.fit(1)
    daemon = harness.agent()
    daemon.step(0.0)
    steps = [(epoch, 2, True) for epoch in (1, 1, 1, 2, 2, 2)]  # 12 examples in batches of 4
    assert harness.now.seen == [Progress(task.task_id, Activity.TRAINING, *step, 77) for step in steps]  # type: ignore[attr-defined]
    assert (harness.now.run, harness.now.heartbeat_s) == ("run", 0.125)
    assert (harness.now.task_id, harness.now.activity) == ("", Activity.IDLE)


def test_a_heartbeat_sees_that_the_search_for_rare_units_gets_on() -> None:
    """It passes all training images through two models, behind the last epoch."""
    harness = AgentHarness(now=Watched(), rules={**RULES, "min_images_per_unit": 2})
    harness.now.seen = []  # type: ignore[attr-defined]
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert harness.now.seen[6:] == [Progress(task.task_id, Activity.TRAINING, 2, 2, True, 77)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", Role)
def test_a_heartbeat_sees_that_scoring_gets_on(role: Role) -> None:
    """Longer than the server waits for a site that does not, an evaluator's test set may take."""
    harness = AgentHarness(now=Watched(), roles=frozenset({role}))
    daemon = harness.agent()
    harness.now.seen = []  # type: ignore[attr-defined]
    if role is Role.TRAINER:
        harness.fit(1)
        daemon.step(0.0)
        harness.now.seen.clear()  # type: ignore[attr-defined]
    task = harness.score(1)
    daemon.step(0.0)
    assert harness.now.seen == [Progress(task.task_id, Activity.SCORING, 0, 0, True, 77)]  # type: ignore[attr-defined]
    if role is Role.EVALUATOR:  # a scoring that is called off ends at the next batch
        harness.now.aborted_task_id = harness.score(2).task_id
        daemon.step(0.0)
        assert (len(harness.link.scores), harness.declined()) == (1, [])


def test_a_daemon_that_loads_its_first_data_already_beats_and_a_run_that_is_left_meanwhile_stays_left() -> None:
    harness, runs = AgentHarness(), list[str]()

    def load(_: Recipe) -> SiteData:
        runs.append(harness.now.run)
        harness.now.left_run = harness.now.run  # as the decision watch sets it
        return site_data()

    harness.load_data = load
    harness.agent().step(0.0)
    assert [*runs, harness.now.left_run] == ["run", "run"]


def test_a_heartbeat_sees_the_upload() -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    seen: list[Progress] = []
    harness.link.before_push = lambda _: seen.append(harness.now.progress(0))
    harness.agent().step(0.0)
    assert [(beat.task_id, beat.activity) for beat in seen] == [(task.task_id, Activity.UPLOADING)]


# Scores

PERSONAL = {"personal.accuracy", "personal.balanced_accuracy", "personal.pm_v", "personal.pm_l"}
GLOBAL = {"global.accuracy", "global.balanced_accuracy"}


@pytest.mark.usefixtures("few_images")
def test_personal_scores_come_only_from_a_fit_that_counted() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    harness.score(1)
    for verdict in (Verdict.LATE, Verdict.ACCEPTED):
        harness.link.verdict = verdict
        harness.fit(2, task_id=verdict)
        harness.score(2)
        work(daemon, 2)
    daemon.step(0.0)
    assert [set(scores) for scores in harness.link.scores] == [set(), set(), PERSONAL]


@pytest.mark.parametrize("method", ["fedavg", "fednh", "solo"])
def test_personal_scores_are_those_of_the_sites_own_model(method: str) -> None:
    harness = AgentHarness(recipe={**RUN, "method": {"name": method}, "plan": {"epochs": 20, "lr": 0.5}})
    daemon = harness.agent()
    base, later = (fednh(), fednh(prototypes={"mean": -np.eye(3, 4, dtype=np.float32)}))
    if method != "fednh":
        base, later = first_model(), first_model(seed=6)
    harness.fit(1, base)
    harness.score(1, later)
    work(daemon, 2)
    personal = harness.store.last_counted("run", 2).personal
    assert personal is not None
    ((scores),) = harness.link.scores
    assert scores["personal.accuracy"] == accuracy(method, personal)
    assert scores["personal.accuracy"] != accuracy(method, installed(method, later))


def installed(method: str, base: Payload) -> Payload:
    if method != "fednh":
        return base
    head = {"prototypes": base[Part.PROTOTYPES]["mean"], "scale": base[Part.HEAD]["scale"]}
    return {Part.BODY: base[Part.BODY], Part.HEAD: head}


def accuracy(method: str, model: Payload) -> float:
    """On the test set, with NumPy."""
    test = site_data().test
    x = (test.pixels().flatten(1).numpy() - 0.5) / 0.5
    z = np.maximum(x @ model[Part.BODY]["linear1.weight"].T + model[Part.BODY]["linear1.bias"], 0)
    head = model[Part.HEAD]
    logits = z @ head["prototypes"].T if method == "fednh" else z @ head["weight"].T + head["bias"]
    return float((logits.argmax(axis=1) == test.labels.numpy()).mean())


def test_a_model_is_scored_once_and_another_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tallies: list[nn.Module] = []

    def counted(model: nn.Module, data: SiteData, examples: Examples | None = None, **others: Any) -> Predictions:
        tallies.append(model)
        return predict(model, data, examples, **others)

    monkeypatch.setattr(evaluation, "predict", counted)
    harness = AgentHarness()
    daemon = harness.agent()
    done = []
    for number, task_id in ((1, "a"), (1, ""), (2, "b"), (2, "c")):  # round 2 is opened again
        if task_id:
            harness.fit(number, first_model(seed=ord(task_id)), task_id)
            daemon.step(0.0)
        harness.score(number, first_model(seed=number))
        daemon.step(0.0)
        done.append(len(tallies))
    assert done == [1, 1, 2, 3]
    assert harness.link.scores[0] == harness.link.scores[1]


def test_an_evaluator_scores_the_global_model() -> None:
    harness = AgentHarness(roles=frozenset({Role.EVALUATOR}), load_data=scoring_only)
    daemon = harness.agent()
    for seed in (5, 6):
        harness.score(seed - 4, first_model(seed=seed))
        daemon.step(0.0)
        assert set(harness.link.scores[-1]) == GLOBAL
        assert harness.link.scores[-1]["global.accuracy"] == accuracy("fedavg", first_model(seed=seed))


@pytest.mark.usefixtures("few_images")
def test_a_daemon_of_both_roles_gives_both_as_far_as_the_policy_says() -> None:
    for rules, given in ((RULES, PERSONAL | GLOBAL), ({**RULES, "metrics": ["personal.pm_v"]}, {"personal.pm_v"})):
        harness = AgentHarness(roles=frozenset(Role), rules=rules)
        harness.fit(1)
        harness.score(1)
        work(harness.agent(), 2)
        assert set(harness.link.scores[0]) == given
    assert harness.link.pushed[0][1].metrics == {}


LOCAL = {f"{of}.local.{name}" for of in ("global", "personal") for name in ("accuracy", "balanced_accuracy")}
WITH_LOCAL = {**RULES, "metrics": [*RULES["metrics"], *LOCAL]}


def with_local_test(recipe: Recipe) -> SiteData:
    return replace(site_data(), local_test=site_data().train)


@pytest.mark.usefixtures("few_images")
def test_the_global_model_is_scored_on_a_sites_own_test_set_too() -> None:
    harness = AgentHarness(rules=WITH_LOCAL, load_data=with_local_test)
    harness.score(1)  # before the site has a model of its own
    harness.fit(2)
    harness.score(2)
    work(harness.agent(), 3)
    assert harness.link.scores[0].keys() == {name for name in LOCAL if name.startswith("global")}
    assert harness.link.scores[1].keys() == PERSONAL | LOCAL
    assert harness.link.scores[1]["global.local.accuracy"] == harness.link.scores[0]["global.local.accuracy"]
    alone = AgentHarness(  # without a common test set only the own one gives scores
        rules=WITH_LOCAL, load_data=lambda recipe: replace(with_local_test(recipe), test=no_examples(recipe.input))
    )
    alone.fit(1)
    alone.score(1)
    work(alone.agent(), 2)
    assert alone.link.scores[0].keys() == LOCAL


@pytest.mark.usefixtures("few_images")
def test_a_method_that_predicts_with_what_it_installs_is_scored_as_downloaded() -> None:
    parts = ["body", "head", "class-shares"]
    rules = {**WITH_LOCAL, "methods": ["cwfedavg"], "parts": parts, "class_distribution_estimate": True}
    recipe = {**RUN, "method": {"name": "cwfedavg"}}
    harness = AgentHarness(recipe=recipe, rules=rules, load_data=with_local_test)
    harness.fit(1, first_model(seed=5))
    for number, seed in ((1, 6), (1, 6), (2, 7)):
        harness.score(number, first_model(seed=seed))
    work(harness.agent(), 4)
    assert [scores["personal.accuracy"] for scores in harness.link.scores] == [
        accuracy("fedavg", first_model(seed=seed)) for seed in (6, 6, 7)
    ]
    assert "global.local.accuracy" not in harness.link.scores[0]  # there is no model of all sites


def test_a_policy_names_what_is_told_of_every_class_once() -> None:
    harness = AgentHarness(roles=frozenset({Role.EVALUATOR}), rules={**RULES, "metrics": ["global.recall"]})
    harness.score(1)
    work(harness.agent(), 1)
    assert harness.link.scores[0].keys() == {"global.recall.0", "global.recall.1", "global.recall.2"}


# Enrolling


@pytest.mark.parametrize(
    ("error", "pause_s", "call"),
    [
        *[(ExcludedError("by the operator"), EXCLUDED_PAUSE_S, call) for call in ("enroll", "next_task")],
        *[(IncidentError("incident 0"), INCIDENT_PAUSE_S, call) for call in ("enroll", "next_task", "push")],
    ],
)
def test_an_excluded_site_waits_enrolls_again_and_loses_nothing(error: Exception, pause_s: float, call: str) -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    harness.link.failing[call] = [error]
    daemon = harness.agent()
    assert daemon.step(0.0) == Wait(0.0)
    assert harness.pauses == [pause_s]
    work(daemon, 1)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]
    assert harness.link.calls["enroll"] == 2
    assert harness.declined() == []


def test_an_exclusion_is_said_once_and_its_end_too() -> None:
    harness = AgentHarness()
    out = [ExcludedError("by the operator: holidays") for _ in range(3)]
    harness.link.failing["enroll"] = [*out, ExcludedError("by the operator: repair")]
    daemon = harness.agent()
    with structlog.testing.capture_logs() as logs:
        work(daemon, 6)
    said = [line["why"] for line in logs if line["log_level"] == "warning"]
    assert said == ["by the operator: holidays", "by the operator: repair"]
    assert [line["event"] for line in logs].count("the server takes this site again") == 1


@pytest.mark.parametrize("call", ["enroll", "next_task", "fetch", "push", "report"])
@pytest.mark.parametrize("error", [RevokedError("the laptop was lost"), FencedError("a newer daemon has enrolled")])
def test_a_revoked_certificate_or_a_newer_daemon_ends_this_one(error: Exception, call: str) -> None:
    harness = AgentHarness()
    harness.score(1) if call == "report" else harness.fit(1)
    harness.link.failing[call] = [error]
    with pytest.raises(type(error)):
        work(harness.agent(), 2)
    assert (harness.pauses, harness.declined()) == ([], [])


def test_a_revoked_daemon_enrolls_again_with_its_next_certificate() -> None:
    harness = AgentHarness()
    daemon = harness.agent()
    harness.link.failing["next_task"] = [RevokedError("rotated")]
    with pytest.raises(RevokedError):
        daemon.step(0.0)
    harness.now.run = ""  # no heartbeats while it waits for a certificate
    work(daemon, 1)
    assert (harness.link.calls["enroll"], harness.now.run) == (2, "run")


def test_a_site_excluded_while_it_hands_in_does_so_when_it_is_admitted() -> None:
    harness = AgentHarness()
    task = harness.fit(1)
    harness.link.failing |= {"push": [ExcludedError("by the operator")], "enroll": [], "next_task": []}
    daemon = harness.agent()
    daemon.step(0.0)
    harness.link.failing["next_task"] = [ExcludedError("by the operator")]
    work(daemon, 2)
    assert [pushed for pushed, _ in harness.link.pushed] == [task]
    assert (harness.pauses, harness.declined()) == ([EXCLUDED_PAUSE_S], [])


@pytest.mark.parametrize("call", ["next_task", "fetch", "report"])
def test_a_server_that_has_restarted_is_greeted_again(call: str) -> None:
    harness = AgentHarness()
    loads = harness.counting_loads()
    task = harness.score(1) if call == "report" else harness.fit(1)
    harness.link.failing[call] = [NotEnrolledError("restarted")]
    daemon = harness.agent()
    assert daemon.step(0.0) == Wait(0.0)
    if call != "next_task":
        harness.link.tasks.append(task)
    assert daemon.step(0.0) == task
    assert (harness.link.calls["enroll"], loads) == (2, ["run"])  # the same run: nothing is prepared twice


def test_the_next_run_is_prepared_when_one_has_ended() -> None:
    harness = AgentHarness()
    loads = harness.counting_loads()
    daemon = harness.agent()
    harness.link.tasks.append(Finished("all rounds are done", last=False))
    assert daemon.step(0.0) == Finished("all rounds are done", last=False)
    assert harness.now.run == "run"
    harness.link.run, harness.link.recipe = "next", Recipe.model_validate({**RUN, "name": "next"}).wire()
    task = harness.fit(1)
    assert daemon.step(0.0) == task
    assert (loads, harness.now.run, harness.link.pushed[0][0].run) == (["run", "next"], "next", "next")


def test_a_server_without_a_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = AgentHarness()
    over = Finished("nothing is queued", last=True)
    monkeypatch.setattr(harness.link, "enroll", lambda *_: over)
    daemon = harness.agent()
    assert (daemon.step(0.0), daemon.step(0.0)) == (over, over)
    assert harness.link.calls["next_task"] == 0


@pytest.mark.parametrize(("announced", "declines"), [(3, False), (2, True)])
def test_a_run_of_smaller_cohorts_than_the_policy_says_is_declined(announced: int, declines: bool) -> None:
    harness = AgentHarness(rules={**RULES, "limits": {**RULES["limits"], "min_cohort": 3}})
    harness.link.min_cohort = announced
    task = harness.fit(1)
    harness.agent().step(0.0)
    assert harness.declined() == ([(task.task_id, FailureReason.POLICY)] if declines else [])
