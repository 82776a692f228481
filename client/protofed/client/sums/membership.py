"""What a site takes into a secure sum: its identity, whom it knows, and what it has promised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protofed.client.sums import own_identity
from protofed.client.sums.peers import Peers
from protofed.client.sums.sessions import FOLDER, Sessions
from protofed.common.clock import utc_now
from protofed.common.errors import CodecError, SecureSumError
from protofed.common.pki.endorsement import check_endorsement, endorsed
from protofed.common.pki.identity import Identity
from protofed.common.protocol.sum_messages import endorsement_of, packed_endorsement
from protofed.common.secure_sums.keys import KeyAdvert
from protofed.common.storage.journal import Fact

Record: TypeAlias = Callable[[str, Mapping[str, Fact]], None]


@dataclass(frozen=True, eq=False)
class Membership:
    """What lies in the state folder, and the certificate that endorses it.

    Attributes:
        record: appends an event and its facts to the site's audit log, durably.
    """

    identity: Ed25519PrivateKey = field(repr=False)
    peers: Peers
    sessions: Sessions
    certified: Callable[[], Identity | None]
    record: Record = lambda _event, _facts: None

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
    certified: Callable[[], Identity | None],
    now: Callable[[], datetime] = utc_now,
    record: Record = lambda _event, _facts: None,
) -> Membership:
    """The membership of a state folder; its identity is made if there is none.

    Args:
        certified: the site's certificate with its CAs; None: plain text on loopback, where nobody has one.
        record: as of `Membership`.

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

    identity = own_identity.load_or_create(state)
    peers = Peers(state, check, now, lambda site, peer: record("pinned", {"site": site, "code": peer.code}))
    return Membership(identity, peers, Sessions(state / FOLDER, now), certified, record)
