"""`protofed client cache`: what is on the disk, and its removal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.image_files import input_, save
from typer.testing import CliRunner

from protofed.client.data.image_cache import ImageCache
from protofed.client.data.pictures import FilePicture
from protofed.common.config.settings import Cache
from protofed.deploy.cli.client import client

RUN = CliRunner()


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Of a site whose cache has two preparations of one image."""
    file, image = tmp_path / "site.toml", save(tmp_path / "a.png", np.zeros((4, 4), np.uint8))
    file.write_text('site = "north"\npolicy = "standard"\nstate = "state"\n[data]\nsource = "digits"\n')
    for size in (4, 5):
        of_run = input_((1, size, size), fit="stretch")
        ImageCache(Cache(folder=tmp_path / "state" / "cache", processes=1), of_run).prepare([FilePicture(image)])
    return file


def test_each_preparation_is_listed_and_cleared(settings: Path) -> None:
    shown = RUN.invoke(client, ["cache", "list", "--settings", str(settings)])
    assert (shown.exit_code, "fit = stretch" in shown.output) == (0, True)
    listed = json.loads(RUN.invoke(client, ["cache", "list", "--settings", str(settings), "--json"]).output)
    names = [row["name"] for row in listed["caches"]]
    assert ([row["images"] for row in listed["caches"]], [name[:5] for name in names]) == ([1, 1], ["1x4x4", "1x5x5"])
    one = RUN.invoke(client, ["cache", "clear", names[0], "--settings", str(settings), "--yes"])
    assert one.output.strip() == f"{names[0]}: removed"
    assert RUN.invoke(client, ["cache", "clear", "--settings", str(settings), "--yes"]).exit_code == 0
    assert "none: images are decoded" in RUN.invoke(client, ["cache", "list", "--settings", str(settings)]).output


def test_nothing_is_removed_unasked_or_by_a_wrong_name(settings: Path) -> None:
    for arguments in (["--settings", str(settings)], ["other", "--settings", str(settings), "--yes"]):
        assert RUN.invoke(client, ["cache", "clear", *arguments]).exit_code != 0
    listed = json.loads(RUN.invoke(client, ["cache", "list", "--settings", str(settings), "--json"]).output)
    assert len(listed["caches"]) == 2
