"""What the operator sees and does, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.server.conftest import TRAINERS, daemon, recipe
from tests.support.operator_lab import OperatorLab, operator_lab
from tests.support.pki import Authority

from protofed.common.errors import ConfigError, ConflictError, ExcludedError, NotEnrolledError
from protofed.common.pki.certificate import Party
from protofed.common.protocol.messages import Activity, Assignment, PauseReason, Progress, Signal, Verdict
from protofed.server.rounds.machine import phases

Register: TypeAlias = Callable[..., None]
ALONE = {"min_sites": 1, "quorum": 1}


@pytest.fixture
def desk() -> OperatorLab:
    """No run, no site."""
    return operator_lab()


@pytest.fixture
def busy(desk: OperatorLab) -> OperatorLab:
    """Round 1 of 2 of run `one` is open for ann, bob and cyd; `two` and `three` wait."""
    for run in ("one", "two", "three"):
        desk.start(run)
    desk.begin()
    return desk


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """Registers a certificate for each of these sites, with these roles."""
    authority = Authority.make()

    def registered(lab: OperatorLab, *sites: str, roles: Sequence[str] = ()) -> None:
        for site in sites:
            folder = authority.issue(tmp_path / site, Party.SITE, site)
            lab.operation.register((folder / "cert.pem").read_text(encoding="ascii"), roles)

    return registered


# Starting


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("", "the recipe: "),
        ("{", "the recipe: "),
        ("[]", "the recipe: "),
        ('{"name": "one", "ronds": 3}', "unknown key 'ronds': did you mean 'rounds'"),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_place(desk: OperatorLab, text: str, phrase: str) -> None:
    with pytest.raises(ConfigError, match=phrase):
        desk.operation.start(text)
    assert desk.operation.runs() == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fedavg", "x" * 5_000),
        ('"fedavg"', '"fednh", "prototype_momentum": "' + "x" * 5_000 + '"'),
        ('"rounds"', '"' + "x" * 5_000 + '"'),
        ("}", "x" * 5_000),
    ],
)
def test_a_refusal_repeats_only_the_beginning_of_what_it_was_given(desk: OperatorLab, old: str, new: str) -> None:
    with pytest.raises(ConfigError) as raised:
        desk.operation.start(recipe().model_dump_json().replace(old, new, 1))
    assert len(str(raised.value)) < 600
    assert desk.operation.runs() == []


def test_an_unknown_method_is_refused_and_no_run_is_left_of_it(desk: OperatorLab) -> None:
    with pytest.raises(ConfigError, match="'fedavg'"):
        desk.start("one", method={"name": "fedavgg"})
    assert desk.operation.runs() == []
    assert desk.start("one").status == "running"


def test_a_name_is_used_once_also_when_its_run_has_ended(desk: OperatorLab) -> None:
    desk.start("one")
    with pytest.raises(ConflictError, match="'one' already"):
        desk.start("one", rounds=9)
    desk.operation.abort("one", "enough")
    with pytest.raises(ConflictError, match="'one' already"):
        desk.start("one", rounds=9)
    assert desk.statuses() == {"one": "aborted"}


def test_sites_that_wait_are_told_of_a_new_run(desk: OperatorLab) -> None:
    desk.enroll(*TRAINERS)
    desk.told.clear()
    desk.start("one")
    assert desk.told[0] is None  # all
    assert isinstance(desk.come_back("ann"), Assignment)


# The queue


def test_runs_go_on_one_after_the_other_in_the_order_of_their_start(busy: OperatorLab) -> None:
    assert busy.statuses() == {"one": "running", "two": "queued", "three": "queued"}
    for value in (1.0, 2.0):
        busy.round(ann=value, bob=value, cyd=value)
    assert busy.statuses() == {"one": "completed", "two": "running", "three": "queued"}
    busy.restart()
    assert list(busy.statuses()) == ["one", "two", "three"]
    busy.operation.abort("two", "")
    assert busy.statuses() == {"one": "completed", "two": "aborted", "three": "running"}
    busy.later(0.0)
    assert busy.run.name == "three"
    assert busy.makers()


# Orders to a run


def test_a_paused_run_ends_its_round_and_opens_no_other_also_after_a_restart(busy: OperatorLab) -> None:
    assert busy.operation.pause("one", paused=True).status == "paused"
    busy.round(ann=1.0, bob=1.0, cyd=1.0)
    busy.later(1.0)
    assert [row.row.round for row in busy.operation.rounds("one")] == [0, 1]
    assert busy.asked("ann") is None
    busy.restart()
    busy.later(1.0)
    assert busy.statuses()["one"] == "paused"
    assert busy.asked("ann") is None
    assert busy.operation.pause("one", paused=False).status == "running"
    busy.later(0.0)
    assert busy.task("ann").round == 2


def test_a_run_that_waits_is_aborted_before_it_began(busy: OperatorLab) -> None:
    assert busy.operation.abort("two", "").row.reason == "aborted by the operator"
    assert busy.statuses() == {"one": "running", "two": "aborted", "three": "queued"}
    assert busy.task("ann").run == "one"
    for value in (1.0, 2.0):
        busy.round(ann=value, bob=value, cyd=value)
    assert busy.statuses()["three"] == "running"


def test_a_run_that_has_ended_takes_no_orders(busy: OperatorLab) -> None:
    busy.operation.abort("one", "enough")
    orders: list[Callable[[], object]] = [
        lambda: busy.operation.abort("one", "again"),
        lambda: busy.operation.pause("one", paused=True),
        lambda: busy.operation.pause("one", paused=False),
    ]
    for order in orders:
        with pytest.raises(ConflictError, match="run 'one' has ended: enough"):
            order()
    assert busy.operation.run("one").row.reason == "enough"


def test_an_ended_run_that_is_rolled_back_is_the_last_in_the_queue(busy: OperatorLab) -> None:
    busy.round(ann=1.0, bob=1.0, cyd=1.0)
    busy.operation.abort("one", "enough")
    assert busy.operation.roll_back("one", 1).status == "queued"
    assert busy.statuses() == {"two": "running", "three": "queued", "one": "queued"}
    busy.restart()
    assert list(busy.statuses()) == ["two", "three", "one"]
    for run in ("two", "three"):
        busy.operation.abort(run, "enough")
    busy.later(0.0)
    assert busy.task("ann").run == "one"
    assert busy.task("ann").round == 2
    assert busy.value == 1.0


def test_a_run_that_goes_on_keeps_its_place_when_it_is_rolled_back(busy: OperatorLab) -> None:
    busy.round(ann=1.0, bob=1.0, cyd=1.0)
    report = busy.operation.roll_back("one", 0)
    assert (report.status, report.overview.rolled_back) == ("running", 2)
    outcomes = {(one.row.round, one.row.attempt): one.outcome for one in busy.operation.rounds("one")}
    assert outcomes == {(0, 1): "published", (1, 1): "rolled-back", (2, 1): "rolled-back"}
    assert list(busy.statuses()) == ["one", "two", "three"]


# Rounds


def test_a_run_of_a_later_version_is_listed_without_its_recipe(busy: OperatorLab) -> None:
    busy.operation.abort("one", "enough")
    with busy.ledger._write() as connection:
        connection.exec_driver_sql("update runs set recipe = '{}' where run = 'one'")
    report = busy.operation.run("one")
    assert (report.recipe, report.status) == (None, "aborted")
    assert [one.row.run for one in busy.operation.runs()] == ["one", "two", "three"]


# Sites


def test_sites_work_are_idle_silent_or_away(busy: OperatorLab) -> None:
    task_id = busy.task("ann").task_id
    busy.beat("ann", task_id, epoch=2, epochs=5, making_progress=True)
    assert (busy.site("ann").status, busy.site("ann").activity_text) == ("working", "training, epoch 2/5")
    assert (busy.site("bob").status, busy.site("bob").activity_text) == ("idle", "idle")
    busy.later(40.0, alive=("bob",))
    assert (busy.site("ann").status, busy.site("ann").progress_age_s) == ("working", 40.0)
    busy.later(20.0)
    assert (busy.site("ann").status, busy.site("ann").progress_age_s) == ("silent", 60.0)
    assert busy.site("bob").status == "idle"
    busy.here = {"bob": busy.here["bob"]}
    busy.restart()
    assert {report.site: report.status for report in busy.operation.sites()} == {
        "ann": "away",
        "bob": "idle",
        "cyd": "away",
        "eva": "away",
    }
    assert busy.site("cyd").progress_age_s is None
    assert list(busy.site("eva").roles) == ["evaluator"]


def test_a_dead_site_is_silent_also_while_no_run_goes_on(desk: OperatorLab) -> None:
    desk.enroll("ann")
    desk.enroll("bob")
    desk.presence.hold("bob", PauseReason.APPROVAL)
    desk.later(80.0)
    assert [desk.site(name).status for name in ("ann", "bob")] == ["idle", "held"]
    desk.later(7.0)
    for name in ("ann", "bob"):
        assert (desk.site(name).status, desk.site(name).activity_text) == ("silent", "no sign for 87 s")
    desk.enroll("ann")
    assert desk.site("ann").status == "idle"


def test_a_site_is_excluded_in_the_middle_of_a_round_and_nobody_waits_for_it(busy: OperatorLab) -> None:
    task = busy.task("cyd")
    report = busy.operation.exclude("cyd", "wrong labels")
    assert (report.status, report.excluded) == ("excluded", "wrong labels")
    site_task = next(one.task for one in busy.operation.rounds("one")[1].tasks if one.task.site == "cyd")
    assert (site_task.task_status, site_task.reason) == ("failed", "excluded: wrong labels")
    assert busy.runs.heartbeat("one", "cyd", daemon("cyd"), Progress(task.task_id, Activity.TRAINING)) is Signal.ABORT
    calls: list[Callable[[], object]] = [
        lambda: busy.push("cyd", busy.model(1.0), task),
        lambda: busy.runs.next_task("one", "cyd", daemon("cyd")),
        lambda: busy.come_back("cyd"),
    ]
    for call in calls:
        with pytest.raises(ExcludedError, match="the operator has excluded site cyd: wrong labels"):
            call()
    for site in ("ann", "bob"):
        busy.push(site, busy.model(2.0))
    assert isinstance(busy.phase, phases.Evaluating)
    assert busy.value == 2.0


def test_what_a_site_handed_in_before_it_was_excluded_counts(busy: OperatorLab) -> None:
    assert busy.push("cyd", busy.model(4.0)).verdict is Verdict.ACCEPTED
    busy.operation.exclude("cyd", "")
    for site in ("ann", "bob"):
        busy.push(site, busy.model(1.0))
    assert busy.value == 2.0
    task = next(task.task for task in busy.operation.rounds("one")[1].tasks if task.task.site == "cyd")
    assert task.task_status == "reported"


def test_an_excluded_site_is_not_invited_again_also_after_a_restart_until_it_is_admitted(desk: OperatorLab) -> None:
    desk.start("one", federation={"min_sites": 2})
    desk.begin()
    desk.operation.exclude("cyd", "wrong labels")
    for site in ("ann", "bob"):
        desk.push(site, desk.model(1.0))
    desk.restart()
    for site in ("ann", "bob", "eva"):
        desk.score(site)
    desk.later(0.0)
    assert desk.site("cyd").status == "excluded"
    assert desk.task("ann").round == 2
    assert [task.task.site for task in desk.operation.rounds("one")[2].tasks] == ["ann", "bob"]
    assert desk.operation.admit("cyd").status == "away"
    with pytest.raises(NotEnrolledError):
        desk.runs.next_task("one", "cyd", daemon("cyd"))
    assert isinstance(desk.come_back("cyd"), Assignment)
    assert desk.site("cyd").status == "idle"


def test_a_site_that_is_registered_and_has_never_been_seen_can_be_kept_out(
    desk: OperatorLab, register: Register
) -> None:
    register(desk, "zoe")
    desk.operation.exclude("zoe", "")
    assert (desk.site("zoe").excluded, list(desk.site("zoe").roles)) == ("by the operator", [])
    with pytest.raises(ConfigError, match=r"site 'Zo e' is no id"):
        desk.operation.exclude("Zo e", "")


def test_a_site_that_is_gone_is_forgotten_and_its_part_in_runs_stays(busy: OperatorLab) -> None:
    busy.push("cyd", busy.model(4.0))
    busy.operation.exclude("cyd", "left the study")
    assert busy.operation.forget("cyd").excluded == "left the study"
    assert [report.site for report in busy.operation.sites()] == ["ann", "bob", "eva"]
    tasks = [task.task for report in busy.operation.rounds("one") for task in report.tasks]
    assert any((task.site, task.task_status) == ("cyd", "reported") for task in tasks)
    del busy.here["cyd"]
    busy.restart()
    assert [report.site for report in busy.operation.sites()] == ["ann", "bob", "eva"]
    assert busy.presence.exclusion("cyd") is None


def test_a_site_that_may_come_back_is_not_forgotten(busy: OperatorLab, register: Register) -> None:
    with pytest.raises(ConflictError, match="was heard of 0 s ago"):
        busy.operation.forget("cyd")
    busy.later(51.0, alive=("ann", "bob"))  # longer than stall_timeout_s
    register(busy, "cyd")
    with pytest.raises(ConflictError, match="protofed certs revoke cyd"):
        busy.operation.forget("cyd")
    busy.operation.revoke("cyd", "has left")
    busy.operation.forget("cyd")
    assert "cyd" not in busy.ledger.sites()


def test_without_a_run_a_daemon_that_was_just_heard_of_is_alive(desk: OperatorLab) -> None:
    desk.enroll("ann")
    desk.later(100.0)
    with pytest.raises(ConflictError):
        desk.operation.forget("ann")
    desk.later(21.0)
    desk.operation.forget("ann")
    assert desk.operation.sites() == []


@pytest.mark.parametrize("reason", ["x" * 301, "two\nlines", "\x1b[31mred"])
def test_a_reason_is_a_line_that_fits_into_every_answer(busy: OperatorLab, reason: str) -> None:
    for order in (lambda: busy.operation.abort("one", reason), lambda: busy.operation.exclude("ann", reason)):
        with pytest.raises(ConfigError, match="a reason is one line of at most 300 characters"):
            order()
    assert busy.operation.abort("one", "é" * 300).row.reason == "é" * 300


def test_a_name_that_is_not_known_is_answered_with_the_nearest_and_not_echoed_whole(desk: OperatorLab) -> None:
    operation = desk.operation
    of_runs: list[Callable[[str], object]] = [
        operation.run,
        operation.rounds,
        lambda name: operation.pause(name, paused=True),
        lambda name: operation.abort(name, ""),
        lambda name: operation.roll_back(name, 0),
    ]
    of_sites: list[Callable[[str], object]] = [
        lambda name: operation.exclude(name, ""),
        operation.admit,
        operation.forget,
    ]
    with pytest.raises(ConfigError, match="expected one of: none yet"):
        operation.run("four")
    with pytest.raises(ConfigError, match="unknown site 'norht': none has enrolled"):
        operation.exclude("norht", "")
    desk.start("one")
    desk.enroll("north")
    for orders, name, said in (
        (of_runs, "four", "no run 'four'"),
        (of_sites, "norht", "unknown site 'norht': did you mean 'north'"),
        ([*of_runs, *of_sites, lambda name: operation.verify(name, 1, 1)], "x" * 5_000, "x"),
    ):
        for order in orders:
            with pytest.raises(ConfigError, match=said) as error:
                order(name)
            assert len(str(error.value)) < 300
    with pytest.raises(ConfigError, match="'north' is not excluded"):
        operation.admit("north")
    assert [report.site for report in operation.sites()] == ["north"]


# Runs that cannot go on


def test_a_run_that_the_registered_sites_cannot_make_up_is_refused_or_forced(
    desk: OperatorLab, register: Register
) -> None:
    register(desk, "north", "south")
    register(desk, "eva", roles=["evaluator"])
    for federation, phrase in (
        ({"quorum": 3}, "3 trainers are needed .*and 2 may take part: north, south"),
        ({"min_sites": 2, "required_sites": ["norht"]}, "'norht'.*did you mean 'north'"),
        ({"min_sites": 2, "required_sites": ["eva"]}, "'eva', which is no site that may train here"),
    ):
        with pytest.raises(ConfigError, match=f"{phrase}.*--force"):
            desk.start("one", federation={"min_sites": 2, **federation})
        assert desk.operation.runs() == []
    text = recipe("one", federation={"min_sites": 2, "quorum": 3}).model_dump_json()
    report = desk.operation.start(text, force=True)
    assert len(report.unmet) == 1
    assert desk.operation.run("one").unmet == report.unmet  # it stays visible,
    register(desk, "west")
    assert desk.operation.run("one").unmet == []  # until it is met
    desk.start("two")
    assert desk.operation.run("two").unmet == []


def test_a_site_that_is_excluded_or_revoked_may_not_take_part(desk: OperatorLab, register: Register) -> None:
    register(desk, "ann", "bob", "cyd")
    report = desk.start("one")
    assert report.unmet == []
    desk.operation.exclude("ann", "")
    assert len(desk.operation.run("one").unmet) == 1
    desk.operation.admit("ann")
    desk.operation.revoke("bob", "has left")
    assert len(desk.operation.run("one").unmet) == 1
    desk.operation.abort("one", "")
    assert list(desk.operation.run("one").unmet) == []


def test_in_plain_text_a_run_is_only_warned_of_sites(desk: OperatorLab) -> None:
    desk.enroll("ann", "bob")
    report = desk.start("one", federation={"required_sites": ["anne"]})
    assert len(report.unmet) == 2
    assert "did you mean 'ann'" in report.unmet[1]


def test_a_model_that_nobody_knows_is_refused_or_forced(desk: OperatorLab) -> None:
    with pytest.raises(ConfigError, match="unknown model 'mpl': did you mean 'mlp'"):
        desk.start("one", model={"name": "mpl"})
    report = desk.operation.start(recipe("one", model={"name": "mpl"}).model_dump_json(), force=True)
    assert report.status == "running"


def test_every_run_that_does_not_go_on_says_why(busy: OperatorLab) -> None:
    def waits(run: str) -> tuple[str, str]:
        found = busy.operation.run(run).waiting
        assert found is not None
        return found.reason.value, found.behind or ",".join(site.site for site in found.missing)

    assert waits("one") == ("updates", "ann,bob,cyd")
    assert waits("two") == ("queued", "one")
    busy.push("ann", busy.model(1.0))
    assert waits("one") == ("updates", "bob,cyd")
    busy.operation.abort("one", "")
    assert busy.operation.run("one").waiting is None
    busy.operation.exclude("cyd", "")
    busy.later(51.0, alive=("ann",))
    assert waits("two") == ("trainers", "bob,cyd")
    missing = {site.site: site.why for site in busy.operation.run("two").waiting.missing}  # type: ignore[union-attr]
    assert missing == {"bob": "silent", "cyd": "excluded"}
    busy.operation.pause("two", paused=True)
    assert waits("two") == ("paused", "")


def test_a_site_that_is_registered_and_has_never_come_is_missing(desk: OperatorLab, register: Register) -> None:
    register(desk, "ann", "bob", "cyd")
    desk.start("one")
    desk.enroll("ann")
    found = desk.operation.run("one").waiting
    assert found is not None
    assert [(site.site, site.why) for site in found.missing] == [("bob", "never enrolled"), ("cyd", "never enrolled")]
    desk.restart()
    desk.presence.forget("ann")
    found = desk.operation.run("one").waiting
    assert found is not None
    assert (found.missing[0].site, found.missing[0].why) == ("ann", "away")
