"""The codec of payloads on the wire and on disk: a safetensors file whose tensors are named `part/name`.

Decoding trusts nothing: the header is bounded and checked before any tensor is allocated. safetensors itself accepts
duplicate names, endless lists, shapes such as (0, 2**40) and any padding. Tensors have one encoding, and no other is
read. A blob's size follows from its manifest, and no byte of a blob is free to carry anything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, NewType, TypeAlias, TypeVar

import numpy as np
from blake3 import blake3

from protofed.common.errors import CodecError, short
from protofed.common.payload import Array, Part, Payload, TensorSpec, describe

Buffer: TypeAlias = bytes | memoryview  # of a blob; a memoryview may be a file in memory
Digest = NewType("Digest", str)  # BLAKE3-256 of a blob's bytes, in hex
_Key = TypeVar("_Key", bytes, tuple[TensorSpec, ...])
_Value = TypeVar("_Value")
_DIGEST = re.compile(r"[0-9a-f]{64}")

MAX_TENSORS = 20_000
MAX_HEADER_BYTES = 4 << 20
MAX_ELEMENTS = 1 << 33  # of one tensor
DTYPES = {"F32": "float32", "F64": "float64", "I64": "int64", "U64": "uint64", "U8": "uint8"}
OF_SUMS = frozenset(
    {"uint64", "uint8"}
)  # words of the ring, and messages: of part secure-aggregation, which has no others
_NATIVE = frozenset(map(np.dtype, DTYPES.values()))  # a dtype of the other byte order equals none of them
_NAMES = {name: short for short, name in DTYPES.items()}
# Of tensors within a blob, as safetensors writes them.
_DTYPE_ORDER = {"uint64": 0, "int64": 1, "float64": 2, "float32": 3, "uint8": 4}
_LENGTH_BYTES, _ALIGNMENT = 8, 8  # of the header's length field; of the tensors' data
_KNOWN = 16  # headers whose checks are remembered: the payloads of a run have two or three
_KNOWN_TENSORS, _KNOWN_BYTES = 1 << 10, 1 << 17  # of the longest of them: a hostile site's would fill the memory
TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a digest: 64 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def digest(*data: Buffer) -> Digest:
    """BLAKE3-256 in hex: the address of a blob, of its bytes or of pieces in order."""
    hashed = blake3()
    for piece in data:
        hashed.update(piece)
    return Digest(hashed.hexdigest())


def encode(payload: Payload) -> bytes:
    """The payload as bytes; equal payloads give equal bytes, whatever the order of their keys.

    Raises:
        CodecError: a tensor's name, dtype or shape is one that `decode` would refuse.
    """
    return b"".join(encoded(payload))


def encoded(payload: Payload) -> list[Buffer]:
    """What `encode` joins, without a copy of the tensors.

    Raises:
        CodecError: as `encode`.
    """
    for part, tensors in payload.items():
        for name, array in tensors.items():
            if array.dtype not in _NATIVE:
                raise CodecError(f"{part}/{name} is {array.dtype}: expected one of {', '.join(DTYPES.values())}")
    beginning, order = _beginning(describe(payload))
    return [beginning, *(_as_bytes(payload[part][name]) for part, name in order)]


def manifest(data: Buffer) -> tuple[TensorSpec, ...]:
    """The tensors of a blob by its checked header, sorted by path; the tensors' data are not read.

    Raises:
        CodecError: the bytes are no payload; the text names the first problem.
    """
    return _checked(data).specs


def encoded_size(specs: Iterable[TensorSpec]) -> int:
    """Size in bytes of the blob that `encode` makes of tensors of these specs, in any order."""
    specs = tuple(specs)
    return _LENGTH_BYTES + len(_canonical_header(specs)) + sum(spec.nbytes for spec in specs)


def header_specs(beginning: bytes) -> tuple[TensorSpec, ...]:
    """The tensors of a blob by its first bytes; whether the rest fits the header is not checked.

    Raises:
        CodecError: the header is incomplete or invalid.
    """
    return _read(_header(beginning)).specs


def shares(specs: Iterable[TensorSpec]) -> dict[Part, float]:
    """Each part's share of the bytes of tensors; empty if there are none."""
    sizes: dict[Part, int] = {}
    for spec in specs:
        sizes[spec.part] = sizes.get(spec.part, 0) + spec.nbytes
    total = sum(sizes.values())
    return {part: size / total for part, size in sizes.items()} if total else {}


def decode(data: Buffer) -> Payload:
    """The payload of a blob, in memory of its own.

    Raises:
        CodecError: the bytes are no payload; nothing is allocated for tensors before the header is checked.
    """
    return {part: {name: array.copy() for name, array in tensors.items()} for part, tensors in view(data).items()}


def view(data: Buffer) -> Payload:
    """The payload of a blob without a copy: read-only arrays; each keeps all of `data` in memory.

    Raises:
        CodecError: the bytes are no payload.
    """
    header = _checked(data)
    start = len(data) - header.nbytes
    parts: dict[Part, dict[str, Array]] = {}
    for spec, at in zip(header.specs, header.offsets, strict=True):
        array: Array = np.ndarray(spec.shape, spec.dtype, data, start + at)
        parts.setdefault(spec.part, {})[spec.name] = array
    return parts


