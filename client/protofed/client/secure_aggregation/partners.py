"""What a site takes into a secure aggregation: its identity, its promises, and its partners.

The identity is an Ed25519 key in the state folder, which partners confirm. A confirmed list of partners is the only
door wherever there is one, and wherever the policy says `partners = "confirmed"`. Otherwise a site's identity is
believed on first use, if its certificate endorses it. Another identity is refused from then on. This trusts whoever
signs certificates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeAlias, TypeVar

import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import TypeAdapter, ValidationError

from protofed.client.secure_aggregation.sessions import FOLDER, Sessions
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import CodecError, ConfigError, SecureAggregationError, StateError
from protofed.common.payload import SiteId
from protofed.common.pki import certificate
from protofed.common.pki.identity import Identity, check_endorsement, endorsed
from protofed.common.protocol import consortium
from protofed.common.protocol.consortium import Consortium, Member
from protofed.common.secure_aggregation.keys import KeyAdvert
from protofed.common.secure_aggregation.messages import packed_endorsement, unpack_endorsement
from protofed.common.storage import files
from protofed.common.storage.journal import Fact

log = structlog.get_logger()
CONFIRMED, OFFERED, MET = "consortium.json", "consortium-offered.json", "met-sites.json"  # in the state folder
CONFIRM = "`protofed client consortium --confirm CODE`"
T = TypeVar("T")
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


def open_membership(
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
            endorsement = unpack_endorsement(advert.endorsement)
        except CodecError as error:
            raise SecureAggregationError("unendorsed", str(error)) from error
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
        identity = Ed25519PrivateKey.generate()
        files.write(path, identity.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        code = certificate.code(fingerprint(identity.public_key().public_bytes_raw()))
        why = (
            "this state folder has a new identity. If partners have confirmed an earlier identity of this site, "
            "they need a new list"
        )
        log.info("identity for secure aggregation made", code=code, folder=str(folder), why=why)
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
        raise StateError(f"cannot read {path}: {error.strerror}; make this daemon's user its owner") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(
            f"{path} holds no Ed25519 key. Restore it. Or remove it: the daemon then makes a new one, and all "
            "partners must confirm a new list (`protofed consortium --offer`)"
        )
    return key


@dataclass(frozen=True)
class Confirmed:
    """The list that counts here.

    Attributes:
        at: when it was confirmed, UTC, RFC 3339.
        by: the person's user name.
    """

    consortium: Consortium
    at: str
    by: str


@dataclass(frozen=True)
class Met:
    """A site that was believed on first use.

    Attributes:
        identity: in hexadecimal digits.
        at: when, UTC, RFC 3339.
    """

    identity: str
    at: str


Pins: TypeAlias = Mapping[SiteId, Met]
_CONFIRMED, _MET = TypeAdapter(Confirmed), TypeAdapter(dict[SiteId, Met])


class Partners:
    """The files of one state folder. The daemon writes what is offered and met, a person what is confirmed.

    Args:
        check: raises SecureAggregationError for an identity that may not be believed on first use.
        now: the current time, UTC.
        on_first_use: called with each site that is believed so, before it is.
    """

    def __init__(
        self,
        folder: Path,
        check: Callable[[KeyAdvert], None] = lambda _: None,
        now: Callable[[], datetime] = utc_now,
        on_first_use: Callable[[SiteId, Met], None] = lambda _site, _met: None,
    ) -> None:
        self._folder, self._check, self._now, self._on_first_use = folder, check, now, on_first_use

    def own(self) -> str:
        """This site's identity, in hexadecimal digits; empty: no daemon has made one here.

        Raises:
            StateError: the file is damaged.
        """
        known = (self._folder / IDENTITY_FILE).exists()
        return load_identity(self._folder).public_key().public_bytes_raw().hex() if known else ""

    def confirmed(self) -> Confirmed | None:
        """The list that a person here confirmed; None: none.

        Raises:
            StateError: the file is damaged. Without it anybody could be aggregated with this site.
        """
        return self._read(CONFIRMED, _CONFIRMED)

    def offered(self) -> Consortium | None:
        """The list that the server offers, as it was last seen; None: none.

        Raises:
            StateError: it cannot be read.
        """
        try:
            return consortium.read((self._folder / OFFERED).read_text())
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise _unreadable(self._folder / OFFERED, str(error)) from error

    def met(self) -> Pins:
        """The sites that were believed on first use, by site; they count only where no list is confirmed.

        Raises:
            StateError: the file is damaged.
        """
        return dict(sorted((self._read(MET, _MET) or {}).items()))

    def note_offer(self, document: str) -> None:
        """Keep the list that the server offers, for whoever is to confirm it; empty: it offers none."""
        path = self._folder / OFFERED
        try:
            if not document:
                path.unlink(missing_ok=True)
            if not document or (path.exists() and path.read_bytes() == document.encode()):
                return
        except OSError as error:
            raise files.write_error(path, error) from error
        try:
            offered = consortium.read(document)
        except ConfigError as error:
            log.error("the server offers a list of partners that cannot be read", why=str(error))
            return
        files.write(path, document.encode())
        why = f"it waits for a person here. Ask the other hospitals whether this list is theirs, and {CONFIRM}"
        log.info("the server offers a list of partners", number=offered.number, digest=offered.digest, why=why)

    def problem(self, *, required: bool) -> str:
        """Why the site takes part in no secure aggregation; empty: it does.

        Args:
            required: the policy asks for a confirmed list.

        Raises:
            StateError: a file is damaged.
        """
        confirmed, offered = self.confirmed(), self.offered()
        if offered is None and confirmed is None:
            return (
                f"no list of partners is confirmed here, and the server offers none yet. Once it does, {CONFIRM}"
                if required
                else ""
            )
        if offered is None:
            return (
                "the server offers no list of partners any more. Ask the coordinator for a new one (`protofed "
                "consortium --offer`)"
            )
        if (own := self.own()) and own not in offered.identities.values():
            return (
                f"list {offered.number} of partners does not have this site's key. If this state folder is new, stop "
                "the daemon and put the old folder back. If that is lost, ask the coordinator for a new list "
                "(`protofed consortium --offer`). If this folder is the old one, tell the other hospitals: somebody "
                "may pose as this site"
            )
        if confirmed is None:
            return f"list {offered.number} of partners waits for a person here: {CONFIRM}"
        before, number = confirmed.consortium, offered.number
        if before.digest == offered.digest:
            return ""
        if number <= before.number:
            return f"the server offers list {number} of partners, and a person here confirmed list {before.number}"
        return f"list {number} of partners waits for a person here, who confirmed list {before.number}: {CONFIRM}"

    def confirm(self, own: str, code: str, by: str) -> Confirmed:
        """Confirm the offered list by the code that people read out: it counts from now on.

        Raises:
            ConfigError, StateError: as of `confirmable`; or the disk takes nothing.
        """
        confirmed = Confirmed(self.confirmable(own, code), stamp(self._now()), by)
        files.write(self._folder / CONFIRMED, json.dumps(asdict(confirmed)).encode())
        return confirmed

    def confirmable(self, own: str, code: str) -> Consortium:
        """The offered list, if a person may confirm it.

        Args:
            own: this site's identity.
            code: that people read out.

        Raises:
            ConfigError: there is none, it is an older one, the code is another list's, or this site's key is not in it.
            StateError: a file cannot be read.
        """
        offered, confirmed = self.offered(), self.confirmed()
        if offered is None:
            raise ConfigError(
                "the server has offered no list of partners to this daemon. The coordinator makes one with "
                "`protofed consortium --offer` once all daemons have started. This daemon must run to receive it"
            )
        before = None if confirmed is None else confirmed.consortium
        if before is not None and offered.number <= before.number and offered != before:
            raise ConfigError(
                f"the server offers list {offered.number}, and a person here confirmed list {before.number}. No "
                "site goes back to an earlier list. Ask the coordinator for a new one (`protofed consortium "
                "--offer`)"
            )
        if own not in offered.identities.values():
            raise ConfigError(
                f"list {offered.number} does not have this site's key. If it has another key under this site's "
                "name, somebody may pose as this site: do not confirm the list, and tell the other hospitals. If "
                "this state folder is new, the coordinator offers a new list (`protofed consortium --offer`)"
            )
        if differs := offered.differences(code):
            raise ConfigError(
                f"this is not the code of list {offered.number}, which the server offers here: group "
                f"{', '.join(map(str, differs))} of four differs. Either the code was misread, or the server showed "
                "two hospitals two lists. Read it out again. Confirm nothing before all hospitals have the same "
                "code"
            )
        return offered

    def trust(self, own: tuple[SiteId, str], adverts: Iterable[KeyAdvert], *, required: bool) -> None:
        """Check the identities of the sites of a sum; remember those that are met first, all of them or none.

        Args:
            own: this site and its identity.
            adverts: of the other sites.
            required: the policy asks for a confirmed list.

        Raises:
            SecureAggregationError: one is not a partner of this site.
            StateError: a file cannot be read or written.
        """
        confirmed, adverts = self.confirmed(), list(adverts)
        if confirmed is not None:
            _check_partners(confirmed.consortium, own, adverts)
        elif required:
            raise SecureAggregationError("unconfirmed-partners", f"no list of partners is confirmed here: {CONFIRM}")
        else:
            self._meet(adverts)

    def _meet(self, adverts: list[KeyAdvert]) -> None:
        known = self.met()
        new = [advert for advert in adverts if not _is_known(known, advert)]
        for advert in new:
            self._check(advert)
        met = {advert.site: Met(advert.identity.hex(), stamp(self._now())) for advert in new}
        for site, one in met.items():
            self._on_first_use(site, one)
        if met:
            entries = {site: asdict(one) for site, one in sorted({**known, **met}.items())}
            files.write(self._folder / MET, json.dumps(entries).encode())

    def _read(self, name: str, adapter: TypeAdapter[T]) -> T | None:
        path = self._folder / name
        try:
            return adapter.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise _unreadable(path, str(error.strerror) if isinstance(error, OSError) else "it is damaged") from error


def _check_partners(listed: Consortium, own: tuple[SiteId, str], adverts: Iterable[KeyAdvert]) -> None:
    met = {own[0]: own[1], **{advert.site: advert.identity.hex() for advert in adverts}}
    for site, identity in met.items():
        if site not in listed.identities:
            raise SecureAggregationError(
                "no-partner", f"{site} is not in list {listed.number}, which a person here confirmed"
            )
        if listed.identities[site] != identity:
            raise SecureAggregationError(
                "changed-identity",
                f"{site} has another identity than list {listed.number} says, which a person here confirmed. Either "
                "its state folder is new, or somebody poses as this site. A new identity needs a new list "
                "(`protofed consortium --offer`)",
            )


def _is_known(known: Pins, advert: KeyAdvert) -> bool:
    """Whether a site was met before, with this identity.

    Raises:
        SecureAggregationError: with another one.
    """
    if (met := known.get(advert.site)) is None:
        return False
    if met.identity != advert.identity.hex():
        raise SecureAggregationError(
            "changed-identity",
            f"{advert.site} has another identity than on {met.at}, when this site first met it. Either its state "
            "folder is new, or somebody poses as it. Let all sites confirm a list (`protofed consortium --offer`). "
            f"With public data, you may instead remove {MET} from the state folder",
        )
    return True


def _unreadable(path: Path, why: str) -> StateError:
    return StateError(f"{path} cannot be read ({why}). Restore it, or remove it and confirm the partners again")
