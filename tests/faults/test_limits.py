"""Faults of what a server stands on: its event loop, memory, descriptors, disk and journal; and of its own code."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import subprocess
from itertools import repeat
from pathlib import Path

import pytest
from tests.conftest import Mount
from tests.faults.conftest import SITES, MakeRun, ProxiedProcesses
from tests.support.fault_proxy import Direction, Mode
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.invariants import JOURNAL, Baseline, leftovers, serves

from protofed.common.failpoint import PATIENT_TEXT
from protofed.common.storage import journal

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
DESCRIPTORS = 64
FIRST_WORDS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # and empty SETTINGS


def fill(folder: Path) -> Path:
    """A file that takes all that is free."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                file.writelines(repeat(bytes(size)))
    return filler


def check_end(here: ProxiedProcesses) -> None:
    """Nothing is lost, though much was refused; and each site has the receipts of its three newest updates."""
    assert here.ended_like_undisturbed(traces=True).receipts == 2 * min(here.recipe.rounds, 3)


def trainers_that_wait(here: ProxiedProcesses) -> None:
    """Both sites' daemons; each pauses once before it hands in its first update, and both are there now."""
    here.trainers("fit-done=sleep4")
    here.wait_until_all("started")


def updates(here: ProxiedProcesses, round: int) -> int:
    """Verdicts of a round."""
    with here.ledger() as ledger:
        return len(ledger.updates(here.recipe.name, round, 1))


def test_row_86_a_blocked_event_loop_is_told_and_passes(make_run: MakeRun) -> None:
    """NOT_SERVING when the loop can say so again, the stack of what blocked it in the log, SERVING a moment later."""
    here = make_run()
    here.server(fails="loop:10=sleep10")
    watch = HealthWatch(here.address)
    go = here.folder / "go"  # the run does not end, nor its server, before that is said
    here.trainer("site-1", fails=f"fit-done=until{go}")
    here.trainer("site-2")
    here.wait_for(lambda: len(watch.heard) >= 3)
    assert watch.heard == [SERVING, NOT_SERVING, SERVING]
    go.touch()
    log = here.log("server")
    assert "the event loop is blocked" in log
    assert "in reach" in log  # the stack's innermost frame
    assert log.index("the event loop is blocked") < log.index("the event loop runs again")
    check_end(here)
    watch.end()


