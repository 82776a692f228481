"""What must be true after every fault (N1 to N8), seen from outside: ledger, blobs, journals, the sites' receipts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protofed.common import codec
from protofed.common.codec import Buffer, Digest, digest
from protofed.common.errors import StateError
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.common.storage import files, journal
from protofed.server.rounds.aggregation.publisher import Publisher
from protofed.server.rounds.aggregation.robust_rule import RobustRule
from protofed.server.rounds.context import build_method, read_recipe, round_context
from protofed.server.rounds.machine.rules import Grouping
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader
from protofed.server.storage.rows import RoundRow, UpdateRow

JOURNAL = "journal.jsonl"  # of a state folder, where there is one
SERVES_WITHIN_S = 30.0


@dataclass(frozen=True)
class Checked:
    """How much a check had to look at: a test says what it expects, so that no check is of nothing.

    Attributes:
        published: rounds with a state, the one of the first model among them.
        updates: that count, in published rounds.
        recomputed: states that were computed once more.
        receipts: on the sites' disks.
        recorded: lines of the server's journal.
    """

    published: int
    updates: int
    recomputed: int
    receipts: int
    recorded: int


class ReadOnlyBlobs:
    """The server's blobs, read-only: what is put is only addressed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, *data: Buffer) -> Digest:
        return digest(*data)

    def get(self, address: Digest) -> bytes:
        """The data, checked against its address."""
        try:
            data = (self._folder / address).read_bytes()
        except OSError as error:
            raise StateError(f"blob {address}: {error.strerror}") from error
        assert digest(data) == address, f"N3: blob {address} is not what was acknowledged"
        return data

    view = get

    def uncache(self, address: Digest) -> None:
        """Nothing is kept."""

    def discard(self, address: Digest) -> None:
        """Nothing is forgotten."""

    def has(self, address: Digest) -> bool:
        return (self._folder / address).exists()


def check(
    server: Path,
    run: str,
    *,
    sites: Iterable[Path] = (),
    final: str | None = None,
    events: Collection[str] = (),
    keep_rounds: int = 2,
) -> Checked:
    """N1 to N4, N6 to N8 of a run whose processes have ended; N5 is `serves`, N7 of a process is `Baseline`.

    Args:
        server, sites: state folders.
        final: the newest state's digest in a run without faults (N8).
        events: that the journal must hold (N6).
        keep_rounds: whose updates the server keeps behind the newest.
    """
    folders = list(sites)
    with closing(LedgerReader(f"sqlite:///{server / LEDGER_FILE}")) as records:
        blobs, rounds = ReadOnlyBlobs(server / "blobs"), records.rounds(run)
        _check_rounds(rounds)
        published = [row for row in rounds if row.state is not None]
        accepted = {row.round: _accepted(records, row) for row in published}
        newest = published[-1].round if published else 0
        for number, rows in accepted.items():
            if number >= newest - keep_rounds:
                _check_blobs(blobs, rows)
        recomputed = _recompute(records, run, blobs, published, accepted)
        receipts = sum(_check_receipts(records, run, folder) for folder in folders)
        recorded = _check_journal(records, server / JOURNAL, events)
    for folder in (server, *folders):
        assert leftovers(folder) == [], "N7: something of an unfinished write or transfer is left"
    if final is not None:
        assert published, "N8: nothing was published"
        assert published[-1].state == final, "N8: the final state differs from that of a run without faults"
    counted = sum(row.counts for rows in accepted.values() for row in rows)
    return Checked(len(published), counted, recomputed, receipts, recorded)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files, and transfers that were started and not ended."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    started = [path for path in found if path.parent.name == "uploads" or path.name.endswith((".held", ".part"))]
    return started + [path for path in found if files.TEMPORARY in str(path.relative_to(folder))]


def serves(address: str, within_s: float = SERVES_WITHIN_S) -> None:
    """N5: the server says so within this time."""
    until, last = time.monotonic() + within_s, ""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while (left := until - time.monotonic()) > 0:
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=min(left, 5.0), wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                last = str(answer)
            except grpc.RpcError as error:
                last = str(error)
            time.sleep(0.1)
    raise AssertionError(f"N5: {address} does not serve after {within_s:.0f} s: {last}")


def resident_bytes(pid: int) -> int:
    """What a process has in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


class Baseline:
    """N7 of a process: its memory and descriptors, now and at the end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes, self._descriptors = resident_bytes(pid), self.descriptors()

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._pid}/fd").iterdir()))

    def check(self, more_bytes: int = 64 << 20, more_descriptors: int = 8) -> None:
        """Not much more than at first."""
        grown, opened = resident_bytes(self._pid) - self._bytes, self.descriptors() - self._descriptors
        assert grown <= more_bytes, f"N7: {grown >> 20} MiB more than at first"
        assert opened <= more_descriptors, f"N7: {opened} descriptors more than at first"


