"""A snapshot on terminals of all sizes, in lines, and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from tests.support.server_replies import NOW, answer, attempt, info, mixed_reply, published, score, site, snapshot_of

from protofed.deploy.operator import tables
from protofed.deploy.operator.screen import Rows, WatchScreen, fitting
from protofed.deploy.operator.snapshot import RunSnapshot
from protofed.deploy.operator.snapshot_builder import waiting
from protofed.deploy.operator.watch import changes, plain
from protofed.protos.v1 import operator_pb2 as pb


def plainly(snapshot: RunSnapshot, width: int, height: int | None = None) -> str:
    """What stands on a terminal of that size; without a height, on one that is high enough."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(WatchScreen(snapshot, height))
    return captured.get()


def shown(snapshot: RunSnapshot, width: int, height: int | None = None) -> list[str]:
    return [line.rstrip() for line in plainly(snapshot, width, height).splitlines()]


@pytest.mark.parametrize("sites", [0, 1, 5, 6, 40, 300])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (60, 20), (59, 15), (40, 12), (30, 9)])
def test_no_line_is_longer_than_the_terminal_nor_below_its_end(width: int, height: int, sites: int) -> None:
    lines = plainly(
        replace(snapshot_of(mixed_reply(sites)), trouble="start it", queue="q " * 90), width, height
    ).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height


def test_a_small_terminal_shows_what_is_worst_and_counts_who_is_left_out() -> None:
    text = plainly(snapshot_of(mixed_reply(40)), 80, 24)
    for phrase in (
        "digits-fednh · fednh · running · 1 round degraded · 1 attempt abandoned",
        "round 7 of 20 ━━━━━━━━━━━━──────────────────────────── 6 done",
        "collecting for 15 s · 10 of 40 sites reported · 12.3 MB received, 45.6 MB sent",
        "90 s so far · about 2 min more",
        "excluded: [bold]wrong data",
        "site-02           failed",
        "[red]out-of-memory",
        "global.accuracy       0.9000",
        "round      4           5           6           7           7, try 2",
        "abandoned",
    ):
        assert phrase in text, text
    lines = shown(snapshot_of(mixed_reply(40)), 80, 24)
    assert sum(line.startswith("site-") for line in lines) == 5
    assert "and 35 more, 5 of them not well" in lines
    wide = shown(snapshot_of(mixed_reply(40)), 120, 40)
    named = sum(line.startswith("site-") for line in wide)
    assert f"and {40 - named} more that are well" in wide
    everything = shown(snapshot_of(mixed_reply(40)), 80)
    assert sum(line.startswith("site-") for line in everything) == 40
    assert not any(line.startswith("and ") for line in everything)


def test_what_others_wrote_is_no_markup_and_a_bar_needs_no_colours() -> None:
    for width in (80, 120, 200):
        text = plainly(snapshot_of(mixed_reply(6)), width)
        for phrase in ("[red]out-of-memory", "[bold]wrong", "epoch 1/3 [/]"):
            assert phrase in text
        assert "\x1b" not in text
    (line,) = [line for line in shown(snapshot_of(mixed_reply(6)), 80) if line.startswith("site-01  ")]
    assert " ".join(line.split()) == "site-01 started ━━━───── 3 s ago 12.3 MB training, epoch 2/5"


def test_telemetry_is_shown_with_its_unit_where_there_is_room() -> None:
    assert "GPU 3.2 GB · disk 120.0 GB free" in plainly(snapshot_of(mixed_reply(6)), 140)
    assert "GPU" not in plainly(snapshot_of(mixed_reply(6)), 80)
    assert "machine" not in plainly(snapshot_of(answer(sites=[site("a")])), 140)
    told = {"step_seconds": 0.123456, "policy_refusals": 3.0, "bytes_released": 2e6, "gpu_memory_bytes": 0.0}
    text = plainly(snapshot_of(answer(sites=[site("a", telemetry=told)])), 200)
    assert "0.123 s a step · 3 refused by policy · 2.0 MB released" in text
    assert "GPU" not in text


ONE_CLASS = pb.ModelWarning(code="one-class", round=6, text="The global model calls every image [nv].")


def own_model(number: int) -> pb.ModelWarning:
    return pb.ModelWarning(code="chance", round=6, site=f"site-{number}", text=f"The model of site-{number} guesses.")


