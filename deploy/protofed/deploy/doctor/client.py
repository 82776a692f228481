"""`protofed client doctor`: the checks of one site's daemon, made with the functions that the daemon itself calls."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from protofed.client.policy.rules import Limits, PrivacyBudget
from protofed.client.state.dp_ledger import FILE, Spent, read
from protofed.client.transport.channels import BusyError, fetch_server_info
from protofed.client.transport.diagnosis import ConnectionDiagnosis, DiagnosisCode, diagnose
from protofed.client.transport.proxy import Proxy
from protofed.common import plugins
from protofed.common.address import find_folder
from protofed.common.clock import utc_now
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import (
    ConfigError,
    PolicyViolationError,
    ProtofedError,
    StateError,
    UnavailableError,
    count,
)
from protofed.common.pki.identity import Identity, LiveIdentity, Party, read_identity
from protofed.common.protocol.call_metadata import REGISTERED, UNKNOWN, ServerInfo
from protofed.common.protocol.messages import PROTOCOL_VERSION, Role
from protofed.common.version import VERSION
from protofed.deploy import shipped
from protofed.deploy.daemons import client
from protofed.deploy.doctor import machine
from protofed.deploy.doctor.checks import Check, CheckFailedError, CheckSkippedError
from protofed.deploy.doctor.secure_aggregation import SiteSums
from protofed.deploy.doctor.site import SiteUnderCheck, policy_summary

LIBRARIES = ("torch", "torchvision", "grpcio", "numpy")  # whose versions are shown
UNREACHABLE = frozenset(
    {
        DiagnosisCode.NO_NAME,
        DiagnosisCode.NOTHING_LISTENS,
        DiagnosisCode.NO_ANSWER,
        DiagnosisCode.PROXY_AWAY,
        DiagnosisCode.PROXY_PASSWORD,
        DiagnosisCode.PROXY_REFUSES,
    }
)


@dataclass
class ClientDoctor:
    """The checks of one site's daemon.

    Attributes:
        read: reads the settings as the daemon does.
        site: the checks of the site's own machine and data.
    """

    read: Callable[[], ClientSettings]
    site: SiteUnderCheck
    clock: Callable[[], datetime] = utc_now

    def checks(self) -> list[Check]:
        """In the order of the table. Causes come first: the exit code is the first finding's."""
        settings, software, server = ("settings",), ("settings", "software"), ("settings", "software", "connection")
        return [
            Check("settings", self.check_settings, "settings-invalid"),
            Check("software", self.check_software),
            Check("connection", self.check_transport, "connection-not-chosen", settings),
            Check("clock", self.check_clock, needs=server),
            Check("identity", self.check_identity, "identity-unreadable", ("settings", "connection")),
            Check("certificate", self.check_certificate, "identity-unreadable", ("settings", "connection", "identity")),
            Check("server", self.check_route, "proxy-away", (*server, "identity")),
            Check("tls", self.check_tls, needs=(*server, "server")),
            Check("admission", self.check_admission, "call-failed", ("server", "tls")),
            Check("version", self.check_version, "call-failed", ("server", "tls")),
            Check("policy", self.check_policy, "policy-invalid", software),
            Check("state folder", lambda: self.site.state(self.settings), needs=settings),
            Check(
                "secure aggregation",
                self.check_secure_aggregation,
                "sum-identity-unusable",
                (*software, "identity", "policy"),
            ),
            Check("privacy budget", self.check_privacy_budget, "privacy-ledger-unusable", (*software, "policy")),
            Check("disk", lambda: machine.disk(self.settings.state), needs=settings),
            Check("cache", lambda: self.site.cache(self.settings), needs=settings),
            Check("metrics", self.check_metrics, "metrics-unusable", settings),
            Check("device", lambda: self.site.device(self.settings), "device-absent", software),
            Check("shared memory", self.site.shared_memory),
            Check("data", lambda: self.site.data(self.settings), "data-unusable", (*software, "policy")),
        ]

    @cached_property
    def settings(self) -> ClientSettings:
        """The daemon's settings. Raises what `read` raises: the first check reports it, the others need that check."""
        return self.read()

    @cached_property
    def identity(self) -> LiveIdentity | None:
        """The site's identity, even one that has expired or is not valid yet; None: plain text."""
        if (folder := find_folder(self.settings.identity)) is None:
            return None
        # `certificate` judges the dates, by the server's clock if this one is wrong; so they must not stop the rest.
        at = machine.valid_time(folder, self.clock())
        return client.own_identity(self.settings, lambda: at)

    @cached_property
    def proxy(self) -> Proxy | None:
        """The proxy to the server, from the settings; None: a direct connection."""
        return client.own_proxy(self.settings)

    @cached_property
    def connection(self) -> ConnectionDiagnosis:
        """The diagnosis of one TLS connection, made once: several checks read it."""
        return diagnose(self.settings.server, self._own_identity(), self.proxy, self.clock, ignore_own_dates=True)

    @cached_property
    def server_info(self) -> ServerInfo | None:
        """The server's clock, versions and opinion of our certificate; None: a server too old to say."""
        return fetch_server_info(self.settings.server, self.identity, self.proxy)

    def check_settings(self) -> str:
        """Keys and values of file, command line and environment."""
        roles = " and ".join(sorted(self.settings.roles))
        return f"site {self.settings.site}, {roles}, server {self.settings.server}"

    def check_software(self) -> str:
        """Versions of the installed libraries, and whether torch can be imported."""
        versions = machine.software("client", LIBRARIES)
        machine.import_quietly(("torch", "torchvision"))
        return versions

    def check_transport(self) -> str:
        """An identity for TLS, or plain text on request."""
        return machine.transport(self.settings.server, self.settings.identity)

    def check_clock(self) -> str:
        """Against the server's clock or, without a connection, against the certificates' dates."""
        try:
            connection = self.connection
            if connection.kind is DiagnosisCode.FINE and (server_info := self.server_info) is not None:
                return machine.compare_clocks(self.clock(), server_info.time)
            if (identity := self._own_identity()) is not None:
                machine.check_clock_by_certificates(identity.certificate, connection, self.clock())
        except ProtofedError as error:
            raise CheckSkippedError("nothing to compare with: see what follows") from error
        raise CheckSkippedError("nothing to compare with: the server could not be asked")

    def check_identity(self) -> str:
        """Complete, private, of this site, and of one CA; `check_certificate` judges the dates."""
        identity = self._own_identity()
        if identity is None:
            raise CheckSkippedError("none in plain text")
        return f"{identity.certificate}, fingerprint {identity.certificate.fingerprint[:16]}…"

    def check_certificate(self) -> str:
        """The certificate's dates, by the server's clock if this machine's is wrong."""
        if (folder := find_folder(self.settings.identity)) is None:
            raise CheckSkippedError("none in plain text")
        at = self._trusted_time()
        return machine.remaining(read_identity(folder, Party.SITE, at).certificate, at)

    def check_route(self) -> str:
        """Name resolution, port and proxy: whether TCP reaches the server."""
        unused = machine.unused_proxies("the setting `proxy`")
        if self.connection.kind in UNREACHABLE:
            raise CheckFailedError(self.connection.kind, f"{self.connection.text}{unused}")
        route = "" if self.proxy is None else f" through the proxy {self.proxy}"
        return f"{self.settings.server} can be reached{route}{unused}"

    def check_tls(self) -> str:
        """The handshake: the server's certificate, and whether the server accepts this site's."""
        if self.identity is None:
            raise CheckSkippedError("plain text")
        kind, text = self.connection.kind, self.connection.text
        if kind is not DiagnosisCode.FINE:
            raise CheckFailedError("server-busy" if kind is DiagnosisCode.BUSY else kind, text)
        return text

    def check_admission(self) -> str:
        """Whether the server has registered this site's certificate and would answer its calls."""
        server_info = self._ask_server()
        if self.identity is None:
            raise CheckSkippedError("in plain text the server accepts everybody")
        if server_info is None or not server_info.status:
            raise CheckSkippedError("the server does not say")
        certificate = f"certificate {self.identity.current().certificate.fingerprint[:16]}…"
        match server_info.status:
            case status if status == REGISTERED:
                self._check_roles(server_info.roles)
                return f"{certificate} is registered there"
            case "revoked":
                raise CheckFailedError("certificate-revoked", f"{certificate} was revoked by the operator")
            case status if status == UNKNOWN:
                raise CheckFailedError(
                    "certificate-not-registered", f"{certificate} is of the right CA, but not registered there"
                )
        raise CheckFailedError("certificate-expired", f"{certificate} is {server_info.status} for the server")

    def _check_roles(self, registered: Sequence[str]) -> None:
        """Whether the server would let this daemon enroll in its roles."""
        foreign = {role.value for role in self.settings.roles} - set(registered)
        if foreign:
            raise CheckFailedError(
                "role-not-registered",
                f"registered as {' and '.join(registered)}; `roles` has {' and '.join(sorted(foreign))}, too",
            )

    def check_version(self) -> str:
        """Software and protocol versions of both sides; only different protocols stop a daemon."""
        server_info = self._ask_server()
        if server_info is None:
            raise CheckFailedError("protocol-mismatch", f"the server does not say its version; here {VERSION}")
        text = f"server {server_info.software}, protocol {server_info.protocol}"
        if server_info.protocol != PROTOCOL_VERSION:
            raise CheckFailedError("protocol-mismatch", f"{text}; here {VERSION}, protocol {PROTOCOL_VERSION}")
        if server_info.software != VERSION:
            raise CheckFailedError("version-differs", f"{text}; here {VERSION}")
        return f"{text}, as here"

    def check_policy(self) -> str:
        """The policy can be read, and what it allows."""
        from protofed.client.policy.policy import Policy

        try:
            file = shipped.policy(self.settings.policy)
        except ConfigError as error:  # a name that no policy has
            raise CheckFailedError("policy-missing", str(error)) from error
        try:
            rules = Policy.read(file).rules
        except PolicyViolationError as error:
            raise CheckFailedError("policy-missing", str(error)) from error
        plugins.allow(rules.plugins)  # of the whole process: `data`, which comes later, may need a plug-in
        self._check_today(rules.limits)
        return policy_summary(rules, self.settings.roles)

    def _check_today(self, limits: Limits) -> None:
        """Check that the policy's limits a day have tasks left."""
        from protofed.client.state.daily_counts import FILE, Counted, DailyCounts

        counts = DailyCounts(self.settings.state / FILE)
        for kind, most in ((Counted.TASKS, limits.tasks_per_day), (Counted.SCORINGS, limits.scorings_per_day)):
            try:
                none = counts.exhausted(kind, most)
            except StateError as error:
                raise CheckFailedError("state-not-writable", str(error)) from error
            if none is not None:
                raise CheckFailedError("today-used-up", none.text(kind, most))

    def check_secure_aggregation(self) -> str:
        """What a site alone can tell of secure aggregation: its identity, its pins, its policy and the run's."""
        from protofed.client.policy.policy import Policy

        if Role.TRAINER not in self.settings.roles:
            raise CheckSkippedError("an evaluator is in no secure aggregation")
        policy = Policy.read(shipped.policy(self.settings.policy))
        recipe, certified = lambda: self.site.run_recipe(self.settings), self._own_identity()
        return SiteSums(self.settings.state, certified, policy, recipe, self._trusted_time()).check()

    def check_privacy_budget(self) -> str:
        """The ledger of what fits with noise have spent, beside the policy's budget."""
        from protofed.client.policy.policy import Policy

        rules = Policy.read(shipped.policy(self.settings.policy)).rules
        return ledger_message(self.settings.state, rules.dp)

    def check_metrics(self) -> str:
        """Whether the daemon could listen for scrapes."""
        return machine.metrics(self.settings.metrics, running=bool(machine.has_running_daemon(self.settings.state)))

    def _ask_server(self) -> ServerInfo | None:
        """As `server_info`; a server that does not answer is a finding, and any other error is one of this machine."""
        try:
            return self.server_info
        except BusyError as error:
            raise CheckFailedError("server-busy", str(error)) from error

    def _own_identity(self) -> Identity | None:
        return None if self.identity is None else self.identity.current()

    def _trusted_time(self) -> datetime:
        """This machine's time, or the server's if both differ by more than `machine.CLOCK`."""
        here = self.clock()
        try:
            server_info = self.server_info if self.connection.kind is DiagnosisCode.FINE else None
        except (ConfigError, UnavailableError):
            return here
        if server_info is None or abs(here - server_info.time) <= machine.CLOCK:
            return here
        return server_info.time


