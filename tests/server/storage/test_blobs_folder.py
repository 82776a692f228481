"""Blobs outside of the state folder: found through it, one server's at a time, and never taken for another ledger's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protofed.common.codec import Digest, digest
from protofed.common.errors import StateError
from protofed.common.protocol.messages import TaskKind
from protofed.server.storage.blobs import FolderBlobs, open_blobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.recovery import sweep_orphans
from protofed.server.storage.rows import RoundRow, TaskRow


class Machine:
    """A state folder, and a ledger."""

    def __init__(self, state: Path) -> None:
        self.state, self.ledger, self.held = state, Ledger(), ExitStack()
        state.mkdir()

    def open(self, elsewhere: Path | None) -> FolderBlobs:
        try:
            return open_blobs(self.state, elsewhere, self.ledger, self.held)
        except StateError:
            self.held.close()  # as its process would by ending
            raise

    def publish(self, state: bytes, blobs: FolderBlobs) -> Digest:
        """A first state, in the ledger, too."""
        self.ledger.begin_run("run", digest(b"recipe"), "{}")
        task = TaskRow("task_id", "run", 0, 1, "site", TaskKind.FIT, None, 0)
        self.ledger.open_round(RoundRow("run", 0, 1, size=1, quorum=1), [task])
        address = blobs.put(state)
        self.ledger.publish("run", 0, 1, address, complete=True)
        return address

    def end(self) -> None:
        self.held.close()
        self.ledger.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "first")
    yield made
    made.end()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "second")
    yield made
    made.end()


def test_blobs_stay_in_the_state_folder_unless_they_are_put_elsewhere(first: Machine) -> None:
    address = first.open(None).put(b"state")
    assert not (first.state / "blobs").is_symlink()
    assert (first.state / "blobs" / address).read_bytes() == b"state"


def test_what_is_elsewhere_is_found_through_the_state_folder_of_each_machine(
    first: Machine, second: Machine, shared: Path
) -> None:
    address = first.publish(b"state", first.open(shared))
    assert (shared / address).read_bytes() == (first.state / "blobs" / address).read_bytes() == b"state"
    first.held.close()
    second.ledger.close()
    second.ledger = first.ledger  # as in a database that both reach
    blobs = second.open(shared)
    assert sweep_orphans(blobs, second.ledger) == 0
    assert blobs.get(address) == b"state"
    second.held.close()
    assert second.open(None).get(address) == b"state"  # the link stays


def test_one_server_at_a_time_has_a_folder(first: Machine, second: Machine, shared: Path) -> None:
    first.open(shared)
    with pytest.raises(StateError, match="in use by another process"):
        second.open(shared)
    first.held.close()
    second.open(shared)


def test_a_folder_that_is_not_there_is_not_made(first: Machine, shared: Path) -> None:
    with pytest.raises(StateError, match="is not there; mount it, or make it"):
        first.open(shared / "unmounted")
    assert list(shared.iterdir()) == []
    first.open(shared)
    first.held.close()
    (shared / "lock").unlink()
    (shared / "uploads").rmdir()
    shared.rmdir()
    with pytest.raises(StateError, match="is not there; mount it, or make it"):
        first.open(None)
    assert not shared.exists()


def test_an_empty_mount_point_is_not_taken_for_the_blobs(first: Machine, shared: Path) -> None:
    address = first.publish(b"state", first.open(shared))
    first.held.close()
    (shared / address).rename(shared.parent / address)
    with pytest.raises(StateError, match=r"none of the ledger's blobs is in .*; is it mounted"):
        first.open(shared)


def test_another_ledgers_blobs_are_not_swept_away(first: Machine, second: Machine, shared: Path) -> None:
    address = first.publish(b"state", first.open(shared))
    first.held.close()
    with pytest.raises(StateError, match="holds 1 blobs, and the ledger knows none"):
        second.open(shared)
    second.publish(b"another state", second.open(None))
    (second.state / "blobs" / digest(b"another state")).unlink()
    with pytest.raises(StateError, match="is it this ledger's"):
        second.open(shared)
    assert (shared / address).exists()


def test_blobs_that_were_not_moved_are_not_lost_sight_of(first: Machine, shared: Path) -> None:
    address = first.publish(b"state", first.open(None))
    with pytest.raises(StateError, match="holds blobs of its own; move what is in it to"):
        first.open(shared)
    (first.state / "blobs" / address).rename(shared / address)
    assert first.open(shared).get(address) == b"state"


def test_a_folder_of_folders_that_somebody_made_is_not_removed(first: Machine, shared: Path) -> None:
    (first.state / "blobs" / "mine" / "deep").mkdir(parents=True)
    with pytest.raises(StateError, match="move what is in it away"):
        first.open(shared)
    assert (first.state / "blobs" / "mine" / "deep").is_dir()


def test_a_blob_without_a_row_is_still_an_orphan(first: Machine, shared: Path) -> None:
    """As a server leaves one that dies between the first update and its row."""
    first.ledger.begin_run("run", digest(b"recipe"), "{}")
    first.open(shared).put(b"update")
    first.held.close()
    blobs = first.open(shared)
    assert sweep_orphans(blobs, first.ledger) == 1
    assert blobs.addresses() == []
