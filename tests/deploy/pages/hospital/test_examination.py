"""The hospital's page on health: what it examines in a process of its own, and what it shows of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.browser_client import Browser
from tests.support.pki import Authority

from protofed.client.policy.approval import FOLDER as APPROVALS
from protofed.client.policy.approval import Approvals
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import Assignment
from protofed.common.storage import files
from protofed.deploy.daemons import readyz
from protofed.deploy.pages.hospital import examination
from protofed.deploy.pages.hospital.examination import SITE, Examination, Examiner, SiteSettings
from protofed.deploy.pages.hospital.page import build_pages, client_page
from protofed.deploy.pages.hospital.site import HospitalSite

SETTINGS = 'site = "site-1"\npolicy = "standard"\nstate = "{state}"\nidentity = "none"\nserver = "127.0.0.1:1"\n{data}'
DIGITS = """[data]
source = "digits"
test_fraction = 0.3
partition = { kind = "dirichlet", sites = 5, beta = 0.3 }
"""
SKIN = """\
name = "skin"
rounds = 1
classes = 2
class_names = ["benign", "malignant"]
input = { shape = [3, 4, 4], fit = "stretch", std = [0.2] }
method = { name = "fednh" }
model = { name = "mlp" }
"""
LONGEST_S = 120.0  # of a real examination on a busy machine; PyTorch is imported
# In place of the examination: says a row, then what it is told, and ends as it is told.
STAND_IN = """
import json, sys
request = json.load(sys.stdin)
print(json.dumps({"doing": "checking: <b>"}), flush=True)
print(json.dumps({"row": {"check": "device", "state": "fine", "seen": "cpu & co"}}), flush=True)
"""


@pytest.fixture
def site(state: Path, tmp_path: Path) -> Callable[..., tuple[Browser, Examiner]]:
    """The pages of the site, opened with settings, and what examines it."""

    def opened(data: str = DIGITS) -> tuple[Browser, Examiner]:
        (file := tmp_path / "site.toml").write_text(SETTINGS.format(state=state, data=data), encoding="utf-8")
        made = HospitalSite(state, "standard", SiteSettings(file, {}))
        assert made.examiner is not None
        return Browser(build_pages(made)), made.examiner

    return opened


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in place of the examination's process."""

    def put(rest: str) -> None:
        monkeypatch.setattr(examination, "COMMAND", (sys.executable, "-c", STAND_IN + rest))

    return put


