"""The list of partners that the server offers: secure aggregation is over the sites where a person confirmed it."""

from __future__ import annotations

from collections.abc import Collection

from protofed.common.errors import ConfigError, ConflictError
from protofed.common.payload import SiteId
from protofed.common.protocol import consortium
from protofed.common.protocol.consortium import Consortium, Partner
from protofed.server.rounds.presence import SitePresence
from protofed.server.storage.ledger import Ledger

MAX_AHEAD = 1000  # lists that sites may have confirmed and this ledger, an older copy, lacks: a site may lie


class PartnerList:
    """The newest list that was offered; the ledger has them all."""

    def __init__(self, ledger: Ledger, presence: SitePresence) -> None:
        self._ledger, self._presence = ledger, presence
        document = ledger.consortium()
        self.offered = None if document is None else consortium.read(document)

    @property
    def document(self) -> str:
        """The offered list as JSON; empty: none is."""
        return "" if self.offered is None else self.offered.document

    def admits(self, site: SiteId) -> bool:
        """Whether a site has confirmed what is offered, or nothing while nothing is."""
        return self._presence.member(site).consortium == ("" if self.offered is None else self.offered.digest)

    def confirmations(self) -> tuple[list[SiteId], list[SiteId]]:
        """The partners of the offered list at which it is confirmed, as their daemons say, and the others."""
        sites = [] if self.offered is None else sorted(self.offered.identities)
        confirmed = [site for site in sites if self.admits(site)]
        return confirmed, [site for site in sites if site not in confirmed]

    def proposed(self, trainers: Collection[SiteId], coordinator: str = "") -> Consortium:
        """The next list, of all these sites.

        Args:
            coordinator: the institution that runs the server; empty: as the offered list says.

        Raises:
            ConfigError: of some site no key is known, there are too few, or nobody says who runs the server.
        """
        known = {} if self.offered is None else {one.site: one for one in self.offered.partners}
        partners = {site: self._partner(site) or known.get(site) for site in sorted(trainers)}
        if missing := [site for site, one in partners.items() if one is None]:
            raise ConfigError(
                f"no key for secure aggregation is known of {', '.join(missing)}: start the daemon there; or, if it "
                "takes no part, revoke its certificate or exclude it"
            )
        if not (coordinator := coordinator or ("" if self.offered is None else self.offered.coordinator)):
            raise ConfigError("say which institution runs this server: --coordinator NAME")
        listed = tuple(one for one in partners.values() if one is not None)
        return consortium.checked(Consortium(self._last_number() + 1, coordinator, listed))

    def checked(self, document: str) -> Consortium:
        """A list that may be offered next.

        Raises:
            ConfigError: it is none.
            ConflictError: a later one, or another one of its number, was offered or confirmed.
        """
        listed = consortium.read(document)
        if listed.number <= (last := self._last_number()):
            raise ConflictError(
                f"list {listed.number} of partners is not newer than list {last}, and no site goes back: offer a new "
                "one"
            )
        return listed

    def offer(self, listed: Consortium) -> None:
        """Offer a list, as `checked` gave it, from now on."""
        self._ledger.offer_consortium(listed.number, listed.document)
        self.offered = listed

    def _partner(self, site: SiteId) -> Partner | None:
        member = self._presence.member(site)
        return Partner(site, member.institution or site, member.identity) if member.identity else None

    def _last_number(self) -> int:
        """Of the lists that were offered here, and of those that sites say a person has confirmed."""
        own = 0 if self.offered is None else self.offered.number
        numbers = (self._presence.member(site).number for site in self._presence.known())
        return max([own, *(number for number in numbers if number <= own + MAX_AHEAD)])
