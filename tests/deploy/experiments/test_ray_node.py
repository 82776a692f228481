"""Jobs elsewhere: the seam, what a node does with a job, and the same table from a real Ray of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import ConfigError
from protofed.common.version import VERSION
from protofed.deploy.experiments import ray_node
from protofed.deploy.experiments.code_digest import digest_code
from protofed.deploy.experiments.experiment import ExperimentJob, Result, plan_jobs
from protofed.deploy.experiments.jobs import JobProgress, Worker, run_jobs
from protofed.deploy.experiments.ray_node import NodeOrder, NodeResult, carry_out
from protofed.deploy.simulation.workers import Block

Recipes = Callable[..., Recipe]
SAME = ("table.md", "table.csv", "curve-global-accuracy.svg", "curve-personal-pm_v.svg")


class RemoteExecutor:
    """A place where each job takes two looks, and the second one to be started fails."""

    def __init__(self, interrupted: bool = False) -> None:
        self.began: list[str] = []
        self.running: dict[ExperimentJob, deque[JobProgress]] = {}
        self.most, self.ended, self._interrupted = 0, False, interrupted

    def start(self, job: ExperimentJob) -> None:
        self.began.append(job.name)
        why = "no data there (on node-2)" if len(self.began) == 2 else None
        self.running[job] = deque(
            [JobProgress(job, 1, "training"), JobProgress(job, 3, "done", ended=True, failure=why)]
        )
        self.most = max(self.most, len(self.running))

    def look(self) -> Iterator[JobProgress]:
        if self._interrupted:
            raise KeyboardInterrupt
        for job, left in list(self.running.items()):
            yield (news := left.popleft())
            if news.ended:
                del self.running[job]

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def jobs(recipe_of: Recipes, tmp_path: Path) -> list[ExperimentJob]:
    made = plan_jobs([recipe_of("fedavg")], [0, 1, 2], None, tmp_path)
    for job in made:
        job.claim()
    return made


def ordered(job: ExperimentJob, *, mark: str = "nowhere", **changes: str) -> str:
    code = digest_code(job.recipe).whole
    known = {"protofed": VERSION, "code": code, "recipe": job.recipe.model_dump_json(), "device": "cpu", **changes}
    return NodeOrder(folder=job.folder, mark=mark, **known).model_dump_json()


def answered(text: str) -> NodeResult:
    return parse_json(text, NodeResult, "the answer")


def deaf(done: int, doing: str) -> None:
    """Hears how a job gets on."""


def test_jobs_go_to_a_place_so_many_at_a_time_until_they_are_interrupted(
    jobs: list[ExperimentJob], capfd: pytest.CaptureFixture[str]
) -> None:
    place = RemoteExecutor()
    failures = run_jobs(jobs, 2, place)
    assert place.began == [job.name for job in jobs]
    assert (place.most, place.ended) == (2, True)
    assert failures == {jobs[1]: "no data there (on node-2)"}
    place = RemoteExecutor(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, place)
    assert place.ended
    assert "the same command goes on from here" in capfd.readouterr().err


@pytest.mark.slow
def test_a_node_without_the_callers_folder_works_in_its_own_and_sends_all_of_it(
    jobs: list[ExperimentJob], tmp_path: Path
) -> None:
    heard: list[int] = []
    there = answered(carry_out(ordered(jobs[0]), lambda done, _: heard.append(done)))
    assert there.failed is None
    assert there.result is not None
    assert "round published" in there.log
    assert heard == sorted(heard)
    assert {path.name for path in jobs[0].folder.iterdir()} == {"recipe.json"}
    (jobs[0].folder / "mark").touch()
    here = answered(carry_out(ordered(jobs[0], mark="mark"), deaf))
    assert (here.failed, here.result, here.log) == (None, None, "")
    sent, kept = parse_json(there.result, Result, "what was sent"), jobs[0].result()
    assert kept is not None
    assert sent.model_dump(exclude={"seconds"}) == kept.model_dump(exclude={"seconds"})
    assert (jobs[0].folder / "state").is_dir()


@pytest.mark.slow
def test_a_job_that_fails_on_a_node_says_why(recipe_of: Recipes, tmp_path: Path) -> None:
    (job,) = plan_jobs([recipe_of("fedavg", federation={"min_sites": 9})], None, None, tmp_path)
    job.claim()
    answer = answered(carry_out(ordered(job), deaf))
    assert "min_sites is 9" in (answer.failed or "")
    assert answer.result is None


def test_a_node_of_another_version_or_code_does_nothing(jobs: list[ExperimentJob]) -> None:
    answer = answered(carry_out(ordered(jobs[0], protofed="9.9"), deaf))
    assert answer.failed == f"protofed {VERSION} is there, not 9.9"
    answer = answered(carry_out(ordered(jobs[0], code="0" * 64), deaf))
    assert "other code is there" in (answer.failed or "")
    assert {path.name for path in jobs[0].folder.iterdir()} == {"recipe.json"}


def test_a_job_that_is_cancelled_leaves_nothing(
    jobs: list[ExperimentJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[Worker] = []

    def start(folder: Path, device: str, workers: int) -> Worker:
        started.append(Worker.start(folder, device, workers))
        return started[-1]

    def interrupt(done: int, doing: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_node, "Worker", type("Spy", (), {"start": staticmethod(start)}))
    with pytest.raises(KeyboardInterrupt):
        carry_out(ordered(jobs[0]), interrupt)
    assert started[0].process.returncode is not None
    assert list(tmp_path.glob("protofed-*")) == []


@pytest.mark.parametrize(("own", "expected"), [(None, {"PROTOFED_DATA": "/callers"}), ("/nodes", {})])
def test_a_node_has_its_own_data_or_else_looks_where_the_caller_does(
    jobs: list[ExperimentJob], monkeypatch: pytest.MonkeyPatch, own: str | None, expected: dict[str, str]
) -> None:
    given: list[dict[str, str]] = []

    def start(folder: Path, device: str, workers: int, **environment: str) -> Worker:
        given.append(environment)
        raise KeyboardInterrupt

    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    if own:
        monkeypatch.setenv("PROTOFED_DATA", own)
    monkeypatch.setattr(ray_node, "Worker", type("Spy", (), {"start": staticmethod(start)}))
    with pytest.raises(KeyboardInterrupt):
        carry_out(ordered(jobs[0], data="/callers"), deaf)
    assert given == [expected]


def test_ray_is_imported_by_nobody_who_does_not_ask_for_it() -> None:
    code = "import sys, protofed.deploy.cli.main, protofed.deploy.experiments.compare; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus-per-job=1"], "is for --ray"),
        (["--ray=local", "--workers=2"], "--workers is for jobs of this machine"),
        (["--ray=local", "--gpus-per-job=0.5"], "--gpus-per-job 0.5 does not go with --device cpu"),
        (["--ray=local", "--device=cuda:1"], "Ray gives each job its own GPU"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(
    more: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {**__import__("os").environ})
    code, _, err = called(capfd, "compare", "digits-fednh", f"--out={tmp_path / 'out'}", *more)
    assert (code, said in err) == (78, True)
    assert not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "find_spec", lambda _: None)
    code, _, err = called(capfd, "compare", "digits-fednh", f"--out={tmp_path / 'out'}", "--ray=auto")
    assert (code, ".whl[client,ray]'" in err) == (78, True)


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, object]:
    about = {"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": "192.0.2.7"}
    return {**about, "Alive": alive, "Resources": resources}


def test_nodes_have_room_for_a_job_a_core_or_a_share_of_their_gpus() -> None:
    ray = pytest.importorskip("protofed.deploy.experiments.ray_cluster")
    nodes = [node("head", CPU=0.0), node("one", CPU=8.0, GPU=2.0), node("two", CPU=3.0), node("gone", alive=False)]
    assert [(found.name, found.room) for found in ray.usable(nodes, 0)] == [
        ("one (192.0.2.7)", 8),
        ("two (192.0.2.7)", 3),
    ]
    assert [found.room for found in ray.usable(nodes, 0.5)] == [4]
    with pytest.raises(ConfigError, match=r"no node of the cluster has a core and 3 GPU for a job; its nodes: head"):
        ray.usable(nodes, 3)
    assert ray_node.resources("cuda", None) == ("cuda", 1.0)
    assert ray_node.resources("auto", 0.25) == ("cuda", 0.25)
    assert ray_node.resources("auto", None) == ray_node.resources("cpu", None) == ("cpu", 0.0)


@pytest.mark.parametrize(("asked", "hired"), [(None, 3), (2, 2), (9, 3)])
def test_no_worker_is_hired_for_whom_the_cluster_has_no_room(
    asked: int | None, hired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = pytest.importorskip("protofed.deploy.experiments.ray_cluster").Cluster(room=3, device="cpu", gpus=0.0)
    sites = pytest.importorskip("protofed.deploy.experiments.ray_workers")
    monkeypatch.setattr(sites, "joined", lambda *_: nullcontext(cluster))
    monkeypatch.setattr(sites.ray, "put", lambda _: "data")
    with closing(block := Block()):
        block.sized(64)
        assert sites.RayWorkers("auto", asked, "cpu", 1, block).size == hired


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_of_this_machine_gives_the_same_table(tmp_path: Path) -> None:
    pytest.importorskip("ray")

    def compared(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "protofed.deploy.cli", "compare", "digits-fedavg", "digits-fednh"]
        command += ["--seeds=0,1", "--rounds=3", f"--out={out}", *more]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)

    plain, ray = compared(tmp_path / "plain"), compared(tmp_path / "ray", "--ray=local")
    assert ray.stdout == plain.stdout
    said = [line.split(" after")[0].partition(" ")[2] for line in ray.stderr.splitlines()[:-1]]
    assert sorted(said) == ["done"] * 4 + ["started"] * 4, ray.stderr  # and nothing of Ray's
    for name in SAME:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    for path in (tmp_path / "plain").glob("*/result.json"):
        other = tmp_path / "ray" / path.parent.name / path.name
        assert {**json.loads(path.read_text()), "seconds": 0} == {**json.loads(other.read_text()), "seconds": 0}
    assert [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in path.read_text("utf-8", "replace")
    ] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sites_on_a_ray_of_this_machine_give_the_same_scores() -> None:
    pytest.importorskip("ray")

    def simulated(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "protofed.deploy.cli", "simulate", "digits-fednh", "--set=rounds=2", "--json"]
        return subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=400)

    plain, ray = (json.loads(simulated(*more).stdout) for more in ((), ("--ray=local", "--workers=2")))
    assert [{**view, "seconds": 0} for view in ray] == [{**view, "seconds": 0} for view in plain]
