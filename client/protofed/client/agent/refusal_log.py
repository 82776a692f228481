"""Why a server does not work with this site now, and how long the site waits before it enrolls again."""

from __future__ import annotations

import structlog

from protofed.common.errors import ExcludedError, IncidentError, NotEnrolledError, ProtocolError
from protofed.common.payload import SiteId

log = structlog.get_logger()
EXCLUDED_PAUSE_S = 30.0
INCIDENT_PAUSE_S = 2.0
# Errors after which the site enrolls again, and the pause before it: the server has restarted, the operator excluded
# this site for now, or a call failed unforeseen at the server.
ENROLL_AGAIN_AFTER_S: dict[type[ProtocolError], float] = {
    NotEnrolledError: 0.0,
    ExcludedError: EXCLUDED_PAUSE_S,
    IncidentError: INCIDENT_PAUSE_S,
}


class RefusalLog:
    """Logs why a site enrolls again; of what lasts, such as an exclusion, its begin and its end."""

    def __init__(self, site: SiteId) -> None:
        self._site = site
        self._lasting = ""  # the refusal that was logged

    def note(self, error: ProtocolError) -> None:
        """Log one of the errors of `ENROLL_AGAIN_AFTER_S`."""
        if isinstance(error, NotEnrolledError):
            log.info("enrolling again", site=self._site, why=str(error))  # a restart needs no attention
        elif not isinstance(error, ExcludedError):
            log.warning("enrolling again", site=self._site, why=str(error))
        elif self._lasting != str(error):
            self._lasting = str(error)
            log.warning("the server refuses this site; waiting until it does not", site=self._site, why=str(error))

    def end(self) -> None:
        """The site has enrolled."""
        if self._lasting:
            self._lasting = ""
            log.info("the server takes this site again", site=self._site)
