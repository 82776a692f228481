"""Protobuf messages to and from the types of `messages`; besides the two ends, nothing else uses the generated code.

Reading is strict: an unknown enumerator or an invalid id is a ProtocolError, never a default.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google_crc32c import value as crc32c

from protofed.common.codec import DTYPES, MAX_TENSORS, TENSOR_NAME, Digest, digest, is_digest
from protofed.common.errors import ConfigError, FailureReason, PolicyViolationError, ProtocolError
from protofed.common.ids import read_id
from protofed.common.payload import NOT_ON_THE_WIRE, Part, TensorSpec
from protofed.common.protocol.consortium import Member, check_identity, check_name
from protofed.common.protocol.messages import (
    LONGEST_S,
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
    read_telemetry,
)
from protofed.protos.v1 import federation_pb2 as pb

E = TypeVar("E", bound=StrEnum)
DIGEST_ALGORITHM = "blake3-256"
MAX_TOTAL = 2**53  # bytes; what every ledger and every JSON reader can count


class _Enum(Generic[E]):
    """Enumerators by name: `body` is PART_BODY."""

    def __init__(self, members: type[E], message_enum: Any, prefix: str, without: Collection[E] = ()) -> None:
        self._to = {m: message_enum.Value(f"{prefix}_{m.name}") for m in members if m not in without}
        self._from = {number: member for member, number in self._to.items()}
        self._prefix = prefix

    def pack(self, member: E) -> Any:
        if member not in self._to:
            raise PolicyViolationError(f"no message can carry {self._prefix.lower()} '{member}'")
        return self._to[member]

    def unpack(self, number: int) -> E:
        if number not in self._from:
            raise ProtocolError(f"{self._prefix.lower()} {number} is not known to this version")
        return self._from[number]


part = _Enum(Part, pb.Part, "PART", without=NOT_ON_THE_WIRE)
role = _Enum(Role, pb.Role, "ROLE")
task_kind = _Enum(TaskKind, pb.TaskKind, "TASK_KIND")
verdict = _Enum(Verdict, pb.Verdict, "VERDICT")
activity = _Enum(Activity, pb.Activity, "ACTIVITY")
failure = _Enum(FailureReason, pb.FailureReason, "FAILURE_REASON")
signal = _Enum(Signal, pb.Signal, "SIGNAL")
_sum_of = _Enum(SumOf, pb.SumOf, "SUM_OF")
_pause_reason = _Enum(PauseReason, pb.PauseReason, "PAUSE_REASON", without=(PauseReason.NONE,))


def read_digest(value: str) -> Digest:
    """`value`, checked.

    Raises:
        ProtocolError: it is no BLAKE3-256 in hex.
    """
    if not is_digest(value):
        raise ProtocolError("a digest is 64 of 0-9 and a-f")
    return Digest(value)


def pack_pause_reason(reason: PauseReason) -> Any:
    """That of an EnrollRequest."""
    return pb.PAUSE_REASON_UNSPECIFIED if reason is PauseReason.NONE else _pause_reason.pack(reason)


def unpack_pause_reason(message: pb.EnrollRequest) -> PauseReason:
    """Why a daemon takes no task, of its EnrollRequest."""
    return _pause_reason.unpack(message.pause_reason) if message.pause_reason else PauseReason.NONE


def pack_task(task: Task) -> pb.Task:
    """A task as a message."""
    return pb.Task(
        kind=task_kind.pack(task.kind),
        run=task.run,
        round=task.round,
        task_id=task.task_id,
        base_digest=task.base_digest or "",
        base_bytes=task.base_bytes,
        remaining_s=task.remaining_s,
        attempt=task.attempt,
        sum_of=_sum_of.pack(task.sum_of) if task.sum_of else pb.SUM_OF_UNSPECIFIED,
        state_round=task.state_round,
    )


def unpack_task(message: pb.Task) -> Task:
    """A task from a message."""
    return Task(
        kind=task_kind.unpack(message.kind),
        run=read_id(message.run),
        round=message.round,
        task_id=read_id(message.task_id),
        base_digest=read_digest(message.base_digest) if message.base_digest else None,
        base_bytes=message.base_bytes,
        remaining_s=_seconds(message.remaining_s),
        attempt=message.attempt,
        sum_of=_sum_of.unpack(message.sum_of) if message.sum_of else None,
        state_round=message.state_round if message.HasField("state_round") else None,
    )


def _seconds(value: float) -> float:
    if not 0 <= value <= LONGEST_S:  # not `value < 0 or …`, which NaN would pass
        raise ProtocolError(f"{value} seconds: expected 0 to {LONGEST_S:.0f}")
    return value


def pack_next(answer: Task | Wait | Finished) -> pb.NextTaskResponse:
    """The answer to NextTask."""
    match answer:
        case Task():
            return pb.NextTaskResponse(task=pack_task(answer))
        case Wait(retry_after_s):
            return pb.NextTaskResponse(wait=pb.Wait(retry_after_s=retry_after_s))
        case Finished(reason, last):
            return pb.NextTaskResponse(finished=pb.Finished(reason=reason, last=last))


def unpack_next(message: pb.NextTaskResponse) -> Task | Wait | Finished:
    """The answer to NextTask."""
    match message.WhichOneof("answer"):
        case "task":
            return unpack_task(message.task)
        case "wait":
            return Wait(_seconds(message.wait.retry_after_s))
        case "finished":
            return Finished(message.finished.reason, message.finished.last)
        case _:
            raise ProtocolError("the server's answer is empty; its version may be another")


def pack_member(member: Member) -> dict[str, Any]:
    """Fields of an EnrollRequest."""
    return {
        "institution": member.institution,
        "identity": member.identity,
        "consortium": member.consortium,
        "consortium_number": member.number,
    }


def unpack_member(message: pb.EnrollRequest) -> Member:
    """What a daemon says of itself for secure aggregation, checked.

    Raises:
        ProtocolError: a name that cannot be shown, or a key or a digest that is none.
    """
    try:
        institution = check_name(message.institution) if message.institution else ""
        identity = check_identity(message.identity) if message.identity else ""
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    consortium = read_digest(message.consortium) if message.consortium else ""
    return Member(institution, identity, consortium, message.consortium_number)


def pack_enrolled(answer: Assignment | Finished, consortium: str = "") -> pb.EnrollResponse:
    """The answer to Enroll, with the list of partners that is offered."""
    match answer:
        case Assignment():
            return pb.EnrollResponse(assignment=pb.Assignment(**asdict(answer)), consortium=consortium)
        case Finished(reason, last):
            return pb.EnrollResponse(finished=pb.Finished(reason=reason, last=last), consortium=consortium)


def unpack_enrolled(message: pb.EnrollResponse) -> Assignment | Finished:
    """The answer to Enroll."""
    match message.WhichOneof("answer"):
        case "assignment":
            fields = message.assignment
            digest = read_digest(fields.preprocessing_digest)
            return Assignment(read_id(fields.run), fields.recipe, fields.keep_rounds, digest, fields.min_cohort)
        case "finished":
            return Finished(message.finished.reason, message.finished.last)
        case _:
            raise ProtocolError("the server's answer is empty; its version may be another")


def pack_receipt(receipt: Receipt) -> pb.Receipt:
    """A receipt as a message."""
    return pb.Receipt(
        verdict=verdict.pack(receipt.verdict),
        reason=receipt.reason,
        digest=receipt.digest,
        record_hash=receipt.record_hash,
    )


def unpack_receipt(message: pb.Receipt) -> Receipt:
    """A receipt from a message."""
    return Receipt(verdict.unpack(message.verdict), message.reason, read_digest(message.digest), message.record_hash)


def read_verdict(call: str, reply: bytes) -> str:
    """The verdict in a serialised answer to the call of this name, for audit logs; empty where there is none."""
    match call:
        case "CommitUpload":
            receipt = pb.Receipt.FromString(reply)
        case "BeginUpload":
            receipt = pb.UploadTicket.FromString(reply).receipt
        case _:
            return ""
    return verdict.unpack(receipt.verdict).value if receipt.verdict else ""


def is_idle(call: str, request: Any, reply: bytes) -> bool:
    """Whether a call of this name, once it is answered, only said that a daemon is there and that it has nothing to do.

    So does an Enroll of a site that takes no tasks at present (`pause_reason`). A call that does not repeat the
    daemon's last one (`enrolled_as`) does more, also if it waits. It may fence another daemon, change the site's roles,
    or be offered another run.
    """
    match call:
        case "Enroll":
            answer = pb.EnrollResponse.FromString(reply).WhichOneof("answer")
            waits_for_a_run, is_paused = request.wait_s > 0, request.pause_reason != pb.PAUSE_REASON_UNSPECIFIED
            return bool(waits_for_a_run if answer == "finished" else answer == "assignment" and is_paused)
        case "NextTask":
            return pb.NextTaskResponse.FromString(reply).WhichOneof("answer") == "wait"
        case "Heartbeat":
            return bool(request.activity == pb.ACTIVITY_IDLE)
        case _:
            return False


def enrolled_as(request: pb.EnrollRequest, reply: bytes) -> Digest:
    """The same for Enrolls that differ at most in how long they wait, and are offered the same run, or none."""
    lasting = pb.EnrollRequest()
    lasting.CopyFrom(request)
    lasting.ClearField("wait_s")
    offered = pb.EnrollResponse.FromString(reply).assignment
    return digest(b"".join(message.SerializeToString(deterministic=True) for message in (lasting, offered)))


def pack_tensors(manifest: Manifest) -> list[pb.Tensor]:
    """A manifest's tensors as messages."""
    return [
        pb.Tensor(part=part.pack(spec.part), name=spec.name, dtype=spec.dtype, shape=spec.shape)
        for spec in manifest.tensors
    ]


