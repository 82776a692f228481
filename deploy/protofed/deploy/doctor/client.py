"""`protofed client doctor`: what one site's daemon needs, with the very functions that the daemon calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from protofed.client.transport.channels import greet
from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode, diagnose
from protofed.client.transport.proxy import Proxy
from protofed.common import plugins
from protofed.common.address import check_connection
from protofed.common.clock import utc_now
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, PolicyViolationError, ProtofedError, UnavailableError
from protofed.common.pki.identity import Identity, LiveIdentity, Party, read_identity
from protofed.common.protocol.messages import PROTOCOL_VERSION
from protofed.common.protocol.server_info import REGISTERED, UNKNOWN, ServerInfo
from protofed.common.version import VERSION
from protofed.deploy.daemons import client_resources
from protofed.deploy.doctor import dates, machine
from protofed.deploy.doctor.checks import Check, CheckFailedError, CheckSkippedError
from protofed.deploy.doctor.site import SiteUnderCheck, allowed

LIBRARIES = ("torch", "torchvision", "grpcio", "numpy")


@dataclass
class ClientDoctor:
    """One examination.

    Attributes:
        read: the settings, as the daemon reads them.
        site: what is looked at on the site's own machine.
    """

    read: Callable[[], ClientSettings]
    site: SiteUnderCheck
    clock: Callable[[], datetime] = utc_now

    def checks(self) -> list[Check]:
        """In the order of the table: causes before what follows from them."""
        settings, software, server = ("settings",), ("settings", "software"), ("settings", "software", "connection")
        return [
            Check("settings", self.look_at_settings, "settings-invalid"),
            Check("software", self.look_at_software),
            Check("connection", self.look_at_connection, "connection-not-chosen", settings),
            Check("clock", self.look_at_clock, needs=server),
            Check("identity", self.look_at_identity, "identity-unreadable", ("settings", "connection")),
            Check("certificate", self.look_at_dates, "identity-unreadable", ("settings", "connection", "identity")),
            Check("server", self.look_at_way, "proxy-away", (*server, "identity")),
            Check("tls", self.look_at_tls, needs=(*server, "server")),
            Check("admission", self.look_at_admission, "server-busy", ("server", "tls")),
            Check("version", self.look_at_version, "server-busy", ("server", "tls")),
            Check("policy", self.look_at_policy, "policy-invalid", software),
            Check("state folder", lambda: self.site.state(self.settings), needs=settings),
            Check("disk", lambda: machine.disk(self.settings.state), needs=settings),
            Check("cache", lambda: self.site.cache(self.settings), needs=settings),
            Check("metrics", self.look_at_metrics, "metrics-unusable", settings),
            Check("device", lambda: self.site.device(self.settings), "device-absent", software),
            Check("shared memory", self.site.shared_memory),
            Check("data", lambda: self.site.data(self.settings), "data-unusable", software),
        ]

    @cached_property
    def settings(self) -> ClientSettings:
        """Of the daemon."""
        return self.read()

    @cached_property
    def identity(self) -> LiveIdentity | None:
        """The site's, whatever its dates; None: plain text."""
        if self.settings.identity is None:
            return None
        at = dates.valid_time(self.settings.identity, self.clock())
        return client_resources.own_identity(self.settings, lambda: at)

    @cached_property
    def proxy(self) -> Proxy | None:
        """On the way to the server."""
        return client_resources.own_proxy(self.settings)

    @cached_property
    def met(self) -> ConnectionDiagnosis:
        """How far a connection goes."""
        return diagnose(self.settings.server, self._shown(), self.proxy, self.clock, whatever_own_dates=True)

    @cached_property
    def greeting(self) -> ServerInfo | None:
        """Of the server; None: it says nothing of itself."""
        return greet(self.settings.server, self.identity, self.proxy)

    def look_at_settings(self) -> str:
        """Keys, values, variables of the environment."""
        roles = " and ".join(sorted(self.settings.roles))
        return f"site {self.settings.site}, {roles}, server {self.settings.server}"

    def look_at_software(self) -> str:
        """Versions of what is installed; torch can be imported."""
        told = machine.software("client", LIBRARIES)
        machine.import_quietly(("torch", "torchvision"))
        return told

    def look_at_connection(self) -> str:
        """Encrypted, or plain text that was asked for."""
        check_connection(self.settings.server, self.settings.identity, self.settings.plaintext)
        return "plain text on this machine" if self.settings.plaintext else f"TLS, identity {self.settings.identity}"

    def look_at_clock(self) -> str:
        """Beside the server's; else by what certificates say."""
        try:
            found = self.met
            if found.kind is DiagnosisCode.FINE and (greeting := self.greeting) is not None:
                return dates.compare(self.clock(), greeting.time)
            if (own := self._shown()) is not None:
                dates.check_evidence(own.certificate, found, self.clock())
        except ProtofedError as error:
            raise CheckSkippedError("nothing to compare with: see what follows") from error
        raise CheckSkippedError("nothing to compare with: the server could not be asked")

    def look_at_identity(self) -> str:
        """Complete, private, this site's, and all of one CA; dates are another check's."""
        own = self._shown()
        if own is None:
            raise CheckSkippedError("none in plain text")
        return f"{own.certificate}, fingerprint {own.certificate.fingerprint[:16]}…"

    def look_at_dates(self) -> str:
        """By this machine's clock, or by the server's where this one is wrong."""
        if self.settings.identity is None:
            raise CheckSkippedError("none in plain text")
        at = self._right_time()
        return dates.remaining(read_identity(self.settings.identity, Party.SITE, at).certificate, at)

    def look_at_way(self) -> str:
        """Name, port, proxy."""
        away = (DiagnosisCode.NO_NAME, DiagnosisCode.NOTHING_LISTENS, DiagnosisCode.NO_ANSWER)
        if self.met.kind in (
            *away,
            DiagnosisCode.PROXY_AWAY,
            DiagnosisCode.PROXY_PASSWORD,
            DiagnosisCode.PROXY_REFUSES,
        ):
            raise CheckFailedError(self.met.kind, self.met.text)
        way = "" if self.proxy is None else f" through the proxy {self.proxy}"
        return f"{self.settings.server} can be reached{way}"

    def look_at_tls(self) -> str:
        """Who answers, and whether it takes this site's certificate."""
        if self.identity is None:
            raise CheckSkippedError("plain text")
        if self.met.kind is not DiagnosisCode.FINE:
            raise CheckFailedError(
                "server-busy" if self.met.kind is DiagnosisCode.BUSY else self.met.kind, self.met.text
            )
        return self.met.text

    def look_at_admission(self) -> str:
        """Whether the server would let this site's calls in."""
        greeting = self.greeting
        if self.identity is None:
            raise CheckSkippedError("in plain text everybody is let in")
        if greeting is None or not greeting.status:
            raise CheckSkippedError("the server does not say: it is of an older version")
        own = f"certificate {self.identity.now().certificate.fingerprint[:16]}…"
        match greeting.status:
            case status if status == REGISTERED:
                return f"{own} is registered there"
            case "revoked":
                raise CheckFailedError("certificate-revoked", f"{own} was revoked by the operator")
            case status if status == UNKNOWN:
                raise CheckFailedError(
                    "certificate-not-registered", f"{own} is of the right CA, but not registered there"
                )
        raise CheckFailedError("certificate-expired", f"{own} is {greeting.status} for the server")

    def look_at_version(self) -> str:
        """Of software and protocol, on both sides."""
        greeting = self.greeting
        if greeting is None:
            raise CheckFailedError(
                "version-differs", f"the server does not say its version: it is older than {VERSION}"
            )
        there = f"server {greeting.software}, protocol {greeting.protocol}"
        if greeting.protocol != PROTOCOL_VERSION:
            raise CheckFailedError("protocol-mismatch", f"{there}; here {VERSION}, protocol {PROTOCOL_VERSION}")
        if greeting.software != VERSION:
            raise CheckFailedError("version-differs", f"{there}; here {VERSION}")
        return f"{there}, as here"

    def look_at_policy(self) -> str:
        """It can be read; what it lets out."""
        from protofed.client.privacy.policy import Policy

        try:
            rules = Policy.read(self.settings.policy).rules
        except PolicyViolationError as error:
            raise CheckFailedError("policy-missing", str(error)) from error
        plugins.allow(rules.plugins)
        return allowed(rules)

    def look_at_metrics(self) -> str:
        """Where they would be answered."""
        return machine.metrics(self.settings.metrics, running=machine.held(self.settings.state))

    def _shown(self) -> Identity | None:
        return None if self.identity is None else self.identity.now()

    def _right_time(self) -> datetime:
        here = self.clock()
        try:
            greeting = self.greeting if self.met.kind is DiagnosisCode.FINE else None
        except (ConfigError, UnavailableError):
            return here
        if greeting is None or abs(here - greeting.time) <= machine.CLOCK:
            return here
        return greeting.time
