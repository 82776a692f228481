"""Messages become our own types or are refused; and no message has a field for what must never be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.common.codec import TENSOR_NAME, Digest
from protofed.common.errors import ConfigError, FailureReason, PolicyViolationError, ProtocolError
from protofed.common.ids import check_id, read_id
from protofed.common.payload import NOT_ON_THE_WIRE, Part, TensorSpec
from protofed.common.protocol import wire
from protofed.common.protocol.messages import (
    Activity,
    Assignment,
    Finished,
    Manifest,
    PauseReason,
    Progress,
    Receipt,
    Role,
    Signal,
    SumOf,
    Task,
    TaskKind,
    Verdict,
    Wait,
)
from protofed.protos.v1 import federation_pb2 as pb

DIGEST = Digest("0123456789abcdef" * 4)
TASK = Task(TaskKind.FIT, "run-1", 3, "task-1", DIGEST, 12, 9.5)
BAD_IDS = ["", "../../x", "x" * 10_240, "nul\0", "sitе", "ａnn", "Ann", "a_b", "a" * 65, "ann\n", "a.b", "-a"]
BAD_DIGESTS = ["", "0" * 63, "0" * 65, DIGEST.upper(), "g" * 64, "../" + "0" * 61, "0" * 63 + "\n", "٠" * 64]

ids = st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True)
digests = st.from_regex(r"[0-9a-f]{64}", fullmatch=True).map(Digest)
counts = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e9)
words = st.text(max_size=40)
tasks = st.builds(
    Task,
    kind=st.sampled_from(TaskKind),
    run=ids,
    round=counts,
    task_id=ids,
    base_digest=st.none() | digests,
    base_bytes=st.integers(0, 2**40),
    remaining_s=seconds,
    attempt=counts,
    sum_of=st.none() | st.sampled_from(SumOf),
    state_round=st.none() | counts,
)
finished = st.builds(Finished, reason=words, last=st.booleans())
specs = st.builds(
    TensorSpec,
    part=st.sampled_from([part for part in Part if part not in NOT_ON_THE_WIRE]),
    name=st.from_regex(TENSOR_NAME, fullmatch=True),
    dtype=st.sampled_from(["float32", "float64", "int64"]),
    shape=st.lists(st.integers(1, 2**33 - 1), max_size=8).map(tuple),
)
manifests = st.builds(
    Manifest, tensors=st.lists(specs, max_size=4).map(tuple), total_bytes=st.integers(0, 2**40), digest=digests
)
progresses = st.builds(
    Progress,
    task_id=st.just("") | ids,
    activity=st.sampled_from(Activity),
    epoch=counts,
    epochs=counts,
    making_progress=st.booleans(),
    bytes_moved=st.integers(0, 2**40),
    failure=st.none() | st.sampled_from(FailureReason),
)
receipts = st.builds(Receipt, verdict=st.sampled_from(Verdict), reason=words, digest=digests, record_hash=words)


def sent(message: Any) -> Any:
    """The message as the peer reads it."""
    return type(message).FromString(message.SerializeToString())


def manifest_message(manifest: Manifest, algorithm: str = wire.DIGEST_ALGORITHM) -> pb.UploadManifest:
    total, tensors = manifest.total_bytes, wire.pack_tensors(manifest)
    return pb.UploadManifest(tensors=tensors, total_bytes=total, digest=manifest.digest, digest_algorithm=algorithm)


ROUND_TRIPS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "next task": (tasks | finished | st.builds(Wait, seconds), wire.pack_next, wire.unpack_next),
    "enroll": (finished | st.builds(Assignment, ids, words, counts, digests), wire.pack_enrolled, wire.unpack_enrolled),
    "receipt": (receipts, wire.pack_receipt, wire.unpack_receipt),
    "manifest": (manifests, manifest_message, wire.unpack_manifest),
    "progress": (progresses, lambda one: pb.HeartbeatRequest(**wire.pack_progress(one)), wire.unpack_progress),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_is_said_comes_back(name: str, data: st.DataObject) -> None:
    values, pack, unpack = ROUND_TRIPS[name]
    said = data.draw(values)
    assert unpack(sent(pack(said))) == said


@pytest.mark.parametrize("reason", PauseReason)
def test_a_pause_reason_comes_back(reason: PauseReason) -> None:
    assert wire.unpack_pause_reason(sent(pb.EnrollRequest(pause_reason=wire.pack_pause_reason(reason)))) is reason


def test_what_stays_at_a_site_has_no_number() -> None:
    for part in NOT_ON_THE_WIRE:
        with pytest.raises(PolicyViolationError, match="no message can carry"):
            wire.part.pack(part)


def test_an_unknown_reason_is_an_error_and_never_a_default() -> None:
    with pytest.raises(ProtocolError, match="pause_reason 99 is not known"):
        wire.unpack_pause_reason(pb.EnrollRequest(pause_reason=99))  # type: ignore[arg-type]
    message = pb.HeartbeatRequest(activity=pb.ACTIVITY_FAILED, failure=99)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="failure_reason 99 is not known"):
        wire.unpack_progress(message)


ENUMS: list[tuple[type[StrEnum], Any, Any]] = [
    (Part, wire.part, pb.Part),
    (Role, wire.role, pb.Role),
    (TaskKind, wire.task_kind, pb.TaskKind),
    (Verdict, wire.verdict, pb.Verdict),
    (Activity, wire.activity, pb.Activity),
    (FailureReason, wire.failure, pb.FailureReason),
    (Signal, wire.signal, pb.Signal),
]
enums = pytest.mark.parametrize(("ours", "table", "theirs"), ENUMS, ids=[ours.__name__ for ours, _, _ in ENUMS])


@enums
def test_every_enumerator_has_one_number_and_comes_back(ours: type[StrEnum], table: Any, theirs: Any) -> None:
    members = [member for member in ours if member not in NOT_ON_THE_WIRE]
    numbers = [table.pack(member) for member in members]
    assert [table.unpack(number) for number in numbers] == members
    assert sorted(numbers) == sorted(set(theirs.values()) - {0})


@enums
@pytest.mark.parametrize("number", [0, -1, 99, 2**31 - 1])
def test_an_unknown_enumerator_is_never_a_default(ours: type[StrEnum], table: Any, theirs: Any, number: int) -> None:
    with pytest.raises(ProtocolError, match="is not known to this version"):
        table.unpack(number)


@pytest.mark.parametrize("value", BAD_IDS)
def test_a_bad_id_is_refused_wherever_it_stands(value: str) -> None:
    task = wire.pack_task(TASK)
    for field in ("run", "task_id"):
        message = pb.Task()
        message.CopyFrom(task)
        setattr(message, field, value)
        with pytest.raises(ProtocolError, match="an id is"):
            wire.unpack_task(message)
    with pytest.raises(ProtocolError, match="an id is"):
        read_id(value)
    with pytest.raises(ConfigError) as error:
        check_id("site", value)
    assert len(str(error.value)) < 200
    assert not {"\n", "\0"} & set(str(error.value))
    assert read_id("site-01") == check_id("site", "site-01") == "site-01"
    assignment = pb.Assignment(run=value, recipe="{}", preprocessing_digest=DIGEST)
    with pytest.raises(ProtocolError, match="an id is"):
        wire.unpack_enrolled(pb.EnrollResponse(assignment=assignment))
    if value:
        with pytest.raises(ProtocolError, match="an id is"):
            wire.unpack_progress(pb.HeartbeatRequest(task_id=value, activity=pb.ACTIVITY_TRAINING))


@pytest.mark.parametrize("value", BAD_DIGESTS)
def test_a_bad_digest_is_refused_wherever_it_stands(value: str) -> None:
    receipt = wire.pack_receipt(Receipt(Verdict.ACCEPTED, "", DIGEST, "s"))
    receipt.digest = value
    refused: list[Callable[[], Any]] = [
        lambda: wire.read_digest(value),
        lambda: wire.unpack_receipt(receipt),
        lambda: wire.unpack_manifest(manifest_message(Manifest((), 0, Digest(value)))),
    ]
    assignment = pb.Assignment(run="run", recipe="{}", preprocessing_digest=value)
    refused.append(lambda: wire.unpack_enrolled(pb.EnrollResponse(assignment=assignment)))
    if value:  # a first task has no base
        refused.append(lambda: wire.unpack_task(wire.pack_task(replace(TASK, base_digest=Digest(value)))))
    for read in refused:
        with pytest.raises(ProtocolError, match="a digest is"):
            read()


EMPTY: list[tuple[Callable[[Any], Any], Any]] = [
    (wire.unpack_next, pb.NextTaskResponse()),
    (wire.unpack_next, pb.NextTaskResponse(task=pb.Task())),
    (wire.unpack_enrolled, pb.EnrollResponse()),
    (wire.unpack_enrolled, pb.EnrollResponse(assignment=pb.Assignment())),
    (wire.unpack_task, pb.Task()),
    (wire.unpack_receipt, pb.Receipt()),
    (wire.unpack_manifest, pb.UploadManifest()),
    (wire.unpack_progress, pb.HeartbeatRequest()),
]


@pytest.mark.parametrize(("read", "message"), EMPTY)
def test_an_empty_message_is_refused(read: Callable[[Any], Any], message: Any) -> None:
    with pytest.raises(ProtocolError):
        read(message)


@pytest.mark.parametrize("algorithm", ["", "sha-256", "BLAKE3-256", "x" * 10_000])
def test_another_digest_algorithm_is_refused_by_name(algorithm: str) -> None:
    with pytest.raises(ProtocolError, match="expected blake3-256") as error:
        wire.unpack_manifest(manifest_message(Manifest((), 0, DIGEST), algorithm))
    assert len(str(error.value)) < 100


TENSOR: dict[str, Any] = {"part": pb.PART_BODY, "name": "w", "dtype": "float32", "shape": [2]}
WRONG: dict[str, list[Any]] = {"part": [0, 77], "name": ["x" * 201, "", "../../x", "a/b", "w\0", "wеight"]}
WRONG |= {"dtype": ["", "float16", "bool", "object", ">f4"], "shape": [[0], [2, 0], [2**33], [2**64 - 1], [1] * 9]}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_tensor_that_cannot_be_is_refused(field: str, value: Any) -> None:
    message = manifest_message(Manifest((), 0, DIGEST))
    message.tensors.append(pb.Tensor(**{**TENSOR, field: value}))
    with pytest.raises(ProtocolError):
        wire.unpack_manifest(message)


@pytest.mark.parametrize("total", [2**53, 2**63, 2**64 - 1])
def test_a_total_that_no_ledger_can_count_is_refused(total: int) -> None:
    with pytest.raises(ProtocolError, match=f"{total} bytes are announced"):
        wire.unpack_manifest(manifest_message(Manifest((), total, DIGEST)))


def test_more_tensors_than_a_payload_may_have_are_refused() -> None:
    message = manifest_message(Manifest((), 0, DIGEST))
    message.tensors.extend([pb.Tensor(**TENSOR)] * 20_001)
    with pytest.raises(ProtocolError, match="20001 tensors"):
        wire.unpack_manifest(message)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=80))
def test_random_bytes_are_read_strictly_or_not_at_all(data: bytes) -> None:
    for read, empty in EMPTY:
        try:
            message = type(empty).FromString(data)
        except DecodeError:
            continue
        try:
            read(message)
        except ProtocolError as error:
            assert len(str(error)) < 300  # noqa: PT017


def test_a_verdict_is_read_from_the_answers_that_have_one() -> None:
    receipt = wire.pack_receipt(Receipt(Verdict.NOT_NEEDED, "", DIGEST, "s"))
    assert wire.read_verdict("CommitUpload", receipt.SerializeToString()) == "not-needed"
    assert wire.read_verdict("BeginUpload", pb.UploadTicket(receipt=receipt).SerializeToString()) == "not-needed"
    assert wire.read_verdict("BeginUpload", pb.UploadTicket(upload=pb.Upload(id="u")).SerializeToString()) == ""
    assert wire.read_verdict("NextTask", receipt.SerializeToString()) == ""
    assert wire.read_verdict("CommitUpload", b"") == "", "of a call that failed"


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2 << 20])
@pytest.mark.parametrize("index", [0, 3, 300])
def test_a_chunk_that_is_put_together_is_the_one_that_protobuf_writes(size: int, index: int) -> None:
    who: dict[str, Any] = {"caller": pb.Caller(site="ann", instance="n1"), "upload": "u1", "index": index}
    data = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    packed = wire.pack_upload_chunk(pb.Chunk(**who), data)
    assert packed == pb.Chunk(**who, data=data, crc32c=crc32c(data)).SerializeToString(deterministic=True)
    assert wire.upload_chunk_size(pb.Chunk(**who), size) == len(packed)
