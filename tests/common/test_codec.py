"""The codec gives back every bit, and hostile bytes are refused before anything is made of them."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from protofed.common import codec
from protofed.common.codec import decode, encode, manifest
from protofed.common.errors import CodecError
from protofed.common.payload import Array, Part, Payload, TensorSpec, describe, same_tensors

quick = settings(max_examples=60, deadline=None, derandomize=True)
names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bits at all: NaNs with a message, denormals, -0.0."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, max_side=3))
    dtype = np.dtype(draw(st.sampled_from(["float32", "float64", "int64"])))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


payloads = st.dictionaries(
    st.sampled_from([*set(Part) - {Part.SECURE_AGGREGATION}]), st.dictionaries(names, arrays(), min_size=1, max_size=4)
)


def blob(header: Any, body: bytes = b"") -> bytes:
    """A blob with this header, right or wrong; a table's is written as the codec does."""
    if isinstance(header, bytes):
        text = header
    else:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def entry(shape: Any = (1,), dtype: Any = "F32", start: int = 0, end: int = 4) -> dict[str, Any]:
    """A header's entry for one float."""
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


def small() -> Payload:
    return {
        Part.BODY: {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.array([7], np.int64)},
        Part.HEAD: {"scale": np.array(0.5)},
    }


def bits(payload: Payload) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All that a payload is."""
    return {f"{p}/{n}": (a.dtype.str, a.shape, a.tobytes()) for p, t in payload.items() for n, a in t.items()}


@quick
@given(payloads)
def test_a_payload_comes_back_bit_for_bit(payload: Payload) -> None:
    data = encode(payload)
    assert bits(decode(data)) == bits(payload)
    assert manifest(data) == describe(payload)
    assert codec.encoded_size(describe(payload)) == len(data)
    assert bits(codec.view(data)) == bits(payload)
    for tensors in decode(data).values():
        for array in tensors.values():
            array[...] = 1  # what was read can be written to
    assert bits(decode(data)) == bits(payload)


@quick
@given(payloads, st.randoms(use_true_random=False))
def test_equal_payloads_give_equal_bytes_whatever_the_order_of_their_keys(payload: Payload, random: Any) -> None:
    def shuffled(table: Any) -> dict[Any, Any]:
        return dict(random.sample(list(table.items()), len(table)))

    other = shuffled({part: shuffled(tensors) for part, tensors in payload.items()})
    assert encode(other) == encode(payload)
    assert encode(decode(encode(payload))) == encode(payload)


@pytest.mark.parametrize("pattern", [0x80000000, 0x00000001, 0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000])
def test_odd_floats_are_kept(pattern: int) -> None:
    array = np.array([pattern], np.uint32).view(np.float32)
    (back,) = decode(encode({Part.BODY: {"x": array}}))[Part.BODY].values()
    assert back.view(np.uint32).tolist() == [pattern]


@pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::-1], np.asfortranarray])
def test_the_layout_in_memory_does_not_matter(view: Callable[[Array], Array]) -> None:
    array = view(np.arange(24, dtype=np.float64).reshape(4, 6))
    same = {Part.BODY: {"x": np.array(array, order="C")}}
    assert encode({Part.BODY: {"x": array}}) == encode(same)
    assert same_tensors(decode(encode({Part.BODY: {"x": array}})), same)
    assert encode({**same, Part.HEAD: {}}) == encode(same)


def test_the_bytes_of_a_payload_never_change() -> None:
    """A ledger of today names blobs by these digests, which are blake3's."""
    assert codec.digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert codec.digest(encode(small())) == "4b4f47e4092f69b3bd6ddebfa7a83fd412bb7d72504b5ad128010465ec7d27d0"


@pytest.mark.parametrize("dtype", ["float16", "bool", "object", "int32", "uint8", ">f4", "U3"])
def test_other_dtypes_are_not_written(dtype: str) -> None:
    with pytest.raises(CodecError, match=r"body/x (is .*float32|has dtype uint8)"):
        encode({Part.BODY: {"x": np.zeros(2, dtype)}})


@pytest.mark.parametrize("name", ["", "../../x", "a/b", "nul\0", "ünï", "-x", ".hidden", "x" * 201, "line\n"])
def test_bad_names_are_not_written(name: str) -> None:
    with pytest.raises(CodecError, match="tensor name"):
        encode({Part.BODY: {name: np.zeros(1)}})


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,) * 9])
def test_what_could_not_be_read_again_is_not_written(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="body/x has shape"):
        encode({Part.BODY: {"x": np.zeros(shape)}})


def test_every_truncation_is_refused() -> None:
    data = encode(small())
    for length in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:length])


