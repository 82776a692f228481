"""The device that a setting names, or a refusal that says what there is."""

from __future__ import annotations

import pytest
import torch

from protofed.client.device import pick_device
from protofed.common.errors import ConfigError, UnavailableError

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "name", "picked"),
    [
        (0, "cpu", "cpu"),
        (2, "cpu", "cpu"),
        (0, "auto", "cpu"),
        (2, "auto", "cuda"),
        (1, "cuda", "cuda"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_picks(gpus: int, name: str, picked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus)
    assert pick_device(name) == torch.device(picked)


@pytest.mark.parametrize(("gpus", "name"), [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1"), (2, "cuda:7")])
def test_a_gpu_that_is_not_there_is_refused(gpus: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus)
    with pytest.raises(UnavailableError, match=rf"'{name}'.*{gpus}.*'cpu'"):
        pick_device(name)


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:", "cuda:-1", "cuda:1x", "cuda0", "mps", "cpu:0", "auto "])
def test_other_names_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    with pytest.raises(ConfigError, match=f"'{name}': expected auto"):
        pick_device(name)


def test_a_gpu_too_many_of_this_very_machine() -> None:
    with pytest.raises(UnavailableError, match="this machine offers"):
        pick_device(f"cuda:{torch.cuda.device_count()}")


@gpu
def test_a_gpu_that_is_there_can_be_used() -> None:
    for name in ("auto", "cuda", "cuda:0"):
        assert torch.ones(2, device=pick_device(name)).sum().item() == 2