def until(examiner: Examiner, run: str, holds: Callable[[Examination], bool]) -> Examination:
    """The examination of a run, once something holds of it."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        found = examiner.newest(run)
        if found is not None and holds(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {LONGEST_S} s: {examiner.newest(run)}")


def ended(examiner: Examiner, run: str = SITE) -> Examination:
    return until(examiner, run, lambda found: not found.goes_on)


def by_check(found: Examination) -> dict[str, Mapping[str, Any]]:
    return {row["check"]: row for row in found.rows}


def offer(state: Path, recipe: Recipe) -> None:
    Approvals(state / APPROVALS).record_offer(Assignment(recipe.name, recipe.wire()))


@pytest.mark.parametrize(("days", "soon"), [(10, True), (300, False)])
def test_the_overview_has_the_end_of_the_certificate(state: Path, tmp_path: Path, days: int, soon: bool) -> None:
    ends = datetime.now(UTC) + timedelta(days=days)
    Authority.make().issue(tmp_path / "identity", Party.SITE, "site-1", ends=ends)
    text = Browser(build_pages(with_identity(state, tmp_path / "identity"))).get("/")
    assert ends.strftime("%Y-%m-%d") in text
    assert ("protofed certs request --renew" in text) is soon


def test_a_certificate_that_cannot_be_read_is_named(state: Path, tmp_path: Path) -> None:
    text = Browser(build_pages(with_identity(state, tmp_path / "gone"))).get("/")
    assert 'id="no-certificate"' in text
    assert str(tmp_path / "gone" / "cert.pem") in text
    assert 'id="certificate"' not in text


def with_identity(state: Path, identity: Path) -> HospitalSite:
    """A site whose settings name this folder."""
    settings = SETTINGS.replace('identity = "none"', f'identity = "{identity}"')
    (file := state.parent / "site.toml").write_text(settings.format(state=state, data=DIGITS), encoding="utf-8")
    return HospitalSite(state, "standard", SiteSettings(file, {}))


def test_without_settings_the_page_says_how_to_start_it(state: Path) -> None:
    browser = Browser(client_page(state, "standard"))
    for path in ("/health", "/runs/kept/check"):
        text = browser.get(path)
        assert 'id="no-settings"' in text
        assert "--settings" in text
        assert "<form" not in text
    for path in ("/health", "/health/stop", "/runs/kept/check"):
        browser.post(path, {}, 400)
    browser.get("/runs/none/check", 400)


def test_the_site_is_examined_beside_its_running_daemon(
    site: Callable[..., tuple[Browser, Examiner]], state: Path, recipe_of: Callable[..., Recipe]
) -> None:
    browser, examiner = site()
    offer(state, recipe_of("fednh", name="offered"))
    lock = files.Lock(state)  # as a daemon's
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    browser.order("/health", whole="yes")
    found = ended(examiner)
    lock.release()
    rows = by_check(found)
    assert found.problem == ""
    assert rows["device"]["state"] == "fine"
    assert "daemon is running" in rows["state folder"]["seen"]
    assert (rows["server"]["state"], rows["server"]["finding"]) == ("finding", "nothing-listens")
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before
    text = browser.get("/health")
    assert rows["server"]["remedy"].split("`")[0] in text
    assert text.index(">server<") < text.index(">settings<")  # what is to be done comes first
    assert 'id="classes"' in text
    assert found.data is not None
    assert found.data["recipe"] == "offered"
    assert f">{sum(found.data['taken']['trains_on']):,}<" in text
    assert "data-going" not in text
    assert 'id="ended"' in text


def test_a_quick_check_loads_no_data_and_its_process_is_told_no_more_than_the_request(
    site: Callable[..., tuple[Browser, Examiner]], stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    browser, examiner = site()
    browser.order("/health")
    found = ended(examiner)
    assert (found.whole, found.data, found.problem) == (False, None, "")
    assert "not loaded" in by_check(found)["data"]["seen"]
    assert 'id="classes"' not in browser.get("/health")
    stand_in("print(json.dumps({'problem': json.dumps(request)}))\n")
    browser.order("/runs/kept/check")
    request = json.loads(ended(examiner, "kept").problem)
    assert request == {"settings": str(tmp_path / "site.toml"), "given": {}, "run": "kept", "whole": False}


def test_data_that_do_not_fit_a_run_are_explained(
    site: Callable[..., tuple[Browser, Examiner]], state: Path, tmp_path: Path
) -> None:
    root = tmp_path / "images"
    for number, name in enumerate(("benign/a", "benign/b", "malignant/c", "Nevi <x>/d")):
        (file := root / "train" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(pixels).save(file)
    (root / "train" / "benign" / "torn.png").write_bytes(b"no image")
    (tmp_path / "skin.toml").write_text(SKIN, encoding="utf-8")
    recipe = read_recipe(tmp_path / "skin.toml")
    offer(state, recipe)
    browser, examiner = site(f'[data]\nsource = "folder"\nroot = "{root}"\n')
    assert "Not checked" in browser.get("/runs/skin/check")
    browser.order("/runs/skin/check")
    found = ended(examiner, "skin")
    assert found.data is not None
    assert found.data["unmapped"].keys() == {"Nevi <x>"}
    text = browser.get("/runs/skin/check")
    for name in ('id="refusal"', 'id="unmapped"', 'id="unreadable"', "torn.png", 'id="classes"'):
        assert name in text
    assert "<x>" not in browser.client.get("/runs/skin/check").text
    assert 'id="outdated"' not in text
    Approvals(state / APPROVALS).record_offer(Assignment("skin", recipe.wire() + " "))
    assert 'id="outdated"' in browser.get("/runs/skin/check")


def test_what_makes_scores_untrue_stands_in_place_of_a_clean_verdict(
    site: Callable[..., tuple[Browser, Examiner]], state: Path, tmp_path: Path
) -> None:
    for number in range(60):
        name = "benign" if number % 2 else "malignant"
        (file := tmp_path / "images" / name / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number // 2).integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(pixels).save(file)
    (tmp_path / "images" / "readme.txt").write_text("about", encoding="utf-8")
    allowed = SKIN.replace("mlp", "digits-cnn").replace("4, 4]", "8, 8]")
    fits = allowed + "federation = { secure = true, min_sites = 3 }\n"
    (tmp_path / "skin.toml").write_text(fits, encoding="utf-8")
    offer(state, read_recipe(tmp_path / "skin.toml"))
    browser, examiner = site(f'[data]\nsource = "folder"\nroot = "{tmp_path / "images"}"\n')
    browser.order("/runs/skin/check")
    found = ended(examiner, "skin")
    assert found.data is not None, found.problem
    assert (found.data["refusal"], found.data["scores_untrue"]) == (None, True)
    text = browser.get("/runs/skin/check")
    assert 'id="but"' in text
    assert 'id="fits"' not in text
    assert "images that occur under several labels: 30" in text
    assert "readme.txt" in text


def test_one_at_a_time_followed_line_by_line_and_stopped_by_a_person(
    site: Callable[..., tuple[Browser, Examiner]], stand_in: Callable[[str], None]
) -> None:
    browser, examiner = site()
    stand_in("import threading; threading.Event().wait()\n")
    browser.order("/health")
    until(examiner, SITE, lambda found: bool(found.rows))
    fragment = browser.client.get("/health?fragment=1").text
    assert "data-going" in fragment  # the script asks again
    assert "cpu &amp; co" in fragment
    assert "checking: &lt;b&gt;" in fragment
    assert 'id="check-quick"' not in fragment
    assert "another check goes on" in browser.order("/runs/kept/check")
    assert examiner.newest("kept") is None
    assert 'id="going"' in browser.get("/runs/kept/check")  # says what it waits for
    process = examiner._process
    assert process is not None
    assert "stopped" in browser.order("/health/stop")
    found = ended(examiner)
    assert "stopped by a person" in found.problem
    assert process.poll() is not None
    assert [row["check"] for row in found.rows] == ["device"]  # what was found by then stays
    assert "no check goes on" in browser.order("/health/stop")
    stand_in("")
    browser.order("/health")
    assert ended(examiner).problem == ""


def test_an_examination_that_dies_says_its_last_words(
    site: Callable[..., tuple[Browser, Examiner]], stand_in: Callable[[str], None]
) -> None:
    browser, examiner = site()
    stand_in("raise MemoryError('<no room>')\n")
    browser.order("/health")
    found = ended(examiner)
    assert "MemoryError: <no room>" in found.problem
    text = browser.client.get("/health").text
    assert 'id="unfinished"' in text
    assert "<no room>" not in text
    stand_in("import os; sys.stdout.write('{\"doing\": '); sys.stdout.flush(); os.kill(os.getpid(), 9)\n")
    browser.order("/health")
    assert "-9" in ended(examiner).problem  # half a line is none


def test_what_the_daemon_lacks_and_settings_that_cannot_be_read_are_said(
    site: Callable[..., tuple[Browser, Examiner]], state: Path, tmp_path: Path
) -> None:
    browser, _ = site()
    assert "The daemon lacks" not in browser.get("/health")
    (state / readyz.ADDRESS_FILE).write_text("http://127.0.0.1:1")
    lock = files.Lock(state)
    assert "The daemon lacks: no answer from http://127.0.0.1:1/readyz" in browser.get("/health")
    lock.release()
    (tmp_path / "site.toml").write_text("device = <b>")
    text = browser.client.get("/health").text
    assert 'id="settings-unusable"' in text
    assert "<b>" not in text
