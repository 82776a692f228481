"""Messages of a secure aggregation come back as they were sent; anything else is refused before it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.common.secure_aggregation.parties import Party

from protofed.common import codec
from protofed.common.errors import CodecError
from protofed.common.payload import Part
from protofed.common.protocol.messages import MAX_SECURE_SITES
from protofed.common.secure_aggregation import messages as sum_messages
from protofed.common.secure_aggregation.masking import Opened, Revealed
from protofed.common.secure_aggregation.messages import (
    ContributorsMessage,
    Message,
    RosterMessage,
    SharesMessage,
    SignatureMessage,
    SurvivorsMessage,
    pack,
    unpack,
)
from protofed.protos.v1 import secure_aggregation_pb2 as pb

ADVERTS = tuple(Party(f"site-{n}").advert() for n in (1, 2, 3))
SEEDS = {"site-1": b"a" * 16, "site-2": b"b" * 16}
MESSAGES: list[Message] = [
    ADVERTS[0],
    RosterMessage(ADVERTS, (("site-1", "site-2"), ("site-3",))),
    SharesMessage({"site-1": b"x", "site-2": b"y"}),
    SignatureMessage(b"s" * 64),
    SurvivorsMessage(("site-1", "site-2"), {}),
    SurvivorsMessage(("site-1", "site-2"), {"site-1": b"s" * 64}),
    Revealed(SEEDS, {"site-3": b"c" * 16}),
]


def sent(message: Message, vector: Any = None) -> bytes:
    return codec.encode(pack(message, vector))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert unpack(sent(message), type(message)) == (message, None)
    assert sent(message) == sent(message)


def test_a_masked_vector_goes_beside_its_message() -> None:
    vector = np.arange(5, dtype=np.uint64) << np.uint64(60)
    message, got = unpack(sent(SignatureMessage(b"s"), vector), SignatureMessage)
    assert message == SignatureMessage(b"s")
    assert got is not None
    assert np.array_equal(got, vector)


def test_counts_come_back_as_they_were_sent() -> None:
    vectors = {site: np.array([1, 2**64 - 1], dtype=np.uint64) for site in ("site-2", "site-1")}
    message, _ = unpack(sent(ContributorsMessage(vectors, SEEDS, Opened(SEEDS, {}))), ContributorsMessage)
    assert (message.signatures, message.seeds) == (SEEDS, Opened(SEEDS, {}))
    assert message.vectors.keys() == vectors.keys()
    assert [words.tolist() for words in message.vectors.values()] == [[1, 2**64 - 1]] * 2


@pytest.mark.parametrize("message", MESSAGES[1:], ids=lambda m: type(m).__name__)
def test_a_message_of_another_kind_is_refused(message: Message) -> None:
    with pytest.raises(CodecError, match="expected a KeyAdvert"):
        unpack(sent(message), type(ADVERTS[0]))


def raw(message: pb.SumStep | bytes, **more: Any) -> bytes:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return codec.encode({Part.SECURE_AGGREGATION: {"message": np.frombuffer(data, np.uint8), **more}})


@pytest.mark.parametrize(
    "message",
    [
        pb.SumStep(keys=pb.SumKeys(site="../x")),
        pb.SumStep(roster=pb.SumRoster(keys=[pb.SumKeys(site="a"), pb.SumKeys(site="a")])),
        pb.SumStep(roster=pb.SumRoster(keys=[pb.SumKeys(site=f"a{n}") for n in range(MAX_SECURE_SITES + 1)])),
        pb.SumStep(roster=pb.SumRoster(groups=[pb.SumGroup(sites=["a", "b"]), pb.SumGroup(sites=["b"])])),
        pb.SumStep(roster=pb.SumRoster(groups=[pb.SumGroup(sites=[f"a{n}"]) for n in range(MAX_SECURE_SITES + 1)])),
        pb.SumStep(shares=pb.SumShares(sealed={"A": b""})),
        pb.SumStep(shares=pb.SumShares(sealed={f"a{n}": b"" for n in range(MAX_SECURE_SITES + 1)})),
        pb.SumStep(survivors=pb.SumSurvivors(sites=["a", "a"])),
        pb.SumStep(revealed=pb.SumSeeds(self_seeds={"": b""})),
        pb.SumStep(contributors=pb.SumContributors(sites=["a"], vectors=[])),
        pb.SumStep(contributors=pb.SumContributors(sites=["a"], vectors=[b"1234567"])),
        b"\xff\xff",
        b"\xa0\x06\x01",  # a field of another version alone
        pb.SumStep(keys=pb.SumKeys(site="a")).SerializeToString() + b"\x0a",
    ],
)
def test_what_is_no_message_is_refused(message: pb.SumStep | bytes) -> None:
    with pytest.raises(CodecError):
        unpack(raw(message), RosterMessage)


def test_other_tensors_are_refused() -> None:
    word = np.zeros(1, dtype=np.uint64)
    for data in (
        codec.encode({Part.BODY: {"w": np.zeros(1, np.float32)}}),
        codec.encode({Part.SECURE_AGGREGATION: {"vector": word}}),
        codec.encode({Part.SECURE_AGGREGATION: {"message": word}}),
        raw(b"\x0a\x00", other=word),
        raw(b"\x0a\x00", vector=np.zeros((1, 1), np.uint64)),
        raw(b"\x0a\x00", vector=np.zeros(1, np.uint8)),
    ):
        with pytest.raises(CodecError):
            unpack(data, RosterMessage)


@given(st.binary(min_size=1, max_size=200))
def test_noise_is_read_or_refused(noise: bytes) -> None:
    try:
        message, _ = unpack(raw(noise), Revealed)
    except CodecError:
        return
    assert isinstance(message, Revealed)


def test_flags_of_most_sites_and_classes_are_one_message_and_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = [f"{n:02}".ljust(64, "s") for n in range(MAX_SECURE_SITES)]
    flags = {site: np.full(sum_messages.MAX_ROWS, 2**64 - 1, dtype=np.uint64) for site in sites}
    message = ContributorsMessage(flags, dict.fromkeys(sites, bytes(64)), Opened(dict.fromkeys(sites, bytes(16)), {}))
    found, _ = unpack(codec.encode(pack(message)), ContributorsMessage)
    assert list(found.vectors) == sites
    monkeypatch.setattr(sum_messages, "MAX_MESSAGE_BYTES", 3)
    with pytest.raises(CodecError, match="at most 3 bytes"):
        unpack(sent(SignatureMessage(b"s")), SignatureMessage)
