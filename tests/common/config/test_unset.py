"""`unset`: what a recipe takes out of the one that it extends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.common.config.test_recipe import BASE, extending

from protofed.common.config.data import Data
from protofed.common.config.recipe import read_recipe
from protofed.common.errors import ConfigError


def test_what_is_extended_loses_what_is_unset(tmp_path: Path) -> None:
    (tmp_path / "root.toml").write_text(f"{BASE}long_tail = 0.1\n[plan]\nlr = 0.5\nmax_grad_norm = 10.0\n")
    base = 'extends = "root.toml"\n[plan]\nmomentum = 0.9\n'
    unset = 'unset = ["plan.max_grad_norm", "data.long_tail"]\n'
    recipe = extending(tmp_path, base=base, text=f"{unset}[plan]\nepochs = 2\n")
    assert (recipe.plan.max_grad_norm, recipe.plan.lr, recipe.plan.momentum, recipe.plan.epochs) == (None, 0.5, 0.9, 2)
    assert recipe.data is not None
    assert (recipe.data.long_tail, recipe.data.source) == (None, "digits")


def test_a_table_that_is_unset_is_replaced(tmp_path: Path) -> None:
    text = 'unset = ["data", "method.prototype_momentum"]\n[data]\nsource = "spiral"\n'
    recipe = extending(tmp_path, base=BASE, text=text)
    assert recipe.method.options == {}
    assert recipe.data == Data(source="spiral")
    assert extending(tmp_path, base=BASE, text='unset = ["data"]\n').data is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('unset = ["plan.max_grad_norm"]', "'plan.max_grad_norm': base.toml sets no such key; remove it"),
        ('unset = ["methd.prototype_momentum"]', "did you mean 'method.prototype_momentum'?"),
        ('unset = ["data.source.kind"]', "base.toml sets no such key"),
        ('unset = ["data", "data"]', "'data': base.toml sets no such key"),
        ('unset = "data"', r"expected a list of keys and tables"),
        ("unset = [1]", r"expected a list of keys and tables"),
    ],
)
def test_an_unset_that_takes_nothing_out_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        extending(tmp_path, base=BASE, text=f"{text}\n")


def test_only_an_extending_recipe_unsets(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(f'unset = ["data"]\n{BASE}')
    with pytest.raises(ConfigError, match="add extends, or remove it"):
        read_recipe(tmp_path / "r.toml")