HEADERS: dict[str, Any] = {
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"body/x": {}}'.encode("utf-16"),
    "a list": [],
    "null": None,
    "metadata": {"__metadata__": {"a": "b"}},
    "no part": {"x": entry()},
    "an unknown part": {"labels/x": entry()},
    "no name": {"body/": entry()},
    "a path": {"body/../../x": entry()},
    "NUL": {"body/x\0": entry()},
    "a long name": {"body/" + "x" * 201: entry()},
    "a lone surrogate": b'{"body/\\ud800": {}}',
    "an entry that is a list": {"body/x": [1]},
    "a dtype that is a number": {"body/x": entry(dtype=32)},
    "a dtype with a NUL": {"body/x": entry(dtype="F\0")},
    "no shape": {"body/x": {"dtype": "F32", "data_offsets": [0, 4]}},
    "a shape that clears the screen": {"body/x": entry("\x1b[2J")},
    "a shape that is a table": {"body/x": entry({})},
    "a size of zero": {"body/x": entry((0, 2**40), end=0)},
    "a negative size": {"body/x": entry((-1,))},
    "a size that is true": {"body/x": entry((True,))},
    "a size that is 1.0": {"body/x": entry((1.0,))},
    "a size of five thousand digits": b'{"body/x":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b"9" * 5000 + b"]}}",
    "sizes whose product wraps around": {"body/x": entry((2**32, 2**32))},
    "nine dimensions": {"body/x": entry((1,) * 9)},
    "a hundred thousand dimensions": {"body/x": entry((1,) * 100_000)},
    "no offsets": {"body/x": {"dtype": "F32", "shape": [1]}},
    "offsets behind the end": {"body/x": entry(start=4, end=8)},
    "huge offsets": {"body/x": entry(start=2**70, end=2**70 + 4)},
    "offsets of another length": {"body/x": entry(end=3)},
    "twins": b"{" + b",".join([b'"body/x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'] * 2) + b"}",
    "a twin in an entry": b'{"body/x":{"dtype":"I64","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "a thousand lists in one another": b"[" * 5000,
    "a thousand tables in one another": b'{"body/x":' * 5000,
    "a deep shape": b'{"body/x":{"dtype":"F32","data_offsets":[0,4],"shape":' + b"[" * 4000 + b"]" * 4000 + b"}}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_is_refused(header: Any) -> None:
    with pytest.raises(CodecError) as refused:
        decode(blob(header, b"1234"))
    assert len(str(refused.value)) < 500  # it goes into logs, receipts and the ledger
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("dtype", ["F16", "BOOL", "I32", "U8", "O", "f32", "float32", ""])
def test_other_dtypes_are_not_read(dtype: str) -> None:
    with pytest.raises(CodecError, match="has dtype"):
        decode(blob({"body/x": entry(dtype=dtype)}, b"1234"))


# Of two floats, and the body's size: overlapping, half so, a gap, one that the body fills, more behind, too short.
OFFSETS = [((0, 4), (0, 4), 8), ((0, 4), (2, 6), 8), ((0, 4), (8, 12), 8), ((0, 4), (8, 12), 12)]
OFFSETS += [((0, 4), (4, 8), 9), ((0, 4), (4, 8), 7)]


@pytest.mark.parametrize(("one", "two", "size"), OFFSETS)
def test_tensors_that_do_not_tile_the_body_are_refused(one: Any, two: Any, size: int) -> None:
    header = {"body/x": entry(start=one[0], end=one[1]), "body/y": entry(start=two[0], end=two[1])}
    with pytest.raises(CodecError):
        decode(blob(header, bytes(size)))


@pytest.mark.parametrize("size", [0, 3, 5, 400])
def test_a_manifest_is_read_only_where_the_body_has_its_size(size: int) -> None:
    assert manifest(blob({"body/x": entry()}, bytes(4))) == (TensorSpec(Part.BODY, "x", "float32", (1,)),)
    with pytest.raises(CodecError, match=f"the tensors take 4 bytes, the blob holds {size}"):
        manifest(blob({"body/x": entry()}, bytes(size)))


def rewritten(change: Callable[[bytes], bytes]) -> bytes:
    """A sound blob with another text of the same header."""
    data = encode(small())
    end = 8 + int.from_bytes(data[:8], "little")
    return blob(change(data[8:end]), data[end:])


@pytest.mark.parametrize("room", [1, 8, 4096, 3 << 20])
@pytest.mark.parametrize("filler", [b" ", b"\n", b"\t"])
def test_a_padded_header_is_refused(room: int, filler: bytes) -> None:
    for padded in (rewritten(lambda text: text + filler * room), rewritten(lambda text: filler * room + text)):
        with pytest.raises(CodecError, match="padded"):
            decode(padded)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b":[", b": ["),
        lambda text: text.replace(b"body/w", b"bod\\u0079/w"),
        lambda text: json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")).encode(),
        lambda text: text.rstrip(),
        lambda text: text.replace(b'"shape"', b'"more":[1],"shape"'),
    ],
    ids=["spaces", "escapes", "another order", "unaligned", "another key"],
)
def test_tensors_have_one_encoding(change: Callable[[bytes], bytes]) -> None:
    data = rewritten(change)
    assert data != encode(small())
    with pytest.raises(CodecError, match="in another order"):
        decode(data)


