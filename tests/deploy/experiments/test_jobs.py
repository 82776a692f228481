"""Jobs as they run: to their end, interrupted, killed, and again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.support.command_line import called

from protofed.client.models.catalogue import device_model
from protofed.client.models.split import SplitModel, dump
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Part
from protofed.common.storage.files import Lock
from protofed.deploy.experiments.code_digest import digest_code
from protofed.deploy.experiments.experiment import ExperimentJob, Result, RoundTraffic, plan_jobs
from protofed.deploy.experiments.job import run_job
from protofed.deploy.experiments.jobs import CompareView, Processes, Worker, run_jobs

Recipes = Callable[..., Recipe]
CPU = torch.device("cpu")


def claimed(recipe: Recipe, out: Path) -> ExperimentJob:
    (job,) = plan_jobs([recipe], None, None, out)
    job.claim()
    return job


def result_of(job: ExperimentJob) -> Result:
    result = job.result()
    assert result is not None
    return result


def build(recipe: Recipe) -> SplitModel:
    return device_model(recipe, CPU, frozenset())


def deaf(done: int, doing: str) -> None:
    """Hears how a job gets on."""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 600  # two cores may have much else to do
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def running_in(folder: Path) -> list[int]:
    """Processes whose command line names a folder in this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it may just have ended
            if f"experiments.job\0{folder}/" in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
    return found


def test_an_interrupted_job_goes_on_to_the_same_end(recipe_of: Recipes, tmp_path: Path) -> None:
    whole, broken = (claimed(recipe_of("fednh"), tmp_path / name) for name in ("whole", "broken"))
    run_job(whole, CPU, deaf)

    def interrupt(done: int, doing: str) -> None:
        if done == 1 and "2/3" in doing:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(broken, CPU, interrupt)
    assert broken.result() is None
    heard: list[int] = []
    run_job(broken, CPU, lambda done, _: heard.append(done))
    assert heard[1] == 1  # after 0, while it is loading
    assert heard[-1] == 3
    first, second = result_of(whole), result_of(broken)
    assert (first.state, first.scores, first.cohorts) == (second.state, second.scores, second.cohorts)
    assert first.seconds > 0


def test_a_result_has_all_that_tables_need(recipe_of: Recipes, tmp_path: Path) -> None:
    job = claimed(recipe_of("fedavg"), tmp_path)
    run_job(job, CPU, deaf)
    result = result_of(job)
    sites = ("site-1", "site-2", "site-3")
    assert result.recipe == job.recipe
    assert result.cohorts == {1: sites, 2: sites, 3: sites}
    assert set(result.scores) == {1, 2, 3}
    assert set(result.scores[3]) == {"evaluator", *sites}
    assert {"loss", "personal.pm_v", "personal.pm_l"} <= set(result.scores[3]["site-2"])
    assert "global.accuracy" in result.scores[3]["evaluator"]
    assert tuple(result.train_examples) == sites
    assert sum(result.train_examples.values()) == 1797 - 520  # all digits but the test set of 52 a class
    assert result.code == digest_code(job.recipe)
    assert result.machine.endswith("device cpu")
    assert result.trained == dict.fromkeys((1, 2, 3), result.train_examples)  # one epoch
    model = len(codec.encode({part: dump(getattr(build(job.recipe), part)) for part in (Part.BODY, Part.HEAD)}))
    assert result.traffic == dict.fromkeys((1, 2, 3), RoundTraffic(up=3 * model, down=3 * model))


def test_under_secure_aggregation_no_bytes_are_told_that_nobody_would_send(recipe_of: Recipes, tmp_path: Path) -> None:
    job = claimed(recipe_of("fedavg", rounds=1, federation={"min_sites": 3, "secure": True}), tmp_path)
    run_job(job, CPU, deaf)
    result = result_of(job)
    assert result.traffic == {}
    assert result.trained == {1: result.train_examples}


def test_failed_and_killed_jobs_do_not_stop_the_others(recipe_of: Recipes, tmp_path: Path) -> None:
    good = recipe_of("fedavg", rounds=1)
    bad = recipe_of("fedavg", name="bad", federation={"min_sites": 9})
    jobs = plan_jobs([bad, good], None, None, tmp_path)
    for job in jobs:
        job.claim()
    failures = run_jobs(jobs, 2, Processes("cpu"))
    assert list(failures) == [jobs[0]]
    assert "min_sites is 9" in failures[jobs[0]]
    assert jobs[0].log.exists()
    assert jobs[0].result() is None
    done = (jobs[1].folder / "result.json").stat().st_mtime_ns
    assert result_of(jobs[1]).cohorts.keys() == {1}
    assert run_jobs(jobs[1:], 2, Processes("cpu")) == {}
    assert (jobs[1].folder / "result.json").stat().st_mtime_ns == done
    assert running_in(tmp_path) == []


