"""Several processes train as one: what comes of it is what one process gives, in every method."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.data_parallel_fits import CASES, outcome, site_of
from torch import Tensor, nn

from protofed.client.distributed.data_parallel import shared
from protofed.client.distributed.launch import Launch, launched
from protofed.common.errors import ConfigError, FailureReason

pytestmark = pytest.mark.timeout(600)  # processes that import PyTorch, on a machine with other work
PATIENCE_S = 500
APART = {"other-data", "idle"}
FAILING = {
    "called-off": "TaskAbortedError -",
    "fails-forward": f"OtherRankError {FailureReason.INTERNAL} rank 1 of",
    "fails-backward": f"OtherRankError {FailureReason.INTERNAL} rank 1 of",
    "fails-in-means": f"OtherRankError {FailureReason.INTERNAL} rank 1 of",
    "daemon-fails": "ValueError - patient",
    "nan": f"TaskFailedError {FailureReason.NUMERIC}",
    "short-for-ever": f"TaskFailedError {FailureReason.OUT_OF_MEMORY}",
}
GIVING = sorted(CASES.keys() - FAILING.keys() - APART)


def run(folder: Path, ranks: int, *names: str) -> str:
    """Do these cases one after the other; what all processes said."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = [*torchrun, "-m", "tests.support.data_parallel_fits", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What two and three ranks gave, in one life of theirs: after every failure they go on."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run(folder, request.param, *(name for name in CASES if name not in APART))


def check_equal(folder: Path, name: str) -> None:
    """To one process, but for the order in which numbers are added."""
    alone = outcome(CASES[name], site_of(secret=CASES[name].secret), alone=True)
    with np.load(folder / f"{name}.npz") as found:
        assert set(found) == alone.keys()
        assert len(alone) >= 5
        for path, expected in alone.items():
            np.testing.assert_allclose(found[path], expected, rtol=2e-4, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", GIVING)
def test_ranks_give_what_one_process_gives(name: str, done: tuple[Path, str]) -> None:
    check_equal(done[0], name)


@pytest.mark.parametrize("name", FAILING)
def test_all_leave_together_what_one_cannot_do(name: str, done: tuple[Path, str]) -> None:
    folder, said = done
    assert (folder / f"{name}.txt").read_text().startswith(FAILING[name])
    assert not (folder / f"{name}.npz").exists()
    assert "all ranks leave the work" in said


def test_a_rank_with_other_data_is_refused(tmp_path: Path) -> None:
    said = run(tmp_path, 2, "other-data")
    assert (
        (tmp_path / "other-data.txt")
        .read_text()
        .startswith(f"TaskFailedError {FailureReason.DATA} the run cannot be prepared")
    )
    assert "the training data here differ from rank 0's: copy the same to every node" in said


@pytest.mark.slow
def test_ranks_wait_longer_for_work_than_for_each_other(tmp_path: Path) -> None:
    run(tmp_path, 2, "idle")
    check_equal(tmp_path, "idle")


def test_a_copy_is_computed_by_all_ranks_with_its_own_weights_and_alone_when_the_fit_is_over() -> None:
    torch.manual_seed(0)
    body, images, seen = Counting(), torch.randn(6, 3), torch.zeros(6, 2)
    kinds = [type(module) for module in body.modules()]
    with shared(body, cast("Any", FirstOfTwo())):
        copy = deepcopy(body)
        torch.nn.init.constant_(copy.layer.weight, 2.0)
        seen[:3] = 2 * images[:3].sum(1, keepdim=True)
        assert torch.allclose(copy(images), seen)  # the other rank has the rest
        assert torch.allclose(body(images)[:3], images[:3] @ body.layer.weight.T)
        assert (body.sizes, copy.sizes) == ([3], [3])
    assert [type(module) for module in body.modules()] == kinds
    seen[3:] = 2 * images[3:].sum(1, keepdim=True)
    assert torch.allclose(copy(images), seen)
    assert copy.sizes == [3, 6]


class Counting(nn.Module):
    """A linear map that notes how many examples it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(3, 2, bias=False), list[int]()

    def forward(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        return cast("Tensor", self.layer(images))


class FirstOfTwo:
    """Rank 0 of two, the other of which sends zeros."""

    size = 2

    def rows(self, count: int) -> slice:
        return slice(0, count // 2)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor


# Which process this is

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (ENVIRONMENT, None),  # of another launcher
        ({**ENVIRONMENT, "TORCHELASTIC_RUN_ID": "x"}, Launch(3, 4, 1, 2)),
        ({**ENVIRONMENT, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_only_torchrun_makes_ranks(environment: dict[str, str], expected: Launch | None) -> None:
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [("auto", 2, "cuda:1"), ("cuda", 2, "cuda:1"), ("auto", 0, "auto"), ("cuda", 0, "cuda"), ("cpu", 2, "cpu")],
)
def test_every_process_of_a_node_has_a_gpu_of_its_own(name: str, gpus: int, expected: str) -> None:
    assert Launch(3, 4, 1, 2).device(name, gpus) == expected


@pytest.mark.parametrize(
    ("name", "gpus", "why"),
    [("auto", 1, "2 processes on this machine, which offers 1 GPUs"), ("cuda:0", 2, "a GPU of its own; set 'auto'")],
)
def test_two_processes_on_one_gpu_are_refused(name: str, gpus: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Launch(3, 4, 1, 2).device(name, gpus)


def test_one_process_on_each_node_may_name_its_gpu() -> None:
    assert Launch(1, 2, 0, 1).device("cuda:1", 2) == "cuda:1"
