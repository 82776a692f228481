"""A log that is followed while its daemon writes on: read once, then what was added; no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.common.storage.journal import Journal, Record, segments
from protofed.deploy.audit.log import LogFollower


class Kept:
    """What was taken, and a journal of short segments that is written to between their list and their reading."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self.journal = Journal(self.path, 1500)
        self.taken: list[Record] = []
        self.adds = 0

    def follower(self) -> LogFollower:
        return LogFollower(self.path, self._begin, self.taken.append)

    def add(self, count: int) -> None:
        for _ in range(count):
            self.journal.append("event", text="x" * 100)

    def _begin(self) -> None:
        self.taken.clear()
        adds, self.adds = self.adds, 0
        self.add(adds)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


@pytest.mark.parametrize("before", [0, 3, 40])
@pytest.mark.parametrize("meanwhile", [1, 10, 40])
def test_segments_that_begin_while_it_is_read_are_no_alarm(kept: Kept, before: int, meanwhile: int) -> None:
    kept.add(before + 1)
    follower = kept.follower()
    kept.adds = meanwhile
    follower.look()
    assert len(segments(kept.path)) > 1 or meanwhile + before < 10
    for more in (0, 1, 10, 30):
        kept.add(more)
        state = follower.look()
        assert state.problem == ""
        assert [record.seq for record in kept.taken] == list(range(1, state.last_number + 1))
    assert kept.taken[-1].facts == {"text": "x" * 100}
    assert follower.recheck().newest == state.newest


def test_a_record_that_was_edited_in_a_segment_started_meanwhile_is_an_alarm(kept: Kept) -> None:
    kept.add(1)
    follower = kept.follower()
    kept.adds = 15
    assert follower.look().problem == ""
    newest = segments(kept.path)[-1].path
    kept.add(2)
    newest.write_bytes(newest.read_bytes()[::-1].replace(b"x", b"y", 1)[::-1])
    assert "is not what was written there" in follower.look().problem
