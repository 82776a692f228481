"""One site's part in one sum, as pure functions: what it knows and was sent, in; what it knows then and sends, out.

A site promises each thing once: one advert, one roster, one vector, one set of survivors. A second one of anything is
refused: two of them with the same masks, or two decryptions, tell the server what one does not. The session is stored
before anything of a step is sent, so that a daemon that was killed sends the same bytes again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict

from protofed.common import codec
from protofed.common.codec import Buffer, Digest, digest
from protofed.common.errors import SecureAggregationError
from protofed.common.payload import Array, Payload, SiteId
from protofed.common.protocol.messages import SumOf
from protofed.common.secure_aggregation import keys, masking
from protofed.common.secure_aggregation.groups import Group, check_own, find_group
from protofed.common.secure_aggregation.keys import KeyAdvert, Roster, SiteSecrets, SumContext, Vector
from protofed.common.secure_aggregation.linear_form import SumLayout
from protofed.common.secure_aggregation.masking import Masks
from protofed.common.secure_aggregation.messages import (
    ContributorsMessage,
    RosterMessage,
    SharesMessage,
    SignatureMessage,
    SurvivorsMessage,
    pack,
    unpack,
)

M = TypeVar("M", KeyAdvert, RosterMessage, SharesMessage, SurvivorsMessage, ContributorsMessage)
Trust: TypeAlias = Callable[
    [Iterable[KeyAdvert]], None
]  # raises SecureAggregationError for an identity that is not the pinned one


@dataclass(frozen=True)
class Session:
    """What a site knows of one sum. The bytes are blobs as they were sent, or received.

    Attributes:
        recipe, base: digests, as the site has read them by itself.
        layout: of its vector of values; the model that it follows from is not at hand at a later step.
        root: of all its secrets for this sum.
        advert: its own.
        roster: RosterMessage that it was sent first.
        group: its own in the roster, the only one that it is aggregated in, except alone.
        dealt: SharesMessage that it sends; shares are drawn at random, so a second drawing would be others.
        kept: its own shares of its own seeds.
        delivered: SharesMessage that it was sent first.
        sent: by vector, the digest of what it sends: a second one under the same masks would show the difference.
        survivors: by vector, the only set that it signs, and reveals shares for.
        revealed: vectors whose shares it has revealed.
        scores: what is aggregated, of a sum of scores: a daemon that was killed must not compute them again.
        noise_std: of what the site adds to each number, where noise is shared; it follows from the model, too.
    """

    run: str
    round: int
    attempt: int
    sum_of: SumOf
    site: SiteId
    recipe: str
    base: str
    vectors: tuple[Vector, ...]
    layout: SumLayout
    root: bytes = field(repr=False)
    advert: bytes = field(repr=False)
    roster: bytes = field(default=b"", repr=False)
    group: Group = ()
    dealt: bytes = field(default=b"", repr=False)
    kept: bytes = field(default=b"", repr=False)
    delivered: bytes = field(default=b"", repr=False)
    sent: Mapping[Vector, str] = field(default_factory=dict)
    survivors: Mapping[Vector, tuple[SiteId, ...]] = field(default_factory=dict)
    revealed: tuple[Vector, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict, repr=False)
    noise_std: float = 0.0

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    @property
    def context(self) -> SumContext:
        """What every key and signature of this sum is bound to."""
        facts = (self.run, self.round, self.attempt, self.sum_of)
        return SumContext(*facts, Digest(self.recipe), Digest(self.base), self.vectors)

    @property
    def secrets(self) -> SiteSecrets:
        """Derived from `root`."""
        return SiteSecrets(self.root, self.context, self.site)


def started(
    context: SumContext, layout: SumLayout, site: SiteId, identity: Ed25519PrivateKey, endorsement: bytes
) -> Session:
    """A new session, with secrets drawn at random, and its advert."""
    root = secrets.token_bytes(keys.ROOT_BYTES)
    advert = keys.advertised(SiteSecrets(root, context, site), identity, endorsement)
    facts = (context.run, context.round, context.attempt, context.sum_of)
    blob = codec.encode(pack(advert))
    return Session(*facts, site, context.recipe, context.base, context.vectors, layout, root, blob)


def check_same(session: Session, context: SumContext) -> None:
    """Check that a sum that was started is asked for again, and not another one under its name.

    Raises:
        SecureAggregationError: it is of another model, or of another recipe.
    """
    if session.context != context:
        what = "model" if session.base != context.base else "recipe, or other vectors,"
        raise SecureAggregationError(
            "other-base",
            f"the secure aggregation of round {session.round}, attempt {session.attempt} started with another "
            f"{what} than this site has",
        )


def advertise(session: Session) -> Payload:
    """The site's keys: it is ready."""
    return codec.decode(session.advert)


