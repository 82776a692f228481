"""What the README says of disclosure is what the code declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import protofed.client.methods
import protofed.server.methods  # noqa: F401  (both register their halves)
from protofed.client.method import client_methods
from protofed.common.citations import PAPERS
from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.server.method import server_methods

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SENDS = {name: client_methods.build(name, {}).sends for name in client_methods}


@pytest.mark.parametrize("part", [part for part in Part if part not in NOT_ON_THE_WIRE])
def test_every_part_that_can_leave_a_site_is_explained(part: Part) -> None:
    methods = (
        ", ".join(f"`{name}`" for name, sends in SENDS.items() if part in sends) or "none; it comes from the server"
    )
    assert f"| `{part}` | {part.discloses} | {methods} |" in README


@pytest.mark.parametrize("name", SENDS)
def test_every_method_has_its_row(name: str) -> None:
    assert f"\n| `{name}` | " in README


@pytest.mark.parametrize("name", SENDS)
def test_every_method_is_called_by_its_paper(name: str) -> None:
    rows = [line.split("|")[-2].strip() for line in README.splitlines() if line.startswith(f"| `{name}` | ")]
    assert (PAPERS[name].source or "–") in rows


@pytest.mark.parametrize("name", SENDS)
def test_every_option_is_listed(name: str) -> None:
    heads = [line.split("|")[1] for line in README.splitlines() if line.startswith("| ")]
    listed = {
        option for head in heads if name in re.split(r"[ ,]+", head) for option in re.findall(r"`([a-z_]+)`", head)
    }
    assert listed == client_methods.options(name) | server_methods.options(name)
