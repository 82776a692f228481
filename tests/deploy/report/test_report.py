"""`protofed report`: of real runs, whatever became of them; the page needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import structlog
from tests.support.command_line import called
from tests.support.disturbed_run import RUN, close_channels, disturbed_run
from tests.support.policies import standard_with_plain_updates

from protofed.client.policy.policy import Policy
from protofed.common.address import NO_TLS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, StateError
from protofed.deploy.cli import report as cli_report
from protofed.deploy.operator.connection import Operator
from protofed.deploy.report.document import megabytes
from protofed.deploy.report.report import report, write_report
from protofed.deploy.report.summary import problems
from protofed.deploy.run_view import NOISE_KEEPS, RunView
from protofed.deploy.simulation.simulation import simulation
from protofed.deploy.state_folder import open_state

RecipeOf = Callable[..., Recipe]
SECTIONS = [
    "summary",
    "curves",
    "classes",
    "groups",
    "fairness",
    "calibration",
    "prototypes",
    "norms",
    "participation",
    "refusals",
    "transfers",
    "settings",
    "provenance",
    "words",
]


def told(
    folder: Path, recipe: Recipe, until: Callable[[Any], bool] = lambda _running: False, policy: Policy | None = None
) -> dict[str, Any]:
    """The run record of a simulation that goes on until then, or to its end."""
    with simulation(recipe, folder, policy=policy) as running:
        running.go(until=lambda: until(running))
    return cli_report.read_run_record(folder, recipe.name)


def page(run_record: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The HTML, which is also well-formed XML, and its sections' texts."""
    html = report(run_record)
    root = ElementTree.fromstring(html)  # noqa: S314  (our own)
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    linked = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert linked <= set(ids)
    return html, {s.attrib["id"]: " ".join("".join(s.itertext()).split()) for s in root.iter("section")}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, recipe_of: RecipeOf) -> dict[str, Any]:
    """FedNH with all scores there are."""
    evaluation = {"frequency_groups": True, "probabilities": True}
    return told(tmp_path_factory.mktemp("report") / "full", recipe_of("fednh", evaluation=evaluation, rounds=2))


@pytest.fixture(scope="module")
def whole(full: dict[str, Any]) -> tuple[str, dict[str, str]]:
    return page(full)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, recipe_of: RecipeOf) -> dict[str, Any]:
    """FedAvg: no prototypes, and no scores beside the usual ones."""
    return told(tmp_path_factory.mktemp("report") / "plain", recipe_of("fedavg", rounds=1))


def test_a_full_run_has_every_section_and_needs_nothing_from_anywhere(whole: tuple[str, dict[str, str]]) -> None:
    html, sections = whole
    assert list(sections) == SECTIONS
    assert "http" not in html.lower().replace("http-equiv", "")
    assert not re.search(r"<script|@import|<iframe|<img|url\((?!#)|\ssrc=", html)
    for element in re.findall(r'(?<=href=")[^"]+', html):
        assert element.startswith(("#", "data:"))
    assert 'class="missing"' not in html
    assert html.count("<svg") == html.count('role="img"') == html.count("<figure>") >= 7
    assert html.count("<title") == html.count("<svg") + 1
    assert html.count("<desc") == html.count("<svg")


def test_the_summary_and_tables_have_the_numbers(full: dict[str, Any], whole: tuple[str, dict[str, str]]) -> None:
    summary = whole[1]["summary"]
    scores = full["scores"][-1]["sites"]
    own = {site: told["personal.pm_v"] for site, told in scores.items() if "personal.pm_v" in told}
    worst = min(own, key=lambda site: own[site])
    assert (
        f"balanced accuracy {100 * scores['evaluator']['global.balanced_accuracy']:.1f} % (10.0 % by chance)" in summary
    )
    assert f"accuracy {100 * scores['evaluator']['global.accuracy']:.1f} %" in summary
    assert "The global model of round 2, on the test set of evaluator" in summary
    assert f"the worst is that of {worst} with {100 * own[worst]:.1f} %" in summary
    assert f"{100 * sum(own.values()) / len(own):.1f} % on average" in summary
    assert (
        "3 of 3 invited sites took part: site-1, site-2 and site-3. The global model was scored by evaluator."
        in summary
    )
    assert "trained by FedNH: 2 of 2 planned rounds are finished" in summary
    assert "Nothing went wrong" in summary
    _, sections = whole
    recalls = full["classes"]["newest"]["sites"]["evaluator"]
    assert all(f"{100 * recalls[f'global.recall.{c}']:.1f}" in sections["classes"] for c in range(10))
    assert f"{full['prototypes']['cosines'][0][1]:.2f}" in sections["prototypes"]
    assert f"{full['rounds'][-1]['statistics']['prototype_shift']:.4f}" in sections["prototypes"]
    received = sum(task["received"] for one in full["rounds"] for task in one["tasks"])
    assert megabytes(received) in sections["transfers"]
    assert "Reliability of the global model in round 2" in sections["calibration"]


