"""What audit logs record of a message: all of its fields, without content.

It goes by protobuf descriptor, so a new field is recorded without a line here. It is safe by default: of a type that
could carry data there is only a size, a name or a digest. Texts and lists are bounded, whatever a peer sends. A site's
own log has the values of numbers and scores, too: who answers for the data reads there what exactly was disclosed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from protofed.common.codec import DTYPES, MAX_TENSORS
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import fingerprint
from protofed.common.storage.journal import Fact

LONGEST_TEXT = 1000  # characters; an operator's reason is shorter
LONGEST_LIST = 128 << 10  # bytes as JSON: about 2000 tensors
MAX_ITEMS = MAX_TENSORS  # of a list whose items are read
MAX_DIMENSIONS = 8
_ITEMSIZE = {name: np.dtype(name).itemsize for name in DTYPES.values()}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def audit_fields(message: Message, *, values: bool = False) -> dict[str, Fact]:
    """A message's fields by name; as on the wire, fields that are 0 or empty are left out.

    Words, ids, digests and integers are recorded as they are. Of `bytes` there is the size, of a floating-point number
    only `True`, of a map its sorted keys. Of a recipe there is its digest, of a certificate its fingerprint. The fields
    of `caller` stand beside the others. A tensor is `body/conv.weight float32 [32, 1, 3, 3]`, and `parts` has `[part,
    tensors, bytes]` of each part.

    A text of more than `LONGEST_TEXT` characters, or a list of more than `LONGEST_LIST` bytes, becomes its length and
    digest; `parts` stays. Of a list of more than `MAX_ITEMS` there is only the length.

    Args:
        values: record floating-point numbers and maps as they are; a number that is not finite becomes a text.
    """
    fields: dict[str, Fact] = {}
    for field, value in message.ListFields():
        if field.is_repeated and len(value) > MAX_ITEMS:
            fields[field.name] = f"{len(value)} items"  # not read: each item takes time, and a peer chose how many
            continue
        if field.message_type is not None and not field.is_repeated:
            fields |= audit_fields(value, values=values)
        elif values and _is_measured(field):
            fields[field.name] = _bounded(_valued(field, value))
        else:
            fields[field.name] = _bounded(_SPECIAL.get(field.name, _plain)(field, value))
        if field.name == "tensors":
            fields["parts"] = _parts(value)
    return fields


def _plain(field: FieldDescriptor, value: Any) -> Fact:
    if field.message_type is not None and not field.message_type.GetOptions().map_entry:
        return f"{len(value)} × {field.message_type.name}"
    if field.is_repeated:
        return [_bounded(_item(field, item)) for item in (sorted(value) if field.message_type else value)]
    return _item(field, value)


def _is_measured(field: FieldDescriptor) -> bool:
    """Whether the field is a floating-point number, or a map to such numbers."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return field.message_type.fields_by_name["value"].cpp_type in _FLOATS
    return field.cpp_type in _FLOATS


def _valued(field: FieldDescriptor, value: Any) -> Fact:
    if field.message_type is not None:
        return {_text(key): _number(value[key]) for key in sorted(value)}
    return [_number(item) for item in value] if field.is_repeated else _number(value)


def _number(value: float) -> Fact:
    return value if math.isfinite(value) else str(value)  # JSON has no other numbers


def _text(key: object) -> str:
    return str(_bounded(str(key)))


def _item(field: FieldDescriptor, value: Any) -> Fact:
    """A single value; of a map, a key."""
    if field.message_type is not None:
        return str(value)
    if field.enum_type is not None:
        return _enum_name(field.enum_type, value)
    if field.cpp_type in _FLOATS:
        return True  # a loss or a score discloses something; that it was sent does not
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    plain: Fact = value
    return plain


@lru_cache(maxsize=256)
def _enum_name(kind: EnumDescriptor, number: int) -> str:
    """`class-presence` for PART_CLASS_PRESENCE; the number, if it is unknown."""
    if number not in kind.values_by_number:
        return str(number)
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return kind.values_by_number[number].name.removeprefix(prefix).lower().replace("_", "-")


def _tensors(_: FieldDescriptor, tensors: Iterable[Any]) -> Fact:
    return [_bounded(f"{_part(tensor)}/{tensor.name} {tensor.dtype} {_shape(tensor)}") for tensor in tensors]


def _part(tensor: Any) -> str:
    return _enum_name(tensor.DESCRIPTOR.fields_by_name["part"].enum_type, tensor.part)


def _shape(tensor: Any) -> str:
    return str(list(tensor.shape)) if len(tensor.shape) <= MAX_DIMENSIONS else f"{len(tensor.shape)} dimensions"


def _parts(tensors: Iterable[Any]) -> Fact:
    """`[part, tensors, bytes]` of each part; tensors that no payload can have count 0 bytes."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for tensor in tensors:
        possible = len(tensor.shape) <= MAX_DIMENSIONS
        sizes[_part(tensor)].append(math.prod(tensor.shape) * _ITEMSIZE.get(tensor.dtype, 0) if possible else 0)
    return _bounded([[part, len(part_sizes), sum(part_sizes)] for part, part_sizes in sorted(sizes.items())])


def _recipe(_: FieldDescriptor, text: str) -> Fact:
    return _digested(text)


def _certificate(_: FieldDescriptor, pem: str | bytes) -> Fact:
    data = pem.encode() if isinstance(pem, str) else pem
    try:
        return f"sha-256 {fingerprint(data)}"
    except ConfigError:
        return f"no certificate: {_digested(data.decode(errors='replace'))}"


_SPECIAL: dict[str, Callable[[FieldDescriptor, Any], Fact]] = {
    "tensors": _tensors,
    "recipe": _recipe,
    "pem": _certificate,
}


def _bounded(value: Fact) -> Fact:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return _digested(value)
    if isinstance(value, list | dict) and len(text := json.dumps(value)) > LONGEST_LIST:
        return f"{len(value)} items, {_digested(text)} as JSON"
    return value


def _digested(text: str) -> str:
    return f"{len(text)} characters, blake3-256 {blake3(text.encode()).hexdigest()}"