def warned(*warnings: pb.ModelWarning) -> RunSnapshot:
    reply = answer(published(910, 920))
    reply.detail.model_warnings.extend(warnings)
    return snapshot_of(reply)


def test_what_speaks_against_a_model_is_in_the_header_and_one_line_once() -> None:
    assert "one-class: The global model calls every image [nv]." in shown(warned(ONE_CLASS), 100)[:6]
    lines = shown(warned(ONE_CLASS, *map(own_model, range(5))), 100)[:10]
    assert [line.split()[0] for line in lines if "model" in line] == ["one-class:", *["chance:"] * 3, "and"]
    assert "and 2 own models more: --json" in lines
    line = "one-class: The global model calls every image [nv]."
    later = warned(
        pb.ModelWarning(code="one-class", round=7, text="The global model calls every image [nv] in round 7.")
    )
    assert line in changes(None, warned(ONE_CLASS))
    assert changes(warned(), warned(ONE_CLASS)) == [line]
    assert changes(warned(ONE_CLASS), later) == []
    assert changes(warned(ONE_CLASS), warned(ONE_CLASS, own_model(1))) == ["chance: The model of site-1 guesses."]


def test_scores_stand_in_their_order_with_changes_for_better_or_worse() -> None:
    names = ("global.auroc", "personal.pm_v", "global.majority", "global.accuracy", "global.balanced_accuracy")
    told = snapshot_of(answer(published(910, 920), scores={1: [score(name, 0.5) for name in names]}))
    assert [one.name for one in told.scores] == [names[3], names[4], names[2], names[1], names[0]]
    first = answer(scores={5: [score("global.accuracy", 0.5), score("global.ece", 0.3)]})
    second = answer(scores={6: [score("global.accuracy", 0.6), score("global.ece", 0.4)]})
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(WatchScreen(snapshot_of(first, second)))
    accuracy, ece = (line for line in captured.get().splitlines() if "global." in line)
    assert "\x1b[32m+0.1000" in accuracy
    assert "\x1b[31m+0.1000" in ece


def test_the_header_says_what_is_the_matter() -> None:
    def lines(snapshot: RunSnapshot) -> list[str]:
        return shown(snapshot, 100)[:6]

    assert "no round was opened yet" in lines(snapshot_of(answer(phase="waiting for sites")))
    queue = [info(run="other"), info(status="queued")]
    waits = snapshot_of(answer(status="queued", runs=queue))
    assert "next in the queue, behind other (running, round 7 of 20)" in lines(waits)
    silent = replace(waits, trouble="start it", silent_s=7.2)
    assert "no answer for 7 s, trying again; start it" in lines(silent)
    failed = snapshot_of(answer(published(910, 920), status="failed", reason="disk [full]", ended_at=930.0))
    assert "disk [full]" in lines(failed)
    assert "took 20 s" in lines(failed)
    assert "80 s so far · paused" in lines(snapshot_of(answer(published(920, 930), status="paused")))
    deadline = snapshot_of(answer([attempt(1, "open", 985, a="started")], deadline_s=600.0))
    assert lines(deadline)[2].startswith("collecting for 15 s of at most 10 min · 0 of 0 sites reported")


def waits(reason: str = "required-sites", has: int = 1, seconds_left: float | None = 604_800.0) -> dict[str, Any]:
    missing = [pb.MissingSite(site="norht", why="unknown", similar="north", required=True)]
    text = f"needs 2 trainers, has {has}; missing: norht (required, no such site is known; did you mean north?)"
    return {
        "waiting": pb.Waiting(reason=reason, text=text, needed=2, has=has, missing=missing, seconds_left=seconds_left)
    }


def test_a_run_that_does_not_go_on_says_why_on_as_many_lines_as_it_takes() -> None:
    stuck = snapshot_of(answer(phase="waiting", unmet=["required_sites names 'norht'"], **waits()))
    for width in (60, 200):
        text = " ".join(line.strip() for line in shown(stuck, width))
        assert "has 1; missing: norht (required, no such site is known; did you mean north?);" in text
        assert "the run fails in 7 d if that stays so" in text
        assert "warning: required_sites names 'norht'" in text
    for reason in ("updates", "scores", "paused", "queued"):  # other lines say these
        assert "norht" not in plainly(snapshot_of(answer(**waits(reason))), 100)


