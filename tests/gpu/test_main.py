"""The command without a GPU, its parts by name, and those of them that a CPU can rehearse in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu import choice, machine, memory, run, telemetry
from tests.gpu.__main__ import main
from tests.gpu.plan import Proof
from tests.gpu.report import JSON, Finding, Status
from tests.gpu.run import NEEDS_S, chosen

from protofed.common.errors import ConfigError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as PyTorch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "no GPU" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_gpu")
def test_a_rehearsal_reports_as_one(tmp_path: Path) -> None:
    assert main(["--rehearse", "--parts", "choice,telemetry", "--out", str(tmp_path), "--data", str(tmp_path)]) == 0
    said = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))
    assert said["kind"] == "CPU rehearsal"
    assert said["machine"]["device"] == "cpu"
    assert [(part["name"], part["status"]) for part in said["parts"]] == [("choice", "passed"), ("telemetry", "passed")]


@pytest.mark.usefixtures("no_gpu")
def test_a_daemon_that_would_not_take_the_gpu_is_found(tmp_path: Path) -> None:
    first = next(choice.work(Proof(torch.device("cuda"), tmp_path)))
    assert isinstance(first, Finding)
    assert (first.what, first.found, first.status) == ("device = 'auto' picks", "cpu", Status.FAILED)


def test_what_is_not_a_rehearsal_is_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "pick", lambda _: torch.device("cpu"), raising=False)  # a daemon whose choice is broken
    monkeypatch.setattr(machine, "facts", lambda device: {"device": str(device)})
    monkeypatch.setattr(run, "carry_out", lambda _, proof, *__: devices.append(proof.device))
    assert main(["--parts", "choice", "--out", str(tmp_path)]) == 0
    assert devices == [torch.device("cuda")]


@pytest.mark.usefixtures("no_gpu")
def test_without_time_every_part_is_not_reached(tmp_path: Path) -> None:
    assert main(["--rehearse", "--minutes", "0", "--out", str(tmp_path)]) == 0
    said = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))
    assert [(part["name"], part["status"]) for part in said["parts"]] == [(name, "not reached") for name in NEEDS_S]


@pytest.mark.usefixtures("no_gpu")
def test_a_library_that_is_missing_is_named_with_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tests.gpu.run")
    monkeypatch.setitem(sys.modules, "structlog", None)
    assert main(["--rehearse"]) == 2
    said = capsys.readouterr().out
    assert "structlog" in said
    assert "tests/gpu/requirements.txt" in said


def test_parts_are_chosen_by_name_and_done_in_order() -> None:
    assert [part.name for part in chosen(["telemetry", "choice"])] == ["choice", "telemetry"]
    assert [part.name for part in chosen(list(NEEDS_S))] == list(NEEDS_S)
    with pytest.raises(ConfigError, match="nccl"):
        chosen(["ncll"])


@pytest.mark.parametrize(
    ("errors", "sizes", "expected"),
    [
        (["out"], [16, 8, 8, 8, 8], {Status.PASSED}),
        (["out", "out"], [16, 8, 4, 4, 4, 4, 4, 4, 4, 4], {Status.PASSED}),
        ([], [16, 16], {Status.FAILED}),  # memory was never short: nothing was shown
        (["out"], [16, 8, 8, 16, 8, 8], {Status.PASSED, Status.FAILED}),  # the size found was not kept
    ],
)
def test_a_shortage_of_memory_has_to_come(errors: list[str], sizes: list[int], expected: set[Status]) -> None:
    assert {finding.status for finding in memory.shown("here", errors, sizes, 16)} == expected


def test_a_machine_without_nvml_says_so() -> None:
    def absent() -> float:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    found = telemetry._read("utilisation", absent)
    assert found.status is Status.SKIPPED
    assert "nvidia-ml-py" in found.found
