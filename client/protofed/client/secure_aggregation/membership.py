"""What a site takes into a secure sum: its identity, its partners, and what it has promised.

The identity is an Ed25519 key in the state folder, which partners confirm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from protofed.client.secure_aggregation.partners import Partners
from protofed.client.secure_aggregation.sessions import FOLDER, Sessions
from protofed.common.errors import CodecError, SecureSumError, StateError
from protofed.common.forms import utc_now
from protofed.common.payload import SiteId
from protofed.common.pki import certificate
from protofed.common.pki.identity import Identity, check_endorsement, endorsed
from protofed.common.protocol.consortium import Member
from protofed.common.secure_aggregation.keys import KeyAdvert
from protofed.common.secure_aggregation.messages import endorsement_of, packed_endorsement
from protofed.common.storage import files
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
IDENTITY_FILE = "sum-identity.pem"
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
        record("met", {"site": peer, "code": certificate.code(fingerprint(bytes.fromhex(identity)))})

    identity = load_or_create_identity(state)
    partners = Partners(state, check, now, lambda peer, one: met(peer, one.identity))
    return Membership(site, identity, partners, Sessions(state / FOLDER, now), certified, institution, record)


def fingerprint(identity: bytes) -> str:
    """SHA-256 of a public identity, 64 hexadecimal digits."""
    return hashlib.sha256(identity).hexdigest()


def load_or_create_identity(folder: Path) -> Ed25519PrivateKey:
    """The identity of a state folder; made if there is none.

    Raises:
        StateError: it cannot be read or written, or is damaged. It is never replaced silently: other sites would refuse
            the new one.
    """
    path = folder / IDENTITY_FILE
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        files.write(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        code = certificate.code(fingerprint(made.public_key().public_bytes_raw()))
        why = "new in this state folder: if partners have confirmed another one of this site's, they need a new list"
        log.info("identity for secure sums made", code=code, folder=str(folder), why=why)
    return load_identity(folder)


def load_identity(folder: Path) -> Ed25519PrivateKey:
    """The identity of a state folder.

    Raises:
        StateError: there is none, or it cannot be read.
    """
    path = folder / IDENTITY_FILE
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; let this daemon's user own it") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(
            f"{path} holds no Ed25519 key; restore it, or remove it to have another one, for which all partners must "
            "then confirm a new list (`protofed consortium offer`)"
        )
    return key
