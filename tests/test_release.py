"""The version is written once, in pyproject.toml; images, chart and documents repeat it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from protofed.common.deprecated import COMMANDS, KEYS

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_every_image_is_named_by_this_version() -> None:
    pattern = r"protofed-(server|client):[0-9][0-9.]*[0-9]"
    named = subprocess.run(
        ("git", "grep", "-ohE", pattern, "--", "deploy", "docs"), cwd=ROOT, capture_output=True, text=True
    )
    assert {image.partition(":")[2] for image in named.stdout.split()} == {VERSION}, "make version"


def test_the_images_and_the_chart_have_this_version() -> None:
    dockerfile = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
    chart = (ROOT / "deploy/helm/protofed/Chart.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"^ARG VERSION=(.+)$", dockerfile, re.MULTILINE)) == {VERSION}
    assert re.findall(r'^(?:version|appVersion): "?([0-9.]+)"?$', chart, re.MULTILINE) == [VERSION, VERSION]


def test_the_newest_changes_are_this_versions_or_the_next_ones() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d+)\.(\d+)\.(\d+)", changes, re.MULTILINE)[0]
    assert tuple(map(int, newest)) >= tuple(map(int, VERSION.split(".")))


def test_no_old_name_is_taken_after_its_end() -> None:
    now = tuple(map(int, VERSION.split(".")))
    old = [*KEYS.items(), *COMMANDS.items()]
    assert [name for name, renamed in old if tuple(map(int, renamed.ends.split("."))) <= now] == []


def test_every_wing_shows_its_types() -> None:
    wings = ("common", "server", "client", "deploy", "protos")
    assert [wing for wing in wings if not (ROOT / wing / "protofed" / wing / "py.typed").is_file()] == []
