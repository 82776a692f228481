"""What docs/explanation/compatibility.md promises by name is there; new names are free."""

from __future__ import annotations

import copy

import pytest

from protofed.common.config.recipe import Recipe
from protofed.common.deprecated import Renamed
from tests.support import public_names
from tests.support.public_names import GOLDEN, collect, find_missing, read_golden, text

PROMISED = read_golden()
NOW = collect(hidden=True)
ADVICE = """
promised by docs/explanation/compatibility.md, and gone. Deprecate it first: put the new name of a key or command into
common/protofed/common/deprecated.py. Other names change with a minor version only, and the CHANGELOG names them.
Then `make compatibility`."""


@pytest.mark.parametrize("topic", PROMISED)
def test_what_is_promised_is_there(topic: str) -> None:
    gone = find_missing({topic: PROMISED[topic]}, NOW)
    assert not gone, "\n".join(gone) + ADVICE


def test_the_list_has_every_topic_with_names_and_is_written_as_it_is_read() -> None:
    assert set(PROMISED) == set(NOW)
    assert all(any(names for names in keys.values()) for keys in PROMISED.values())
    assert GOLDEN.read_text(encoding="utf-8") == text(PROMISED)


@pytest.mark.parametrize(
    ("topic", "key", "name"),
    [
        ("python", "protofed.lab", "simulate"),
        ("exit codes", "finding", "clock-wrong 14"),
        ("exit codes", "error", "ConfigError 78"),
        ("commands", "protofed runs show", "--json"),
        ("keys", "Recipe", "plan.dp.max_unit_norm"),
        ("keys", "PolicyRules", "limits.losses"),
        ("keys", "ClientSettings", "server"),
        ("methods", "fednh", "prototype_momentum"),
        ("metrics", "protofed_updates_total", "verdict"),
        ("protocol", "protofed.protos.v1.Task", "task_id = 4"),
        ("protocol", "protofed.protos.v1.Role", "ROLE_TRAINER = 1"),
        ("json", "runs show", "rounds.sites.task_status"),
        ("json", "runs watch", "waiting.missing.why"),
    ],
)
def test_a_name_that_goes_is_found(topic: str, key: str, name: str) -> None:
    assert name in PROMISED[topic][key]
    now = copy.deepcopy(dict(NOW))
    now[topic][key].remove(name)
    assert find_missing(PROMISED, now) == [f"{topic}: {key} {name}"]


def test_a_key_that_goes_is_found_and_what_is_new_is_not() -> None:
    now = {"commands": {"protofed": ["--version", "--new"], "protofed new": []}, "topic": {}}
    assert find_missing({"commands": {"protofed": ["--version"], "protofed old": []}}, now) == [
        "commands: protofed old"
    ]
    assert find_missing({"commands": {"protofed": ["--version"]}}, now) == []


def test_a_deprecated_name_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_names, "COMMANDS", {"runs list": Renamed("runs show", "9.0.0")})
    monkeypatch.setattr(public_names, "KEYS", {(Recipe.__name__, "plan.rate"): Renamed("lr", "9.0.0")})
    now = collect()
    assert "plan.rate" in now["keys"]["Recipe"]
    assert now["commands"]["protofed runs list"] == now["commands"]["protofed runs show"]