def _check_rounds(rounds: Sequence[RoundRow]) -> None:
    """N4: monotone, one state a round, and at most the newest attempt is open."""
    order = [(row.round, row.attempt) for row in rounds]
    assert order == sorted(set(order)), f"N4: {order}"
    numbers = [row.round for row in rounds if row.state is not None]
    assert numbers == list(range(len(numbers))), f"N4: published rounds are {numbers}"
    for row, after in itertools.pairwise(rounds):
        assert (row.state is None) != (row.abandoned is None), f"N4: {row} was left without an end"
        assert after.round == row.round + (row.state is not None), f"N4: {after} follows {row}"


def _accepted(records: LedgerReader, at: RoundRow) -> list[UpdateRow]:
    """N2: one a site; and what is reported was accepted."""
    rows = [row for row in records.updates(at.run, at.round, at.attempt) if row.verdict is Verdict.ACCEPTED]
    # A site of a secure aggregation sends something for each step.
    by_task = [(row.task.sum_of, row.task.kind, row.task.site) for row in rows]
    assert len(by_task) == len(set(by_task)), f"N2: two updates of a site count in round {at.round}: {by_task}"
    handed_in = [t for t in records.tasks(at.run, at.round, at.attempt) if t.kind != "score"]
    reported = {
        (task.sum_of, task.kind, task.site) for task in handed_in if task.task_status in ("reported", "rejected")
    }
    assert reported == set(by_task), f"N1: round {at.round} has reports of {reported} and updates of {by_task}"
    return rows


def _check_blobs(blobs: ReadOnlyBlobs, rows: Iterable[UpdateRow]) -> None:
    """N1, N3: there, whole, and finite."""
    for row in rows:
        if not row.counts:
            continue
        assert blobs.has(row.digest), f"N1: the update of {row.task.site} in round {row.task.round} is gone"
        data = blobs.get(row.digest)
        assert len(data) == row.bytes, f"N3: {row}"
        for tensors in codec.decode(data).values():
            assert all(np.isfinite(array).all() for array in tensors.values()), f"N3: {row}"


def _recompute(
    records: LedgerReader,
    run: str,
    blobs: ReadOnlyBlobs,
    published: Sequence[RoundRow],
    accepted: dict[int, list[UpdateRow]],
) -> int:
    """N4: every state whose inputs are still there, bit for bit; how many those are."""
    known = records.run(run)
    assert known is not None, f"the ledger has no run {run}"
    recipe = read_recipe(known)
    method, grouping = build_method(recipe), Grouping.of_run(recipe)
    done, before = 0, None
    for row in published:
        used = [update for update in accepted[row.round] if update.counts]
        if all(blobs.has(address) for address in [before, *(update.digest for update in used)] if address is not None):
            rules = recipe.federation
            rule = RobustRule.of(recipe, method)
            publisher = Publisher(method, blobs, rules.min_contributors, rules.fixed_point, recipe.fingerprint(), rule)
            state = publisher.restore(before).state if before is not None else None
            sites = [update.task.site for update in used if update.task.kind is not TaskKind.REFINE]
            groups = () if grouping is None else grouping.started(records.groups(row.closed_at), sites)
            context = round_context(recipe, row.round, row.enrolled)
            again = publisher.publish(publisher.recomputed(state, used, context, groups)).address
            assert again == row.state, f"N4: round {row.round} gives {again}, the ledger says {row.state}"
            done += 1
        before = row.state
    assert before is None or blobs.has(before), "N4: the newest state is gone"
    return done


def _check_receipts(records: LedgerReader, run: str, site: Path) -> int:
    """N1: what a site holds a receipt for is in the ledger; how many those are."""
    paths = sorted((site / run).glob("*/receipt.json"))
    for path in paths:
        receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        task_id = json.loads(path.with_name("task.json").read_text(encoding="utf-8"))["task"]["task_id"]
        task = records.task(task_id)
        assert task is not None, f"N1: the ledger lost the task of {path}"
        # Of a secure aggregation, the receipt is that of the masked numbers, which were asked for by a later task.
        rows = [row for row in records.updates(run, task.round, task.attempt) if row.task.site == task.site]
        known = {(row.digest, row.receipt().record_hash) for row in rows if row.verdict is Verdict.ACCEPTED}
        assert known, f"N1: the ledger lost the update of {path}"
        assert (receipt["digest"], receipt["record_hash"]) in known, f"N1: {path} says otherwise"
    return len(paths)


def _check_journal(records: LedgerReader, path: Path, events: Collection[str]) -> int:
    """N6: unbroken, holds these events, and nothing that the ledger lost; how many lines."""
    if not path.exists():
        assert not events, f"N6: there is no {path}"
        return 0
    told: list[journal.Record] = list(journal.records(path))
    missing = set(events) - {record.event for record in told}
    assert not missing, f"N6: the journal does not tell of {missing}"
    seals = {record.facts["record_hash"] for record in told if record.facts.get("verdict") == Verdict.ACCEPTED}
    assert seals <= records.sealed(), "N1: the ledger lost what the journal says was accepted"
    return len(told)