def share(
    session: Session, blob: Buffer, trust: Trust, *, pinned: Group | None, fewest: int
) -> tuple[Session, Payload]:
    """Take the roster; give its sites their sealed shares of this site's secrets.

    Args:
        pinned: this site's group; None: it has been in none, but alone.
        fewest: sites of it that recipe and policy ask for.

    Raises:
        SecureAggregationError: the roster is a second one, lacks this site's own advert or has another one in its name,
            has too few sites, has this site in another group or a small one, or names an identity that is not the
            pinned one.
    """
    if session.roster:
        if _message(blob, RosterMessage) != _message(session.roster, RosterMessage):
            raise SecureAggregationError(
                "second-roster", "the server sent a second, different roster for the same secure aggregation"
            )
        return session, codec.decode(session.dealt)
    message = _message(blob, RosterMessage)
    adverts = message.adverts
    own = [advert for advert in adverts if advert.site == session.site]
    if not own:
        raise SecureAggregationError("not-in-roster", "the roster lacks this site, which sent its keys")
    if own != [_message(session.advert, KeyAdvert)]:
        raise SecureAggregationError("replaced-keys", "the roster has other keys for this site than the site sent")
    roster = Roster(session.context, adverts, message.groups)
    check_own(roster.groups, session.site, pinned, fewest)
    roster.check_signatures()
    trust([advert for advert in adverts if advert.site != session.site])
    dealt = masking.dealt(session.secrets, roster)
    payload = pack(SharesMessage(masking.sealed(session.secrets, roster, dealt)))
    own_shares = masking.packed(dealt[session.site])
    group = find_group(roster.groups, session.site)
    return replace(session, roster=bytes(blob), group=group, dealt=codec.encode(payload), kept=own_shares), payload


def send_flags(session: Session, blob: Buffer, flags: Array, identity: Ed25519PrivateKey) -> tuple[Session, Payload]:
    """Take the others' shares; give this site's masked flags [R] uint64 of 0 and 1, signed.

    Raises:
        SecureAggregationError: the shares, or flags, are other than those sent before, false, or of too few sites.
    """
    session = _with_shares(session, blob)
    masks = _masks(session, Vector.CONTRIBUTORS)
    vector = masking.masked(masks, session.secrets, flags)
    signature = masking.signed_vector(masks, vector, identity)
    return _sends(session, Vector.CONTRIBUTORS, vector), pack(SignatureMessage(signature), vector)


def open_flags(session: Session, blob: Buffer, flags: Array, fewest: int) -> Array | None:
    """The rows [R] bool that at least so many sites hold, counted from what all sites sent; None: the sum has no rows.

    Args:
        flags: this site's, as of `send_flags`: others count on a row that it held then.
        fewest: contributors of a row that leaves; of one alone none does, whatever a recipe says.

    Raises:
        SecureAggregationError: the survivors are not those agreed to by this site, or their messages are not; or this
            site's flags are other than those that it sent.
    """
    if Vector.CONTRIBUTORS not in session.vectors:
        return None
    message, masks = _message(blob, ContributorsMessage), _masks(session, Vector.CONTRIBUTORS)
    agreed = session.survivors.get(Vector.CONTRIBUTORS)
    if agreed is None or tuple(message.vectors) != agreed:
        raise SecureAggregationError("second-survivors", "the flags come from other sites than this site agreed to")
    _sends(session, Vector.CONTRIBUTORS, masking.masked(masks, session.secrets, flags))
    counts = masking.counted(masks, agreed, message.vectors, message.signatures, message.seeds)
    return np.asarray(counts >= max(fewest, 2))


def send_values(session: Session, blob: Buffer, numbers: Array) -> tuple[Session, Payload]:
    """Give this site's numbers [N] uint64 under their masks.

    Args:
        blob: the others' shares; or, where rows were counted, what `open_flags` took.

    Raises:
        SecureAggregationError: as of `send_flags`; or the numbers are other than those sent before.
    """
    if Vector.CONTRIBUTORS not in session.vectors:
        session = _with_shares(session, blob)
    vector = masking.masked(_masks(session, Vector.VALUES), session.secrets, numbers)
    return _sends(session, Vector.VALUES, vector), pack(SignatureMessage(b""), vector)


def agree(
    session: Session,
    blob: Buffer,
    vector: Vector,
    identity: Ed25519PrivateKey,
    before: Sequence[SiteId] | None = None,
) -> tuple[Session, Payload]:
    """Sign the survivors of one vector: the only set that this site ever signs for it.

    Args:
        before: the survivors for whom this site revealed VALUES in another attempt of the round; None: it did not.

    Raises:
        SecureAggregationError: it is a second set, lacks this site, is not that of the attempt before, or lacks a site
            whose rows were counted; or it splits a group.
    """
    message = _message(blob, SurvivorsMessage)
    session = _agreed(session, message.sites, vector, before)
    return session, pack(SignatureMessage(masking.signed(_masks(session, vector), message.sites, identity)))


