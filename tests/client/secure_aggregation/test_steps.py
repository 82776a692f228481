"""Daemons of four sites in a secure aggregation, with the server's part by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model
from tests.support.sum_server import SumServer, steps_of
from tests.support.training_doubles import KilledError

from protofed.client.agent import task_tools
from protofed.client.agent.agent import Agent
from protofed.client.method import client_methods
from protofed.client.policy.policy import Released
from protofed.client.secure_aggregation.partners import open_membership
from protofed.client.secure_aggregation.sessions import FOLDER, Sessions
from protofed.client.site import PreparedRun
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.store import FitOutcome
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import FailureReason, SecureAggregationError
from protofed.common.payload import Array, Part, Payload, describe
from protofed.common.protocol.messages import Finished, Receipt, SumOf, Task, TaskKind
from protofed.common.secure_aggregation.keys import SumContext, Vector
from protofed.common.secure_aggregation.linear_form import FixedPoint, SumLayout, read_form
from protofed.common.storage.journal import Fact
from protofed.server.rounds.secure_aggregation.totals import check_total

SITES = ("ann", "bob", "cleo", "dan")
SECURE: dict[str, Any] = {**RUN, "federation": {"heartbeat_s": 0.125, "secure": True, "min_sites": 3}}
SHARED: dict[str, Any] = {
    **SECURE,
    "plan": {
        "epochs": 1,
        "batch_size": 8,
        "lr": 0.5,
        "dp": {"noise_multiplier": 2.0, "sampling_rate": 0.5, "shared_by": 3},
    },
}
BASE = first_model()


class Daemon:
    """One site's daemon, which may be killed at any call."""

    def __init__(self, folder: Path, name: str, recipe: dict[str, Any] = SECURE) -> None:
        self.folder, self.refused, self.recorded = folder / name, list[str](), list[tuple[str, Mapping[str, Fact]]]()
        self.made = AgentHarness(DiskStore(self.folder), recipe, dict(RULES), name=name)
        self.agent = self._start()

    def _start(self) -> Agent:
        agent = self.made.agent()
        agent._work.sums.membership = open_membership(self.folder, self.made.name, lambda: None, record=self._record)
        agent._work.tools.on_refusal = lambda _, violation: self.refused.append(str(violation))
        return agent

    def _record(self, event: str, facts: Mapping[str, Fact]) -> None:
        self.recorded.append((event, facts))

    def killed(self) -> None:
        self.made.restart(self.folder)
        self.agent = self._start()

    def work(self, task: Task, base: bytes) -> bytes | None:
        """What the daemon uploads for a task; None: it declined it."""
        before = len(self.made.link.pushed)
        self.made.link.blobs[str(task.base_digest)] = base
        self.made.link.tasks.append(task)
        while self.made.link.tasks:
            self.agent.step(0.0)
        mine = [released for pushed, released in self.made.link.pushed[before:] if pushed.task_id == task.task_id]
        return mine[-1].data if mine else None

    @property
    def uploads(self) -> list[tuple[Task, Released]]:
        return self.made.link.pushed


class Round:
    """Round 1 of the run, at four sites."""

    def __init__(
        self, folder: Path, attempt: int = 1, daemons: dict[str, Daemon] | None = None, table: dict[str, Any] = SECURE
    ) -> None:
        base = codec.encode(BASE)
        recipe = Recipe.model_validate(table).fingerprint()
        at = ("run", 1, attempt, SumOf.UPDATE)
        self.server = SumServer(SumContext(*at, recipe, codec.digest(base), (Vector.VALUES,)), (SITES,))
        self.daemons = daemons or {site: Daemon(folder, site, table) for site in SITES}
        for site, daemon in self.daemons.items():
            self.server.take(TaskKind.FIT, site, self.sent(daemon, TaskKind.FIT, base))

    def task(self, kind: TaskKind, base: bytes, name: str = "") -> Task:
        context = self.server.context
        name = name or f"{kind}-{context.attempt}"
        at = (codec.digest(base), len(base), 60.0, context.attempt, SumOf.UPDATE)
        return Task(kind, context.run, context.round, name, *at)

    def sent(self, daemon: Daemon, kind: TaskKind, base: bytes | None = None) -> bytes:
        data = base or self.server.blob(kind, daemon.made.name)
        upload = daemon.work(self.task(kind, data), data)
        assert upload is not None, daemon.refused
        return upload

    def until(self, last: TaskKind | None) -> Round:
        for step in steps_of(self.server.context):
            if step is last:
                break
            there = self.server.uploads.get(step, {})
            for site in sorted(self.daemons.keys() - there.keys()):
                self.server.take(step, site, self.sent(self.daemons[site], step))
        return self