ACCOUNTANT = "dp-accounting"


def ledger_message(state: Path, budget: PrivacyBudget | None) -> str:
    """What is spent, and left.

    Args:
        state: the site's state folder.
        budget: the policy's; None: it has none, and a ledger alone is checked.

    Raises:
        CheckSkippedError: there is neither a budget nor a ledger.
        CheckFailedError: no epsilon can be computed, the ledger cannot be written, or all is spent.
        StateError: the ledger cannot be read, or is damaged.
    """
    path = state / FILE
    if budget is None and not path.exists():
        raise CheckSkippedError("the policy has no privacy budget (dp), and no fit had noise")
    spent = read(path)
    _check_writable(path)
    if budget is None:
        return f"the policy has none; {_fits(spent)} had noise"
    now = _epsilon(spent, budget.delta)
    text = (
        f"epsilon {now:.3g} of {budget.epsilon:g} is spent on each {budget.unit} at delta {budget.delta:g}, by "
        f"{_fits(spent)}; {ACCOUNTANT} {importlib.metadata.version(ACCOUNTANT)}"
    )
    if now >= budget.epsilon:
        raise CheckFailedError("privacy-budget-spent", text)
    return text


def _fits(spent: Spent) -> str:
    torn = f", and {count(spent.torn, 'half-written line')} that each count as the largest" if spent.torn else ""
    return f"{count(len(spent.spends), 'fit')}{torn}"


def _epsilon(spent: Spent, delta: float) -> float:
    from protofed.client.policy.dp_accountant import NoisySums, epsilon

    try:
        epsilon([NoisySums(0.1, 2.0, 1)], delta)  # of nothing it computes nothing, and would seem to be there
        return epsilon(spent.events(), delta)
    except ImportError as error:
        raise CheckFailedError("library-missing", f"{ACCOUNTANT} cannot be imported: {error}") from error


def _check_writable(path: Path) -> None:
    """Check that a fit could be counted, without writing: a line in the ledger is a fit."""
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise CheckFailedError("privacy-ledger-unusable", f"{path} cannot be written: give it to the daemon's account")