def test_classes_are_called_as_the_run_calls_them(full: dict[str, Any]) -> None:
    names = [f"lesion <{c}>" for c in range(10)]
    html, sections = page({**full, "recipe": {**full["recipe"], "class_names": names}})
    for section in ("classes", "prototypes", "norms"):
        assert all(name in sections[section] for name in names), section
    assert any(name in sections["summary"] for name in names)  # found least, or never
    assert "lesion <" not in html


def without(*empty: str) -> list[str]:
    """The sections of a page in which some have nothing to say."""
    told = [key for key in SECTIONS if key not in empty]
    return [*told[:-1], "absent", told[-1]]


class Headings(HTMLParser):
    """Which headings of a page have no content before the next one of their level or above, or before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.empty: list[str] = []
        self._open: list[tuple[int, str]] = []  # level and text of headings below which nothing stands yet
        self._within = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if re.fullmatch("h[1-6]", tag):
            self._within = int(tag[1])
            self.close_above(self._within)
            self._open.append((self._within, ""))

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-6]", tag):
            self._within = 0

    def handle_data(self, data: str) -> None:
        if self._within:
            level, text = self._open.pop()
            self._open.append((level, text + data))
        elif data.strip():
            self._open.clear()

    def close_above(self, level: int) -> None:
        self.empty += [text for of, text in self._open if of >= level]
        self._open = [(of, text) for of, text in self._open if of < level]


def empty_headings(html: str) -> list[str]:
    parser = Headings()
    parser.feed(html.partition("<main>")[2].partition("</main>")[0])
    parser.close_above(0)
    return parser.empty


def test_a_heading_without_content_is_found() -> None:
    for html in ("<h2>A</h2> <h2>B</h2>text", "<h2>B</h2>text<h2>A</h2>", "<h2>C</h2>t<h3>A</h3><h2>B</h2>t"):
        assert empty_headings(f"<main>{html}</main>") == ["A"]
    assert empty_headings("<main><h2>A</h2><h3>B</h3>text</main>") == []


def test_no_heading_of_a_minimal_run_is_empty_and_each_reason_stands_once(
    plain: dict[str, Any], tmp_path: Path, recipe_of: RecipeOf
) -> None:
    with simulation(recipe_of("fednh"), tmp_path) as running:
        running.runs.tick()
        running.run.stop("the wrong classes")
    for run_record in (plain, cli_report.read_run_record(tmp_path, None)):
        html, sections = page(run_record)
        assert empty_headings(html) == []
        reasons = [line.partition(": ")[2] for line in re.findall(r"<li>(.*?)</li>", html[html.index('id="absent"') :])]
        assert reasons
        assert len(reasons) == len(set(reasons))
        assert list(sections)[-2:] == ["absent", "words"]
    assert list(sections) == ["summary", "refusals", "settings", "provenance", "absent", "words"]
    for said in ("The run was aborted on", "the wrong classes", "No scores were reported"):
        assert said in sections["summary"]
    assert "Nothing went wrong" not in sections["summary"]
    assert "No round has been opened yet" in sections["absent"]


def test_what_a_run_has_not_is_left_out_and_nothing_went_wrong_only_where_it_did_not(plain: dict[str, Any]) -> None:
    html, sections = page(plain)
    assert list(sections) == without("groups", "calibration", "prototypes")
    assert "Calibration: Not scored: add [evaluation] probabilities = true" in sections["absent"]
    assert "Frequent and rare classes: Not scored: add [evaluation] frequency_groups = true" in sections["absent"]
    assert "fedavg has none" in sections["absent"]
    assert "Norms of the rows of the head" in sections["norms"]
    assert "<code>[evaluation] probabilities = true</code>" in html
    assert problems(RunView(plain))[0].startswith("Nothing went wrong")
    for task_status, said in (
        ("late", "had not reported when the round closed"),
        ("failed", "could not train"),
        ("rejected", "rejected"),
    ):
        run_record = json.loads(json.dumps(plain))
        next(one for one in run_record["rounds"][-1]["tasks"] if one["kind"] == "fit")["task_status"] = task_status
        found = problems(RunView(run_record))
        assert any(said in sentence for sentence in found)
        assert "No update of site-1 was ever used." in found


def test_training_alone_has_no_global_model_and_no_prototypes(tmp_path: Path, recipe_of: RecipeOf) -> None:
    _, sections = page(told(tmp_path, recipe_of("solo", rounds=1)))
    assert "No recalls of the global model" in sections["classes"]
    assert "The own models of 3 sites: " in sections["summary"]
    assert "Norms by class and site: Nothing to show" in sections["absent"]


def test_a_run_that_goes_on_is_told_as_it_is(tmp_path: Path, recipe_of: RecipeOf) -> None:
    run_record = told(
        tmp_path, recipe_of("fednh"), until=lambda running: len(running.ledger.scores("small-fednh")) == 1
    )
    summary = page(run_record)[1]["summary"]
    assert "The run is going on: 1 of 3 planned rounds are finished" in summary
    assert "so far" in summary


@pytest.mark.parametrize(("sites", "rounds", "classes"), [(2, 5, 2), (20, 400, 50)])
def test_a_run_of_any_size_has_a_page_of_sensible_size(
    full: dict[str, Any], sites: int, rounds: int, classes: int
) -> None:
    run_record = json.loads(json.dumps(full))
    names = [f"site-{number:02d}" for number in range(sites)]
    fit = next(task for task in full["rounds"][-1]["tasks"] if task["kind"] == "fit")
    last = run_record["rounds"][-1] | {"tasks": [fit | {"site": name} for name in names]}
    run_record["rounds"] = [last | {"round": number} for number in range(1, rounds + 1)]
    own = {name: {"personal.pm_v": place / sites} for place, name in enumerate(names)}
    run_record["scores"] = [{"round": number, "sites": own} for number in range(1, rounds + 1)]
    recalls = {name: {f"personal.recall.{c}": c / classes for c in range(classes)} for name in names}
    run_record["classes"] |= {which: {"round": rounds, "sites": recalls} for which in ("newest", "best")}
    run_record["recipe"] |= {"classes": classes, "rounds": rounds}
    run_record["prototypes"] = {"round": rounds, "cosines": [[1.0] * classes] * classes}
    run_record["norms"] = {"round": rounds, "part": "head", "sites": {name: [1.0] * classes for name in names}}
    html, sections = page(run_record)
    assert len(html) < 2e6
    assert sections["participation"].count("site-01") == 2  # of the calendar, and of the table behind it
    widest = max(len(row) for row in re.findall(r"<tr>.*?</tr>", html))
    assert widest < 12_000


KEPT = "sent no scores of their own models"
EVALUATION = {"frequency_groups": True, "probabilities": True}


def test_where_sites_keep_their_scores_the_page_says_so_and_shows_an_evaluators(
    tmp_path: Path, recipe_of: RecipeOf
) -> None:
    run_record = told(
        tmp_path,
        recipe_of("fednh", rounds=2, evaluation=EVALUATION),
        policy=Policy.read(standard_with_plain_updates(tmp_path)),
    )
    html, sections = page(run_record)
    assert run_record["classes"]["judged_by"] == "global.balanced_accuracy"
    assert RunView(run_record).keeping == ["site-1", "site-2", "site-3"]
    for section in ("summary", "curves", "classes", "fairness"):
        assert f"The sites {KEPT}" in sections.get(section, sections["absent"]), section
    assert "The global model was scored by evaluator." in sections["summary"]
    assert "own models: mean" not in sections["summary"]
    assert "own, newest" not in sections["classes"]
    assert "Own models" not in sections["curves"] + sections["groups"] + sections["calibration"]
    assert "personal." not in html
    assert not re.search(r"\bnan\b", html, re.IGNORECASE)
    assert "fairness" not in sections


def test_without_a_global_model_either_nothing_is_claimed(tmp_path: Path, recipe_of: RecipeOf) -> None:
    run_record = told(
        tmp_path,
        recipe_of("solo", rounds=1, evaluation=EVALUATION),
        policy=Policy.read(standard_with_plain_updates(tmp_path)),
    )
    html, sections = page(run_record)
    assert (run_record["scores"], run_record["classes"]["judged_by"]) == ([], "")
    for section in ("summary", "curves", "classes", "groups", "fairness", "calibration"):
        assert KEPT in sections.get(section, sections["absent"]), section
    assert "scored by evaluator" not in sections["summary"]
    assert "[evaluation]" not in sections["absent"]  # the recipe has it
    assert not re.search(r"\bnan\b", html, re.IGNORECASE)


DP = {"noise_multiplier": 1.0, "max_unit_norm": 1.0, "sampling_rate": 0.25}


@pytest.mark.parametrize("noisy", [True, False])
def test_where_own_scores_stay_because_of_noise_the_page_says_so_instead(
    tmp_path: Path, recipe_of: RecipeOf, noisy: bool
) -> None:
    plan = {"epochs": 1, "batch_size": 16, "lr": 0.1, **({"dp": DP} if noisy else {})}
    run_record = told(tmp_path, recipe_of("fedavg", rounds=1, plan=plan))
    _, sections = page(run_record)
    assert RunView(run_record).kept_by_noise is noisy
    for section in ("summary", "curves", "fairness"):
        assert (NOISE_KEEPS[1:] in sections.get(section, sections["absent"])) is noisy, section
        assert KEPT not in sections.get(section, "")


def test_own_scores_of_sites_are_told_as_the_record_has_them(
    full: dict[str, Any], whole: tuple[str, dict[str, str]]
) -> None:
    with_noise = full | {"recipe": full["recipe"] | {"plan": {**full["recipe"]["plan"], "dp": DP}}}
    assert not RunView(with_noise).kept_by_noise  # sites have sent some
    silent = with_noise | {"scores": [{**scored, "sites": {}, "spreads": {}} for scored in full["scores"]]}
    assert RunView(silent).kept_by_noise
    assert not RunView(silent | {"rounds": full["rounds"][:1]}).kept_by_noise  # round 0 has no scores

    def without_2(scored: dict[str, Any]) -> dict[str, Any]:
        return {**scored, "sites": {site: of for site, of in scored["sites"].items() if site != "site-2"}}

    by_class = {which: without_2(full["classes"][which]) for which in ("newest", "best")}
    some = full | {"scores": list(map(without_2, full["scores"])), "classes": full["classes"] | by_class}
    assert (RunView(full).keeping, RunView(some).keeping) == ([], ["site-2"])
    assert f"1 of 3 sites {KEPT}" in page(some)[1]["fairness"]
    evaluation = {**full["recipe"]["evaluation"], "personal_test_images": 2000}
    sampled = page({**full, "recipe": {**full["recipe"], "evaluation": evaluation}})[1]["summary"]
    assert "each on a stratified sample, at most 2,000, of the test images that its site was set up with" in sampled
    assert "each on the test images that its site was set up with" in whole[1]["summary"]


@pytest.fixture
def troubled(live_server: Callable[..., Any], recipe_of: RecipeOf) -> Iterator[Any]:
    """A server with a run in which several things went wrong."""
    server, daemons = disturbed_run(live_server, recipe_of)
    yield server
    close_channels(daemons)


@pytest.fixture
def spoken(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The command line in this process: exit code, standard output, standard error."""
    yield partial(called, capfd)
    structlog.reset_defaults()


