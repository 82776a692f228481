"""A daemon is ready when it can take part; else it says what is missing, a line each, without any file of the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.pki import Authority
from tests.support.scripted_server import RUN, site_data

from protofed.client.agent import readiness
from protofed.client.agent.metrics import ClientMetrics
from protofed.client.agent.readiness import DaemonReadiness, SiteDataLoader
from protofed.client.data.site_data import SiteData
from protofed.common.config.recipe import Recipe
from protofed.common.errors import DataError
from protofed.common.pki.identity import LiveIdentity, Party

RECIPE = Recipe.model_validate(RUN)
POLICY = 'methods = ["fedavg"]\nparts = ["body", "head"]\n'


def unreadable(_: Recipe) -> SiteData:
    raise DataError("cannot read /data/Ann-Other-1961.png")


@pytest.fixture
def ready(tmp_path: Path) -> DaemonReadiness:
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    metrics = ClientMetrics("ann", answered_at=lambda: 0.0, clock=lambda: 1.0)
    loading = SiteDataLoader(lambda _: site_data(), None)
    return DaemonReadiness("server:7443", None, metrics, torch.device("cpu"), loading, policy)


def test_with_all_of_it_a_daemon_is_ready_and_all_that_is_missing_is_said_at_once(ready: DaemonReadiness) -> None:
    assert ready() == []
    ready.policy.unlink()
    bare = replace(ready, metrics=ClientMetrics("ann"), loading=SiteDataLoader(unreadable, Path("/nowhere/at/all")))
    assert [line.partition(":")[0] for line in bare()] == ["enrolled", "data", "policy"]
    assert "server:7443" in bare()[0]


def test_an_identity_is_usable_until_it_ends(
    ready: DaemonReadiness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = LiveIdentity(Authority.make().issue(tmp_path / "identity", Party.SITE, "ann"), Party.SITE)
    held = replace(ready, identity=identity)
    assert held() == []
    ends = identity.current().certificate.not_after
    monkeypatch.setattr(readiness, "utc_now", lambda: ends.replace(year=ends.year + 1))
    (line,) = held()
    assert line.startswith("identity: the ")
    assert "has expired" in line


def test_a_gpu_that_is_lost_is_said_in_one_line(ready: DaemonReadiness, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = replace(ready, device=torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 2))
    assert on_gpu() == []

    def lost(_: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    (line,) = on_gpu()
    assert line.startswith("device: cuda:0 cannot be used: CUDA error: unspecified launch failure; ")
    assert "\n" not in line


def test_a_root_is_looked_into_until_the_data_are_loaded(ready: DaemonReadiness, tmp_path: Path) -> None:
    root = tmp_path / "data"
    loading = SiteDataLoader(lambda _: site_data(), root)
    waiting = replace(ready, loading=loading)
    (line,) = waiting()
    assert line.startswith("data: data.root cannot be read: No such file or directory; ")
    root.mkdir()
    assert waiting() == []
    root.rmdir()
    root.write_text("one archive")
    assert waiting() == []
    root.unlink()
    loading(RECIPE)
    assert waiting() == []  # they are in memory


def test_data_that_could_not_be_loaded_are_missing_until_they_are(ready: DaemonReadiness, tmp_path: Path) -> None:
    there = [False]
    loading = SiteDataLoader(lambda recipe: site_data() if there[0] else unreadable(recipe), tmp_path)
    held = replace(ready, loading=loading)
    assert held() == []
    with pytest.raises(DataError):
        loading(RECIPE)
    assert held() == ["data: they were not loaded for the run that goes on; the daemon's log says why"]
    there[0] = True
    assert loading(RECIPE).classes == 3
    assert held() == []


@pytest.mark.parametrize("text", [None, "methods = [", POLICY + "allow_all = true"])
def test_a_policy_that_could_not_be_read_again_is_missing(ready: DaemonReadiness, text: str | None) -> None:
    ready.policy.unlink()
    if text is not None:
        ready.policy.write_text(text)
    (line,) = ready()
    assert line.startswith("policy: ")
    assert "policy.toml" in line
