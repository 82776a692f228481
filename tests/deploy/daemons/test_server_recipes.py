"""The recipes of `server start`: files, and names of those that come with protofed."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.config.settings import ServerSettings, read_settings
from protofed.common.errors import ConfigError
from protofed.deploy import shipped
from protofed.deploy.daemons.server import recipes_of


def test_a_server_takes_shipped_recipes_by_name(tmp_path: Path) -> None:
    (own := tmp_path / "own.toml").write_text(shipped.resolved("digits-fednh"))
    read = read_settings(ServerSettings, None, {"recipes": ["digits-fedavg", str(own)]})
    assert [recipe.name for recipe in recipes_of(read, ())] == ["digits-fedavg", "digits-fednh"]


def test_a_misspelt_recipe_of_a_server_is_named_with_the_nearest() -> None:
    read = read_settings(ServerSettings, None, {"recipes": ["digits-fednhh"]})
    with pytest.raises(ConfigError, match="did you mean 'digits-fednh'"):
        recipes_of(read, ())