def test_every_update_that_was_not_used_is_there_with_its_reason(troubled: Any) -> None:
    with Operator(troubled.address, NO_TLS) as operator:
        run_record = operator.run_record(RUN)
    _, sections = page(run_record)
    refused = [update for one in run_record["rounds"] for task in one["tasks"] for update in task["refused"]]
    assert len(refused) == 1
    assert refused[0]["reason"] in sections["refusals"]
    assert "rejected" in sections["refusals"]
    assert "1 round went on with fewer updates than wanted: 1." in sections["summary"]
    assert "site-4 (1 time)" in sections["summary"]
    signs = re.search(r"Signs.*", sections["participation"])
    assert signs is not None
    assert all(meaning in signs.group() for meaning in ("rejected", "could not train", "had not reported", "was used"))


def test_what_a_site_says_is_text_and_nothing_else(plain: dict[str, Any]) -> None:
    run_record = json.loads(json.dumps(plain))
    evil = "<script>alert(1)</script> `<b>` & \"'"
    update = {"verdict": "refused", "code": "damaged", "reason": evil, "bytes": 1, "digest": "0" * 64}
    task = next(task for task in run_record["rounds"][-1]["tasks"] if task["kind"] == "fit")
    task |= {"refused": [update], "task_status": "rejected", "reason": evil}
    run_record["run"]["reason"] = evil
    html, sections = page(run_record)
    assert "<script" not in html
    assert "<b>" not in html
    assert sections["refusals"].count(evil) == 2
    assert evil.replace("`", "") in sections["summary"]


