"""The pictures of the hospital's pages: what they draw, how they are served, and that they are drawn once."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from tests.support.browser_client import Browser
from tests.support.task_recipes import task_recipe

from protofed.client.policy.approval import FOLDER as APPROVALS
from protofed.client.policy.approval import Approvals
from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.state.dp_ledger import FILE as LEDGER
from protofed.client.state.dp_ledger import DpLedger, Spent, read
from protofed.client.state.own_scores import FOLDER as SCORES
from protofed.client.state.own_scores import OwnRoundScores, OwnScores
from protofed.client.transport.audit import FILE as AUDIT
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.protocol.messages import Assignment, Task, TaskKind
from protofed.common.storage.journal import Journal
from protofed.deploy.audit.reader import HandedIn
from protofed.deploy.pages import pictures
from protofed.deploy.pages.guard import SVG_POLICY
from protofed.deploy.pages.hospital import figures, site
from protofed.deploy.pages.hospital.examination import Examination, SiteSettings
from protofed.deploy.pages.hospital.page import build_pages, client_page
from protofed.deploy.pages.hospital.site import MAX_POINTS, HospitalSite, PrivacyCurve, PrivacyPoint, chosen
from protofed.deploy.pages.pictures import NARROW, WIDE
from protofed.deploy.pages.shell import stamp, utc
from protofed.deploy.site.own_scores import ScoresView
from protofed.deploy.site.privacy import PrivacySpent

IMAGE = re.compile(r'<img class="drawn" src="(/pictures/\w+\.svg)"[^>]* alt="([^"]+)"')
RAW = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")
TASK = Task(TaskKind.FIT, "digits", 1, "a", Digest("a" * 64), 1, 60.0)
BUDGET = 'methods = ["fedavg"]\nparts = ["body"]\ndp = { epsilon = 8.0, delta = 1e-6, unit = "patient" }\n'
WAIT_S = 60.0


def images(text: str) -> dict[str, str]:
    return dict(IMAGE.findall(text))


def add_update(state: Path, number: int, size: int) -> None:
    """An update of the run `kept`, as announced."""
    facts: dict[str, Any] = {"run": "kept", "round": number, "task_id": f"t{number}", "parts": [["body", 3, size]]}
    journal = Journal(state / AUDIT)
    journal.append("sent", call="BeginUpload", digest=f"d{number}", bytes=90, facts=facts)
    journal.close()


def xs(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_xdata())]


def ys(line: Line2D) -> list[float]:
    return [float(value) for value in np.asarray(line.get_ydata())]


def bars_of(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_a_picture_is_svg_without_scripts_with_its_words_and_numbers_beside_it(state: Path) -> None:
    browser = Browser(client_page(state))
    text = browser.get("/left")
    ((address, words),) = images(text).items()
    assert "body" in words
    assert 'id="numbers-parts"' in text
    narrow = re.findall(r'srcset="([^"]+)"', text)
    for one in (address, *narrow):
        answer = browser.client.get(one)
        assert answer.headers["content-type"] == "image/svg+xml"
        assert answer.headers["content-security-policy"] == SVG_POLICY
        assert answer.text.startswith("<?xml")
        assert "<script" not in answer.text
    browser.get("/pictures/none.svg", 400)
    assert len(narrow) == 1


def test_a_picture_is_drawn_once_and_anew_when_something_has_left(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    real = pictures._drawn

    def noted(sketch: pictures.Sketch) -> pictures.Picture:
        drawn.append(sketch.title)
        return real(sketch)

    monkeypatch.setattr(pictures, "_drawn", noted)
    browser = Browser(client_page(state))
    first = images(browser.get("/left"))
    assert images(browser.get("/left?fragment=1")) == first
    assert len(drawn) == 1
    add_update(state, 2, 5_000_000)
    second = images(browser.get("/left"))
    assert second.keys() != first.keys()
    assert len(drawn) == 2


def test_a_site_that_sent_nothing_has_no_picture(state: Path) -> None:
    (state / AUDIT).unlink()
    shutil.rmtree(state / SCORES)
    browser = Browser(client_page(state))
    for path in ("/", "/left", "/runs/kept"):
        assert images(browser.get(path)) == {}
    assert 'id="log-good"' not in browser.get("/left")


def test_times_are_readable_on_every_page(state: Path) -> None:
    OwnScores(state / SCORES).record("kept", 1, {"personal.pm_l": 0.25})
    DpLedger(state / LEDGER).spend(TASK, "noise", [NoisySums(0.1, 1.5, 10)])
    browser = Browser(client_page(state, "standard"))
    browser.order("/pause", until="90m", reason="moved")
    for path in ("/", "/left", "/runs", "/runs/kept", "/runs/kept/approve", "/health", "/pause"):
        assert RAW.findall(browser.get(path)) == [], path
    assert stamp("2026-11-25T06:30:00Z") == "2026-11-25 06:30:00"
    assert stamp("2026-11-25T06:30:00.123+00:00") == "2026-11-25 06:30:00"
    assert (stamp(""), stamp("soon")) == ("–", "soon")
    assert utc("paused since 2026-11-25T06:30:00Z, until then") == "paused since 2026-11-25 06:30:00 UTC, until then"
    assert stamp("2026-11-25T06:30:00+02:00") == "2026-11-25T06:30:00+02:00"  # not UTC: left as it is


def table(
    rounds: int, left: Mapping[int, set[str]], *names: str, aggregated: Mapping[int, set[str]] | None = None
) -> ScoresView:
    every = [OwnRoundScores(n, "2026-11-25T06:30:00Z", dict.fromkeys(names, n / 100)) for n in range(1, rounds + 1)]
    return ScoresView(every, HandedIn(names=dict(left), aggregated=dict(aggregated or {})))


def test_scores_that_left_are_filled_half_in_an_aggregation_and_those_that_stayed_hollow() -> None:
    name = "personal.local.accuracy"
    sketch = figures.scores_sketch(table(3, {2: {name}}, name, "personal.recall.1"), {"personal.local": 0.625})
    assert sketch is not None
    (axes,) = sketch.draw(WIDE).axes
    marks = {xs(line)[0]: line for line in axes.lines if len(xs(line)) == 1}
    filled = {number: line.get_markerfacecolor() == line.get_color() for number, line in marks.items()}
    assert filled == {1: False, 2: True, 3: False}
    majority = [line for line in axes.lines if set(ys(line)) == {62.5}]
    assert len(majority) == 1
    for part in ("1.0% in round 1", "3.0% in round 3", "1 of 3 sent", "62.5%"):
        assert part in sketch.description
    assert figures.scores_sketch(table(3, {}, "train.own"), {}) is None
    sketch = figures.scores_sketch(table(3, {2: {name}}, name, aggregated={1: {name}}), {})
    assert sketch is not None
    (axes,) = sketch.draw(WIDE).axes
    styles = {xs(line)[0]: line.get_fillstyle() for line in axes.lines if len(xs(line)) == 1}
    assert styles == {1: "bottom", 2: "full", 3: "full"}
    assert "1 of 3 sent, 1 of 3 sent in a secure aggregation" in sketch.description


def test_findings_are_in_percent_and_errors_of_a_number_in_a_panel_of_their_own() -> None:
    names = ("personal.local.auroc", "personal.local.sensitivity", "personal.local.mae", "personal.local.class_auroc.0")
    sketch = figures.scores_sketch(table(3, {}, *names), {})
    assert sketch is not None
    shares, errors = sketch.draw(WIDE).axes
    assert [ys(line) for line in shares.lines if len(xs(line)) > 1] == [pytest.approx([1.0, 2.0, 3.0])] * 2
    assert [ys(line) for line in errors.lines if len(xs(line)) > 1] == [pytest.approx([0.01, 0.02, 0.03])]
    assert (shares.get_ylabel(), errors.get_ylabel()) == ("%", "")
    assert errors.get_title() == "This site's own model, on its own test images: mean absolute error"
    assert "personal.local.mae: 0.010 in round 1, 0.030 in round 3" in sketch.description


def test_of_many_rounds_all_are_on_the_line_and_some_have_marks() -> None:
    sketch = figures.scores_sketch(table(500, {}, "personal.accuracy", "loss"), {})
    assert sketch is not None
    figure = sketch.draw(NARROW)
    scores, loss = figure.axes
    assert len(xs(scores.lines[0])) == 500
    assert len(scores.lines) == len(loss.lines) == 1 + figures.MAX_MARKS
    assert figure.get_figheight() > sketch.draw(WIDE).get_figheight()  # panels below each other


def test_the_line_of_the_commonest_class_takes_a_check_of_the_same_recipe(
    state: Path, recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    offer = Approvals(state / APPROVALS).offer("kept")
    OwnScores(state / SCORES).record("kept", 1, {"personal.local.accuracy": 0.25})
    site = HospitalSite(state, None, SiteSettings(tmp_path / "site.toml", {}))
    browser = Browser(build_pages(site))
    assert "commonest" not in " ".join(images(browser.get("/runs/kept")).values())
    data = {"taken": {"own_test_set": [1, 3], "tests_on": [5, 5]}}
    found = Examination("kept", True, 1.0, 2.0, recipe=offer.digest, data=data)
    assert site.examiner is not None
    for recipe, known in ((offer.digest, True), ("another", False)):
        site.examiner._examinations["kept"] = replace(found, recipe=recipe)
        words = " ".join(images(browser.get("/runs/kept")).values())
        assert ("75.0% of personal.local.accuracy" in words) is known


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_what_is_no_class_has_no_commonest_one(task: str, state: Path, tmp_path: Path) -> None:
    """A check counts findings, or all images: neither is a share of classes."""
    Approvals(state / APPROVALS).record_offer(Assignment("odd", task_recipe(task).wire()))
    OwnScores(state / SCORES).record("odd", 1, {"personal.local.auroc": 0.75})
    site = HospitalSite(state, None, SiteSettings(tmp_path / "site.toml", {}))
    assert site.examiner is not None
    digest = Approvals(state / APPROVALS).offer("odd").digest
    data = {"taken": {"own_test_set": [1, 3], "tests_on": [5, 5]}}
    site.examiner._examinations["odd"] = Examination("odd", True, 1.0, 2.0, recipe=digest, data=data)
    words = " ".join(images(Browser(build_pages(site)).get("/runs/odd")).values())
    assert "75.0% in round 1" in words
    assert "commonest" not in words


def test_bytes_stack_to_what_left_by_run_and_by_round() -> None:
    parts = {("a", f"part-{n}"): 10**n for n in range(8)} | {("b", "part-7"): 5}
    sketch = figures.by_run_sketch(parts)
    assert sketch is not None
    (axes,) = sketch.draw(WIDE).axes
    assert sum(bar.get_width() for bar in bars_of(axes)) == sum(parts.values())
    assert len(axes.containers) == figures.MAX_PARTS
    assert len({bars[0].get_hatch() for bars in axes.containers}) == figures.MAX_PARTS  # without colours, too
    assert figures.by_run_sketch({}) is None
    rounds = {number: {"body": 10, "head": number % 2} for number in range(1, 1001)} | {0: {"body": 7777}}
    sketch = figures.by_round_sketch("long", rounds)
    assert sketch is not None
    assert sketch.numbers is not None
    assert len(sketch.numbers.rows) <= figures.MAX_BARS
    (axes,) = sketch.draw(WIDE).axes
    assert sum(bar.get_height() for bar in bars_of(axes)) == 10 * 1000 + 500
    assert figures.by_round_sketch("none", {0: {"body": 1}}) is None


def spent_by(fits: int, state: Path) -> Spent:
    ledger = DpLedger(state / LEDGER)
    for number in range(fits):
        ledger.spend(replace(TASK, task_id=f"t{number}", round=number), "noise", [NoisySums(0.1, 1.5, 1)])
    return read(state / LEDGER)


def complete(curve: PrivacyCurve, spent: Spent) -> list[PrivacyPoint]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        points, whole = curve.points(spent, 1e-5)
        if whole:
            return points
        time.sleep(0.005)
    raise AssertionError("the points are not computed")


def test_no_request_waits_for_the_accountant_and_no_point_is_computed_twice(tmp_path: Path) -> None:
    threads, sizes = set(), []
    go_on = threading.Event()

    def account(events: Iterable[NoisySums], delta: float) -> float:
        assert go_on.wait(WAIT_S)
        threads.add(threading.current_thread())
        sizes.append(sum(event.count for event in events))
        return float(sizes[-1])

    curve, spent = PrivacyCurve(account), spent_by(5, tmp_path)
    assert curve.points(spent, 1e-5) == ([], False)  # at once
    go_on.set()
    points = complete(curve, spent)
    assert [(point.fit, point.epsilon, point.round) for point in points] == [(n, float(n), n - 1) for n in range(1, 6)]
    more = spent_by(7, tmp_path)
    assert [point.fit for point in complete(curve, more)] == [1, 2, 3, 4, 5, 6, 7]
    assert sizes == [1, 2, 3, 4, 5, 6, 7]
    assert threading.main_thread() not in threads


def test_another_ledger_in_its_place_is_computed_anew(tmp_path: Path) -> None:
    curve = PrivacyCurve(lambda events, _: float(sum(event.noise_multiplier for event in events)))
    first = complete(curve, spent_by(2, tmp_path))
    ledger = DpLedger(tmp_path / "other" / LEDGER)
    ledger.spend(TASK, "noise", [NoisySums(0.1, 9.0, 1)])
    other = complete(curve, read(tmp_path / "other" / LEDGER))
    assert [point.epsilon for point in first] == [1.5, 1.5]
    assert [point.epsilon for point in other] == [9.0]


def test_few_fits_are_chosen_and_beyond_all_use_is_in_the_table_alone(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [PrivacyPoint(1, "2026-11-25T06:30:00Z", "a", 1, 2.0), PrivacyPoint(2, "", "a", 2, None)]
    spent = PrivacySpent((), 0, None, 1e-5, 8.0, "patient")
    sketch = figures.privacy_sketch(points, spent)
    (axes,) = sketch.draw(WIDE).axes
    assert xs(axes.lines[0]) == [0, 1]
    assert set(ys(axes.lines[1])) == {8.0}  # the budget
    assert sketch.numbers is not None
    assert sketch.numbers.rows[1][-1] == "beyond all use"
    assert len(figures.privacy_sketch(points, replace(spent, budget=None)).draw(WIDE).axes[0].lines) == 1
    for fits in (0, 1, 59, 60, 61, 1000, 12_345):
        picked = chosen(fits)
        assert len(picked) <= MAX_POINTS
        assert picked == sorted(set(picked))
        assert picked[-1:] == ([fits] if fits else [])
        assert set(chosen(fits + 1)) >= set(picked) - {fits} or len(chosen(fits + 1)) < len(picked)
    monkeypatch.setattr(site, "MAX_POINTS", 4)
    curve = PrivacyCurve(lambda events, _: float(sum(event.count for event in events)))
    assert [point.fit for point in complete(curve, spent_by(10, state))] == [4, 8, 10]


def test_the_overview_draws_what_is_spent_beside_the_budget(state: Path, tmp_path: Path) -> None:
    DpLedger(state / LEDGER).spend(TASK, "noise", [NoisySums(0.1, 1.5, 10)])
    (policy := tmp_path / "budget.toml").write_text(BUDGET)
    site = HospitalSite(state, str(policy))
    browser = Browser(build_pages(site))
    assert "data-going" in browser.get("/")  # its points are being computed
    deadline = time.monotonic() + WAIT_S
    while not (found := images(browser.get("/"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (words,) = found.values()
    assert "of 8 for each patient" in words
    text = browser.get("/")
    assert "data-going" not in text
    assert 'id="numbers-privacy"' in text
