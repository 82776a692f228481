"""`client peers`: the identities that a site has pinned."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.command_line import called

from protofed.client.sums.membership import membership_of
from protofed.client.sums.own_identity import fingerprint
from protofed.client.sums.peers import Peers
from protofed.client.transport.audit import FILE, ClientAudit
from protofed.common.errors import SecureSumError
from protofed.common.pki import codes
from protofed.common.secure_sums.keys import KeyAdvert
from protofed.common.storage.journal import Journal
from protofed.common.storage.segments import SEGMENT_BYTES

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


def test_the_audit_log_has_who_was_pinned_and_forgotten_and_by_whom(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (codes.code(fingerprint(number * 32)) for number in (b"1", b"2"))
    journal = Journal(tmp_path / FILE, SEGMENT_BYTES)
    audit = ClientAudit(journal)
    member = membership_of(tmp_path, lambda: None, record=audit.secure_sum)
    member.peers.trust([advert(b"1" * 32)])
    journal.close()
    assert run("pin", "north", second, "--state", tmp_path, "--yes")[0] == 0
    assert run("forget", "north", "--state", tmp_path, "--yes")[0] == 0
    code, out, _ = called(capfd, "audit", "show", tmp_path, "--json")
    assert code == 0
    notes = [note["what"] for note in json.loads(out)["notes"]]
    assert notes[0] == f"identity of north pinned on first use, code {first}"
    assert notes[1].startswith("identity of north pinned by ")
    assert f", code {second}, " in notes[1]
    assert notes[2].startswith("identity of north forgotten by ")
    assert called(capfd, "audit", "verify", tmp_path)[0] == 0


def test_the_own_code_is_no_other_sites(tmp_path: Path, run: Run) -> None:
    own = json.loads(run("list", "--state", tmp_path, "--json")[1])["own"]
    for code in (own["code"], own["code"].lower().replace("-", ""), own["fingerprint"]):
        exit_code, _, err = run("pin", "north", code, "--state", tmp_path)
        assert (exit_code, "this site's own code" in err) == (78, True)
    assert Peers(tmp_path).pins() == {}
    assert not (tmp_path / FILE).exists()


def test_a_name_that_was_never_met_is_said(tmp_path: Path, run: Run) -> None:
    Peers(tmp_path).trust([advert(b"1" * 32)])
    code = codes.code(fingerprint(b"2" * 32))
    assert "has been met" in run("pin", "nroth", code, "--state", tmp_path)[1]
    assert "has been met" not in run("pin", "north", code, "--state", tmp_path, "--yes")[1]


def test_what_is_no_code_or_no_pinned_site_is_refused(tmp_path: Path, run: Run) -> None:
    assert run("pin", "north", "1234", "--state", tmp_path)[0] == 78
    assert run("forget", "north", "--state", tmp_path, "--yes")[0] == 78
    assert run("list", "--state", tmp_path / "mistyped")[0] == 78