def test_the_server_says_what_its_folder_says(troubled: Any, tmp_path: Path, spoken: Any) -> None:
    with Operator(troubled.address, NO_TLS) as operator:
        assert operator.run_record(RUN) == cli_report.read_run_record(tmp_path / "server", RUN)
        number, data = operator.state(RUN)
        assert (number, data) == (1, troubled.blobs.get(troubled.runs.current.published.address))
        assert operator.state(RUN, 0)[0] == 0
        for call in (operator.run_record, operator.state):
            with pytest.raises(ConfigError, match="no run 'other'"):
                call("other")
    remote = spoken("report", RUN, "--server", troubled.address, "--identity=none", "--json")
    local = spoken("report", "--state", tmp_path / "server", "--json")
    assert remote[0] == local[0] == 0
    assert json.loads(remote[1]) == json.loads(local[1])
    out = tmp_path / "there" / "is.html"
    assert spoken("report", RUN, "--server", troubled.address, "--identity=none", "--out", out)[0] == 0
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_folder_is_read_as_it_stands(tmp_path: Path, recipe_of: RecipeOf, spoken: Any) -> None:
    state = tmp_path / "state"
    told(state, recipe_of("solo", rounds=1))

    def stands() -> dict[Path, int]:  # but for what SQLite's readers tell each other
        return {path: path.stat().st_mtime_ns for path in state.rglob("*") if path.suffix != ".sqlite-shm"}

    before = stands()
    code, out, err = spoken("report", "--state", tmp_path, "--out", tmp_path / "r.html")  # as of a job of `compare`
    assert (code, err) == (0, "")
    assert str(tmp_path / "r.html") in out
    assert stands() == before


