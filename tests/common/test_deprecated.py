"""A key or a command under its old name works, with a warning that names the new one and the version of its end."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protofed.common import deprecated
from protofed.common.config import recipe, settings, toml_files
from protofed.common.deprecated import Renamed, rename_command, rename_json, rename_keys
from protofed.common.errors import ConfigError
from protofed.testing.small_recipe import small_recipe

KEYS = {("Recipe", "plan.batch"): Renamed("batch_size", "0.5.0")}
COMMANDS = {"client plan": Renamed("client preview", "0.5.0")}


def test_an_old_key_is_read_as_the_new_one_and_warned_of() -> None:
    written = {"plan": {"batch": 8, "lr": 0.1}}
    with capture_logs() as logs:
        assert rename_keys(written, "Recipe", "a.toml", KEYS) == {"plan": {"batch_size": 8, "lr": 0.1}}
    assert written == {"plan": {"batch": 8, "lr": 0.1}}, "the table of the caller stays"
    told = "a.toml: 'plan.batch' is now called 'batch_size'. Version 0.5.0 does not accept the old name any more"
    assert [(log["log_level"], log["event"]) for log in logs] == [("warning", told)]
    with pytest.raises(ConfigError, match=r"a\.toml: 'plan\.batch' is called 'batch_size', which is there too; remove"):
        rename_keys({"plan": {"batch": 8, "batch_size": 16}}, "Recipe", "a.toml", KEYS)


@pytest.mark.parametrize(
    ("table", "kind"),
    [({"plan": {"batch": 8}}, "PolicyRules"), ({"batch": 8}, "Recipe"), ({"plan": 1}, "Recipe"), ({}, "Recipe")],
    ids=["of another file", "of another table", "no table", "nothing"],
)
def test_any_other_key_stays_as_it_is(table: dict[str, object], kind: str) -> None:
    with capture_logs() as logs:
        assert rename_keys(table, kind, "a.toml", KEYS) == table
    assert logs == []


def test_json_that_software_wrote_is_read_by_the_new_keys_and_nobody_is_warned() -> None:
    with capture_logs() as logs:
        assert json.loads(rename_json('{"plan": {"batch": 8}}', "Recipe", "it", KEYS)) == {"plan": {"batch_size": 8}}
        for text in ('{"plan": {"batch_size": 8}}', "{"):
            assert rename_json(text, "Recipe", "it", KEYS) == text
    assert logs == []


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next release has renamed a key of recipes, and one of a site's settings."""
    keys = {("Recipe", "turns"): Renamed("rounds", "9.0.0"), ("ClientSettings", "folder"): Renamed("state", "9.0.0")}
    for module, name in ((recipe, "rename_keys"), (recipe, "rename_json"), (toml_files, "rename_keys")):
        monkeypatch.setattr(module, name, partial(getattr(deprecated, name), keys=keys))
    monkeypatch.setattr(settings, "rename_keys", partial(rename_keys, keys=keys))


@pytest.mark.usefixtures("renamed")
def test_an_old_key_works_wherever_it_is_written(tmp_path: Path) -> None:
    sound = small_recipe("fedavg")
    old = sound.wire().replace('"rounds":', '"turns":')
    assert recipe.parse_json(old, recipe.Recipe, "the ledger").wire() == sound.wire()
    (tmp_path / "base.toml").write_text("rounds = 3\n", encoding="utf-8")
    (tmp_path / "own.toml").write_text('extends = "base.toml"\nturns = 5\n', encoding="utf-8")
    assert toml_files.read_extended(tmp_path / "own.toml") == {"rounds": 5}
    (tmp_path / "site.toml").write_text('site = "a"\nfolder = "kept"\n[data]\nsource = "digits"\n', encoding="utf-8")
    read = settings.read_settings(settings.ClientSettings, tmp_path / "site.toml", {"policy": "open"})
    assert read.state == tmp_path / "kept"


@pytest.mark.parametrize(
    ("line", "run", "warned"),
    [
        ("client plan a --state b", "client preview a --state b", True),
        ("client plans a", "client plans a", False),
        ("client", "client", False),
    ],
)
def test_an_old_command_is_run_under_its_new_name_and_warned_of(line: str, run: str, warned: bool) -> None:
    with capture_logs() as logs:
        assert rename_command(line.split(), COMMANDS) == run.split()
    assert [log["event"] for log in logs] == warned * [
        "`protofed client plan` is now called `protofed client preview`. Version 0.5.0 does not accept the old name "
        "any more"
    ]
