"""Datasets and partitions of other packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protofed.client.data.site import load_sites
from protofed.common import plugins
from protofed.common.config.data import Data
from protofed.common.config.recipe import parse
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, DataError

GREY = Input(shape=(1, 2, 2))
MODULE = """
import numpy as np
import torch
from protofed.client.data.examples import Examples
from protofed.client.data.split import DataSplit

def blank(data):
    count = data.options.get("count", 8)
    half = DataSplit(Examples(torch.zeros(count, 1, 2, 2), torch.arange(count) % 2))
    return half, half

def by_parity(labels, rng, sites=2):
    order = rng.permutation(len(labels))
    return np.array_split(order, sites)

def one_list(data): return [1, 2]
def raises(data): raise KeyError("mine")
def twice(labels, rng): return [[0, 1], [1, 2]]
def beyond(labels, rng): return [[0], [99]]
def nobody(labels, rng): return []
"""


@pytest.fixture(autouse=True)
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ["blank", "by_parity", "one_list", "raises", "twice", "beyond", "nobody"]
    monkeypatch.setattr(plugins, "_allowed", {f"outside_data:{name}" for name in names})
    (tmp_path / "outside_data.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("outside_data", None)


def data(source: str = "outside_data:blank", **more: Any) -> Data:
    return parse({"source": source, **more}, Data, "settings")


def test_a_dataset_is_read_with_its_options_and_cut_by_a_partition_with_its_own() -> None:
    said = data(options={"count": 12}, partition={"kind": "outside_data:by_parity", "sites": 3})
    sites = load_sites(said, GREY, 2)
    assert [len(site.train) for site in sites] == [4, 4, 4]
    assert len(sites[0].test) == 12
    again = load_sites(said, GREY, 2)
    assert [site.train.labels.tolist() for site in again] == [site.train.labels.tolist() for site in sites]


@pytest.mark.parametrize("name", ["one_list", "raises", "twice", "beyond", "nobody"])
def test_a_dataset_or_partition_that_gives_something_else_is_refused(name: str) -> None:
    name = f"outside_data:{name}"
    dataset = name.endswith(("one_list", "raises"))
    with pytest.raises(DataError, match=f"'{name}'"):
        load_sites(data(name) if dataset else data(partition={"kind": name}), GREY, 2)


@pytest.mark.parametrize("key", ["source", "partition"])
def test_neither_is_imported_unless_it_is_allowed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_allowed", set())
    table: dict[str, Any] = {"source": "spiral"}
    table |= {"source": "outside_data:blank"} if key == "source" else {"partition": {"kind": "outside_data:by_parity"}}
    with pytest.raises(ConfigError, match="not allowed here"):
        load_sites(parse(table, Data, "settings"), Input(shape=(1, 1, 2)), 6)
    assert "outside_data" not in sys.modules


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"source": "digitz"}, "unknown source 'digitz': did you mean 'digits'"),
        ({"source": "digits", "options": {"count": 1}}, "source digits has no options"),
        ({"source": "digits", "partition": {"kind": "shard"}}, "unknown partition 'shard': did you mean 'shards'"),
    ],
)
def test_typos_are_told_the_nearest_name(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(table, Data, "settings")
