"""What may not get in, over the real service: rows 20, 45 to 47, 49, 51, 52, 63 to 66, 68 to 70 of the fault table."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from tests.support.invariants import resident_bytes
from tests.support.processes import Processes
from tests.support.raw_client import FEDERATION, MODEL, Code, RawClient, refused, send_compressed, zeros

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.payload import Array, Part, Payload, Tensors, describe
from protofed.common.protocol import wire
from protofed.common.protocol.messages import Manifest
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.rounds.intake.intake import examined
from protofed.server.verdicts import RefusalCode, UpdateProblem

RUN = "small-fedavg"
FIRST: Tensors = MODEL[Part.BODY]
STRANGE_IDS = {
    "path": "../../x",
    "absolute": "/etc/passwd",
    "long": "a" * 10_240,
    "nul": "a\0b",
    "look-alike": "smаll-fedavg",  # the second a is Cyrillic
    "upper case": "A",
    "empty": "",
    "unknown": "never-seen",
}


@pytest.fixture
def serve(live_server: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path) -> Iterator[Any]:
    """Starts a server of one run, and gives calls to it."""
    opened: list[RawClient] = []

    def start(*sites: str, method: str = "fedavg", **federation: object) -> list[RawClient]:
        rules = {"min_sites": len(sites), "quorum": 1, "score_every": 0, **federation}
        address = live_server(recipe_of(method, federation=rules), tmp_path / "server").address
        opened.extend(RawClient(address, f"small-{method}", site).enroll() for site in sites)
        return opened

    yield start
    for one in opened:
        one.channel.close()


@pytest.fixture
def site(serve: Callable[..., list[RawClient]]) -> RawClient:
    """The only site of a run whose first model is there."""
    (one,) = serve("site-1")
    assert one.push(one.task()).verdict == pb.VERDICT_ACCEPTED
    return one


@pytest.fixture
def verdicts(tmp_path: Path) -> Callable[[], list[tuple[int, str, str, str]]]:
    """Reads round, site, verdict and reason of all that was judged."""

    def read() -> list[tuple[int, str, str, str]]:
        with sqlite3.connect(f"file:{tmp_path / 'server' / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
            return ledger.execute("select round, site, verdict, reason from updates order by rowid").fetchall()

    return read


def body(**tensors: Array) -> Payload:
    return {**MODEL, Part.BODY: {**FIRST, **tensors}}


def files(folder: Path) -> dict[Path, int]:
    """All files but the ledger's and the audit log, with their sizes."""
    kept = ("ledger", "audit")
    return {path: path.stat().st_size for path in folder.rglob("*") if not path.name.startswith(kept)}


# Identities


@pytest.mark.parametrize("strange", STRANGE_IDS.values(), ids=STRANGE_IDS)
def test_row_20_a_strange_id_touches_no_file(site: RawClient, strange: str, tmp_path: Path) -> None:
    task, data, before = site.task(), codec.encode(MODEL), files(tmp_path)
    announced = site.announcement(task, data, MODEL)
    for field in ("run", "task_id"):
        message = pb.UploadManifest.FromString(announced.SerializeToString())
        setattr(message, field, strange)
        assert refused(site.say, "BeginUpload", message)[0] is Code.INVALID_ARGUMENT
    unknown = pb.NextTaskRequest(caller=pb.Caller(site=strange, instance="a"), run=RUN)
    known = strange == STRANGE_IDS["unknown"]
    assert refused(site.say, "NextTask", unknown)[0] is (Code.UNAUTHENTICATED if known else Code.INVALID_ARGUMENT)
    scores = pb.ScoresRequest(caller=site.caller, run=RUN, task_id=strange)
    assert refused(site.say, "ReportScores", scores)[0] is Code.INVALID_ARGUMENT
    assert refused(site.put, strange, 0, b"x")[0] is Code.FAILED_PRECONDITION  # begin it again
    assert refused(site.commit, task, strange)[0] is Code.FAILED_PRECONDITION
    assert files(tmp_path) == before


@pytest.mark.parametrize(("field", "value"), [("run", "other-run"), ("task_id", "0" * 32)])
def test_row_45_an_update_for_another_run_or_a_future_round_is_refused(site: RawClient, field: str, value: str) -> None:
    announced = site.announcement(site.task(), codec.encode(MODEL), MODEL, **{field: value})
    assert refused(site.say, "BeginUpload", announced)[0] is Code.INVALID_ARGUMENT