def test_a_job_with_workers_has_the_result_of_one_without(recipe_of: Recipes, tmp_path: Path) -> None:
    plain, spread = (claimed(recipe_of("fednh", rounds=1), tmp_path / name) for name in ("plain", "spread"))
    run_job(plain, CPU, deaf)
    assert run_jobs([spread], 1, Processes("cpu", 2)) == {}
    assert result_of(spread).model_dump(exclude={"seconds"}) == result_of(plain).model_dump(exclude={"seconds"})


def test_a_killed_worker_says_so_and_one_without_parent_ends(recipe_of: Recipes, tmp_path: Path) -> None:
    job = claimed(recipe_of("fedavg", rounds=10000), tmp_path)
    killed, orphan = (Worker.start(job.folder, "cpu") for _ in range(2))  # one of them may find the folder in use
    killed.process.kill()
    killed.process.wait()
    why = killed.failure()
    assert why is not None
    assert "SIGKILL" in why
    assert orphan.process.stdin is not None
    orphan.process.stdin.close()
    assert orphan.process.wait(timeout=30) != 0
    assert orphan.failure() is not None


def test_every_job_has_a_bar_on_a_terminal_and_elsewhere_two_lines(recipe_of: Recipes, tmp_path: Path) -> None:
    jobs = plan_jobs([recipe_of("fedavg")], [0, 1, 2], None, tmp_path)
    text = StringIO()
    with CompareView(jobs, set(jobs[1:]), Console(file=text, width=80)) as view:
        view.started(jobs[1])
        view.moved(jobs[1], 1, "training 0/3")
        view.ended(jobs[1], None)
        view.started(jobs[2])
        view.ended(jobs[2], "no [red]data")
    lines = text.getvalue().splitlines()
    assert lines[0] == "1 of 3 jobs were done before"
    assert lines[2].startswith("small-fedavg-seed1 done after 0 s, 2/3 jobs")
    assert lines[4].startswith("small-fedavg-seed2 failed: no [red]data after")
    assert len(lines) == 5
    jobs = plan_jobs([recipe_of("fedavg")], [0, 1], None, tmp_path)
    text = StringIO()
    console = Console(file=text, width=120, height=30, force_terminal=True, color_system=None)
    with CompareView(jobs, set(jobs), console) as view:
        view.started(jobs[0])
        view.moved(jobs[0], 2, "training 1/3")
    last = text.getvalue().splitlines()[-4:-1]  # then the cursor is shown again
    assert all(words in last[0] for words in ("small-fedavg-seed0", "2/3", "training 1/3"))
    assert all(words in last[1] for words in ("small-fedavg-seed1", "0/3", "waiting"))
    assert all(words in last[2] for words in ("total", "2/6", "0/2 jobs"))


@pytest.mark.parametrize(
    ("arguments", "code", "phrase"),
    [
        (("digits-fedhn",), 78, "did you mean 'digits-fednh'?"),
        (("digits-fednh", "--seeds", "a"), 78, "0,1,2"),
        (("digits-fednh", "--format", "cvs"), 78, "did you mean 'csv'?"),
        ((), 74, "name recipes"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(
    arguments: tuple[str, ...], code: int, phrase: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, _, err = called(capfd, "compare", *arguments, "--out", tmp_path / "out")
    assert (ended, phrase in err) == (code, True)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_compared_in_by_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = Lock(tmp_path)
    code, _, err = called(capfd, "compare", "digits-fednh", "--out", tmp_path)
    lock.release()
    assert (code, "in use" in err) == (74, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_was_stopped_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "protofed.deploy.cli", "compare", "digits-fedavg", "digits-solo"]
    command += ["--rounds=8", "--seeds=0,1", f"--out={out}", "--jobs=2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: any("round published" in log.read_text() for log in out.glob("*/job.log")))
    first.send_signal(number)
    told, _ = first.communicate(timeout=30)
    assert first.returncode == (-9 if number == signal.SIGKILL else 130), told
    assert "Traceback" not in told
    wait_for(lambda: running_in(out) == [])  # at once, unless nobody was left to end them
    again = subprocess.Popen([*command, "--format=json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: running_in(out) != [])
    victim = running_in(out)[0]
    os.kill(victim, signal.SIGKILL)
    printed, told = again.communicate(timeout=200)
    assert again.returncode == 1, told
    assert "1 of 4 jobs failed" in told
    assert "SIGKILL" in told
    assert [row["recipe"] for row in json.loads(printed)["rows"]] == ["digits-fedavg", "digits-solo"]
    last = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "3 of 4 jobs were done before" in last.stderr
    resumed = [log for log in out.glob("*/job.log") if "run resumed" in log.read_text()]
    assert resumed
    printed_again = subprocess.run(
        [*command[:4], f"--out={out}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed_again.stdout == last.stdout
    assert {path.name for path in out.iterdir()} >= {"table.md", "table.csv", "table.json", "curve-personal-pm_v.svg"}
