"""`[data]`: keys that do not go together are refused with what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protofed.common.config.data import Data
from protofed.common.config.recipe import parse
from protofed.common.errors import ConfigError


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"source": "medmnist"}, "expected dataset with source medmnist, and with no other"),
        ({"source": "folder", "dataset": "dermamnist"}, "expected dataset with source medmnist"),
        ({"source": "manifest", "group_pattern": "(a)", "group_column": "b"}, "both name the groups; remove one"),
        ({"source": "folder", "path_column": "a"}, "path_column is of source manifest"),
        ({"source": "manifest", "site_column": "a"}, "site_column is of partition"),
        ({"source": "manifest", "label_column": []}, "label_column"),
        ({"source": "npz", "group_pattern": "(a)"}, "for source npz add arrays train_group and test_group"),
        ({"source": "digits", "group_pattern": "(a)"}, "for source digits remove it"),
        ({"source": "folder", "group_pattern": "a"}, r"expected a regular expression with one \(group\)"),
        ({"source": "folder", "group_pattern": "(a"}, r"expected a regular expression with one \(group\)"),
        ({"source": "folder", "label_map": {"a": "mel"}, "ignore_labels": ["a"]}, "in label_map and in ignore_labels"),
        ({"source": "folder", "max_unreadable_fraction": 1.0}, "max_unreadable_fraction = 1.0"),
        ({"source": "folder", "max_unreadable_fraction": -0.1}, "max_unreadable_fraction = -0.1"),
        ({"source": "folder", "preprocessing_digest": ""}, "preprocessing_digest = ''"),
    ],
)
def test_what_does_not_go_together_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(table, Data, "site.toml")


def test_what_is_not_said_changes_nothing() -> None:
    plain = Data(source="npz")
    assert (dict(plain.label_map), plain.ignore_labels, plain.max_unreadable_fraction) == ({}, frozenset(), 0)
    assert (plain.group_pattern, plain.preprocessing_digest) == (None, None)


ROOTS: list[tuple[str | None, ...]] = [("images.csv", "/data", "/data/images.csv"), (None, "/data", None)]
ROOTS += [("/other/images.csv", "/data", "/other/images.csv"), ("images.csv", None, "images.csv")]


@pytest.mark.parametrize(("root", "common", "place"), ROOTS)
def test_a_relative_root_lies_in_the_common_folder(
    root: str | None, common: str | None, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    if common is not None:
        monkeypatch.setenv("PROTOFED_DATA", common)
    found = Data.model_validate({"source": "manifest", "root": root}).place
    assert found == (None if place is None else Path(place))


def test_settings_that_were_read_are_read_again() -> None:
    for table in ({"source": "digits"}, {"source": "manifest", "label_column": ["a", "b"]}):
        data = Data.model_validate(table)
        assert Data.model_validate(data.model_dump()) == data
        assert Data.model_validate_json(data.model_dump_json()) == data