def test_row_46_what_one_site_said_counts_for_no_other(
    serve: Callable[..., list[RawClient]], verdicts: Callable[[], list[Any]]
) -> None:
    one, two = serve("site-1", "site-2")
    for maker in (one, two):  # of the first model
        maker.push(maker.task())
    task = one.task()
    one.recorded.clear()
    assert one.push(task).verdict == pb.VERDICT_ACCEPTED
    before = verdicts()
    for call, message in list(one.recorded):
        replayed = type(message).FromString(message.SerializeToString())
        replayed.caller.CopyFrom(two.caller)  # type: ignore[attr-defined]
        code, text = refused(two.say, call, replayed)
        assert code is (Code.INVALID_ARGUMENT if call == "BeginUpload" else Code.FAILED_PRECONDITION)
        assert "of this site" in text or "for this site" in text
    assert verdicts() == before


def test_row_47_an_update_replayed_in_the_next_round_never_counts_again(
    site: RawClient, verdicts: Callable[[], list[Any]]
) -> None:
    task = site.task()
    site.recorded.clear()
    receipt = site.push(task, body(w=FIRST["w"] + 1))
    recorded, following = list(site.recorded), site.task()
    assert following.round == task.round + 1
    answer = site.say(*recorded[0])
    assert (answer.receipt.verdict, answer.receipt.record_hash) == (pb.VERDICT_DUPLICATE, receipt.record_hash)
    for call, message in recorded[1:]:
        assert refused(site.say, call, message)[0] is Code.FAILED_PRECONDITION
    moved = pb.UploadManifest.FromString(recorded[0][1].SerializeToString())
    moved.task_id, moved.round = following.task_id, following.round
    answer = site.say("BeginUpload", moved)
    assert answer.receipt.verdict == pb.VERDICT_REFUSED
    assert answer.receipt.reason == "it starts from another model than the task names"
    assert [row[2] for row in verdicts() if row[0] == following.round] == ["refused"]


# Messages


def test_row_49_no_message_takes_the_server_more_than_64_mib(tmp_path: Path, recipe_of: Callable[..., Recipe]) -> None:
    processes = Processes.of(tmp_path, recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1, "score_every": 0}))
    process = processes.server()
    try:
        site = RawClient(processes.address, RUN).enroll()
        assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
        before = resident_bytes(process.pid)
        bomb = zeros(1 << 30)
        for call in ("Enroll", "PutChunk"):
            assert b"grpc-status\x0212" in send_compressed(processes.address, call, bomb)  # UNIMPLEMENTED
        nested = b""
        for _ in range(1000):
            nested = b"\x0a" + _varint(len(nested)) + nested
        raw: list[tuple[str, bytes, grpc.StatusCode]] = [
            ("PutChunk", bytes(8 << 20), Code.RESOURCE_EXHAUSTED),
            ("Enroll", bytes(1 << 20), Code.RESOURCE_EXHAUSTED),
            ("BeginUpload", b"\x32\x00" * 1_000_000, Code.RESOURCE_EXHAUSTED),
            ("BeginUpload", b"\x32\x00" * 500_000, Code.INVALID_ARGUMENT),
            ("BeginUpload", b"\x32\x02\x08\x01" * 250_000, Code.INVALID_ARGUMENT),
            ("CommitUpload", b"\x3a\x00" * 100_000, Code.INVALID_ARGUMENT),
            ("Enroll", nested, Code.INVALID_ARGUMENT),
            ("Enroll", b"\x0b" * 1000 + b"\x0c" * 1000, Code.INVALID_ARGUMENT),  # groups
        ]
        for call, data, expected in raw:
            assert site.raw(call, data).code() is expected, call
        assert resident_bytes(process.pid) - before < 64 << 20
        assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    finally:
        processes.kill("server")


def _varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


@pytest.mark.parametrize("call", FEDERATION.methods_by_name)
def test_row_51_an_empty_message_is_refused(site: RawClient, call: str) -> None:
    assert site.raw(call, b"").code() is Code.INVALID_ARGUMENT


MARKER = b"never-to-be-stored"


def test_row_52_unknown_fields_are_ignored_and_never_stored(
    site: RawClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = b"\xfa\x3f" + bytes([len(MARKER)]) + MARKER  # field 1023
    say = site.say

    def more(call: str, message: Message) -> Any:
        return say(call, type(message).FromString(message.SerializeToString() + unknown))

    monkeypatch.setattr(site, "say", more)
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and MARKER in path.read_bytes()]


def test_row_52_unknown_enumerators_are_refused(site: RawClient) -> None:
    task, data = site.task(), codec.encode(MODEL)
    announced = site.announcement(task, data, MODEL)
    announced.tensors[0].part = 77  # type: ignore[assignment]
    messages: dict[str, Message] = {
        "Enroll": pb.EnrollRequest(caller=site.caller, protocol_version=1, roles=[pb.ROLE_TRAINER, 99]),  # type: ignore[list-item]
        "Heartbeat": pb.HeartbeatRequest(caller=site.caller, run=RUN, task_id=task.task_id, activity=99),  # type: ignore[arg-type]
        "BeginUpload": announced,
    }
    for call, message in messages.items():
        code, text = refused(site.say, call, message)
        assert (code, "not known to this version" in text) == (Code.INVALID_ARGUMENT, True), call


