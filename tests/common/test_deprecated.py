"""A key or a command under its old name works, with a warning that names the new one and the version of its end."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from protofed.common.deprecated import Renamed, rename_command, rename_keys
from protofed.common.errors import ConfigError

KEYS = {("Recipe", "plan.batch"): Renamed("batch_size", "0.5.0")}
COMMANDS = {"client plan": Renamed("client preview", "0.5.0")}


def test_an_old_key_is_read_as_the_new_one_and_warned_of() -> None:
    written = {"plan": {"batch": 8, "lr": 0.1}}
    with capture_logs() as logs:
        assert rename_keys(written, "Recipe", "a.toml", KEYS) == {"plan": {"batch_size": 8, "lr": 0.1}}
    assert written == {"plan": {"batch": 8, "lr": 0.1}}, "the table of the caller stays"
    assert [(log["log_level"], log["event"]) for log in logs] == [
        ("warning", "a.toml: 'plan.batch' is now called 'batch_size'; version 0.5.0 takes the old name no more")
    ]


@pytest.mark.parametrize(
    ("table", "kind"),
    [({"plan": {"batch": 8}}, "PolicyRules"), ({"batch": 8}, "Recipe"), ({"plan": 1}, "Recipe"), ({}, "Recipe")],
    ids=["of another file", "of another table", "no table", "nothing"],
)
def test_any_other_key_stays_as_it_is(table: dict[str, object], kind: str) -> None:
    with capture_logs() as logs:
        assert rename_keys(table, kind, "a.toml", KEYS) == table
    assert logs == []


def test_a_key_under_both_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.toml: 'plan\.batch' is called 'batch_size', which is there too; remove"):
        rename_keys({"plan": {"batch": 8, "batch_size": 16}}, "Recipe", "a.toml", KEYS)


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
        "`protofed client plan` is now called `protofed client preview`; version 0.5.0 takes the old name no more"
    ]
