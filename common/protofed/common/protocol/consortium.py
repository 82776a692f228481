"""A consortium: the numbered list of partners that hospitals confirm by one code. No other site is aggregated with
them.

Whoever runs server and CA can register sites of its own, and subtract what these sent from a sum. No certificate stops
that, so people do: each hospital confirms the list in which the partners' identities for secure aggregation stands.

The coordinator chooses the list freely, and could show two hospitals two lists with one code. For a plain hash of 80
bits such a pair is found in 2**40 trials, which is an afternoon. So `scrypt` makes a code take a third of a second and
128 MiB, and 2**40 codes some 10,000 years of a core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from protofed.common.codec import Digest, digest
from protofed.common.errors import ConfigError, short
from protofed.common.ids import check_id
from protofed.common.payload import SiteId
from protofed.common.pki import certificate
from protofed.common.protocol.messages import MIN_SECURE_SITES

MAX_PARTNERS, MAX_NAME = 1000, 100
MAX_BYTES = 1 << 19  # of a document; it travels in the answer to Enroll
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1, "maxmem": 256 << 20}
_IDENTITY_DIGITS = 64  # Ed25519, 32 bytes


@dataclass(frozen=True)
class Partner:
    """One site of a consortium.

    Attributes:
        institution: as the site's settings say it.
        identity: public half of its Ed25519 key for secure aggregation, in hexadecimal digits.
    """

    site: SiteId
    institution: str
    identity: str

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __str__(self) -> str:
        return self.site if self.institution == self.site else f"{self.institution} ({self.site})"


@dataclass(frozen=True)
class Member:
    """What a daemon says of itself when it enrolls.

    Attributes:
        identity: as of `Partner`; empty: it takes part in no secure aggregation.
        consortium, number: digest and number of the list that a person at the site has confirmed; empty: none.
    """

    institution: str = ""
    identity: str = ""
    consortium: str = ""
    number: int = 0


@dataclass(frozen=True)
class Consortium:
    """A list of partners. Two lists are the same list if their digests are equal.

    Attributes:
        number: from 1; of two lists the later one has the larger number, and no site goes back.
        coordinator: the institution that runs the server, as it calls itself.
        partners: sorted by site.
    """

    number: int
    coordinator: str
    partners: tuple[Partner, ...]

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @cached_property
    def document(self) -> str:
        """The list as JSON: the same bytes for the same list."""
        return _LIST.dump_json(self).decode()

    @cached_property
    def digest(self) -> Digest:
        """Of the document."""
        return digest(self.document.encode())

    @property
    def code(self) -> str:
        """What people read out: four groups of four. It takes a third of a second and 128 MiB."""
        return certificate.code(_stretched(self.document))

    @cached_property
    def identities(self) -> dict[SiteId, str]:
        """The identity of each site."""
        return {partner.site: partner.identity for partner in self.partners}

    @property
    def coordinating(self) -> tuple[Partner, ...]:
        """Partners of the institution that runs the server: what it learns as the server, they know."""
        own = self.coordinator.casefold()
        return tuple(one for one in self.partners if own in (one.institution.casefold(), one.site))

    def differences(self, text: str) -> list[int]:
        """The groups, from 1, in which a code that a person read out differs from this list's; none: it is that one.

        Raises:
            ConfigError: it is no code.
        """
        return certificate.differences(text, _stretched(self.document))

    def named(self, sites: Iterable[SiteId]) -> str:
        """These sites with their institutions, in words; one that is not in the list by its id alone."""
        known = {partner.site: str(partner) for partner in self.partners}
        return ", ".join(known.get(site, site) for site in sites)


def read(document: str) -> Consortium:
    """A list from its document.

    Raises:
        ConfigError: it is none, or breaks a rule of lists.
    """
    if len(document) > MAX_BYTES:
        raise ConfigError(f"a consortium's list has at most {MAX_BYTES} bytes; this one has {len(document)}")
    try:
        consortium = _LIST.validate_json(document)
    except ValidationError as error:
        raise ConfigError("this is no list of partners: expected number, coordinator and partners") from error
    return checked(consortium)


def checked(consortium: Consortium) -> Consortium:
    """The list, checked.

    Raises:
        ConfigError: too few or too many partners, out of order, two of one site or key, or a name that cannot be shown.
    """
    sites, keys = [one.site for one in consortium.partners], [one.identity for one in consortium.partners]
    if not MIN_SECURE_SITES <= len(sites) <= MAX_PARTNERS:
        raise ConfigError(f"a consortium has {MIN_SECURE_SITES} to {MAX_PARTNERS} partners; this list has {len(sites)}")
    if consortium.number < 1 or sites != sorted(set(sites)):
        raise ConfigError("a consortium's list is numbered from 1, sorted by site, and names each site once")
    if len(set(keys)) < len(keys):
        raise ConfigError("two partners of the consortium have the same identity: one of them poses as the other")
    for one in consortium.partners:
        check_id("site", one.site)
        check_name(one.institution)
        check_identity(one.identity)
    check_name(consortium.coordinator)
    return consortium


def check_identity(identity: str) -> str:
    """An identity, checked.

    Raises:
        ConfigError: it is no key of the right length.
    """
    if len(identity) != _IDENTITY_DIGITS or set(identity) - set("0123456789abcdef"):
        raise ConfigError(
            f"an identity is an Ed25519 key of {_IDENTITY_DIGITS} hexadecimal digits, not {short(identity)!r}"
        )
    return identity


def check_name(institution: str) -> str:
    """An institution's name, checked: what a person reads on a screen must be what is there.

    Raises:
        ConfigError: it is empty, too long, or has characters that do not print.
    """
    if not (institution.strip() == institution and 0 < len(institution) <= MAX_NAME and institution.isprintable()):
        raise ConfigError(
            f"institution {institution[:MAX_NAME]!r}: expected 1 to {MAX_NAME} printable characters, without a "
            "space at either end"
        )
    return institution


def changes(before: Consortium | None, after: Consortium) -> list[str]:
    """What a person must know of a new list beside the one confirmed before, a sentence each."""
    if before is None:
        return []
    old, new = ({one.site: one for one in known.partners} for known in (before, after))
    sentences = [f"{new[site]} is new." for site in sorted(new.keys() - old.keys())]
    sentences += [f"{old[site]} is no longer a partner." for site in sorted(old.keys() - new.keys())]
    for site in sorted(new.keys() & old.keys()):
        if new[site].identity != old[site].identity:
            sentences.append(f"{new[site]} has another identity for secure aggregation: ask that hospital why.")
        if new[site].institution != old[site].institution:
            sentences.append(f"{site} is called {new[site].institution}; the list before said {old[site].institution}.")
    if before.coordinator != after.coordinator:
        sentences.append(f"{after.coordinator} runs the server; the list before said {before.coordinator}.")
    return sentences


_LIST = TypeAdapter(Consortium)


@lru_cache(maxsize=8)
def _stretched(document: str) -> str:
    """64 hexadecimal digits that are expensive to compute."""
    return hashlib.scrypt(document.encode(), salt=b"protofed consortium", dklen=32, **_SCRYPT).hex()