def test_a_view_copies_nothing_and_cannot_be_written_to() -> None:
    data = encode({Part.BODY: {"w": np.ones(1 << 20)}})  # 8 MiB
    tracemalloc.start()
    array = codec.view(data)[Part.BODY]["w"]
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert not array.flags.writeable


@pytest.mark.parametrize("length", [9, 2**31, 50 << 20, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_blob_is_refused(length: int) -> None:
    with pytest.raises(CodecError, match="header of"):
        decode(length.to_bytes(8, "little") + b"{}" + bytes(6))


def test_a_header_of_50_mb_is_refused_unread() -> None:
    data = blob(b" " * (50 << 20))
    tracemalloc.start()
    with pytest.raises(CodecError, match="header of"):
        decode(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("count", [30_000, 200_000])
def test_more_tensors_than_any_model_has_are_refused(count: int) -> None:
    line = '"body/%d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = ",".join(line % (i, 4 * i, 4 * i + 4) for i in range(count))
    with pytest.raises(CodecError, match=r"30000 tensors: at most 20000|header of"):
        decode(blob(b"{" + header.encode() + b"}", bytes(4 * count)))


def test_pickles_archives_and_programs_are_refused_and_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "sings"
    pickled = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()  # written by hand: no code of ours makes any
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickled)
    arrays = io.BytesIO()
    np.savez(arrays, x=np.zeros(3))
    foreign = [pickled, archive.getvalue(), arrays.getvalue(), b"\x7fELF\x02\x01\x01" + bytes(57), b"#!/bin/sh\n" * 9]
    for data in (*foreign, *(blob(data) for data in foreign)):
        with pytest.raises(CodecError):
            decode(data)
    assert not canary.exists()


@pytest.mark.parametrize("filler", [b"[],", b"{},", b'"a",', b"1.5,", b"123456789012345678901234567890,"])
def test_a_hostile_header_costs_a_small_multiple_of_its_size(filler: bytes) -> None:
    data = blob(b"[" + filler * ((1 << 20) // len(filler)) + b"0]")
    tracemalloc.start()
    with pytest.raises(CodecError):
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * len(data)


PIECES = [b"", b"0", b"9", b'"', b"[", b"]", b"{", b"}", b",", b"-", b"F64", b"\0", b"\xff"]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A sound blob with bytes changed, inserted or cut out, most of them in the header."""
    data = bytearray(encode(small()))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.sampled_from(PIECES))
    if draw(st.booleans()):  # a length that fits, so that the header is reached
        end = data.rfind(b"}") + 1
        data[:8] = max(0, end - 8).to_bytes(8, "little")
    return bytes(data)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.one_of(mutations(), st.binary(max_size=200), st.binary(max_size=100).map(blob)))
def test_random_bytes_are_a_payload_or_a_codec_error_and_cost_little(data: bytes) -> None:
    tracemalloc.start()
    try:
        payload = decode(data)
    except CodecError:
        assert tracemalloc.get_traced_memory()[1] < 64 * len(data) + (128 << 10)
        return
    finally:
        tracemalloc.stop()
    assert bits(decode(encode(payload))) == bits(payload)
    assert manifest(data) == describe(payload)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_tensor_that_is_not_finite_is_named(value: float, dtype: str) -> None:
    bad = np.array([1.0, value], dtype)
    payload = {Part.HEAD: {"a": bad}, Part.BODY: {"b": bad, "a": np.zeros(2), "c": bad}}
    assert codec.first_not_finite(payload) == "body/b"
    assert codec.first_not_finite({Part.BODY: {"n": np.array([2**62]), "x": np.array([-0.0, 5e-324])}}) is None


@pytest.mark.parametrize(
    "sent", [codec.encoded_size, lambda specs: codec.header_specs(header_of(specs))], ids=["announced", "uploaded"]
)
def test_a_header_of_thousands_of_tensors_does_not_stay_in_memory(sent: Callable[..., Any]) -> None:
    sent((TensorSpec(Part.BODY, "warm", "float32", (1,)),))
    tracemalloc.start()
    for site in range(2):
        sent(tuple(TensorSpec(Part.BODY, f"{site}.{number}", "float32", (1,)) for number in range(10_000)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1 << 20


def header_of(specs: tuple[TensorSpec, ...]) -> bytes:
    sizes = {spec.path: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for spec in specs}
    text = json.dumps(sizes).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("dtype", ["uint64", "uint8"])
def test_words_of_a_secure_aggregation_are_of_no_other_part(dtype: str) -> None:
    words = np.array([1, 2, 3], dtype=dtype)
    data = encode({Part.SECURE_AGGREGATION: {"vector": words}})
    assert np.array_equal(decode(data)[Part.SECURE_AGGREGATION]["vector"], words)
    assert data == save({"secure-aggregation/vector": words})
    with pytest.raises(CodecError, match="of part secure-aggregation"):
        encode({Part.BODY: {"w": words}})
    for foreign in ({"body/w": words}, {"secure-aggregation/vector": words.astype(np.float32)}):
        with pytest.raises(CodecError, match="of part secure-aggregation"):
            decode(save(foreign))
