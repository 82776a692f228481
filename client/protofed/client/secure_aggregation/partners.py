"""Whom this site lets itself be summed with: the partners that a person here confirmed, or whoever is met first.

A confirmed list is the only door wherever there is one, and wherever the policy says `partners = "confirmed"`. Else a
site's identity is believed on first use, if its certificate endorses it, and another one is refused from then on: that
trusts whoever signs certificates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from protofed.common.errors import ConfigError, SecureSumError, StateError
from protofed.common.forms import stamp, utc_now
from protofed.common.payload import SiteId
from protofed.common.protocol import consortium
from protofed.common.protocol.consortium import Consortium
from protofed.common.secure_aggregation.keys import KeyAdvert
from protofed.common.storage import files

log = structlog.get_logger()
CONFIRMED, OFFERED, MET = "consortium.json", "consortium-offered.json", "met-sites.json"  # in the state folder
CONFIRM = "`protofed client consortium confirm CODE`"


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
T = TypeVar("T")
_CONFIRMED, _MET = TypeAdapter(Confirmed), TypeAdapter(dict[SiteId, Met])


class Partners:
    """The files of one state folder. The daemon writes what is offered and met, a person what is confirmed.

    Args:
        check: raises SecureSumError for an identity that may not be believed on first use.
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

    def confirmed(self) -> Confirmed | None:
        """The list that a person here confirmed; None: none.

        Raises:
            StateError: the file is damaged: without it the site could be summed with anybody.
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
            log.error("the server offers a list of partners that is none", why=str(error))
            return
        files.write(path, document.encode())
        why = f"it waits for a person here: ask whether it is yours, and {CONFIRM}"
        log.info("the server offers a list of partners", number=offered.number, digest=offered.digest, why=why)

    def problem(self, *, required: bool) -> str:
        """Why the site takes part in no secure sum; empty: it does.

        Args:
            required: the policy asks for a confirmed list.

        Raises:
            StateError: a file is damaged.
        """
        confirmed, offered = self.confirmed(), self.offered()
        if offered is None and confirmed is None:
            return (
                f"no list of partners is confirmed here, and the server offers none yet; then {CONFIRM}"
                if required
                else ""
            )
        if offered is None:
            return "the server offers no list of partners any more: the coordinator offers a new one"
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
                "the server has offered no list of partners to this daemon: the coordinator makes one with `protofed "
                "consortium offer` once all daemons have started; this one must run, to be given it"
            )
        before = None if confirmed is None else confirmed.consortium
        if before is not None and offered.number <= before.number and offered != before:
            raise ConfigError(
                f"the server offers list {offered.number}; list {before.number} was confirmed here, and no site goes "
                "back: the coordinator offers a new one with `protofed consortium offer`"
            )
        if own not in offered.identities.values():
            raise ConfigError(
                f"list {offered.number} is without this site's key. If another key stands in this site's name, "
                "somebody stands in for this site: do not confirm it, and tell the other hospitals. If this folder "
                "is new, the coordinator offers a new list (`protofed consortium offer`)"
            )
        if differs := offered.differences(code):
            raise ConfigError(
                f"this is not the code of list {offered.number}, which the server offers here: group "
                f"{', '.join(map(str, differs))} of four differs. The code was misread, or two hospitals were shown "
                "two lists. Read it out again, and confirm nothing before all hospitals have the same code"
            )
        return offered

    def trust(self, own: tuple[SiteId, str], adverts: Iterable[KeyAdvert], *, required: bool) -> None:
        """Check the identities of the sites of a sum; remember those that are met first, all of them or none.

        Args:
            own: this site and its identity.
            adverts: of the other sites.
            required: the policy asks for a confirmed list.

        Raises:
            SecureSumError: one is not whom this site lets itself be summed with.
            StateError: a file cannot be read or written.
        """
        confirmed, adverts = self.confirmed(), list(adverts)
        if confirmed is not None:
            _check_partners(confirmed.consortium, own, adverts)
        elif required:
            raise SecureSumError("unconfirmed-partners", f"no list of partners is confirmed here: {CONFIRM}")
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
            kept = {site: asdict(one) for site, one in sorted({**known, **met}.items())}
            files.write(self._folder / MET, json.dumps(kept).encode())

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
            raise SecureSumError("no-partner", f"{site} is not in list {listed.number}, which was confirmed here")
        if listed.identities[site] != identity:
            raise SecureSumError(
                "changed-identity",
                f"{site} has another identity than list {listed.number} says, which was confirmed here: its state "
                "folder is new, or somebody stands in for it; a new identity takes a new list (`protofed consortium "
                "offer`)",
            )


def _is_known(known: Pins, advert: KeyAdvert) -> bool:
    """Whether a site was met before, with this identity.

    Raises:
        SecureSumError: with another one.
    """
    if (met := known.get(advert.site)) is None:
        return False
    if met.identity != advert.identity.hex():
        raise SecureSumError(
            "changed-identity",
            f"{advert.site} has another identity than when it was first met here, {met.at}: its state folder is new, "
            "or somebody stands in for it. Let all sites confirm a list (`protofed consortium offer`), or, with public "
            f"data, remove {MET} from the state folder",
        )
    return True


def _unreadable(path: Path, why: str) -> StateError:
    return StateError(f"{path} cannot be read ({why}); restore it, or remove it and confirm the partners anew")
