"""What a site takes into a secure sum: its identity, its partners, and what it has promised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protofed.client.sums import own_identity
from protofed.client.sums.own_identity import fingerprint
from protofed.client.sums.partners import Partners
from protofed.client.sums.sessions import FOLDER, Sessions
from protofed.common.clock import utc_now
from protofed.common.errors import CodecError, SecureSumError
from protofed.common.payload import SiteId
from protofed.common.pki import codes
from protofed.common.pki.endorsement import check_endorsement, endorsed
from protofed.common.pki.identity import Identity
from protofed.common.protocol.consortium import Member
from protofed.common.protocol.sum_messages import endorsement_of, packed_endorsement
from protofed.common.secure_sums.keys import KeyAdvert
from protofed.common.storage.journal import Fact

Record: TypeAlias = Callable[[str, Mapping[str, Fact]], None]


@dataclass(frozen=True, eq=False)
class Membership:
    """What lies in the state folder, and the certificate that endorses it.

    Attributes:
        institution: as the site's settings say it; empty: they do not.
        record: appends an event and its facts to the site's audit log, durably.
    """

    site: SiteId
    identity: Ed25519PrivateKey = field(repr=False)
    partners: Partners
    sessions: Sessions
    certified: Callable[[], Identity | None]
    institution: str = ""
    record: Record = lambda _event, _facts: None

    @property
    def own(self) -> tuple[SiteId, str]:
        """This site and the public half of its identity, in hexadecimal digits."""
        return self.site, self.identity.public_key().public_bytes_raw().hex()

    def member(self) -> Member:
        """What the server is told at an enrolling.

        Raises:
            StateError: the confirmed list is damaged.
        """
        confirmed = self.partners.confirmed()
        own = Member(self.institution, self.own[1])
        if confirmed is None:
            return own
        return replace(own, consortium=confirmed.consortium.digest, number=confirmed.consortium.number)

    def trust(self, adverts: Iterable[KeyAdvert], *, required: bool) -> None:
        """As `Partners.trust`."""
        self.partners.trust(self.own, adverts, required=required)

    def endorsement(self) -> bytes:
        """Of the identity, by the site's certificate as it is now; empty in plain text.

        Raises:
            ConfigError: the certificate's key cannot sign it.
        """
        certified = self.certified()
        public = self.identity.public_key().public_bytes_raw()
        return packed_endorsement(None if certified is None else endorsed(certified, public))


def membership_of(
    state: Path,
    site: SiteId,
    certified: Callable[[], Identity | None],
    now: Callable[[], datetime] = utc_now,
    record: Record = lambda _event, _facts: None,
    institution: str = "",
) -> Membership:
    """The membership of a state folder; its identity is made if there is none.

    Args:
        certified: the site's certificate with its CAs; None: plain text on loopback, where nobody has one.
        institution, record: as of `Membership`.

    Raises:
        StateError: a file cannot be read or written.
    """

    def check(advert: KeyAdvert) -> None:
        if (own := certified()) is None:
            return
        try:
            endorsement = endorsement_of(advert.endorsement)
        except CodecError as error:
            raise SecureSumError("unendorsed", str(error)) from error
        check_endorsement(endorsement, advert.site, advert.identity, own.authorities_pem, now())

    def met(peer: SiteId, identity: str) -> None:
        record("met", {"site": peer, "code": codes.code(fingerprint(bytes.fromhex(identity)))})

    identity = own_identity.load_or_create(state)
    partners = Partners(state, check, now, lambda peer, one: met(peer, one.identity))
    return Membership(site, identity, partners, Sessions(state / FOLDER, now), certified, institution, record)
