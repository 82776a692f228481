"""What the wire can say at all, read from the messages' descriptors: a new field fails until somebody allows it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.protos.v1 import federation_pb2 as pb
from protofed.protos.v1 import secure_aggregation_pb2 as sums

# Every field of every message that a site sends, and why it may leave.
ALLOWED = {
    "Caller.site": "the site's id, as in its certificate",
    "Caller.instance": "drawn at random when the daemon starts: which of a site's daemons is the newest",
    "EnrollRequest.caller": "who",
    "EnrollRequest.protocol_version": "version of these messages",
    "EnrollRequest.software_version": "version of protofed",
    "EnrollRequest.roles": "whether it trains, scores, or both",
    "EnrollRequest.pause_reason": "whether it waits for its approval or schedule, or a person paused it or took it out "
    "of the run, its policy cannot be read, or its privacy budget is spent",
    "EnrollRequest.institution": "the hospital's name, as its settings say it for the list of partners",
    "EnrollRequest.identity": "public half of a key that the daemon drew at random",
    "EnrollRequest.consortium": "digest of a list that the server offered: a person has confirmed it",
    "EnrollRequest.consortium_number": "of that list",
    "EnrollRequest.wait_s": "how long the daemon would wait for a run",
    "NextTaskRequest.caller": "who",
    "NextTaskRequest.run": "the run's name, as the server gave it",
    "NextTaskRequest.wait_s": "how long the daemon would wait for an answer",
    "HeartbeatRequest.caller": "who",
    "HeartbeatRequest.run": "as the server gave it",
    "HeartbeatRequest.task_id": "the task's, as the server gave it",
    "HeartbeatRequest.activity": "one of a fixed list: training, uploading, ...",
    "HeartbeatRequest.epoch": "of the plan's epochs",
    "HeartbeatRequest.epochs": "of the plan",
    "HeartbeatRequest.bytes_moved": "progress of a transfer",
    "HeartbeatRequest.failure": "one of a fixed list; no text",
    "HeartbeatRequest.making_progress": "whether training got on within the last minute: no batches can be counted",
    "HeartbeatRequest.telemetry": "numbers of the site's machine and daemon that its policy names; none without it",
    "HeartbeatRequest.TelemetryEntry.key": "a name of the closed list in common.telemetry",
    "HeartbeatRequest.TelemetryEntry.value": "one number: of memory, disk, time, or of what the policy did; what each "
    "discloses stands beside its name, and those that hint at the number of examples are in no policy but open.toml",
    "GetChunkRequest.caller": "who",
    "GetChunkRequest.run": "as the server gave it",
    "GetChunkRequest.digest": "of the server's own blob",
    "GetChunkRequest.index": "which chunk of it",
    "Chunk.caller": "who",
    "Chunk.upload": "the upload's id, as the server gave it",
    "Chunk.index": "which chunk of it",
    "Chunk.data": "tensors that the gate released; the only bytes there are",
    "Chunk.crc32c": "checksum of the data",
    "Tensor.part": "what the tensor discloses: what the policy allows or refuses",
    "Tensor.name": "of the model's layer, or a class's number",
    "Tensor.dtype": "of the model",
    "Tensor.shape": "of the model's layer",
    "UploadManifest.caller": "who",
    "UploadManifest.run": "as the server gave it",
    "UploadManifest.round": "as the server gave it",
    "UploadManifest.task_id": "the task's, as the server gave it",
    "UploadManifest.base_digest": "digest of the server's own blob",
    "UploadManifest.tensors": "what the update holds, without its numbers",
    "UploadManifest.total_bytes": "bytes of the update",
    "UploadManifest.digest": "of the update",
    "UploadManifest.digest_algorithm": "a constant",
    "CommitRequest.caller": "who",
    "CommitRequest.run": "as the server gave it",
    "CommitRequest.round": "as the server gave it",
    "CommitRequest.task_id": "the task's, as the server gave it",
    "CommitRequest.upload": "the upload's id, as the server gave it",
    "CommitRequest.digest": "of the update",
    "CommitRequest.metrics": "scalars that the site's policy names",
    "CommitRequest.MetricsEntry.key": "a name in the policy",
    "CommitRequest.MetricsEntry.value": "one number",
    "CommitRequest.weight": "total number of examples, only if the policy says example_count",
    "ScoresRequest.caller": "who",
    "ScoresRequest.run": "as the server gave it",
    "ScoresRequest.round": "as the server gave it",
    "ScoresRequest.task_id": "the task's, as the server gave it",
    "ScoresRequest.scores": "scalars that the site's policy names",
    "ScoresRequest.ScoresEntry.key": "a name in the policy",
    "ScoresRequest.ScoresEntry.value": "one number",
}
# What a site sends of a secure aggregation, in a blob of part SECURE_AGGREGATION beside a masked vector.
ALLOWED_IN_SUMS = {
    "SumStep.keys": "public keys",
    "SumStep.shares": "sealed shares",
    "SumStep.signature": "under what all sites are told alike, or under its own masked flags",
    "SumStep.revealed": "shares, once enough sites have signed the same survivors",
    "SumKeys.site": "the site's id, as in its certificate",
    "SumKeys.identity": "a public key",
    "SumKeys.endorsement": "its certificate's signature under that key",
    "SumKeys.share_key": "a public key",
    "SumKeys.mask_keys": "public keys",
    "SumKeys.commitments": "to random seeds",
    "SumKeys.signature": "of these keys",
    "SumShares.sealed": "shares of random seeds, each readable by one other site",
    "SumShares.SealedEntry.key": "that site",
    "SumShares.SealedEntry.value": "its shares",
    "SumSignature.signature": "a signature",
    "SumSeeds.self_seeds": "one share a survivor",
    "SumSeeds.SelfSeedsEntry.key": "the survivor",
    "SumSeeds.SelfSeedsEntry.value": "the share",
    "SumSeeds.mask_seeds": "one share a site that dropped out",
    "SumSeeds.MaskSeedsEntry.key": "that site",
    "SumSeeds.MaskSeedsEntry.value": "the share",
}
FROM_THE_SERVER = {"SumStep.roster", "SumStep.survivors", "SumStep.contributors"}
# Where a site may say a number of its own choosing: nothing else is a float, and nothing else is a list.
FLOATS = {
    *("EnrollRequest.wait_s", "NextTaskRequest.wait_s", "HeartbeatRequest.TelemetryEntry.value"),
    *("CommitRequest.MetricsEntry.value", "CommitRequest.weight", "ScoresRequest.ScoresEntry.value"),
}
LISTS = {"EnrollRequest.roles", "HeartbeatRequest.telemetry", "UploadManifest.tensors", "Tensor.shape"}
LISTS |= {"CommitRequest.metrics", "ScoresRequest.scores"}
BYTES = {"Chunk.data"}
# Every field of the server's answers.
ANSWERS = {
    "Assignment": "keep_rounds min_cohort preprocessing_digest recipe run",
    "EnrollResponse": "assignment consortium finished",
    "Finished": "last reason",
    "HeartbeatResponse": "signal",
    "NextTaskResponse": "finished task wait",
    "Receipt": "digest reason record_hash verdict",
    "Task": "attempt base_bytes base_digest kind state_round remaining_s round run sum_of task_id",
    "Upload": "id received_chunks",
    "UploadTicket": "receipt upload",
    "Wait": "retry_after_s",
}
NEVER = {
    *("label", "labels", "target", "targets", "count", "counts", "histogram", "histograms", "distribution"),
    *("frequency", "frequencies", "image", "images", "pixel", "pixels", "picture", "example", "examples", "sample"),
    *("samples", "patient", "patients", "raw", "text", "message", "note", "path", "file", "host", "address"),
}
PARTS = {
    *("body", "head", "prototypes", "class_presence", "class_shares", "class_models", "secure_aggregation"),
    *("control", "class_gradients", "choice", "steps", "site_models"),
}


def sent(file: FileDescriptor) -> dict[str, FieldDescriptor]:
    """Every field that a call of a site can hold, by the name in `ALLOWED`."""
    return reached(file, [method.input_type for method in file.services_by_name["Federation"].methods])


def reached(
    file: FileDescriptor, left: list[Descriptor], without: frozenset[str] = frozenset()
) -> dict[str, FieldDescriptor]:
    """Every field of these messages and of those in them, by the name in `ALLOWED`."""
    found: dict[str, FieldDescriptor] = {}
    while left:
        message = left.pop()
        for field in message.fields:
            name = f"{message.full_name.removeprefix(file.package + '.')}.{field.name}"
            if name not in found and name not in without:
                found[name] = field
                left += [field.message_type] if field.message_type else []
    return found


def of_type(file: FileDescriptor, *types: int) -> set[str]:
    return {name for name, field in sent(file).items() if field.type in types}


def words(file: FileDescriptor) -> Iterator[tuple[str, set[str]]]:
    """Every name of the file, both directions, with the words it is made of."""

    def of(message: Descriptor) -> Iterator[str]:
        yield message.name
        yield from (field.name for field in message.fields)
        for nested in message.nested_types:
            yield from of(nested)

    names = [name for message in file.message_types_by_name.values() for name in of(message)]
    names += [value.name for enum in file.enum_types_by_name.values() for value in enum.values]
    for name in names:
        yield name, {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])", name)}


def forbidden(file: FileDescriptor) -> set[str]:
    return {name for name, parts in words(file) if parts & NEVER}


def test_every_field_that_a_site_sends_was_allowed_knowingly() -> None:
    assert set(sent(pb.DESCRIPTOR)) == set(ALLOWED)
    assert all(ALLOWED.values())
    answers = {f"{message}.{field}" for message, fields in ANSWERS.items() for field in fields.split()}
    assert set(reached(pb.DESCRIPTOR, [*pb.DESCRIPTOR.message_types_by_name.values()])) == set(ALLOWED) | answers


def test_what_a_site_sends_of_a_secure_aggregation_was_allowed_knowingly() -> None:
    file = sums.DESCRIPTOR
    found = reached(file, [file.message_types_by_name["SumStep"]], frozenset(FROM_THE_SERVER))
    assert set(found) == set(ALLOWED_IN_SUMS)
    numbers = {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE}
    assert {field.type for field in found.values()} <= numbers
    assert all(field.message_type is None or field.message_type.file is file for field in found.values())


@pytest.mark.parametrize("file", [pb.DESCRIPTOR, sums.DESCRIPTOR])
def test_nothing_is_named_for_labels_counts_or_images(file: FileDescriptor) -> None:
    assert forbidden(file) == set()


def test_bytes_floats_and_lists_are_only_where_they_are_named() -> None:
    file, kind = pb.DESCRIPTOR, FieldDescriptor
    assert of_type(file, kind.TYPE_BYTES) == BYTES
    assert of_type(file, kind.TYPE_DOUBLE, kind.TYPE_FLOAT) == FLOATS
    assert {name for name, field in sent(file).items() if field.is_repeated} == LISTS


def test_messages_are_of_this_file_and_calls_have_one_each() -> None:
    for name, field in sent(pb.DESCRIPTOR).items():
        assert field.message_type is None or field.message_type.file is pb.DESCRIPTOR, f"{name} could hold anything"
    for method in pb.DESCRIPTOR.services_by_name["Federation"].methods:
        assert not method.client_streaming, f"{method.name} is a stream"


def test_parts_are_these_and_simulated_ones_have_no_number() -> None:
    values = {value.name.removeprefix("PART_").lower() for value in pb.DESCRIPTOR.enum_types_by_name["Part"].values}
    assert values == PARTS | {"unspecified"}
    assert {part.replace("-", "_") for part in set(Part) - NOT_ON_THE_WIRE} == PARTS
    assert {"label-distribution", "private"} == NOT_ON_THE_WIRE


@pytest.fixture
def widened() -> FileDescriptor:
    """Our messages, and what somebody might add to them."""
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    messages: dict[str, DescriptorProto] = {message.name: message for message in file.message_type}
    kind = FieldDescriptorProto
    messages["CommitRequest"].field.add(
        name="label_counts", number=90, type=kind.TYPE_UINT64, label=kind.LABEL_REPEATED
    )
    messages["Caller"].field.add(name="more", number=90, type=kind.TYPE_BYTES, label=kind.LABEL_OPTIONAL)
    messages["Tensor"].field.add(name="mean", number=90, type=kind.TYPE_DOUBLE, label=kind.LABEL_OPTIONAL)
    file.enum_type[0].value.add(name="PART_RAW_IMAGES", number=90)
    pool = DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    assert isinstance(found, FileDescriptor)
    return found


def test_what_somebody_might_add_is_found(widened: FileDescriptor) -> None:
    assert set(sent(widened)) - set(ALLOWED) == {"CommitRequest.label_counts", "Caller.more", "Tensor.mean"}
    assert forbidden(widened) == {"label_counts", "PART_RAW_IMAGES"}
    assert of_type(widened, FieldDescriptor.TYPE_BYTES) - BYTES == {"Caller.more"}
    assert of_type(widened, FieldDescriptor.TYPE_DOUBLE) - FLOATS == {"Tensor.mean"}