def test_row_87_a_server_short_of_memory_takes_no_upload_and_lives(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites are told to wait and do; with room again the run goes on where it was."""
    here = make_run()
    with monkeypatch.context() as patched:
        patched.setenv("PROTOFED_SERVER_MEMORY_LIMIT_MB", "1")
        here.server()
    here.trainers()
    here.wait_for(lambda: "short of memory" in here.log("site-1") + here.log("site-2"))
    serves(here.address)
    assert "memory is short" in here.log("server")
    assert updates(here, 0) == 0
    assert leftovers(here.folder / "server") == []
    here.running["server"].send_signal(signal.SIGTERM)
    assert here.finish(["server"]) == [0]
    here.server()
    check_end(here)


def test_row_88_a_server_out_of_descriptors_refuses_and_lives(make_run: MakeRun) -> None:
    """No crash while others hold them all, and nothing is lost; a legitimate daemon gets through when they go."""
    here = make_run()
    here.server()
    here.trainer("site-1")
    here.wait_for(lambda: '"ready"' in here.log("site-1"))  # connected; the first model takes two
    pid = here.running["server"].pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    host, port = here.address.split(":")
    held = [socket.create_connection((host, int(port)), timeout=5) for _ in range(2 * DESCRIPTORS)]
    for connection in held:
        connection.sendall(FIRST_WORDS)
    here.wait_for(lambda: Baseline(pid).descriptors() >= DESCRIPTORS)
    late = here.trainer("site-2")  # cannot be taken in now
    with pytest.raises(AssertionError, match="does not serve"):
        serves(here.address, within_s=3.0)
    assert here.running["server"].poll() is None
    for connection in held:
        connection.close()
    serves(here.address)
    assert late.poll() is None
    check_end(here)
    with here.ledger() as ledger:
        assert [row.rejected for row in ledger.updates(here.recipe.name) if row.rejected] == []


def test_row_88_71_updates_that_cannot_be_opened_now_are_not_taken_for_damaged(make_run: MakeRun) -> None:
    """Out of descriptors while it aggregates, the server waits and computes again: no update is rejected for that."""
    here = make_run()
    here.server(fails="aggregation-started:2=sleep5")  # the first one is the model's
    here.trainers()
    here.wait_until_all("reported")
    pid = here.running["server"].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    here.wait_for(lambda: "no space for the new state" in here.log("server"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    check_end(here)


@pytest.mark.parametrize("place", ["commit-recorded:2", "enroll-answered:1"])
def test_row_90_an_unforeseen_error_tells_peers_nothing(make_run: MakeRun, place: str) -> None:
    """INTERNAL with an incident's id on the wire and in the site's log, the text only in the server's; it goes on."""
    here = make_run()
    here.server(fails=f"{place}=raise")
    heard: list[bytes] = []

    def record(way: Direction, data: bytes) -> bool:
        heard.append(data)
        return False

    for site in SITES:
        here.behind(site).mode = Mode(tap=record)
    here.trainers()
    check_end(here)
    wire, server = b"".join(heard), here.log("server")
    assert b"internal error, incident " in wire  # so what is on the wire can be read
    assert PATIENT_TEXT.encode() not in wire
    assert b"Jane" not in wire
    assert PATIENT_TEXT in server
    daemons = here.log("site-1") + here.log("site-2")
    assert "internal error, incident " in daemons
    assert "Jane" not in daemons


def test_row_58_a_disk_full_while_updates_come_takes_none_and_recovers(make_run: MakeRun, mount: Mount) -> None:
    """RESOURCE_EXHAUSTED, no row and nothing half written; the same again succeeds when there is room."""
    here = make_run()
    mount(here.folder / "server", "size=40m")
    here.server()
    trainers_that_wait(here)
    filler = fill(here.folder / "server")
    here.wait_for(lambda: all("resource_exhausted" in here.log(site) for site in SITES))
    assert updates(here, 1) == 0
    assert leftovers(here.folder / "server") == []
    serves(here.address)
    filler.unlink()
    check_end(here)


def test_row_58_71_a_disk_full_while_a_state_is_stored_waits_for_room(make_run: MakeRun, mount: Mount) -> None:
    """The aggregate is computed again when there is room; the updates stay."""
    here = make_run()
    mount(here.folder / "server", "size=40m")
    here.server(fails="aggregation-done:2=sleep5")  # the first one is the model's
    here.trainers()
    here.wait_until_all("reported")
    filler = fill(here.folder / "server")
    here.wait_for(lambda: "no space for the new state" in here.log("server"))
    serves(here.address)
    assert updates(here, 1) == 2
    filler.unlink()
    check_end(here)


def test_row_59_a_disk_that_turns_read_only_ends_the_server_and_nothing_is_acknowledged(
    make_run: MakeRun, mount: Mount
) -> None:
    """Exit code 74, which names the disk; repaired and started again, it takes what the sites have kept."""
    here = make_run()
    here.server()
    trainers_that_wait(here)
    uploads = here.folder / "server" / "blobs" / "uploads"
    mount(uploads, "ro")
    assert here.finish(["server"]) == [74], here.logs()
    assert os.strerror(errno.EROFS) in here.log("server")
    assert updates(here, 1) == 0
    assert all(not list(here.folder.glob(f"{site}/*/*/receipt.json")) for site in SITES)
    subprocess.run(["umount", str(uploads)], check=True)
    here.server()
    check_end(here)


def test_row_89_while_the_journal_cannot_be_written_nothing_is_acknowledged(make_run: MakeRun, mount: Mount) -> None:
    """Mutating calls are refused, or the server ends; every receipt that a site holds stands in the journal."""
    here = make_run(rounds=6)
    path, disk = here.folder / "server" / JOURNAL, here.folder / "disk"
    mount(disk, "size=1m")
    path.parent.mkdir()
    path.symlink_to(disk / JOURNAL)
    here.server()
    trainers_that_wait(here)
    filler = fill(disk)
    server = here.running["server"]
    here.wait_for(lambda: server.poll() is not None or "resource_exhausted" in here.log("site-1") + here.log("site-2"))
    recorded = {record.facts["record_hash"] for record in journal.records(path) if record.event == "verdict"}
    with here.ledger() as ledger:
        rows = ledger.updates(here.recipe.name)
        assert not {row.receipt().record_hash for row in rows} <= recorded, "nothing was refused"
    receipts = list(here.folder.glob("site-*/*/*/receipt.json"))
    assert all(any(str(seal) in receipt.read_text() for seal in recorded) for receipt in receipts)
    filler.unlink()
    if server.poll() is not None:
        assert server.returncode == 74
        here.server()
    check_end(here)