def layout_and_point() -> tuple[SumLayout, FixedPoint]:
    fixed_point = Recipe.model_validate(SECURE).federation.fixed_point
    assert fixed_point is not None
    return SumLayout.of(read_form(client_methods.build("fedavg", {}), "fedavg"), describe(BASE), BASE), fixed_point


def expected(round_: Round) -> Array:
    total = None
    for daemon in round_.daemons.values():
        [(_, update)] = daemon.made.store.unsettled("run")
        layout, fixed_point = layout_and_point()
        words = layout.words(update, fixed_point)
        total = words if total is None else total + words
    assert total is not None
    return total


def test_where_noise_is_shared_the_sum_has_that_of_all_sites(tmp_path: Path) -> None:
    round_ = Round(tmp_path, table=SHARED).until(TaskKind.MASK)
    aggregated = expected(round_)
    round_.until(None)
    noise = (round_.server.total() - aggregated).view(np.int64) * 2.0**-40
    recipe = Recipe.model_validate(SHARED)
    assert recipe.plan.dp is not None
    alone = recipe.plan.dp.noise_share(recipe.plan.lr, recipe.plan.batch_size)
    moved = noise[noise != 0.0]
    assert len(moved) == len(noise) - 1, "all but the sum of the weights"
    assert moved.std() == pytest.approx(2 * alone, rel=4 / np.sqrt(2 * len(moved))), "of four sites"


def test_without_its_noise_nothing_of_an_update_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Round(tmp_path, table=SHARED).until(TaskKind.MASK)
    ann, blob = round_.daemons["ann"], round_.server.blob(TaskKind.MASK, "ann")
    monkeypatch.setattr(PreparedRun, "noise", lambda *_: None)
    assert ann.work(round_.task(TaskKind.MASK, blob), blob) is None
    assert ann.made.declined()[-1] == ("mask-1", FailureReason.INTERNAL)


def test_the_server_gets_the_sum_and_no_update(tmp_path: Path) -> None:
    round_ = Round(tmp_path).until(TaskKind.MASK)
    aggregated = expected(round_)
    round_.until(TaskKind.REVEAL)
    assert all(list(daemon.folder.rglob("*-update.json")) for daemon in round_.daemons.values())
    round_.until(None)
    assert list(tmp_path.rglob("*-update.json")) == []  # nothing of a sum's secrets stays once the server has all
    assert round_.server.total().tolist() == aggregated.tolist()
    for daemon in round_.daemons.values():
        assert [set(codec.decode(released.data)) for _, released in daemon.uploads if released.data] == [
            {Part.SECURE_AGGREGATION}
        ] * len(daemon.uploads)
        assert all(released.metrics == {} and released.weight is None for _, released in daemon.uploads)
        assert daemon.made.store.newest_counted("run") == 1
        assert daemon.made.store.unsettled("run") == []
        assert daemon.refused == []


@pytest.mark.parametrize("killed", [False, True])
def test_with_a_site_that_withholds_its_update_nobody_reads_the_sum_of_the_others(tmp_path: Path, killed: bool) -> None:
    """Were its part the model as received, three such sites would leave the fourth one's update in the sum alone."""
    round_ = Round(tmp_path).until(TaskKind.MASK)
    for site in SITES[1:]:
        store = round_.daemons[site].made.store
        [(task, update)] = store.unsettled("run")
        store.stage(task, FitOutcome(update, {}, {}, replace(store.trained_by(task), withheld=True)))
        if killed:
            round_.daemons[site].killed()
    aggregated = expected(round_)
    round_.until(None)
    total = round_.server.total()
    assert not np.any(total == aggregated)
    layout, fixed_point = layout_and_point()
    check_total(layout, aggregated, fixed_point, len(SITES))
    with pytest.raises(SecureAggregationError, match="random") as failed:
        check_total(layout, total, fixed_point, len(SITES))
    assert failed.value.code == "withheld"


