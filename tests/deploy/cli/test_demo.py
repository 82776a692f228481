"""The demo as a user runs it, to its end and interrupted."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.command_line import called

from protofed.common.errors import StateError
from protofed.deploy import shipped
from protofed.deploy.cli.demo import CREATED, MARKER, RECIPES, _story, empty_folder, run_demo


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protofed.deploy.cli", "demo", f"--keep={folder}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_running(folder: Path) -> list[str]:
    """Command lines of processes that work in the demo's folder."""
    lines = [command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if str(folder) in line and " demo " not in line]


def command_line(path: Path) -> str:
    with contextlib.suppress(OSError):  # it may just have ended
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("log", ["server.log", "evaluator.log"])
def test_ctrl_c_leaves_nothing_running(log: str, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = start(folder)
    wait_for((folder / log).exists)
    wait_for(lambda: left_running(folder) != [])
    demo.send_signal(signal.SIGINT)
    out, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130, out
    assert "Traceback" not in out
    assert left_running(folder) == []


@pytest.mark.parametrize("name", ["thesis.txt", "server/.git/HEAD", "ca/ca.key", "site-1/patients.csv", ".hidden"])
def test_a_folder_with_something_else_in_it_is_left_alone(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text("years of work", encoding="utf-8")
    with pytest.raises(StateError, match="--keep"):
        empty_folder(tmp_path)
    assert theirs.read_text(encoding="utf-8") == "years of work"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


def test_the_command_refuses_such_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server").mkdir()
    code, out, _ = called(capfd, "demo", f"--keep={tmp_path}")
    assert code == 74, out
    assert [path.name for path in tmp_path.iterdir()] == ["server"]


def test_a_former_demos_folder_loses_what_the_demo_made_but_through_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.txt").touch()
    folder = tmp_path / "demo"
    empty_folder(folder)
    for name in CREATED:
        (folder / name).touch()
    (folder / "site-1").unlink()
    (folder / "site-1").symlink_to(elsewhere)
    for name in ("notes.txt", "site-6/data.csv", "mine.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    empty_folder(folder)
    assert {path.name for path in folder.iterdir()} == {MARKER, "notes.txt", "site-6", "mine.log"}
    assert (elsewhere / "kept.txt").exists()
    empty_folder(tmp_path / "demo")
    (tmp_path / "link").symlink_to(tmp_path / "demo")
    with pytest.raises(StateError, match="--keep"):
        empty_folder(tmp_path / "link")


def test_a_demo_of_few_rounds_tells_of_every_run_and_leaves_nothing_running(tmp_path: Path) -> None:
    """The demo's whole way, in its process, with the shipped recipes cut to their first rounds."""
    recipes, folder = tmp_path / "recipes", tmp_path / "demo"
    recipes.mkdir()
    for name in RECIPES:
        text = shipped.recipe_file(name).read_text(encoding="utf-8")
        (recipes / f"{name}.toml").write_text(re.sub(r"(?m)^rounds = \d+$", "rounds = 5", text), encoding="utf-8")
    screen = StringIO()
    run_demo(folder, Console(file=screen, width=120), recipes)
    out = screen.getvalue()
    assert left_running(folder) == []
    views = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    assert [view["run"] for view in views] == list(RECIPES)
    assert {view["round"] for view in views} == {5}
    for view in views:
        assert f"{100 * view['scores']['personal.pm_v']['mean']:.1f}" in out
    assert "no report.html" not in out
    assert (folder / "report.html").is_file()


def test_the_demos_last_sentence_is_of_its_own_scores() -> None:
    assert _story({"FedNH": 0.8, "FedAvg": 0.7, "alone": 0.4}).startswith("Here, as in each of five seeds")
    assert _story({"FedNH": 0.7, "FedAvg": 0.8, "alone": 0.4}).startswith("Not here, but in each of five seeds")


@pytest.mark.slow
def test_the_demo_shows_fednh_ahead_and_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = start(folder)
    out, _ = demo.communicate(timeout=300)
    assert demo.returncode == 0, out
    assert left_running(folder) == []
    scores = {view["run"]: view["scores"] for view in json.loads((folder / "scores.json").read_text(encoding="utf-8"))}
    fednh, fedavg, solo = (scores[f"digits-{name}"] for name in ("fednh", "fedavg", "solo"))
    assert fednh["global.accuracy"]["mean"] > fedavg["global.accuracy"]["mean"] > 0.7
    own = [run["personal.balanced_accuracy"]["mean"] for run in (fednh, fedavg, solo)]
    assert sorted(own, reverse=True) == own
    assert "Here, as in each of five seeds" in out
    assert "global.accuracy" not in solo
    assert all(f"{100 * run['personal.pm_v']['mean']:.1f}" in out for run in (fednh, fedavg, solo))
    assert f"{100 * fednh['global.accuracy']['mean']:.1f} %" in (folder / "report.html").read_text(encoding="utf-8")
    assert "report.html" in out