def first_not_finite(payload: Payload) -> str | None:
    """`part/name` of the first floating-point tensor of any shape with NaN or infinity; None: all are finite."""
    for part in sorted(payload):
        for name, array in sorted(payload[part].items()):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{part}/{name}"
    return None


class _PayloadHeader(NamedTuple):
    """What a header says.

    Attributes:
        specs: sorted by path.
        offsets: where each one's data begin, behind the header.
        nbytes: of all data.
        canonical: `encode` writes this header for these tensors.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int
    canonical: bool


def _checked(data: Buffer) -> _PayloadHeader:
    text = _header(data)
    header, body = _read(text), len(data) - _LENGTH_BYTES - len(text)
    if header.nbytes != body:
        raise CodecError(f"the tensors take {header.nbytes} bytes, the blob holds {body}")
    if not header.canonical:
        raise CodecError(
            "the header is padded, or lists its tensors in another order; expected the header that protofed writes "
            "for them"
        )
    return header


def _as_bytes(array: Array) -> memoryview:
    """[...] as bytes; a memoryview of no dimension or of no element cannot be cast."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _header(data: Buffer) -> bytes:
    if len(data) < _LENGTH_BYTES:
        raise CodecError(f"{len(data)} bytes: shorter than the length field of a payload")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise CodecError(f"header of {length} bytes in a blob of {len(data)}: cut short, or not a payload")
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _remembered(longest: int) -> Callable[[Callable[[_Key], _Value]], Callable[[_Key], _Value]]:
    """What a function of a header gave for the last `_KNOWN` of at most this length."""

    def decorate(compute: Callable[[_Key], _Value]) -> Callable[[_Key], _Value]:
        known = lru_cache(_KNOWN)(compute)
        return lambda key: known(key) if len(key) <= longest else compute(key)

    return decorate


@_remembered(_KNOWN_BYTES)
def _read(text: bytes) -> _PayloadHeader:
    """Remembered by its bytes: a header says the same in every update."""
    try:
        table = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CodecError("the header is not JSON: not a payload") from error
    if not isinstance(table, dict):
        raise CodecError("the header is not a table: not a payload")
    if len(table) > MAX_TENSORS:
        raise CodecError(f"{len(table)} tensors: at most {MAX_TENSORS} are read")
    specs = sorted((_spec(path, entry) for path, entry in table.items()), key=lambda spec: spec.path)
    starts, at = {}, 0
    for spec in sorted(specs, key=_position):
        starts[spec.path], at = at, at + spec.nbytes
    offsets = tuple(starts[spec.path] for spec in specs)
    return _PayloadHeader(tuple(specs), offsets, at, text == _canonical_header(tuple(specs)))


@_remembered(_KNOWN_TENSORS)
def _beginning(specs: tuple[TensorSpec, ...]) -> tuple[bytes, tuple[tuple[Part, str], ...]]:
    """What a blob of these tensors begins with, and the order of their data behind it."""
    for spec in specs:
        _check_name(spec.name)
        _check_shape(spec.path, spec.shape)
        _check_dtype(spec)
    header = _canonical_header(specs)
    order = tuple((spec.part, spec.name) for spec in sorted(specs, key=_position))
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header, order


@_remembered(_KNOWN_TENSORS)
def _canonical_header(specs: tuple[TensorSpec, ...]) -> bytes:
    """The header that safetensors writes for these tensors: JSON without spaces, then spaces up to the alignment."""
    entries, at = {}, 0
    for spec in sorted(specs, key=_position):
        end = at + spec.nbytes
        entries[spec.path] = {"dtype": _NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return text + b" " * (-len(text) % _ALIGNMENT)


def _position(spec: TensorSpec) -> tuple[int, str]:
    return _DTYPE_ORDER[spec.dtype], spec.path


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise CodecError(f"{key[:80]!r} is twice in the header")
        table[key] = value
    return table


def _spec(path: str, entry: Any) -> TensorSpec:
    part, slash, name = path.partition("/")
    if not slash or part not in list(Part):
        raise CodecError(f"{path[:80]!r} names no part: expected one of {', '.join(Part)} and a slash")
    _check_name(name)
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CodecError(f"{path} has dtype {short(str(dtype), 20)}: expected one of {', '.join(DTYPES)}")
    spec = TensorSpec(Part(part), name, DTYPES[dtype], _check_shape(path, shape))
    _check_dtype(spec)
    return spec


def _check_dtype(spec: TensorSpec) -> None:
    if (spec.dtype in OF_SUMS) != (spec.part is Part.SECURE_AGGREGATION):
        of_sums = ", ".join(sorted(OF_SUMS))
        raise CodecError(f"{spec.path} has dtype {spec.dtype}: {of_sums} are those of part {Part.SECURE_AGGREGATION}")


def _check_shape(path: str, shape: Any) -> tuple[int, ...]:
    # `type(n) is int`: JSON's true and false are of a subclass of int.
    sizes = isinstance(shape, list | tuple) and len(shape) <= 8 and all(type(n) is int and n > 0 for n in shape)
    if not sizes or math.prod(shape) > MAX_ELEMENTS:
        raise CodecError(f"{path} has shape {short(str(shape), 60)}: expected at most 8 positive sizes, 2^33 elements")
    return tuple(shape)


def _check_name(name: str) -> None:
    if not TENSOR_NAME.fullmatch(name):
        raise CodecError(f"tensor name {name[:80]!r}: expected letters, digits, '_', '.', '-', at most 200 of them")