def test_random_words_are_the_same_after_a_restart_and_others_in_each_sum(tmp_path: Path) -> None:
    sessions = [Sessions(Round(tmp_path / name).daemons["ann"].folder / FOLDER) for name in ("a", "b")]
    found = [session.find("run", 1, 1, SumOf.UPDATE) for session in sessions]
    words = [session.secrets.random_words(1000).tolist() for session in [*found, found[0]] if session is not None]
    assert words[0] == words[2]
    assert not set(words[0]) & set(words[1])


def again_after_a_kill(round_: Round, step: TaskKind, base: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Ann's upload of a step in which she was killed: the same bytes as those before."""
    ann, killed = round_.daemons["ann"], list[bytes]()
    push = ann.made.link.push

    def kill(task: Task, released: Released) -> Receipt:
        if task.kind is step and not killed:
            killed.append(released.data)
            raise KeyboardInterrupt
        return push(task, released)

    monkeypatch.setattr(ann.made.link, "push", kill)
    ann.killed()
    with pytest.raises(KeyboardInterrupt):
        ann.work(round_.task(step, base), base)
    ann.made.link.tasks.clear()
    ann.killed()
    upload = ann.work(round_.task(step, base), base)
    assert upload is not None
    assert upload == killed[0]
    return upload


@pytest.mark.parametrize("table", [SECURE, SHARED], ids=["no noise", "noise"])
@pytest.mark.parametrize("step", [TaskKind.FIT, *steps_of(SumContext("r", 1, 1, SumOf.UPDATE, "", ""))])  # type: ignore[arg-type]
def test_a_killed_daemon_sends_the_same_bytes(
    tmp_path: Path, step: TaskKind, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round(tmp_path, table=table).until(TaskKind.SHARE if step is TaskKind.FIT else step)
    base = codec.encode(BASE) if step is TaskKind.FIT else round_.server.blob(step, "ann")
    upload = again_after_a_kill(round_, step, base, monkeypatch)
    if step is TaskKind.FIT:
        assert upload == round_.server.uploads[step]["ann"]
    else:
        round_.server.take(step, "ann", upload)
    round_.until(None)
    round_.server.total()


def test_a_round_that_is_opened_again(tmp_path: Path) -> None:
    first = Round(tmp_path).until(TaskKind.MASK)
    again = Round(tmp_path, attempt=2, daemons=first.daemons).until(TaskKind.MASK)
    aggregated = expected(again)
    assert again.until(None).server.total().tolist() == aggregated.tolist()
    ann = first.daemons["ann"]
    blob = first.server.blob(TaskKind.MASK, "ann")
    assert ann.work(first.task(TaskKind.MASK, blob, "late"), blob) is None
    assert "secure-aggregation.attempt-over" in ann.refused[-1]


OTHER = codec.encode({**BASE, Part.HEAD: {name: array * 2 for name, array in BASE[Part.HEAD].items()}})


def test_what_is_aggregated_is_the_update_of_the_model_that_all_were_sent(tmp_path: Path) -> None:
    """Else a server could have all others train from a model that teaches them nothing: the sum would be one update."""
    round_ = Round(tmp_path)
    ann, aggregated = round_.daemons["ann"], expected(round_)
    assert ann.work(round_.task(TaskKind.FIT, OTHER, "another"), OTHER) is None
    assert "secure-aggregation.other-base" in ann.refused[-1]
    round_.until(None)
    assert round_.server.total().tolist() == aggregated.tolist()


def test_what_waits_is_handed_in_for_the_model_that_it_was_trained_from(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    ann = round_.daemons["ann"]
    [session] = (ann.folder / FOLDER / "run").glob("*.json")
    session.unlink()  # as if the daemon had been killed before it was stored
    ann.agent._work.tools.guard._settled.clear()
    ann.work(round_.task(TaskKind.FIT, OTHER), OTHER)
    found = Sessions(ann.folder / FOLDER).find("run", 1, 1, SumOf.UPDATE)
    assert found is not None
    assert found.base == codec.digest(codec.encode(BASE))


def test_an_update_of_another_model_is_not_masked(tmp_path: Path) -> None:
    round_ = Round(tmp_path).until(TaskKind.MASK)
    ann = round_.daemons["ann"]
    [(fitted, update)] = ann.made.store.unsettled("run")
    ann.made.store.stage(replace(fitted, base_digest=codec.digest(OTHER)), FitOutcome(update, {}, {}))
    blob = round_.server.blob(TaskKind.MASK, "ann")
    assert ann.work(round_.task(TaskKind.MASK, blob), blob) is None
    assert "secure-aggregation.other-base" in ann.refused[-1]


def test_a_sum_ends_by_the_recipe_that_it_began_by(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    ann = round_.daemons["ann"]
    federation = {**SECURE["federation"], "min_contributors": 2, "sum_step_s": 30.0}
    ann.made.recipe = {**SECURE, "federation": federation}
    ann.made.link.recipe = Recipe.model_validate(ann.made.recipe).wire()
    ann.killed()
    blob = round_.server.blob(TaskKind.SHARE, "ann")
    assert ann.work(round_.task(TaskKind.SHARE, blob), blob) is None
    assert "secure-aggregation.other-base" in ann.refused[-1]


def test_what_waits_for_a_sum_does_not_leave_when_the_run_is_offered_without_sums(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    ann = round_.daemons["ann"]
    before = len(ann.uploads)
    ann.made.link.recipe = Recipe.model_validate(RUN).wire()
    ann.killed()
    ann.agent.step(0.0)
    fit = round_.task(TaskKind.FIT, codec.encode(BASE))
    assert ann.work(fit, codec.encode(BASE)) is None
    assert len(ann.uploads) == before


def test_a_damaged_session_ends_no_daemon(tmp_path: Path) -> None:
    round_ = Round(tmp_path)
    ann = round_.daemons["ann"]
    folder = ann.folder / FOLDER
    [session] = (folder / "run").glob("*.json")
    session.write_bytes(b"{}")
    blob = round_.server.blob(TaskKind.SHARE, "ann")
    assert ann.work(round_.task(TaskKind.SHARE, blob), blob) is None
    assert ann.made.declined()[-1] == ("share-1", FailureReason.DISK)
    theirs = folder / "run" / "1-notes.json"
    theirs.write_bytes(b"of a person")
    (folder / "run.json").write_bytes(b"damaged as well")
    ann.made.link.tasks.append(Finished("it is over", True))
    assert isinstance(ann.agent.step(0.0), Finished)
    assert session.exists()  # it cannot be remembered that it is over
    (folder / "run.json").unlink()
    ann.agent._work.sums.over("run")
    assert not session.exists()
    assert theirs.exists()


def test_a_server_cannot_have_a_plain_update_of_a_secure_run(tmp_path: Path) -> None:
    daemon, base = Daemon(tmp_path, "ann"), codec.encode(BASE)
    plain = Task(TaskKind.FIT, "run", 1, "plain", codec.digest(base), len(base), 60.0)
    assert daemon.work(plain, base) is None
    assert "secure-aggregation.out-of-order" in daemon.refused[-1]
    assert daemon.uploads == []
    daemon.killed()
    daemon.agent.step(0.0)  # what is staged is handed in again at the enrolling
    assert daemon.uploads == []


def test_without_secure_aggregation_or_an_identity_a_site_takes_no_part(tmp_path: Path) -> None:
    made = AgentHarness(DiskStore(tmp_path / "ann"))
    made.offer(TaskKind.SHARE, 1, BASE)
    made.offer(TaskKind.SCORE_SUM, 1, BASE)
    agent = made.agent()
    agent.step(0.0)
    agent.step(0.0)
    assert [reason for _, reason in made.declined()] == [FailureReason.REFUSED] * 2
    made = AgentHarness(DiskStore(tmp_path / "bob"), SECURE)
    made.fit()
    made.agent().step(0.0)
    assert [reason for _, reason in made.declined()] == [FailureReason.REFUSED]
    assert made.link.pushed == []


def test_classes_are_counted_before_their_rows_leave(tmp_path: Path) -> None:
    recipe = {**SECURE, "method": {"name": "fednh"}}
    width = BASE[Part.HEAD]["weight"].shape[1]
    base: Payload = {
        Part.BODY: BASE[Part.BODY],
        Part.HEAD: {"scale": np.array(1.0, dtype=np.float32)},
        Part.PROTOTYPES: {"mean": np.eye(3, width, dtype=np.float32)},
    }
    data, read = codec.encode(base), Recipe.model_validate(recipe)
    at = ("run", 1, 1, SumOf.UPDATE)
    round_ = Round.__new__(Round)
    both = (Vector.CONTRIBUTORS, Vector.VALUES)
    round_.server = SumServer(SumContext(*at, read.fingerprint(), codec.digest(data), both), (SITES,))
    round_.daemons = {site: Daemon(tmp_path, site, recipe) for site in SITES}
    for site, daemon in round_.daemons.items():
        round_.server.take(TaskKind.FIT, site, round_.sent(daemon, TaskKind.FIT, data))
    round_.until(TaskKind.MASK)
    assert round_.server.counts().tolist() == [4, 4, 0]  # nobody has an image of class 2
    [(_, update)] = round_.daemons["ann"].made.store.unsettled("run")
    layout = SumLayout.of(read_form(client_methods.build("fednh", {}), "fednh"), describe(update.payload), base)
    round_.until(None)
    fixed_point = read.federation.fixed_point
    assert fixed_point is not None
    sums = layout.named(fixed_point.decoded(round_.server.total()))
    assert sums["contributors"].tolist() == [4.0, 4.0, 0.0]
    assert sums["rows"][0].any()


def test_another_group_is_refused_by_a_daemon_that_was_killed_and_a_small_one_by_its_policy(tmp_path: Path) -> None:
    first = Round(tmp_path).until(TaskKind.SHARE)
    ann = first.daemons["ann"]
    first.sent(ann, TaskKind.SHARE)
    ann.killed()
    later = Round(tmp_path, 2, first.daemons).until(TaskKind.SHARE)
    later.server.groups = (("ann", "bob", "cleo"), ("dan",))
    blob = later.server.blob(TaskKind.SHARE, "ann")
    assert ann.work(later.task(TaskKind.SHARE, blob), blob) is None
    assert "secure-aggregation.other-group" in ann.refused[-1]
    dan = first.daemons["dan"]
    assert dan.work(later.task(TaskKind.SHARE, blob), blob) is None
    assert "secure-aggregation.small-group" in dan.refused[-1]


@pytest.mark.parametrize(("asked", "declined"), [(1, False), (3, False), (4, True)])
def test_a_run_of_smaller_groups_than_the_policys_is_declined(tmp_path: Path, asked: int, declined: bool) -> None:
    daemon = Daemon(tmp_path, "ann")
    policy = daemon.agent._site.policy
    daemon.agent._site.policy = replace(policy, rules=policy.rules.model_copy(update={"sum_group": asked}))
    base = codec.encode(BASE)
    at = (codec.digest(base), len(base), 60.0, 1, SumOf.UPDATE)
    upload = daemon.work(Task(TaskKind.FIT, "run", 1, "fit", *at), base)
    assert (upload is None) is declined
    assert ("sum_group" in "".join(daemon.refused)) is declined


def test_a_daemon_killed_after_its_numbers_were_taken_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_ = Round(tmp_path).until(TaskKind.MASK)
    ann, blob = round_.daemons["ann"], round_.server.blob(TaskKind.MASK, "ann")
    push = ann.made.link.push

    def kill(task: Task, released: Released) -> Receipt:
        receipt = push(task, released)
        if task.kind is TaskKind.MASK:
            raise KeyboardInterrupt
        return receipt

    monkeypatch.setattr(ann.made.link, "push", kill)
    ann.killed()
    with pytest.raises(KeyboardInterrupt):
        ann.work(round_.task(TaskKind.MASK, blob), blob)
    monkeypatch.undo()
    ann.made.link.tasks.clear()
    round_.server.take(TaskKind.MASK, "ann", ann.uploads[-1][1].data)
    ann.killed()
    round_.until(None)
    assert ann.made.store.newest_counted("run") == 1
    assert ann.made.store.unsettled("run") == []


def test_an_update_leaves_by_the_recipe_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits without noise, which its sum adds: by another recipe, offered while the daemon was down, too little."""
    daemon, base = Daemon(tmp_path, "ann", SHARED), codec.encode(BASE)

    def killed_after_staging(failpoint: str) -> None:
        if failpoint == "staged":
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(task_tools, "reach", killed_after_staging)
        with pytest.raises(KilledError):
            daemon.work(Task(TaskKind.FIT, "run", 1, "f", codec.digest(base), len(base), 60.0, 1, SumOf.UPDATE), base)
    dp = {**SHARED["plan"]["dp"], "noise_multiplier": 1e-3}
    quieter = {**SHARED, "plan": {**SHARED["plan"], "dp": dp}}
    daemon.made.recipe = quieter
    daemon.killed()
    daemon.made.link.recipe = Recipe.model_validate(quieter).wire()
    daemon.agent.step(0.0)
    assert daemon.uploads == []
    assert daemon.made.declined() == [("f", FailureReason.REFUSED)]
