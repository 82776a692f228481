"""What is wrong with an update, if anything: pure checks, each None for an update that passes it."""

from __future__ import annotations

import math

from protofed.common import codec
from protofed.common.codec import Buffer, Digest
from protofed.common.errors import CodecError
from protofed.common.payload import NOT_A_MOVE, Part, Payload, TensorSpec
from protofed.common.protocol.messages import Manifest, Scores
from protofed.common.protocol.score_names import metrics_problem
from protofed.common.tensors import norm_of
from protofed.server.method import ExpectedUpdate
from protofed.server.verdicts import RejectionCode, UpdateProblem

MAX_UPDATE_BYTES = 4 << 30
LARGEST_JUMP = 10  # factor between a site's example counts in two rounds: sites grow, but not by that much


def size_problem(manifest: Manifest) -> UpdateProblem | None:
    """Whether the announced total is within the limit and the one that the announced tensors are encoded to."""
    expected = codec.encoded_size(manifest.tensors)
    if manifest.total_bytes > MAX_UPDATE_BYTES or manifest.total_bytes != expected:
        text = f"{manifest.total_bytes} bytes announced for tensors that are encoded to {expected}"
        return UpdateProblem(RejectionCode.SIZE, text)
    return None


def base_problem(base: Digest | None, named: Digest | None) -> UpdateProblem | None:
    """Whether an update starts from the model that its task names."""
    return (
        None if base == named else UpdateProblem(RejectionCode.BASE, "it starts from another model than the task names")
    )


def manifest_problem(manifest: Manifest, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether an upload announces what the method expects: names, dtypes, shapes."""
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return UpdateProblem(RejectionCode.TENSORS, "a tensor is announced twice")
    required = {spec.path: spec for spec in expected.required}
    known = required | {spec.path: spec for spec in expected.optional}
    if missing := sorted(required.keys() - announced.keys()):
        return UpdateProblem(RejectionCode.TENSORS, f"{missing[0]} is missing ({len(missing)} in all)")
    for path, spec in announced.items():
        if path not in known:
            return UpdateProblem(RejectionCode.TENSORS, f"{path} is not part of this method's update")
        if spec != known[path]:
            return UpdateProblem(RejectionCode.TENSORS, f"{path} is {_shape(spec)}, expected {_shape(known[path])}")
    return None


def first_model_problem(manifest: Manifest, classes: int, max_model_mb: float) -> UpdateProblem | None:
    """Whether an upload announces a freshly made model: BODY, and HEAD with a floating-point `weight` [C, D].

    Args:
        max_model_mb: the recipe's, in 10^6 bytes: of a first model nothing else says how large it is.
    """
    if manifest.total_bytes > max_model_mb * 1e6:
        text = f"a first model of {manifest.total_bytes} bytes: this run accepts max_model_mb = {max_model_mb:g}"
        return UpdateProblem(RejectionCode.SIZE, text)
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return UpdateProblem(RejectionCode.TENSORS, "a tensor is announced twice")
    if any(spec.part not in (Part.BODY, Part.HEAD) for spec in manifest.tensors):
        return UpdateProblem(RejectionCode.TENSORS, "a first model has only a body and a head")
    head = announced.get(f"{Part.HEAD}/weight")
    if head is None or len(head.shape) != 2 or head.shape[0] != classes or head.dtype == "int64":
        return UpdateProblem(RejectionCode.TENSORS, f"a first model needs a head with weight [{classes}, D]")
    return None


def contents(data: Buffer, manifest: Manifest) -> UpdateProblem | Payload:
    """The payload of an upload, if it has the tensors that were announced; else what is wrong.

    No copy: an update takes its own size of memory while it is examined.
    """
    try:
        if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
            return UpdateProblem(RejectionCode.CONTENTS, "the upload holds other tensors than were announced")
        return codec.view(data)
    except CodecError as error:
        return UpdateProblem(RejectionCode.DAMAGED, str(error))


def examined(data: Buffer, manifest: Manifest, base: Payload | None, max_update_norm: float) -> UpdateProblem | float:
    """The problem with the bytes of an update, or else its norm.

    The norm is Euclidean, over all floating-point tensors together: of (update - base) for a tensor that the base has
    under the same path and shape, of the tensor itself for any other. Integer buffers are left out, and what says who
    counts, which one or how long, and not how far the model moved.

    Args:
        base: the model that the update started from; None: the update is a first model.
        max_update_norm: the largest norm that the run accepts.
    """
    payload = contents(data, manifest)
    if isinstance(payload, UpdateProblem):
        return payload
    moves = {part: tensors for part, tensors in payload.items() if part not in NOT_A_MOVE}
    others = {part: tensors for part, tensors in payload.items() if part in NOT_A_MOVE}
    norm = norm_of(moves, base or {})  # NaN and infinity carry into the norm: models need no second pass
    if math.isfinite(norm) and norm <= max_update_norm and codec.first_not_finite(others) is None:
        return norm
    if path := codec.first_not_finite(payload):
        return UpdateProblem(RejectionCode.NOT_FINITE, f"{path} has values that are not finite")
    text = f"the update's norm is {norm:.6g}: this run accepts at most {max_update_norm:g}"
    return UpdateProblem(RejectionCode.NORM, text)


def scalars_problem(metrics: Scores, weight: float | None, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether the numbers beside the tensors are those of a training, each in its range."""
    if (text := metrics_problem(metrics)) is not None:
        return UpdateProblem(RejectionCode.SCALARS, text)
    if expected.weight and weight is None:
        text = "the total example count is missing: this run weights by it, and the site's policy withholds it"
        return UpdateProblem(RejectionCode.COUNT, text)
    if weight is not None and not (math.isfinite(weight) and 1 <= weight < 2**53):  # 2**53: floats count exactly below
        return UpdateProblem(RejectionCode.COUNT, f"an example count of {weight}")
    return None


def jump_problem(weight: float | None, before: float | None) -> UpdateProblem | None:
    """Whether an example count is implausibly far from the site's previous one in this run."""
    if weight is None or before is None or before / LARGEST_JUMP <= weight <= before * LARGEST_JUMP:
        return None
    text = f"an example count of {weight:g} after {before:g}: expected at most {LARGEST_JUMP} times more or less"
    return UpdateProblem(RejectionCode.COUNT, text)


def _shape(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