def test_a_run_that_is_not_there_is_an_error_with_those_that_are(
    tmp_path: Path, recipe_of: RecipeOf, spoken: Any
) -> None:
    told(tmp_path, recipe_of("solo", rounds=1))
    told(tmp_path, recipe_of("solo", rounds=1, name="again"))
    code, _, err = spoken("report", "other", "--state", tmp_path)
    assert (code, "expected one of: small-solo, again" in err) == (78, True)
    code, _, err = spoken("report", "--state", tmp_path)
    assert (code, "holds 2 runs; name one of: small-solo, again" in err) == (78, True)
    assert spoken("report")[0] == 78
    code, _, err = spoken("report", "--state", tmp_path / "nowhere")
    assert (code, "holds no ledger.sqlite" in err) == (74, True)


def test_without_the_extra_the_command_says_what_to_install(
    tmp_path: Path, recipe_of: RecipeOf, spoken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(tmp_path, recipe_of("solo", rounds=1))
    monkeypatch.setitem(__import__("sys").modules, "protofed.deploy.report.report", None)
    code, _, err = spoken("report", "--state", tmp_path)
    assert (code, ".whl[report]'" in err) == (78, True)


def test_a_damaged_blob_is_as_one_that_is_not_kept(tmp_path: Path, recipe_of: RecipeOf) -> None:
    found = told(tmp_path, recipe_of("fednh", rounds=1))
    assert found["prototypes"]["cosines"]
    path = tmp_path / "blobs" / found["rounds"][-1]["state"]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert cli_report.read_run_record(tmp_path, None)["prototypes"]["round"] == 0
    with open_state(tmp_path) as kept, pytest.raises(StateError, match="has changed on disk"):
        kept.blobs.get(found["rounds"][-1]["state"])
    write_report(found, tmp_path / "report.html")