def test_a_reason_to_wait_is_a_line_when_it_is_new_and_json_by_its_fields() -> None:
    before, stuck = snapshot_of(answer()), snapshot_of(answer(unmet=["a", "b"], **waits()))
    assert [line.partition(";")[0] for line in changes(before, stuck)] == [
        "needs 2 trainers, has 1",
        "warning: a",
        "warning: b",
    ]
    assert changes(stuck, snapshot_of(answer(unmet=["a", "b"], **waits(seconds_left=5.0)))) == []
    (line,) = changes(stuck, snapshot_of(answer(unmet=["b"], **waits(has=0))))
    assert line.startswith("needs 2 trainers, has 0")
    assert changes(stuck, before) == []
    told = json.loads(json.dumps(plain(snapshot_of(answer(unmet=["a"], **waits())))))
    assert told["unmet"] == ["a"]
    assert {key: told["waiting"][key] for key in ("reason", "needed", "has", "seconds_left")} == {
        "reason": "required-sites",
        "needed": 2,
        "has": 1,
        "seconds_left": 604_800.0,
    }
    assert told["waiting"]["missing"] == [{"site": "norht", "why": "unknown", "similar": "north", "required": True}]
    assert plain(snapshot_of(answer()))["waiting"] is None


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("back-off", "x, in 40 s"),
        ("updates", "x; 40 s left"),
        ("trainers", "x; the run fails in 40 s if that stays so"),
    ],
)
def test_the_time_that_is_left_is_said_as_what_it_is(reason: str, said: str) -> None:
    found = waiting(info(waiting=pb.Waiting(reason=reason, text="x", seconds_left=40.0)))
    assert found is not None
    assert found.sentence == said


def test_a_list_of_runs_says_it_in_short_and_a_run_shows_all_of_it() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(
            tables.runs_table([info(phase="waiting", **waits()), info(phase="collecting", **waits("updates"))])
        )
    lines = captured.get().splitlines()
    assert lines[1].rstrip().endswith("needs 2 trainers, has 1")
    assert lines[2].rstrip().endswith("collecting")
    with console.capture() as captured:
        for part in tables.run_parts(pb.RunDetail(info=info(unmet=["w"], **waits())), everything=False):
            console.print(part)
    assert "missing: norht (required" in captured.get()
    assert "warning: w" in captured.get()


def test_what_is_less_important_goes_first() -> None:
    there = Rows(sites=10, problems=5, scores=4, strip=4)
    assert fitting(there, 0).lines(there.sites) == 0
    assert fitting(there, 3) == Rows(sites=1)
    assert fitting(there, 5) == Rows(sites=3)
    assert fitting(there, 7) == Rows(sites=3, problems=1)
    assert fitting(there, 9) == Rows(sites=3, problems=1, scores=1)
    assert fitting(there, 13) == Rows(sites=3, problems=1, scores=1, strip=4)
    assert fitting(there, None) == replace(there, gaps=1)
    for room in range(60):
        rows = fitting(there, room)
        assert rows.lines(there.sites) <= room
    assert fitting(there, 30) == replace(there, gaps=1)


def test_a_line_says_what_is_new_and_json_all_fields() -> None:
    before = snapshot_of(mixed_reply(4))
    assert changes(None, before) == [
        "digits-fednh · fednh · running · round 7 of 20",
        "round 7: abandoned after 10.0 s, 0 of 0 reported: no quorum: 2 of 4 · about 2 min more (by the last 6 rounds)",
    ]
    assert changes(before, snapshot_of(mixed_reply(4), now=NOW + 100)) == []
    told = json.loads(json.dumps(plain(snapshot_of(mixed_reply(4)))))
    assert (told["run"], told["status"], told["round"], told["rounds"]) == ("digits-fednh", "running", 7, 20)
    assert told["rest"]["by_rounds"] == 6
    assert told["sites"][1]["site"] == "site-02"
    assert {one["site"]: one["care"] for one in told["sites"]}["site-00"] == "well"
    assert told["history"][3]["failed"] == {"late": 1}
    assert told["problems"][0]["what"] == "failed"


