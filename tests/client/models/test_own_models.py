"""A user's own model: imported only where the site's policy lists it, refused in one line where it cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.client.models.catalogue import build
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import ConfigError

GREY = Input(shape=(1, 8, 8))

OWN = """
import torch
from torch import nn
from protofed.client.models.split import SplitModel

def narrow(input, classes, width=3):
    size = input.shape[0] * input.shape[1] * input.shape[2]
    noise = nn.Sequential(nn.Flatten(), nn.Linear(size, width), Noise(), nn.BatchNorm1d(width))
    return SplitModel(noise, nn.Linear(width, classes))

class Noise(nn.Module):
    def forward(self, x):
        assert not self.training
        return x + torch.randn(x.shape)

def plain(input, classes): return nn.Linear(2, classes)
def unsplit(input, classes): return SplitModel(nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
def off_by_one(input, classes): return narrow(input, classes + 1)
def fails(input, classes): raise KeyError("of mine\\nin two lines")
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the site's, importable as `site_models`, and one that cannot be imported."""
    (tmp_path / "site_models.py").write_text(OWN)
    (tmp_path / "site_broken.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("site_models", None)


@pytest.mark.usefixtures("own")
def test_own_factory_that_the_site_allows() -> None:
    name = "site_models:narrow"
    torch.manual_seed(4)
    model = build(NamedOptions.model_validate({"name": name, "width": 5}), GREY, 4, frozenset({name}))
    tried = torch.get_rng_state()
    torch.manual_seed(4)
    sys.modules["site_models"].narrow(GREY, 4, width=5)
    assert torch.equal(tried, torch.get_rng_state())  # although the trial itself drew noise
    assert all(module.training for module in model.modules())  # although the trial was not
    model.eval()
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 4)
    assert model.body(torch.rand(2, 1, 8, 8)).shape == (2, 5)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("allowed", [set(), {"site_models"}, {"site_models:plain"}, {"site_models:narrow2"}, {"*"}])
def test_own_factory_that_the_site_does_not_list_is_never_imported(allowed: set[str]) -> None:
    with pytest.raises(ConfigError, match=r"narrow' is a plug-in that is not allowed here\. Add it to `plugins`"):
        build(NamedOptions(name="site_models:narrow"), GREY, 4, frozenset(allowed))
    assert "site_models" not in sys.modules


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("site_nowhere:make", {}, "'site_nowhere' cannot be imported: ModuleNotFoundError.*expected package.module:"),
        ("site_broken:make", {}, "'site_broken' cannot be imported: RuntimeError: no licence"),
        ("site_models:make", {}, "'site_models' has no 'make'$"),
        ("site_models:plain", {}, "returned a Linear: expected a factory.* returns a SplitModel"),
        ("site_models:number", {}, "not callable.*expected a factory"),
        ("site_models:narrow", {"wide": 3}, "failed with options: wide: TypeError: .*'wide'.*expected a factory"),
        ("site_models:fails", {}, "KeyError: .*of mine.*expected a factory"),
        ("site_models:off_by_one", {}, r"features \[2, 3\] and logits \[2, 5\] .*expected .*\[2, D\] .*\[2, 4\]$"),
        ("site_models:unsplit", {}, r"features \[2, 1, 8, 8\] and logits \[2, 4\] for 2 images of \[1, 8, 8\]"),
        ("site_models:narrow", {"width": -1}, "failed with options: width: RuntimeError"),
    ],
)
def test_own_factory_that_cannot_be_used(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(NamedOptions.model_validate({"name": name, **options}), GREY, 4, frozenset({name}))
    assert "\n" not in str(caught.value)
