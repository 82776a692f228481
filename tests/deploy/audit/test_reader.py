"""`protofed audit …`: what a site's and a server's log tell, and whether they are as they were written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.support.command_line import called

from protofed.client.transport.audit import ClientAudit as SiteAudit
from protofed.common import codec
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.protocol import wire
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.storage.journal import Journal, Record
from protofed.deploy.cli import audit as cli_audit
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import operator_pb2 as op
from protofed.server.access.authorization import Peer
from protofed.server.rpc.audit import AuditEntry, ServerAudit

KEPT = Path(__file__).parents[2] / "golden" / "v0_3_0"
Protofed: TypeAlias = Callable[..., tuple[int, str, str]]
OPERATOR = Peer("0e" * 32, "operator", "jo")
ACCEPTED = pb.Receipt(verdict=pb.VERDICT_ACCEPTED, digest="0" * 64).SerializeToString()
STALE = pb.Receipt(verdict=pb.VERDICT_LATE, digest="0" * 64).SerializeToString()
TENSORS = [
    pb.Tensor(part=pb.PART_BODY, name="conv.weight", dtype="float32", shape=[10, 10]),
    pb.Tensor(part=pb.PART_BODY, name="conv.bias", dtype="float32", shape=[10]),
    pb.Tensor(part=pb.PART_PROTOTYPES, name="prototypes", dtype="float32", shape=[3, 4]),
]


BASE: dict[str, Any] = {"run": "run-1", "round": 1, "base_digest": "ba5e" * 16}
TASK = pb.NextTaskResponse(task=pb.Task(run="x" * 46)).SerializeToString()
assert len(TASK) == 50


def caller(site: str) -> pb.Caller:
    return pb.Caller(site=site, instance=f"daemon-{site}")


def fit(site: str, round: int, reply: bytes) -> list[tuple[str, Any, bytes]]:
    """What a site sends for a task, and what is answered."""
    task_id, digest = f"n{round}{site}", codec.digest(f"{round}{site}".encode())
    upload = f"{site}.{task_id}.{digest}"
    where: dict[str, Any] = {
        "caller": caller(site),
        "run": "run-1",
        "round": round,
        "task_id": task_id,
        "digest": digest,
    }
    return [
        ("NextTask", pb.NextTaskRequest(caller=caller(site), run="run-1", wait_s=20.0), TASK),
        ("BeginUpload", pb.UploadManifest(**where, tensors=TENSORS, total_bytes=488), b""),
        ("PutChunk", pb.Chunk(caller=caller(site), upload=upload, data=b"x" * 488), b""),
        ("CommitUpload", pb.CommitRequest(**where, upload=upload, metrics={"loss": 0.5}), reply),
    ]


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Protofed:
    """The command line: exit code, standard output, standard error."""
    monkeypatch.setattr(cli_audit.console, "width", 100)  # whatever COLUMNS was when it was made
    return partial(called, capfd, "audit")


@pytest.fixture
def server_log(tmp_path: Path) -> Path:
    """State folder of a server: an operator and two sites over two rounds; the second is too late for one of them."""
    audit = ServerAudit(tmp_path / "server" / "audit.jsonl")
    calls = [(OPERATOR, "StartRun", op.StartRunRequest(recipe="{}"), b"info", "OK")]
    for site in ("ann", "bob"):
        for number in (1, 2):
            reply = STALE if (site, number) == ("bob", 2) else ACCEPTED
            calls += [(Peer("ab" * 32, "site", site), *call, "OK") for call in fit(site, number, reply)]
    again = fit("ann", 1, ACCEPTED)[1][1]
    calls += [(Peer("ab" * 32, "site", "ann"), "BeginUpload", again, b"", "ALREADY_EXISTS")]

    async def note() -> None:
        for peer, call, message, reply, code in calls:
            await audit.note(AuditEntry(call, peer, message.SerializeToString(), message, code, reply))

    asyncio.run(note())
    audit.close()
    return tmp_path / "server"


@pytest.fixture
def site_log(tmp_path: Path) -> Path:
    """State folder of a site: a round that was accepted, one in which the policy let nothing out."""
    journal = Journal(tmp_path / "site" / "audit.jsonl")
    audit = SiteAudit(journal)
    audit.server("fl.example.org:7443", "first seen", "cd" * 32, "nobody was known there")
    for call, message, reply in fit("ann", 1, ACCEPTED):
        data = message.SerializeToString()
        for _ in range(2 if call == "BeginUpload" else 1):  # the first is lost
            audit.sent("fl.example.org:7443", "ab" * 32, call, audit_fields(message, values=True), data)
        if call == "BeginUpload":
            audit.answered(call, codec.digest(data), code="UNAVAILABLE")
        if verdict := wire.read_verdict(call, reply):
            audit.answered(call, codec.digest(data), verdict=verdict)
    audit.task(audit_fields(pb.Task(kind=pb.TASK_KIND_INITIALISE, run="run-1", task_id="n0ann"), values=True))
    for remaining in (9.0, 8.0):  # given again
        audit.task(audit_fields(pb.Task(**BASE, kind=pb.TASK_KIND_FIT, task_id="n1ann", remaining_s=remaining)))
    task = Task(TaskKind.FIT, "run-1", 2, "n2ann", None, 0, 9.0)
    audit.refused(task, PolicyViolationError("prototypes/prototypes: not allowed"))
    journal.close()
    return tmp_path / "site"


def log_lines(folder: Path) -> list[bytes]:
    return (folder / "audit.jsonl").read_bytes().splitlines(keepends=True)


def newest(folder: Path) -> str:
    return str(json.loads(log_lines(folder)[-1])["hash"])


def test_good_logs_are_told_with_their_newest_hash_and_as_json(
    protofed: Protofed, server_log: Path, site_log: Path
) -> None:
    code, out, _ = protofed("verify", server_log)
    lines = [json.loads(line) for line in log_lines(server_log)]
    assert code == 0
    assert f"good, {len(lines)} records from {lines[0]['at']} to {lines[-1]['at']}" in out
    assert f"newest hash {lines[-1]['hash']}" in out
    code, out, _ = protofed("verify", server_log, "--json")
    found = json.loads(out)
    assert (code, found["intact"], found["problems"]) == (0, True, [])
    assert found["logs"][0]["newest"] == newest(server_log)
    code, out, _ = protofed("verify", site_log, "--expect", "0" * 64, "--json")
    assert (code, json.loads(out)["intact"], len(json.loads(out)["problems"])) == (1, False, 1)
    code, out, _ = protofed("verify", server_log / "audit.jsonl", site_log, "--expect", newest(site_log))
    assert code == 0
    assert out.count(": good, ") == 2
    assert f"is record {len(log_lines(site_log))}" in out


def test_a_hash_of_before_is_found_in_a_log_that_grew_and_in_none_written_anew(
    protofed: Protofed, server_log: Path, site_log: Path
) -> None:
    before = newest(server_log)
    audit = ServerAudit(server_log / "audit.jsonl")
    message = pb.HeartbeatRequest()
    asyncio.run(audit.note(AuditEntry("Heartbeat", OPERATOR, b"", message, "OK", b"")))
    audit.close()
    code, out, _ = protofed("verify", server_log, "--expect", before)
    assert code == 0
    assert f"is record {len(log_lines(server_log)) - 1}: nothing up to it was changed" in out
    before = newest(site_log)
    last, lines = Record(0, "", "", {}, ""), []
    for line in log_lines(site_log):
        said = json.loads(line)
        said["facts"].pop("digest", None)
        last = Record(said["seq"], said["at"], said["event"], said["facts"], last.hash).sealed()
        lines.append(last.line())
    (site_log / "audit.jsonl").write_bytes(b"".join(lines))
    assert protofed("verify", site_log)[0] == 0, "nobody can tell without a hash"
    code, _, err = protofed("verify", site_log, "--expect", before)
    assert code == 1
    assert "written anew" in err


def test_a_bad_log_is_named_and_the_others_are_told(protofed: Protofed, server_log: Path, site_log: Path) -> None:
    lines = log_lines(site_log)
    (site_log / "audit.jsonl").write_bytes(b"".join([*lines[:2], lines[2].replace(b"run-1", b"run-2"), *lines[3:]]))
    code, out, err = protofed("verify", site_log, server_log)
    assert code == 1
    assert "line 3: record 3 is not what was written there" in err
    assert str(site_log) in err
    assert str(server_log) in out
    assert str(site_log) not in out


def test_a_log_that_is_empty_or_ends_in_half_a_line_is_no_tampering(
    protofed: Protofed, site_log: Path, tmp_path: Path
) -> None:
    whole = len(log_lines(site_log))
    with (site_log / "audit.jsonl").open("ab") as file:
        file.write(b'{"at":')
    code, out, _ = protofed("verify", site_log)
    assert code == 0
    assert f"good, {whole} records" in out
    assert f"only 6 bytes of record {whole + 1}. Its writer is writing now, or was killed" in out
    Journal(site_log / "audit.jsonl").close()
    _, out, _ = protofed("verify", site_log)
    assert "1 half lines of killed processes were cut off" in out
    (tmp_path / "audit.jsonl").touch()
    code, out, _ = protofed("verify", tmp_path)
    assert code == 0
    assert "there are no records" in out


@pytest.mark.parametrize("wrong", ["abc", "G" * 64, "0" * 65])
def test_what_is_no_hash_is_refused(protofed: Protofed, site_log: Path, wrong: str) -> None:
    code, _, err = protofed("verify", site_log, "--expect", wrong)
    assert code == 78
    assert "is no hash" in err


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_folder_without_a_log_is_refused(protofed: Protofed, tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "none"):
        code, _, err = protofed(command, path)
        assert code == 78
        assert "a state folder with audit.jsonl" in err


def rounds(said: str) -> dict[int, Any]:
    return {row["round"]: row for row in json.loads(said)["rounds"] if row["run"] == "run-1"}


def test_a_server_tells_by_round_what_came_and_went(protofed: Protofed, server_log: Path) -> None:
    code, out, _ = protofed("show", server_log, "--json")
    assert code == 0
    assert "messages" not in json.loads(out)
    found = rounds(out)
    assert sorted(found) == [0, 1, 2]
    assert found[0]["messages"] == 4, "tasks are asked for outside of rounds"
    assert found[0]["answer_bytes"] == 200
    assert found[1]["who"] == ["ann", "bob"]
    assert found[1]["messages"] == 7, "three a site, and one again"
    assert found[1]["verdicts"] == {"accepted": 2}
    assert found[1]["errors"] == {"ALREADY_EXISTS": 1}
    assert found[2]["verdicts"] == {"accepted": 1, "late": 1}
    assert found[2]["errors"] == {}
    sizes = sum(len(message.SerializeToString()) for site in ("ann", "bob") for _, message, _ in fit(site, 2, b"")[1:])
    assert found[2]["bytes"] == sizes
    _, out, _ = protofed("show", server_log, "--round", "2", "--json", "--messages")
    assert list(rounds(out)) == [2]
    assert {message["round"] for message in json.loads(out)["messages"]} == {2}
    _, out, _ = protofed("show", server_log, "--run", "run-1", "--json")
    assert {row["run"] for row in json.loads(out)["rounds"]} == {"run-1"}


def test_tensors_are_told_by_part_and_an_update_that_is_tried_twice_counts_once(
    protofed: Protofed, server_log: Path, site_log: Path
) -> None:
    two_sites = [{"part": "body", "tensors": 4, "bytes": 880}, {"part": "prototypes", "tensors": 2, "bytes": 96}]
    assert rounds(protofed("show", server_log, "--json")[1])[1]["parts"] == two_sites
    one = [{"part": "body", "tensors": 2, "bytes": 440}, {"part": "prototypes", "tensors": 1, "bytes": 48}]
    assert rounds(protofed("show", site_log, "--json")[1])[1]["parts"] == one


def test_a_site_tells_what_left_it_what_was_refused_and_what_it_was_given(protofed: Protofed, site_log: Path) -> None:
    _, out, _ = protofed("show", site_log, "--json", "--messages")
    found, told = rounds(out), json.loads(out)
    assert found[1]["messages"] == 4, "every attempt"
    assert found[1]["answer_bytes"] is None
    assert found[1]["verdicts"] == {"accepted": 1}
    assert found[1]["errors"] == {"UNAVAILABLE": 1}
    assert (found[2]["messages"], found[2]["errors"]) == (0, {"policy": 1})
    assert [message["call"] for message in told["messages"]] == [
        "NextTask",
        "BeginUpload",
        "BeginUpload",
        "PutChunk",
        "CommitUpload",
    ]
    chunk, commit = told["messages"][-2:]
    assert (chunk["run"], chunk["round"]) == ("run-1", 1), "by the upload that it names"
    assert commit["verdict"] == "accepted"
    assert commit["digest"] == codec.digest(fit("ann", 1, b"")[-1][1].SerializeToString())
    assert [note["what"].partition(":")[0] for note in told["notes"]] == [
        "server fl.example.org",
        "refused by the policy, round 2 of run run-1",
    ]
    _, out, _ = protofed("show", site_log, "--json")
    told = [(row["round"], row["kind"], row["given"], row["base_digest"]) for row in json.loads(out)["tasks"]]
    assert told == [(0, "initialise", 1, ""), (1, "fit", 2, "ba5e" * 16)]
    assert "ba5e" in protofed("show", site_log)[1]
    assert protofed("show", site_log, "--bases")[1] == f"run-1 1 fit {'ba5e' * 16}\n"
    assert protofed("show", site_log, "--bases", "--round", "2")[1].strip() == ""
    assert "loss 0.5" in protofed("show", site_log, "--messages")[1]


def test_a_run_that_no_record_names_is_refused_with_those_that_are_named(
    protofed: Protofed, server_log: Path, site_log: Path, tmp_path: Path
) -> None:
    for log in (server_log, site_log):
        code, out, err = protofed("show", log, "--run", "nosuch")
        assert (code, out, "run-1" in err) == (ConfigError.exit_code, "", True)
    (tmp_path / "audit.jsonl").touch()
    code, _, err = protofed("show", tmp_path, "--run", "nosuch")
    assert (code, "nosuch" in err) == (ConfigError.exit_code, True)
    assert protofed("show", server_log, "--run", "run-1", "--round", "99")[0] == 0


def test_the_tables_fit_a_terminal(protofed: Protofed, server_log: Path, site_log: Path) -> None:
    for log in (server_log, site_log):
        _, out, _ = protofed("show", log, "--messages")
        lines = [line.rstrip() for line in out.splitlines()]
        assert max(map(len, lines)) <= 100
        assert any(line.split()[-2:] == ["1", "accepted"] or line.endswith("2 accepted") for line in lines)
        assert any("CommitUpload" in line and line.endswith("accepted") for line in lines)
    assert any("2 body, 440 B" in line for line in lines)
    assert any("refused by the policy" in line for line in lines)


def test_notes_say_what_was_not_recorded_what_was_counted_and_which_policy_counts(
    protofed: Protofed, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "audit.jsonl")
    journal.append("resumed", unrecorded={"CommitUpload": 1}, refused={"BeginUpload": 3})
    peer: dict[str, Any] = {"fingerprint": "ab" * 32, "party": "site", "name": "ann"}
    journal.append("counted", peer=peer, calls={"PutChunk OK": 4999, "Heartbeat OK": 7}, bytes=123456)
    SiteAudit(journal).policy("standard", codec.digest(b"the file"))
    journal.close()
    told = [note["what"] for note in json.loads(protofed("show", tmp_path, "--json")[1])["notes"]]
    phrases = [
        ("not recorded, nor answered: 1 × CommitUpload", "refused before they acted: 3 × BeginUpload"),
        ("site 'ann'", "4999 × PutChunk OK"),
        ("standard", codec.digest(b"the file")),
    ]
    for what, said in zip(told, phrases, strict=True):
        assert all(phrase in what for phrase in said)


def test_a_log_that_was_changed_is_not_shown(protofed: Protofed, site_log: Path) -> None:
    lines = log_lines(site_log)
    (site_log / "audit.jsonl").write_bytes(b"".join([*lines[:2], *lines[3:]]))
    code, out, err = protofed("show", site_log)
    assert code == 1
    assert out == ""
    assert "record 3 is not" in err


def test_what_peers_wrote_is_no_markup(protofed: Protofed, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.jsonl")
    journal.append("call", peer={"name": "[red]ann"}, call="[bold]X", facts={}, bytes=1, digest="0", answer_bytes=0)
    journal.append("server", server="[link=x]s", finding="changed", certificate=None, why="\x1b[31m")
    journal.close()
    _, out, _ = protofed("show", tmp_path, "--messages")
    assert "[red]ann" in out
    assert "[bold]X" in out
    assert "\\x1b[31m" in out
    assert "\x1b" not in out


def test_what_cannot_be_a_run_gets_no_row(protofed: Protofed, tmp_path: Path) -> None:
    audit = ServerAudit(tmp_path / "audit.jsonl")
    for run in ("../x", "a b", "x" * 100, "run-1"):
        message = pb.GetChunkRequest(run=run)
        asyncio.run(audit.note(AuditEntry("GetChunk", OPERATOR, b"12", message, "INVALID_ARGUMENT", b"")))
    audit.close()
    told = json.loads(protofed("show", tmp_path, "--json")[1])
    assert [(row["run"], row["messages"]) for row in told["rounds"]] == [("", 3), ("run-1", 1)]


def test_neither_another_journal_nor_a_lone_answer_has_messages(protofed: Protofed, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("verdict", site="ann", round=1)
    journal.close()
    assert protofed("show", tmp_path / "journal.jsonl")[1].strip() == "No messages."
    assert protofed("verify", tmp_path / "journal.jsonl")[0] == 0
    journal = Journal(tmp_path / "audit.jsonl")
    journal.append("answered", call="CommitUpload", digest="0" * 64, verdict="accepted")
    journal.close()
    assert protofed("show", tmp_path)[1].strip() == "No messages."
