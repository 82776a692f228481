"""Published states come out again, or it is said why not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, OutOfSpaceError
from protofed.server.operator.verification import VerificationResult, Verified, verify_round
from protofed.server.storage.blobs import FolderBlobs

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab


@pytest.fixture
def lab(make: MakeLab, tmp_path: Path) -> Lab:
    """Three rounds on disk."""
    lab = make(rounds=9, keep_rounds=9, blobs=FolderBlobs(tmp_path)).begin()
    for value in (1.0, 2.0, 3.0):
        lab.round(ann=value, bob=value + 1, cyd=value + 2)
    return lab


def verified(lab: Lab, round: int, attempt: int = 1) -> Verified:
    return verify_round(lab.ledger, lab.blobs, "test", round, attempt)


def spoil(folder: Path, address: Digest) -> None:
    path = folder / address
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_every_published_state_comes_out_again(lab: Lab) -> None:
    for row in lab.ledger.rounds("test"):
        if row.state is not None:
            assert verified(lab, row.round) == Verified(VerificationResult.SAME, row.state, row.state)


@pytest.mark.parametrize("since", [(2, 1), (3, 1), (2, 2)])
def test_a_clock_that_was_set_back_accuses_no_ledger(lab: Lab, since: tuple[int, int]) -> None:
    lab.run.roll_back(1)
    lab.later(0.0)
    for value in (7.0, 7.5):
        lab.round(ann=value, bob=8.0, cyd=9.0)
    with lab.ledger._write() as connection:
        change = "update rounds set opened_at = opened_at - 3600, closed_at = closed_at - 3600"
        connection.exec_driver_sql(f"{change} where round >= ? and attempt >= ?", since)
    for row in lab.ledger.rounds("test", rolled_back=True):
        if row.state is not None:
            assert verified(lab, row.round, row.attempt).finding is VerificationResult.SAME


@pytest.mark.parametrize("what", ["state", "update"])
def test_a_blob_that_changed_is_named(lab: Lab, tmp_path: Path, what: str) -> None:
    state = lab.ledger.rounds("test")[2].state
    assert state is not None
    spoil(tmp_path, state if what == "state" else lab.ledger.updates("test", 2)[0].digest)
    found = verified(lab, 2)
    assert found.finding is VerificationResult.DAMAGED
    assert "has changed on disk" in found.reason


def test_a_lack_of_handles_is_no_damage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_path: Path) -> memoryview:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(lab.blobs, "_read", unreadable)
    with pytest.raises(OutOfSpaceError):
        verified(lab, 2)


def test_other_bytes_are_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from protofed.server.methods.fedavg import FedAvgServer

    monkeypatch.setattr(FedAvgServer, "aggregate", lambda *_: lab.model(9.0))
    found = verified(lab, 2)
    assert found.finding is VerificationResult.DIFFERENT
    assert found.recomputed not in (None, found.published)


def test_what_was_discarded_in_its_time_is_not_called_damaged(lab: Lab) -> None:
    lab.blobs.discard(lab.ledger.updates("test", 1)[0].digest)
    found = verified(lab, 1)
    assert found.finding is VerificationResult.NOT_KEPT
    assert "see keep_rounds" in found.reason


@pytest.mark.parametrize(("round", "attempt"), [(4, 1), (2, 2), (77, 1)])
def test_rounds_that_published_nothing_are_refused(lab: Lab, round: int, attempt: int) -> None:
    with pytest.raises(ConfigError, match=f"published nothing in attempt {attempt} of round {round}"):
        verified(lab, round, attempt)


def test_the_oldest_kept_round_can_be_verified_with_few_rounds_kept(make: MakeLab) -> None:
    lab = make(rounds=9, keep_rounds=2, federation={"score_every": 0}).begin()  # unscored: none is the best
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        lab.round(ann=value, bob=value + 1, cyd=value + 2)
    found = {row.round: verified(lab, row.round).finding for row in lab.ledger.rounds("test") if row.state}
    assert [found[number] for number in (3, 4, 5)] == [VerificationResult.SAME] * 3
    assert found[1] is VerificationResult.NOT_KEPT
