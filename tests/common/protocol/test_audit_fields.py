"""What an audit log says of a message: everything that it tells, no content, and never more than has room in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pki import Authority

from protofed.common.codec import DTYPES, MAX_TENSORS, digest
from protofed.common.payload import Part, TensorSpec
from protofed.common.pki.certificate import Party, fingerprint
from protofed.common.protocol.audit_fields import LONGEST_LIST, LONGEST_TEXT, MAX_ITEMS, audit_fields
from protofed.common.storage import journal
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import operator_pb2 as op

CALLER = pb.Caller(site="site-a", instance="0a")
WHO = {"site": "site-a", "instance": "0a"}
CONTENT = "3.14159"


def requests() -> Iterator[Any]:
    """Every request message of both services."""
    for file in (pb, op):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (getattr(file, method.input_type.name) for method in service.methods)


TRAINS = pb.EnrollRequest(protocol_version=1, roles=[pb.ROLE_TRAINER, pb.ROLE_EVALUATOR], caller=CALLER)
FAILED = pb.HeartbeatRequest(activity=pb.ACTIVITY_FAILED, failure=pb.FAILURE_REASON_OUT_OF_MEMORY, epoch=2)
TENSORS = [
    pb.Tensor(part=pb.PART_BODY, name="w", dtype="float32", shape=[3, 4]),
    pb.Tensor(part=pb.PART_CLASS_PRESENCE, name="p", dtype="int64", shape=[10]),
    pb.Tensor(part=pb.PART_BODY, name="s", dtype="float64"),
]
LISTED = ["body/w float32 [3, 4]", "class-presence/p int64 [10]", "body/s float64 []"]
SUMS = [["body", 2, 56], ["class-presence", 1, 80]]
MEASURED = pb.CommitRequest(caller=CALLER, round=2, metrics={"loss": 3.14159, "accuracy": 0.0}, weight=0.0)
SAID: list[tuple[Any, dict[str, Any]]] = [
    (TRAINS, WHO | {"protocol_version": 1, "roles": ["trainer", "evaluator"]}),
    (pb.NextTaskRequest(caller=CALLER, run="r", wait_s=20.0), WHO | {"run": "r", "wait_s": True}),
    (FAILED, {"activity": "failed", "failure": "out-of-memory", "epoch": 2}),
    (pb.GetChunkRequest(caller=CALLER, run="r", digest="d", index=3), WHO | {"run": "r", "digest": "d", "index": 3}),
    (pb.Chunk(index=1, data=CONTENT.encode(), crc32c=9), {"index": 1, "data": "7 bytes", "crc32c": 9}),
    (pb.UploadManifest(tensors=TENSORS, total_bytes=136), {"tensors": LISTED, "parts": SUMS, "total_bytes": 136}),
    (MEASURED, WHO | {"round": 2, "metrics": ["accuracy", "loss"], "weight": True}),
    (pb.CommitRequest(caller=CALLER), WHO),
    (pb.HeartbeatRequest(telemetry={"step_seconds": 0.125}), {"telemetry": ["step_seconds"]}),
    (pb.ScoresRequest(scores={"accuracy": 3.14159}), {"scores": ["accuracy"]}),
    (op.StartRunRequest(recipe=CONTENT), {"recipe": f"7 characters, blake3-256 {digest(CONTENT.encode())}"}),
    (op.AbortRunRequest(run="r", reason="why\n"), {"run": "r", "reason": "why\n"}),
    (op.ShowRunRequest(first=-3), {"first": -3}),
    (op.ListRunsRequest(), {}),
]


@pytest.mark.parametrize(("message", "said"), SAID, ids=[type(message).__name__ for message, _ in SAID])
def test_a_message_is_told_by_its_fields_and_without_content(message: Any, said: dict[str, Any]) -> None:
    told = audit_fields(message)
    assert told == said
    assert CONTENT not in json.dumps(told)


def test_no_number_that_could_be_measured_is_ever_told() -> None:
    """By type, so that a field which is added later is covered."""
    for kind in requests():
        message, floats = kind(), []
        for field in kind.DESCRIPTOR.fields:
            if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
                setattr(message, field.name, 3.14159)
                floats.append(field.name)
        told = audit_fields(message)
        assert told == dict.fromkeys(floats, True)


def test_a_sites_own_log_has_the_values_of_numbers() -> None:
    commit = pb.CommitRequest(caller=CALLER, round=2, metrics={"loss": 0.25, "accuracy": -0.0}, weight=3.0)
    said = {"round": 2, "metrics": {"accuracy": 0.0, "loss": 0.25}, "weight": 3.0}
    assert audit_fields(commit, values=True) == WHO | said
    task = pb.Task(kind=pb.TASK_KIND_FIT, run="r", task_id="t", base_digest="d", base_bytes=9, remaining_s=4.5)
    told = {"kind": "fit", "run": "r", "task_id": "t", "base_digest": "d", "base_bytes": 9, "remaining_s": 4.5}
    assert audit_fields(task, values=True) == told
    assert audit_fields(pb.NextTaskRequest(caller=CALLER, wait_s=20.0), values=True) == WHO | {"wait_s": 20.0}
    chunk = audit_fields(pb.Chunk(upload="u", data=CONTENT.encode()), values=True)
    assert chunk == {"upload": "u", "data": "7 bytes"}, "data never"


def test_values_that_json_does_not_have_and_too_many_of_them_are_texts() -> None:
    scores = {"a": float("nan"), "b": float("inf"), "c" * 2000: 1.0}
    told = audit_fields(pb.ScoresRequest(scores=scores), values=True)["scores"]
    assert isinstance(told, dict)
    assert (told["a"], told["b"], len(told)) == ("nan", "inf", 3)
    assert max(map(len, told)) <= LONGEST_TEXT
    many = pb.ScoresRequest(scores={f"{'s' * 200}{number}": 0.5 for number in range(2048)})
    assert "blake3-256" in str(audit_fields(many, values=True)["scores"])
    json.dumps(audit_fields(many, values=True), allow_nan=False)


def test_requests_have_no_other_messages_in_them_than_those_that_are_told_here() -> None:
    """The fields of a message within one stand beside the others: a second kind could hide them."""
    inner = {
        (field.message_type.name, field.name)
        for kind in requests()
        for field in kind.DESCRIPTOR.fields
        if field.message_type is not None and not field.message_type.GetOptions().map_entry
    }
    assert inner == {("Caller", "caller"), ("Tensor", "tensors")}


def test_parts_and_bytes_are_those_of_the_manifest() -> None:
    specs = [TensorSpec(Part.HEAD, f"w{kind}", kind, (2, 5)) for kind in DTYPES.values()]
    message = pb.UploadManifest(
        tensors=[pb.Tensor(part=pb.PART_HEAD, name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in specs]
    )
    told = audit_fields(message)
    assert told["parts"] == [["head", len(specs), sum(spec.nbytes for spec in specs)]]


def test_a_certificate_is_told_by_its_fingerprint(tmp_path: Path) -> None:
    folder = Authority.make().issue(tmp_path / "ann", Party.OPERATOR, "ann")
    pem = (folder / "cert.pem").read_bytes()
    told = audit_fields(op.RegisterCertificateRequest(pem=pem.decode()))
    assert told == {"pem": f"sha-256 {fingerprint(pem)}"}
    other = audit_fields(op.RegisterCertificateRequest(pem="nonsense"))
    assert other == {"pem": f"no certificate: 8 characters, blake3-256 {digest(b'nonsense')}"}


def manifest(count: int, name: str) -> pb.UploadManifest:
    parts = (pb.PART_BODY, pb.PART_HEAD)
    tensors = [pb.Tensor(part=parts[i % 2], name=f"{name}{i}", dtype="float32", shape=[2]) for i in range(count)]
    return pb.UploadManifest(tensors=tensors)


def test_the_longest_list_of_tensors_has_room_in_a_line_and_keeps_its_sums() -> None:
    told = audit_fields(manifest(MAX_TENSORS, "w" * 190))
    assert len(json.dumps(told)) < 500
    assert str(told["tensors"]).startswith("20000 items, ")
    assert told["parts"] == [["body", 10_000, 80_000], ["head", 10_000, 80_000]]
    other = audit_fields(manifest(MAX_TENSORS, "v" * 190))
    assert other["tensors"] != told["tensors"], "its digest tells one list from another"
    listed = audit_fields(manifest(1000, "layer4.2.downsample.1.running_mean"))["tensors"]
    assert isinstance(listed, list)
    assert len(listed) == 1000, "all of a large model"
    beyond = pb.UploadManifest(tensors=[pb.Tensor()] * (MAX_ITEMS + 1), total_bytes=5)  # no payload has so many
    assert audit_fields(beyond) == {"tensors": f"{MAX_ITEMS + 1} items", "total_bytes": 5}


def unknown(number: int) -> Any:
    """An enumerator of another version."""
    return number


HOSTILE = [
    op.AbortRunRequest(run="x" * 200_000, reason="\0" * 50_000),
    pb.UploadManifest(tensors=[pb.Tensor(part=pb.PART_BODY, name="w", dtype="float32", shape=[2**64 - 1] * 50_000)]),
    pb.UploadManifest(tensors=[pb.Tensor(part=pb.PART_BODY, name="w", dtype="int64", shape=[2**64 - 1] * 8)] * 20_000),
    pb.UploadManifest(tensors=[pb.Tensor(part=unknown(number)) for number in range(MAX_ITEMS)]),
    pb.UploadManifest(tensors=[pb.Tensor(name="\0" * 900_000)]),
    pb.ScoresRequest(scores={"\0" * 900 + str(number): float("nan") for number in range(250)}),
    pb.EnrollRequest(roles=[unknown(99)] * 250_000),
    pb.NextTaskRequest(wait_s=float("nan")),
    pb.CommitRequest(weight=float("inf")),
]


@pytest.mark.parametrize("message", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_a_peer_sends_its_line_is_bounded_json(message: Any) -> None:
    line = json.dumps(audit_fields(message), allow_nan=False)
    assert len(line) < 2 * LONGEST_LIST + 20 * LONGEST_TEXT < journal.LONGEST / 8


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_whatever_can_be_parsed_can_be_told(data: bytes) -> None:
    for kind in requests():
        try:
            message = kind.FromString(data)
        except DecodeError:
            continue
        json.dumps(audit_fields(message), allow_nan=False)
