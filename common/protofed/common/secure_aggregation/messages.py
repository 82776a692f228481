"""Messages of a secure aggregation to and from blobs: the tensor `message`, and `vector` beside it where one is sent.

Reading is strict, and knows nothing of keys: what a message says is checked by the modules beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from protofed.common import codec
from protofed.common.codec import Buffer
from protofed.common.errors import CodecError
from protofed.common.ids import is_id
from protofed.common.payload import Array, Part, Payload, SiteId
from protofed.common.pki.identity import Endorsement
from protofed.common.protocol.messages import MAX_SECURE_SITES
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.keys import KeyAdvert
from protofed.common.secure_aggregation.masking import Opened, Revealed
from protofed.protos.v1 import secure_aggregation_pb2 as pb

MESSAGE, VECTOR = "message", "vector"
MAX_MESSAGE_BYTES = 4 << 20
MAX_ROWS = 10_000  # classes whose flags, of as many sites as a sum takes, are one `ContributorsMessage`


@dataclass(frozen=True)
class RosterMessage:
    """The keys of all sites of a sum, and their groups."""

    adverts: tuple[KeyAdvert, ...]
    groups: Groups


@dataclass(frozen=True)
class SharesMessage:
    """Sealed shares: of one site by receiver, or for one site by sender."""

    sealed: Mapping[SiteId, bytes]


@dataclass(frozen=True)
class SignatureMessage:
    """A site's signature."""

    signature: bytes


@dataclass(frozen=True)
class SurvivorsMessage:
    """Whose masked vectors are there; with signatures, once sites have agreed on it."""

    sites: tuple[SiteId, ...]
    signatures: Mapping[SiteId, bytes]


@dataclass(frozen=True)
class ContributorsMessage:
    """What tells how many hold each row: the survivors' masked flags [N] uint64, their signatures, the seeds."""

    vectors: Mapping[SiteId, Array]
    signatures: Mapping[SiteId, bytes]
    seeds: Opened


Message: TypeAlias = (
    KeyAdvert | RosterMessage | SharesMessage | SignatureMessage | SurvivorsMessage | Revealed | ContributorsMessage
)
M = TypeVar("M", bound=Message)


def pack(message: Message, vector: Array | None = None) -> Payload:
    """A message, and the masked vector [N] uint64 that it is about, as a payload."""
    data = np.frombuffer(_packed(message).SerializeToString(deterministic=True), dtype=np.uint8)
    return {Part.SECURE_AGGREGATION: {MESSAGE: data} if vector is None else {MESSAGE: data, VECTOR: vector}}


def unpack(data: Buffer, kind: type[M]) -> tuple[M, Array | None]:
    """What a blob holds: the message, and the vector [N] uint64, if there is one; a view of `data`.

    Raises:
        CodecError: it is no message of this kind.
    """
    tensors = codec.view(data).get(Part.SECURE_AGGREGATION, {})
    if MESSAGE not in tensors or not tensors.keys() <= {MESSAGE, VECTOR}:
        raise CodecError("this is no message of a secure aggregation")
    raw, vector = tensors[MESSAGE], tensors.get(VECTOR)
    if raw.dtype != np.uint8 or raw.nbytes > MAX_MESSAGE_BYTES or not _is_vector(vector):
        raise CodecError(f"a message is of uint8 and at most {MAX_MESSAGE_BYTES} bytes, a vector [N] of uint64")
    try:
        message = _unpacked(pb.SumStep.FromString(raw.tobytes()))
    except DecodeError as error:
        raise CodecError("a message of a secure aggregation cannot be read") from error
    if not isinstance(message, kind):
        raise CodecError(f"a message of a secure aggregation is a {type(message).__name__}; expected a {kind.__name__}")
    return message, vector


def packed_endorsement(endorsement: Endorsement | None) -> bytes:
    """An endorsement as an advert has it; none in plain text."""
    return b"" if endorsement is None else pb.SumEndorsement(**vars(endorsement)).SerializeToString(deterministic=True)


def unpack_endorsement(data: bytes) -> Endorsement:
    """What `packed_endorsement` gave.

    Raises:
        CodecError: it cannot be read.
    """
    try:
        message = pb.SumEndorsement.FromString(data)
    except DecodeError as error:
        raise CodecError("the endorsement of an identity cannot be read") from error
    return Endorsement(message.certificate, message.signature)


