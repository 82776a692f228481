"""`protofed audit …` on logs of several files: read as one, what is missing or exchanged is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protofed.client.transport.audit import ClientAudit
from protofed.common import codec
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.storage.journal import Journal, records, segment_path, segments, verify
from protofed.protos.v1 import federation_pb2 as pb

KEPT = Path(__file__).parents[2] / "golden" / "v0_3_0"
ROUNDS = 12


def send(journal: Journal, round: int) -> None:
    message = pb.CommitRequest(run="run-1", round=round, task_id=f"t{round}", digest=codec.digest(b"x"))
    ClientAudit(journal).sent("fl:7443", "ab" * 32, "CommitUpload", audit_fields(message), message.SerializeToString())


def rounds(out: str) -> list[Any]:
    return [row["round"] for row in json.loads(out)["rounds"]]


def test_all_segments_or_one_alone_are_verified_and_shown_as_one_log(protofed: Any, state: Path) -> None:
    code, out, _ = protofed("verify", state)
    assert code == 0
    assert f"good, {ROUNDS + 3} records" in out
    assert list(records(state / "audit.jsonl"))[-1].hash in out
    assert rounds(protofed("show", state, "--json")[1]) == list(range(1, ROUNDS + 1))
    code, out, _ = protofed("verify", segment_path(state / "audit.jsonl", 2))
    assert code == 0
    assert "of segment 1:" in out


def test_what_is_in_an_archive_is_said_and_its_end_can_be_expected_there(
    protofed: Any, state: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    newest = list(records(state / "audit.jsonl"))[-1].hash
    for segment in segments(state / "audit.jsonl")[:2]:
        shutil.move(segment.path, archive / segment.path.name)
    moved = list(records(archive / "audit.jsonl"))
    code, out, _ = protofed("verify", state, "--expect", newest)
    assert code == 0
    assert f"records 1 to {len(moved)} are not here, of segments 1 to 2" in " ".join(out.split())
    assert moved[-1].hash in out
    assert protofed("verify", archive, "--expect", moved[-1].hash)[0] == 0
    assert protofed("verify", state, "--expect", moved[-1].hash)[0] == 0, "the first record here has it"
    assert protofed("verify", state, "--expect", moved[0].hash)[0] == 1, "it is in the archive alone"
    assert protofed("verify", state, archive, "--expect", moved[0].hash)[0] == 0
    assert rounds(protofed("show", state, "--json")[1])[-1] == ROUNDS
    assert rounds(protofed("show", archive, "--json")[1])[0] == 1


@pytest.mark.parametrize("number", [2, 3])
def test_a_segment_that_is_missing_in_the_middle_is_named(protofed: Any, state: Path, number: int) -> None:
    (gone := segment_path(state / "audit.jsonl", number)).unlink()
    for command in ("verify", "show"):
        code, _, err = protofed(command, state)
        assert code == 1
        assert gone.name in err


@pytest.mark.parametrize("part", ["server", "site-1", "site-2"])
def test_a_log_of_0_2_0_is_the_first_segment_as_it_is(tmp_path: Path, part: str) -> None:
    path = tmp_path / "audit.jsonl"
    shutil.copy(KEPT / part / "audit.jsonl", path)
    kept, count = path.read_bytes(), verify(path)
    journal = Journal(path, len(kept))
    send(journal, 9)
    journal.close()
    assert path.read_bytes() == kept
    assert [record.event for record in list(records(path))[count:]] == ["segment", "sent"]