# Contents

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_row_63_numbers_that_are_not_finite_are_invalid(
    site: RawClient, value: float, verdicts: Callable[[], list[Any]]
) -> None:
    task, poisoned = site.task(), FIRST["w"].copy()
    poisoned[1, 2] = value
    receipt = site.push(task, body(w=poisoned))
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_REFUSED, "body/w has values that are not finite")
    assert verdicts()[-1] == (task.round, "site-1", "refused", receipt.reason)
    assert site.push(task).verdict == pb.VERDICT_ACCEPTED  # the task is still open


@pytest.mark.parametrize("value", [-0.0, 1e-45, -1e-45])
def test_row_63_negative_zeros_and_denormals_are_accepted(site: RawClient, value: float) -> None:
    assert site.push(site.task(), body(w=np.full((2, 3), value, np.float32))).verdict == pb.VERDICT_ACCEPTED


SHAPES: dict[str, tuple[Payload, str]] = {
    "shape": (body(w=np.ones((2, 4), np.float32)), "body/w is float32 [2, 4], expected float32 [2, 3]"),
    "transposed": (body(w=FIRST["w"].T.copy()), "body/w is float32 [3, 2], expected float32 [2, 3]"),
    "missing": ({**MODEL, Part.BODY: {}}, "body/w is missing (1 in all)"),
    "extra": (body(more=FIRST["w"]), "body/more is not part of this method's update"),
    "renamed": ({**MODEL, Part.BODY: {"v": FIRST["w"]}}, "body/w is missing (1 in all)"),
    "float64": (body(w=FIRST["w"].astype(np.float64)), "body/w is float64 [2, 3], expected float32 [2, 3]"),
    "int64": (body(w=FIRST["w"].astype(np.int64)), "body/w is int64 [2, 3], expected float32 [2, 3]"),
}


@pytest.mark.parametrize(("payload", "reason"), SHAPES.values(), ids=SHAPES)
def test_row_64_and_65_tensors_other_than_expected_are_named(site: RawClient, payload: Payload, reason: str) -> None:
    receipt = site.push(site.task(), payload)
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_REFUSED, reason)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "bool", ">f4", "object", "F32"])
def test_row_65_other_dtypes_cannot_be_announced(site: RawClient, dtype: str) -> None:
    announced = site.announcement(site.task(), codec.encode(MODEL), MODEL)
    announced.tensors[0].dtype = dtype
    assert refused(site.say, "BeginUpload", announced)[0] is Code.INVALID_ARGUMENT


def header(entries: dict[str, Any], room: int = 0) -> bytes:
    """A safetensors file with this header, and zeros for its tensors."""
    text = json.dumps(entries).encode() + b" " * room
    return len(text).to_bytes(8, "little") + text + bytes(24 + 120)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), offsets: tuple[int, int] = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEAD_ENTRY = {"head/weight": entry(shape=(10, 3), offsets=(24, 144))}
HEADERS: dict[str, bytes] = {
    "float16": header({"body/w": entry("F16"), **HEAD_ENTRY}),
    "bfloat16": header({"body/w": entry("BF16"), **HEAD_ENTRY}),
    "zero size": header({"body/w": entry(shape=(0, 1 << 40)), **HEAD_ENTRY}),
    "endless": header({"body/w": entry(shape=(1 << 40, 1 << 40)), **HEAD_ENTRY}),
    "path": header({"../../x": entry(), **HEAD_ENTRY}),
    "path in a part": header({"body/../../x": entry(), **HEAD_ENTRY}),
    "overlap": header({"body/w": entry(), "head/weight": entry(shape=(10, 3), offsets=(0, 120))}),
    "deep": header({"body/w": json.loads("[" * 900 + "]" * 900)}),
    "200k tensors": header({f"body/{n}": entry() for n in range(200_000)}),
    "header of 50 MB": header({"body/w": entry(), **HEAD_ENTRY}, room=50_000_000),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_row_65_and_66_a_header_that_lies_is_invalid(site: RawClient, data: bytes) -> None:
    announced = Manifest(describe(MODEL), len(data), codec.digest(data))
    assert isinstance(examined(data, announced, MODEL, 1e9), UpdateProblem)
    receipt = site.push(site.task(), MODEL, data)
    assert receipt.verdict == pb.VERDICT_REFUSED


@pytest.mark.parametrize(
    "change", [{"shape": [0, 1 << 40]}, {"shape": [1 << 40]}, {"name": "../../x"}, {"name": "w\0"}, {"name": ""}]
)
def test_row_66_a_tensor_that_cannot_be_cannot_be_announced(site: RawClient, change: dict[str, Any]) -> None:
    known: dict[str, Any] = {"part": pb.PART_BODY, "name": "w", "dtype": "float32", "shape": [2, 3]}
    tensor = pb.Tensor(**{**known, **change})
    announced = site.announcement(site.task(), codec.encode(MODEL), MODEL, tensors=[tensor])
    assert refused(site.say, "BeginUpload", announced)[0] is Code.INVALID_ARGUMENT


def test_row_66_200_000_announced_tensors_are_refused_before_one_is_looked_at(site: RawClient) -> None:
    announced = site.announcement(site.task(), codec.encode(MODEL), MODEL)
    announced.tensors.extend([pb.Tensor()] * 200_000)
    code, text = refused(site.say, "BeginUpload", announced)
    assert (code, "200002 tensors are announced: expected at most" in text) == (Code.INVALID_ARGUMENT, True)


# Counts


@pytest.mark.parametrize("weight", [-1.0, 0.0, 2.0**63, math.nan, math.inf, 0.5])
def test_row_68_an_example_count_that_cannot_be_is_invalid(
    site: RawClient, weight: float, verdicts: Callable[[], list[Any]]
) -> None:
    receipt = site.push(site.task(), weight=weight)
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_REFUSED, f"an example count of {weight}")
    assert verdicts()[-1][2] == "refused"


