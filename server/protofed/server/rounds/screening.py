"""The update firewall: what is wrong with an update, cheapest check first (PROTOCOL §2). None means nothing.

Size and base of the announcement, then its names, dtypes and shapes; of the bytes, whether they are those tensors,
finite and of a norm that can be; then the numbers beside them. A chunk's CRC and the digest are `blobs`' to check.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import median_high

import numpy as np

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import CodecError
from protofed.common.payload import Array, Part, Payload, SiteId, TensorSpec
from protofed.common.protocol.messages import Manifest
from protofed.server.method import ExpectedUpdate
from protofed.server.verdicts import RejectionCode, UpdateProblem

MAX_UPDATE_BYTES = 4 << 30
LARGEST_JUMP = 10  # of a site's example count from one round to another: sites grow, but not by that much
MAX_SCALARS = 2048  # a recall for each of some hundred classes, on two test sets
HEADER_ROOM = codec.MAX_HEADER_BYTES
SMALLEST_COHORT = 3  # of two norms that differ nobody can say which is odd
BLOCK = 1 << 16  # numbers whose difference is held at a time: 512 KiB
_SCALAR = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def size_fault(manifest: Manifest) -> UpdateProblem | None:
    """Whether the announced total is within the limit and can be that of the announced tensors."""
    numbers = sum(spec.nbytes for spec in manifest.tensors)
    if manifest.total_bytes > MAX_UPDATE_BYTES or not numbers < manifest.total_bytes <= numbers + HEADER_ROOM:
        return UpdateProblem(
            RejectionCode.SIZE, f"{manifest.total_bytes} bytes announced for tensors of {numbers} bytes"
        )
    return None


def base_fault(base: Digest | None, named: Digest | None) -> UpdateProblem | None:
    """Whether an update starts from the model that its task names."""
    return (
        None if base == named else UpdateProblem(RejectionCode.BASE, "it starts from another model than the task names")
    )


def manifest_fault(manifest: Manifest, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether an upload is announced as the method expects it: names, dtypes, shapes."""
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


def first_model_fault(manifest: Manifest, classes: int) -> UpdateProblem | None:
    """Whether an upload is announced as a freshly made model: BODY, and HEAD with a real `weight` [C, D]."""
    announced = {spec.path: spec for spec in manifest.tensors}
    if len(announced) != len(manifest.tensors):
        return UpdateProblem(RejectionCode.TENSORS, "a tensor is announced twice")
    if any(spec.part not in (Part.BODY, Part.HEAD) for spec in manifest.tensors):
        return UpdateProblem(RejectionCode.TENSORS, "a first model has only a body and a head")
    head = announced.get(f"{Part.HEAD}/weight")
    if head is None or len(head.shape) != 2 or head.shape[0] != classes or head.dtype == "int64":
        return UpdateProblem(RejectionCode.TENSORS, f"a first model needs a head with weight [{classes}, D]")
    return None


def examined(data: bytes, manifest: Manifest, base: Payload | None, max_update_norm: float) -> UpdateProblem | float:
    """What is wrong with the bytes that came, or else the update's norm.

    The norm is Euclidean, over all floating-point tensors together: of (update - base) for a tensor that the base holds
    under the same path and shape, of the tensor itself for any other. Integer buffers are left out.

    Args:
        base: what the update started from; None: it is a first model.
        max_update_norm: the largest norm that is let in.
    """
    try:
        if codec.manifest(data) != tuple(sorted(manifest.tensors, key=lambda spec: spec.path)):
            return UpdateProblem(RejectionCode.CONTENTS, "the upload holds other tensors than were announced")
        payload = codec.decode(data)
    except CodecError as error:
        return UpdateProblem(RejectionCode.DAMAGED, str(error))
    norm = _norm(payload, base or {})
    if math.isfinite(norm) and norm <= max_update_norm:
        return norm
    text = f"the update's norm is {norm:.6g}: this run lets in at most {max_update_norm:g}"
    return not_finite(payload) or UpdateProblem(RejectionCode.NORM, text)


def not_finite(payload: Payload) -> UpdateProblem | None:
    """Names the first tensor with NaN or infinity."""
    path = codec.first_not_finite(payload)
    return UpdateProblem(RejectionCode.NOT_FINITE, f"{path} has values that are not finite") if path else None


def scalars_fault(scalars: Mapping[str, float], weight: float | None, expected: ExpectedUpdate) -> UpdateProblem | None:
    """Whether the numbers beside the tensors can be used."""
    if len(scalars) > MAX_SCALARS or not all(map(math.isfinite, scalars.values())):
        return UpdateProblem(RejectionCode.SCALARS, f"metrics: expected at most {MAX_SCALARS} finite numbers")
    if not all(map(_SCALAR.fullmatch, scalars)):
        return UpdateProblem(RejectionCode.SCALARS, "metrics: a name is 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-'")
    if expected.weight and weight is None:
        text = "the total example count is missing: this run weights by it, and the site's policy withholds it"
        return UpdateProblem(RejectionCode.COUNT, text)
    if weight is not None and not (math.isfinite(weight) and 1 <= weight < 2**53):
        return UpdateProblem(RejectionCode.COUNT, f"an example count of {weight}")
    return None


def jump_fault(weight: float | None, before: float | None) -> UpdateProblem | None:
    """Whether an example count is far from the one that the site told before in this run."""
    if weight is None or before is None or before / LARGEST_JUMP <= weight <= before * LARGEST_JUMP:
        return None
    text = f"an example count of {weight:g} after {before:g}: expected at most {LARGEST_JUMP} times more or less"
    return UpdateProblem(RejectionCode.COUNT, text)


def outliers(norms: Mapping[SiteId, float], factor: float | None) -> dict[SiteId, str]:
    """The accepted updates of a cohort that are set aside, each with the reason.

    An update is set aside if its norm exceeds `factor` times the median of its cohort's, the upper one of an even
    number: for a factor of at least 1 that is always fewer than half. Nobody is set aside in a cohort of fewer than
    three, nor where the median is zero: most updates then do not say how large a change should be, and whoever did
    train would be the one to go (`max_update_norm` still holds).

    Args:
        norms: of all accepted updates of one round, as `examined` gives them.
        factor: None or 0 turns the rule off.
    """
    if not factor or len(norms) < SMALLEST_COHORT:
        return {}
    median = median_high(norms.values())
    return {
        site: f"its norm of {norm:.6g} is more than {factor:g} times the cohort's median of {median:.6g}"
        for site, norm in sorted(norms.items())
        if 0 < factor * median < norm
    }


def _norm(payload: Payload, base: Payload) -> float:
    """In float64, in which no square of a float32 overflows; that of a huge float64 is infinite, and so is the norm."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for part, tensors in payload.items():
            for name, array in tensors.items():
                if array.dtype.kind == "f":
                    total += _squares(array, base.get(part, {}).get(name))
    return math.sqrt(total)


def _squares(array: Array, base: Array | None) -> float:
    """Block by block: no temporary of the tensor's size, and the same sum whatever the number of threads."""
    flat, total = array.reshape(-1), 0.0
    origin = base.reshape(-1) if base is not None and base.shape == array.shape else None
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK].astype(np.float64)
        if origin is not None:
            block -= origin[start : start + BLOCK]
        total += float(np.einsum("i,i->", block, block))
    return total


def _shape(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
