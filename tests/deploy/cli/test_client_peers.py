"""`client peers`: the identities that a site has pinned."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.client.sums.peers import Peers, fingerprint
from protofed.common.errors import SecureSumError
from protofed.common.pki import codes
from protofed.common.secure_sums.keys import KeyAdvert

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command's exit code and what it printed."""
    return partial(called, capfd, "client", "peers")


def advert(identity: bytes) -> KeyAdvert:
    return KeyAdvert("north", identity, b"", b"", (), (), b"")


def test_a_refused_identity_is_listed_and_pinned_by_its_code(tmp_path: Path, run: Run) -> None:
    Peers(tmp_path).trust([advert(b"1" * 32)])
    with pytest.raises(SecureSumError):
        Peers(tmp_path).trust([advert(b"2" * 32)])
    code = codes.code(fingerprint(b"2" * 32))
    _, said, _ = run("list", "--state", tmp_path)
    assert f"refused since: {code}" in said
    assert "on first use" in said
    assert run("pin", "north", code, "--state", tmp_path, "--yes")[0] == 0
    Peers(tmp_path).trust([advert(b"2" * 32)])
    listed = json.loads(run("list", "--state", tmp_path, "--json")[1])
    [peer] = listed["peers"]
    assert (peer["site"], peer["code"], bool(peer["by"])) == ("north", code, True)
    assert listed["own"]["code"] == codes.code(listed["own"]["fingerprint"])
    assert run("forget", "north", "--state", tmp_path, "--yes")[0] == 0
    assert Peers(tmp_path).pins() == {}


def test_what_is_no_code_or_no_pinned_site_is_refused(tmp_path: Path, run: Run) -> None:
    assert run("pin", "north", "1234", "--state", tmp_path)[0] == 78
    assert run("forget", "north", "--state", tmp_path, "--yes")[0] == 78
    assert run("list", "--state", tmp_path / "mistyped")[0] == 78