def test_a_round_is_one_line_with_who_took_part_and_its_scores_and_each_error_has_its_own() -> None:
    rounds, sites = published(910, 920, 930, a="reported"), [site("a"), site("b")]
    first = answer([*rounds, attempt(3, "open", 930, a="started", b="started")], sites, {2: [score("x", 0.5)]}, round=3)
    after = [*rounds, attempt(3, "degraded", 930, 942, a="reported", b="late")]
    after[-1].sites[1].reason = "silent"
    after[-1].sites[0].refusals.append("damaged: not a number")
    second = answer(after, [site("a"), site("b", "silent")], {3: [score("x", 0.75)]}, round=3)
    assert changes(snapshot_of(first), snapshot_of(first, second)) == [
        "round 3: degraded after 12.0 s, 1 of 2 took part without b, 1 late, 1 refused · x 0.7500 (+0.2500) · about 3 "
        "min more (by the last 3 rounds)",
        "round 3: b late: silent",
        "round 3: a refused: damaged: not a number",
        "b: silent: training, epoch 2/5",
    ]


SUMMING = pb.Waiting(reason="sum", text="2 of 2 sites are to answer", needed=2, has=0, seconds_left=60.0)


def sum_of(status: str, *steps: str, outcome: str = "open", **scored: str) -> pb.RoundInfo:
    """Round 1 under a secure aggregation of a and b, in the last of the steps, of which `status` are the tasks."""
    row = attempt(1, outcome, 910, 0.0 if outcome == "open" else 920, a="reported", b="reported")
    for kind in steps:
        for name in "ab":
            row.sites.add(site=name, kind=kind, task_status=status if kind == steps[-1] else "reported")
    for name, told in scored.items():
        row.sites.add(site=name, kind="score", task_status=told)
    return row


def test_a_secure_aggregation_is_one_line_a_round_whatever_its_steps() -> None:
    steps, told = ("share", "mask", "agree", "reveal"), {1: [score("x", 0.5)]}
    summing = [
        answer([sum_of(status, *steps[:number])], round=1, phase=f"summing: {steps[number - 1]}", waiting=SUMMING)
        for number in range(1, len(steps) + 1)
        for status in ("invited", "started", "reported")
    ]
    done = sum_of("reported", *steps, outcome="published")
    asked = sum_of("reported", *steps, outcome="published", e="started")
    opened = [done, attempt(2, "open", 921, a="invited", b="invited")]
    replies = [
        answer([attempt(1, "open", 910, a="invited", b="started")], round=1),
        *summing,
        answer([done], round=1, phase="waiting"),
        answer([asked], round=1, phase="evaluating"),
        answer([asked], scores=told, round=1, phase="evaluating"),
        answer([done], scores=told, round=1, phase="waiting"),
        answer(opened, scores=told, round=2),
    ]
    seen = [snapshot_of(*replies[: number + 1]) for number in range(len(replies))]
    lines = [line for before, after in pairwise(seen) for line in changes(before, after)]
    assert lines == ["round 1: published after 10.0 s, 2 of 2 took part · x 0.5000"]


def test_who_dropped_out_is_named_and_a_round_without_scores_waits_for_the_next() -> None:
    row = sum_of("reported", "share", "mask", outcome="degraded")
    row.sites[-1].task_status = "late"
    lines = changes(snapshot_of(answer()), snapshot_of(answer([row], scores={1: [score("x", 0.5)]})))
    assert lines[0].startswith("round 1: degraded after 10.0 s, 1 of 2 took part without b, 1 late · x 0.5000")
    rounds = published(910, 920, a="reported")
    before = snapshot_of(answer([attempt(1, "open", 910, a="started")], round=1))
    closed, line = answer(rounds, round=1, phase="waiting"), "round 1: published after 10.0 s, 1 of 1 took part"
    assert changes(before, snapshot_of(closed)) == []
    next_one = answer([*rounds, attempt(2, "open", 921, a="invited")], round=2)
    assert changes(snapshot_of(closed), snapshot_of(next_one)) == [line]
    for status in ("paused", "completed"):
        assert line in changes(snapshot_of(closed), snapshot_of(answer(rounds, round=1, status=status)))
    assert line in changes(before, snapshot_of(answer(rounds, round=1, **waits())))


def test_a_silent_server_and_the_end_are_told() -> None:
    well = snapshot_of(mixed_reply(4))
    silent = replace(well, trouble="start it", silent_s=3.0)
    assert changes(well, silent) == ["no answer for 3 s, trying again; start it"]
    assert changes(silent, replace(silent, silent_s=9.0)) == []
    assert changes(replace(silent, silent_s=9.0), well) == ["it answers again, after 9 s"]
    going, ended = snapshot_of(answer()), snapshot_of(answer(status="aborted", reason="enough", ended_at=990.0))
    assert changes(going, ended) == ["digits-fednh · fednh · aborted · round 7 of 20 · enough"]