def reveal(
    session: Session, blob: Buffer, vector: Vector, before: Sequence[SiteId] | None = None
) -> tuple[Session, Payload]:
    """Give the shares that open the sum of the survivors that enough of them have signed.

    Raises:
        SecureAggregationError: as of `agree`; or too few have signed.
    """
    message = _message(blob, SurvivorsMessage)
    session = _agreed(session, message.sites, vector, before)
    masks = _masks(session, vector)
    masking.check_signatures(masks, message.sites, message.signatures)
    shares = masking.revealed(masks, message.sites, _all_shares(session))
    return replace(session, revealed=tuple(sorted({*session.revealed, vector}))), pack(shares)


def _agreed(session: Session, sites: tuple[SiteId, ...], vector: Vector, before: Sequence[SiteId] | None) -> Session:
    if vector not in session.sent:
        raise SecureAggregationError(
            "out-of-order", f"the server asks for the survivors before this site sent its {vector}"
        )
    masks = _masks(session, vector)
    masking.check_survivors(masks, sites)
    if session.survivors.get(vector, sites) != sites:
        raise SecureAggregationError(
            "second-survivors",
            "the server named a second, different set of survivors for the same secure aggregation",
        )
    if session.site not in sites:
        raise SecureAggregationError("other-survivors", "the server asks this site to sign survivors without this site")
    if vector is Vector.VALUES and Vector.CONTRIBUTORS in session.vectors and sites != masks.included:
        raise SecureAggregationError(
            "other-survivors",
            f"the contributors were counted among {', '.join(masks.included)}. An aggregate over fewer sites could "
            "show the row of one site",
        )
    if before is not None and tuple(before) != sites:  # of the contributors, too: their numbers would tell its classes
        raise SecureAggregationError(
            "other-survivors",
            f"the secure aggregation of round {session.round} was decrypted before, over {', '.join(before)}. A "
            "second one over other sites would show the difference",
        )
    return replace(session, survivors={**session.survivors, vector: sites})


def _sends(session: Session, vector: Vector, masked: Array) -> Session:
    sent = digest(masked.view(np.uint8).data)
    if session.sent.get(vector, sent) != sent:
        raise SecureAggregationError(
            "other-numbers",
            f"this site's {vector} differ from those that it sent for the same secure aggregation. The server could "
            "compute their difference. Has the policy changed since?",
        )
    return replace(session, sent={**session.sent, vector: sent})


def _with_shares(session: Session, blob: Buffer) -> Session:
    if session.delivered:
        if _message(blob, SharesMessage) != _message(session.delivered, SharesMessage):
            raise SecureAggregationError(
                "second-shares", "the server sent other shares than before for the same secure aggregation"
            )
        return session
    roster = _roster(session)
    sealed = _message(blob, SharesMessage).sealed
    if session.site in sealed:
        raise SecureAggregationError("bad-shares", "the server sent shares in this site's own name")
    keys.check_members(roster, sorted({*sealed, session.site}), "sites that dealt shares")
    masking.opened_shares(session.secrets, roster, sealed)
    return replace(session, delivered=bytes(blob))


def _all_shares(session: Session) -> dict[SiteId, masking.SharesOfSite]:
    sealed = _message(session.delivered, SharesMessage).sealed
    own = masking.unpacked(session.kept, session.vectors)
    return {**masking.opened_shares(session.secrets, _roster(session), sealed), session.site: own}


def _masks(session: Session, vector: Vector) -> Masks:
    """With rows, VALUES are masked among the sites whose flags were counted."""
    if not session.delivered:
        raise SecureAggregationError("out-of-order", "the server asks for a step before it sent this site its shares")
    included = tuple(sorted({*_message(session.delivered, SharesMessage).sealed, session.site}))
    if vector is Vector.VALUES and Vector.CONTRIBUTORS in session.vectors:
        if Vector.CONTRIBUTORS not in session.survivors:
            raise SecureAggregationError(
                "out-of-order", "the server asks for values before the contributors of each row were counted"
            )
        included = session.survivors[Vector.CONTRIBUTORS]
    return Masks(_roster(session), vector, included)


def _roster(session: Session) -> Roster:
    if not session.roster:
        raise SecureAggregationError("out-of-order", "the server asks for a step before it sent this site the roster")
    message = _message(session.roster, RosterMessage)
    return Roster(session.context, message.adverts, message.groups)


def _message(blob: Buffer, kind: type[M]) -> M:
    return unpack(blob, kind)[0]