def unpack_manifest(message: pb.UploadManifest) -> Manifest:
    """An upload's manifest, with its sizes bounded before anything is allocated for them."""
    if message.digest_algorithm != DIGEST_ALGORITHM:
        raise ProtocolError(f"digest algorithm '{message.digest_algorithm[:20]}': expected {DIGEST_ALGORITHM}")
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError(f"{len(message.tensors)} tensors are announced: expected at most {MAX_TENSORS}")
    if not message.total_bytes < MAX_TOTAL:
        raise ProtocolError(f"{message.total_bytes} bytes are announced: expected fewer than 2^53")
    specs = tuple(_unpack_tensor(tensor) for tensor in message.tensors)
    return Manifest(specs, message.total_bytes, read_digest(message.digest))


def _unpack_tensor(message: pb.Tensor) -> TensorSpec:
    if message.dtype not in DTYPES.values() or len(message.shape) > 8 or not TENSOR_NAME.fullmatch(message.name):
        raise ProtocolError(
            "a tensor has a name of at most 200 letters, digits, '_', '.' and '-', "
            f"dtype {', '.join(DTYPES.values())}, at most 8 dimensions"
        )
    if any(not 0 < size < 2**33 for size in message.shape):
        raise ProtocolError("a tensor's sizes are from 1 to 2^33")
    return TensorSpec(part.unpack(message.part), message.name, message.dtype, tuple(message.shape))