PROTOTYPES: dict[str, tuple[list[tuple[str, int]], str]] = {
    "behind the last class": ([("10", 3)], "prototypes/10 is not part of this method's update"),
    "with a leading zero": ([("01", 3)], "prototypes/01 is not part of this method's update"),
    "twice": ([("1", 3), ("1", 3)], "a tensor is announced twice"),
    "of another length": ([("1", 4)], "prototypes/1 is float32 [4], expected float32 [3]"),
}


@pytest.mark.parametrize(("rows", "reason"), PROTOTYPES.values(), ids=PROTOTYPES)
def test_row_69_prototypes_of_no_class_are_invalid(
    serve: Callable[..., list[RawClient]], rows: list[tuple[str, int]], reason: str
) -> None:
    (site,) = serve("site-1", method="fednh")
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    update: Payload = {Part.BODY: FIRST, Part.HEAD: {"scale": np.ones((), np.float32)}}
    announced = site.announcement(site.task(), codec.encode(update), update)
    announced.tensors.extend(
        pb.Tensor(part=pb.PART_PROTOTYPES, name=name, dtype="float32", shape=[size]) for name, size in rows
    )
    announced.total_bytes = codec.encoded_size(wire.unpack_manifest(announced).tensors)
    receipt = site.say("BeginUpload", announced).receipt
    assert (receipt.verdict, receipt.reason) == (pb.VERDICT_REFUSED, reason)


def test_row_69_a_huge_prototype_is_invalid_and_an_empty_one_does_no_harm(
    serve: Callable[..., list[RawClient]],
) -> None:
    (site,) = serve("site-1", method="fednh")
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
    update: Payload = {Part.BODY: FIRST, Part.HEAD: {"scale": np.ones((), np.float32)}}
    task, huge = site.task(), np.full(3, 1e30, np.float32)
    receipt = site.push(task, {**update, Part.PROTOTYPES: {"1": huge}})
    assert receipt.verdict == pb.VERDICT_REFUSED
    assert "the update's norm is 1.73205e+30" in receipt.reason
    assert site.push(task, {**update, Part.PROTOTYPES: {"1": np.zeros(3, np.float32)}}).verdict == pb.VERDICT_ACCEPTED
    assert site.task().round == 2


# Programs


@pytest.mark.parametrize("kind", ["bytes", "zip", "elf"])
def test_row_70_programs_in_place_of_a_payload_are_never_run(site: RawClient, kind: str, tmp_path: Path) -> None:
    canary, file = tmp_path / "canary", tmp_path / "file"
    program = f"cposix\nsystem\n(S'touch {canary}'\ntR.".encode()
    file.write_bytes(program)
    loader = "".join(("pick", "le"))  # the guard against loaders reads this file, too
    subprocess.run([sys.executable, "-m", loader, str(file)], check=True, capture_output=True)
    assert canary.exists()  # it does run where it is loaded
    canary.unlink()
    match kind:
        case "zip":
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("archive/data.pkl", program)
                archive.writestr("archive/version", "3\n")
        case "elf":
            file.write_bytes(Path(sys.executable).resolve().read_bytes()[:4096])
    data = file.read_bytes() + bytes(200)
    problem = examined(data, Manifest(describe(MODEL), len(data), codec.digest(data)), None, 1e9)
    assert isinstance(problem, UpdateProblem)
    assert problem.code is RefusalCode.DAMAGED
    assert site.push(site.task(), MODEL, data).verdict == pb.VERDICT_REFUSED
    assert not canary.exists()
    assert site.push(site.task()).verdict == pb.VERDICT_ACCEPTED
