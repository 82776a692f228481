"""The other sites' identities for secure sums, as this site has pinned them: a server cannot put its own in between.

A site is pinned on first use if its certificate endorses the identity, or by a person who has its code from a person
there. From then on another identity is refused until a person pins that one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from protofed.client.sums import own_identity
from protofed.client.sums.own_identity import fingerprint
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError, SecureSumError, StateError, unknown
from protofed.common.ids import check_id
from protofed.common.payload import SiteId
from protofed.common.pki import codes
from protofed.common.secure_sums.keys import KeyAdvert
from protofed.common.storage import files

FILE = "peers.json"


@dataclass(frozen=True)
class Peer:
    """What is pinned of one site.

    Attributes:
        fingerprint: SHA-256 of its identity, or the code of it that a person gave.
        at: when it was pinned, UTC, RFC 3339.
        by: the person's user name; empty: on first use.
        refused: fingerprint of another identity that was refused since; empty: none.
    """

    fingerprint: str
    at: str
    by: str = ""
    refused: str = ""

    @property
    def code(self) -> str:
        """The code that a person reads aloud."""
        return codes.code(self.fingerprint) if len(self.fingerprint) == 64 else self.fingerprint

    @property
    def is_contested(self) -> bool:
        """Whether another identity was refused since this one was pinned."""
        return bool(self.refused) and bool(codes.differences(self.fingerprint, self.refused))


Pins: TypeAlias = Mapping[SiteId, Peer]
_PINS = TypeAdapter(dict[SiteId, Peer])


def is_pinned(peer: Peer, identity: bytes) -> bool:
    """Whether an identity is the one that was pinned."""
    return not codes.differences(peer.fingerprint, fingerprint(identity))


def unknown_of(pins: Pins, adverts: Iterable[KeyAdvert]) -> list[KeyAdvert]:
    """The adverts of sites that are not pinned yet.

    Raises:
        SecureSumError: one has another identity than its site's pinned one.
    """
    new = []
    for advert in adverts:
        if (peer := pins.get(advert.site)) is None:
            new.append(advert)
        elif not is_pinned(peer, advert.identity):
            raise SecureSumError(
                "changed-identity",
                f"{advert.site} has another identity (code {codes.code(fingerprint(advert.identity))}) than the one "
                f"pinned here (code {peer.code}): ask a person there to read out its code (`protofed client peers "
                f"list`), and if it is the new one, `protofed client peers pin {advert.site} CODE`",
            )
    return new


class Peers:
    """The pins in a state folder. The daemon and the command line may use them at the same time.

    Args:
        check: raises SecureSumError for an identity that may not be pinned on first use.
        now: the current time, UTC.
        on_first_use: called with each site that is pinned so, before it is trusted.
    """

    def __init__(
        self,
        folder: Path,
        check: Callable[[KeyAdvert], None] = lambda _: None,
        now: Callable[[], datetime] = utc_now,
        on_first_use: Callable[[SiteId, Peer], None] = lambda _site, _peer: None,
    ) -> None:
        self._folder, self._path, self._check, self._now = folder, folder / FILE, check, now
        self._on_first_use = on_first_use

    def pins(self) -> dict[SiteId, Peer]:
        """All pins, by site.

        Raises:
            StateError: the file is damaged.
        """
        try:
            return dict(sorted(_PINS.validate_json(self._path.read_bytes()).items()))
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "it holds no pins"
            raise StateError(
                f"{self._path} cannot be read ({why}); restore it, or remove it to pin every site anew"
            ) from error

    def trust(self, adverts: Iterable[KeyAdvert]) -> None:
        """Check the identities of other sites, and pin those that are new; all of them, or none.

        Raises:
            SecureSumError: one is not the pinned one, or is new and its site's certificate does not endorse it.
            StateError: the pins cannot be read or written.
        """
        with self._alone():
            pins, adverts = self.pins(), list(adverts)
            try:
                new = unknown_of(pins, adverts)
            except SecureSumError:
                self._note_refused(pins, adverts)
                raise
            for advert in new:
                self._check(advert)
            if new:
                at = stamp(self._now())
                met = {advert.site: Peer(fingerprint(advert.identity), at) for advert in new}
                for site, peer in met.items():
                    self._on_first_use(site, peer)
                self._write({**pins, **met})

    def pin(self, site: SiteId, code: str, by: str) -> Peer:
        """Pin the identity of a code that a person gave, in place of another one.

        Raises:
            ConfigError: the site's name, or the code, is none, or the code is this site's own.
            StateError: the pins cannot be read or written.
        """
        own = fingerprint(own_identity.load_or_create(self._folder).public_key().public_bytes_raw())
        if not codes.differences(code, own):
            raise ConfigError(
                f"{code} is this site's own code; expected that of {site}, as a person there reads it out from "
                "`protofed client peers list`"
            )
        plain = code.strip().lower().removeprefix("sha256:").replace(":", "").replace(" ", "")
        peer = Peer(plain if len(plain.replace("-", "")) == 64 else _grouped(code), stamp(self._now()), by)
        with self._alone():
            self._write({**self.pins(), check_id("site", site): peer})
        return peer

    def forget(self, site: SiteId) -> None:
        """Pin the site again when it is met next.

        Raises:
            ConfigError: it is not pinned.
        """
        with self._alone():
            pins = self.pins()
            if site not in pins:
                none = ConfigError("no site is pinned here yet")
                raise unknown("site", site, pins) if pins else none
            del pins[site]
            self._write(pins)

    def _note_refused(self, pins: Pins, adverts: Iterable[KeyAdvert]) -> None:
        """So that `list` shows the code to whoever asks why a sum was refused."""
        found = {
            advert.site: Peer(**{**asdict(peer), "refused": fingerprint(advert.identity)})
            for advert in adverts
            if (peer := pins.get(advert.site)) is not None and not is_pinned(peer, advert.identity)
        }
        self._write({**pins, **found})

    def _write(self, pins: Pins) -> None:
        files.write(self._path, json.dumps({site: asdict(peer) for site, peer in sorted(pins.items())}).encode())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes the pins meanwhile: a person's pin must not be lost to the daemon's."""
        try:
            handle = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise StateError(f"cannot use {self._folder}: {error.strerror}; expected a state folder") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _grouped(code: str) -> str:
    letters = code.replace("-", "").replace(" ", "").upper()
    return "-".join(letters[at : at + codes.GROUP] for at in range(0, len(letters), codes.GROUP))