def pack_progress(progress: Progress) -> dict[str, Any]:
    """Fields of a HeartbeatRequest."""
    fields = {
        name: getattr(progress, name) for name in ("epoch", "epochs", "making_progress", "bytes_moved", "task_id")
    }
    return {
        **fields,
        "failure": pb.FAILURE_REASON_UNSPECIFIED if progress.failure is None else failure.pack(progress.failure),
        "activity": activity.pack(progress.activity),
        "telemetry": dict(progress.telemetry),
    }


def unpack_progress(message: pb.HeartbeatRequest) -> Progress:
    """A site's progress, of a heartbeat."""
    return Progress(
        task_id=read_id(message.task_id) if message.task_id else "",
        activity=activity.unpack(message.activity),
        epoch=message.epoch,
        epochs=message.epochs,
        making_progress=message.making_progress,
        bytes_moved=message.bytes_moved,
        failure=failure.unpack(message.failure) if message.failure else None,
        telemetry=read_telemetry(message.telemetry),
    )


_DATA_TAG = bytes([pb.Chunk.DESCRIPTOR.fields_by_name["data"].number << 3 | 2])  # 2: of a length and bytes
_CHECKSUM_BYTES = pb.Chunk(crc32c=1).ByteSize()


def pack_chunk(index: int, data: bytes) -> bytes:
    """A serialised `Chunk` of a download."""
    return pb.Chunk(index=index, data=data, crc32c=crc32c(data)).SerializeToString()


def pack_upload_chunk(chunk: pb.Chunk, data: bytes) -> bytes:
    """A serialised `Chunk` of an upload: as protobuf does it, but the data are copied once, and not in and out.

    Args:
        chunk: who sends it, to which upload and where in it; without data and checksum.
    """
    checksum = pb.Chunk(crc32c=crc32c(data))
    # Fields stand by number, and a message's are those of its parts one after the other.
    return b"".join(
        [chunk.SerializeToString(deterministic=True), _before(len(data)), data, checksum.SerializeToString()]
    )


def upload_chunk_size(chunk: pb.Chunk, size: int) -> int:
    """Bytes of what `pack_upload_chunk` makes of it with so many bytes of data, whose checksum is not 0."""
    return chunk.ByteSize() + len(_before(size)) + size + _CHECKSUM_BYTES


def _before(size: int) -> bytes:
    """Tag and length of a chunk's data; the length as a varint: seven bits a byte, the top bit: more follow."""
    length = bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return _DATA_TAG + length + bytes([size])