def _is_vector(vector: Array | None) -> bool:
    return vector is None or (vector.dtype == np.uint64 and vector.ndim == 1)


def _packed(message: Message) -> pb.SumStep:
    match message:
        case KeyAdvert():
            return pb.SumStep(keys=_keys(message))
        case RosterMessage(adverts, groups):
            grouped = [pb.SumGroup(sites=group) for group in groups]
            return pb.SumStep(roster=pb.SumRoster(keys=[_keys(advert) for advert in adverts], groups=grouped))
        case SharesMessage(sealed):
            return pb.SumStep(shares=pb.SumShares(sealed=dict(sealed)))
        case SignatureMessage(signature):
            return pb.SumStep(signature=pb.SumSignature(signature=signature))
        case SurvivorsMessage(sites, signatures):
            return pb.SumStep(survivors=pb.SumSurvivors(sites=sites, signatures=dict(signatures)))
        case Revealed():
            return pb.SumStep(revealed=_seeds(message))
        case ContributorsMessage(vectors, signatures, seeds):
            words = [vectors[site].astype("<u8", copy=False).tobytes() for site in sorted(vectors)]
            contributors = pb.SumContributors(
                sites=sorted(vectors), vectors=words, signatures=dict(signatures), seeds=_seeds(seeds)
            )
            return pb.SumStep(contributors=contributors)


def _unpacked(message: pb.SumStep) -> Message:
    match message.WhichOneof("content"):
        case "keys":
            return _advert(message.keys)
        case "roster":
            return _roster(message.roster)
        case "shares":
            return SharesMessage(_by_site(message.shares.sealed))
        case "signature":
            return SignatureMessage(message.signature.signature)
        case "survivors":
            sites = tuple(message.survivors.sites)
            _check_sites(sites)
            return SurvivorsMessage(sites, _by_site(message.survivors.signatures))
        case "revealed":
            return Revealed(_by_site(message.revealed.self_seeds), _by_site(message.revealed.mask_seeds))
        case "contributors":
            return _contributors(message.contributors)
        case _:
            raise CodecError("a message of a secure aggregation is empty; its sender's version may be another")


def _roster(message: pb.SumRoster) -> RosterMessage:
    _check_sites([keys.site for keys in message.keys])
    _check_sites([site for group in message.groups for site in group.sites])
    groups = tuple(tuple(group.sites) for group in message.groups)
    return RosterMessage(tuple(_advert(keys) for keys in message.keys), groups)


def _keys(advert: KeyAdvert) -> pb.SumKeys:
    return pb.SumKeys(**vars(advert))


def _advert(message: pb.SumKeys) -> KeyAdvert:
    _check_sites([message.site])
    return KeyAdvert(
        message.site,
        message.identity,
        message.endorsement,
        message.share_key,
        tuple(message.mask_keys),
        tuple(message.commitments),
        message.signature,
    )


def _seeds(seeds: Revealed | Opened) -> pb.SumSeeds:
    return pb.SumSeeds(self_seeds=dict(seeds.self_seeds), mask_seeds=dict(seeds.mask_seeds))


def _contributors(message: pb.SumContributors) -> ContributorsMessage:
    _check_sites(message.sites)
    if len(message.vectors) != len(message.sites) or any(len(words) % 8 for words in message.vectors):
        raise CodecError("the flags of a secure aggregation are not one vector of whole words a site")
    vectors = {
        site: np.frombuffer(words, dtype="<u8") for site, words in zip(message.sites, message.vectors, strict=True)
    }
    seeds = Opened(_by_site(message.seeds.self_seeds), _by_site(message.seeds.mask_seeds))
    return ContributorsMessage(vectors, _by_site(message.signatures), seeds)


def _by_site(entries: Mapping[str, bytes]) -> dict[SiteId, bytes]:
    _check_sites(list(entries))
    return dict(sorted(entries.items()))


def _check_sites(sites: Sequence[str]) -> None:
    if len(sites) > MAX_SECURE_SITES or not all(map(is_id, sites)) or len(set(sites)) != len(sites):
        raise CodecError(
            f"a message of a secure aggregation names at most {MAX_SECURE_SITES} sites, each once, by their ids"
        )
