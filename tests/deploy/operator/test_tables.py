"""Runs, rounds and sites as the commands list them, on terminals of any width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from tests.support.disturbed_run import RUN

from protofed.common.errors import ConfigError
from protofed.deploy.operator import tables
from protofed.deploy.operator.connection import plain
from protofed.deploy.operator.snapshot_builder import best_snapshot
from protofed.deploy.run_view import best_sentence, kept_best
from protofed.protos.v1 import operator_pb2 as pb

BEST = pb.BestRound(round=7, score="global.balanced_accuracy", value=0.8125, kept=7)


def shown(width: int, *parts: Any) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_words_and_numbers_are_never_cut(width: int) -> None:
    run, reason = "a-rather-long-name-of-a-run-on-ham10000-with-seed-3", "words " * 40
    info = pb.RunInfo(run=run, method="cwfedavg-private", status="completed", round=300, rounds=300, invited=100)
    lines = shown(width, tables.runs_table([info]))
    assert max(map(len, lines)) <= width
    for word in ("cwfedavg-private", "completed", "300/300", "0/100"):
        assert any(word in line.split() for line in lines), lines
    assert "".join(line.split()[0] for line in lines[1:] if not line.startswith(" ")) == run
    row = pb.RoundInfo(round=300, attempt=12, outcome="rolled-back", reason=reason, opened_at=1, closed_at=2)
    row.sites.add(site="hospital-of-a-long-name", kind="initialise", task_status="rejected", reason=reason)
    lines = shown(width, *tables.run_parts(pb.RunDetail(info=info, rounds=[row]), everything=True))
    assert max(map(len, lines)) <= width
    assert " ".join(lines).count("words") == 80
    for word in ("rolled-back", "rejected", "initialise", "300", "12"):
        assert any(word in line.split() for line in lines), lines


def test_a_list_cuts_no_date_and_gives_an_end_in_few_words() -> None:
    info = pb.SiteInfo(site="a-site-with-a-long-name", roles=["trainer"], status="working", activity_text="training")
    info.certificate_until = 4_000_000_000.0
    page = io.StringIO()
    Console(file=page, width=30, soft_wrap=True).print(tables.sites_table([info]))
    assert "2096-10-02" in page.getvalue()
    assert "certificate until" in page.getvalue()
    why = "round 7 was abandoned 5 times: 3 of 3 sites cannot do the task (last reason: policy; the log names the rule)"
    ended = pb.RunInfo(run="lesions", method="fednh", status="failed", reason=why, ended_at=1.0, round=7, rounds=40)
    text = " ".join(shown(120, tables.runs_table([ended])))
    assert "round 7 was abandoned 5 times" in text
    assert "names the rule" not in text
    ended.reason = "words " * 40
    assert " ".join(shown(120, tables.runs_table([ended]))).count("words") < 10
    assert " ".join(shown(120, *tables.run_parts(pb.RunDetail(info=ended), everything=False))).count("words") == 40


def test_a_run_has_its_warnings_above_few_rounds_and_few_scores() -> None:
    warnings = [pb.ModelWarning(code="one-class", round=2, text="It calls every image 'nv'.")]
    detail = pb.RunDetail(rounds=[pb.RoundInfo(round=2)], attempts=1, model_warnings=warnings)
    lines = shown(80, *tables.run_parts(detail, everything=False))
    assert lines.index("one-class: It calls every image 'nv'.") < lines.index("rounds")
    assert plain(detail)["model_warnings"] == [
        {"code": "one-class", "round": 2, "site": "", "text": "It calls every image 'nv'."}
    ]
    scores = [pb.Score(name=name, mean=0.5, sites=3) for name in ("global.accuracy", "global.recall.7")]
    lines = shown(80, *tables.run_parts(pb.RunDetail(scores=scores, scored_round=4), everything=False))
    assert "scores after round 4" in lines
    assert sum("global" in line for line in lines) == 1
    detail = pb.RunDetail(info=pb.RunInfo(ended_at=1.0), rounds=[pb.RoundInfo(round=1, outcome="open")])
    assert any("unfinished" in line for line in shown(80, *tables.run_parts(detail, everything=False)))


def test_of_many_rounds_the_newest_are_shown() -> None:
    rounds = [pb.RoundInfo(round=number, outcome="published") for number in range(25)]
    few = shown(80, *tables.run_parts(pb.RunDetail(rounds=rounds[-10:], attempts=25), everything=False))
    assert sum("published" in line for line in few) == 10
    assert "15 earlier attempts: --all" in few
    whole = shown(80, *tables.run_parts(pb.RunDetail(rounds=rounds, attempts=25), everything=True))
    assert sum("published" in line for line in whole) == 25
    assert not any("earlier" in line for line in whole)


@pytest.mark.parametrize(("kept", "end"), [(5, "the best that is kept is round 5"), (-1, "none is kept")])
def test_the_best_round_is_named_with_its_score_and_whether_it_is_kept(kept: int, end: str) -> None:
    (line,) = [
        line for line in shown(120, *tables.run_parts(pb.RunDetail(best=BEST), everything=False)) if "best" in line
    ]
    assert line == "best: round 7, global.balanced_accuracy 0.8125 (chosen by this score: optimistic)"
    assert not any("best" in line for line in shown(120, *tables.run_parts(pb.RunDetail(), everything=False)))
    best = best_snapshot(pb.RunDetail(best=pb.BestRound(round=7, score="x", value=0.5, kept=kept)))
    assert best is not None
    assert best_sentence(best).endswith(f"its state is no longer kept, {end}")
    with pytest.raises(ConfigError, match="no longer kept") as error:
        kept_best(RUN, best)
    assert ("round 5" in str(error.value)) is (kept == 5)
