"""The sites of a server and their certificates: what each does, the orders about it, and signing requests.

Requests are signed where the CA's folder is at hand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError, ProtofedError, short
from protofed.common.pki.identity import AUTHORITIES, Party
from protofed.common.protocol.roles import OPERATOR, check_roles
from protofed.deploy.certs import files
from protofed.deploy.certs.lifecycle import CA_KEY, Bundle, authority_name, read_authority, read_bundle, sign_request
from protofed.deploy.certs.request import check_addressee, check_key, read_request
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import machine_line
from protofed.deploy.operator.snapshot_builder import sites
from protofed.deploy.operator.tables import CERTIFICATE_SOON_S
from protofed.deploy.pages.shell import Page, find_shell, read_form, read_secret_field
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb

SITES_SHOWN: Final = 50


@dataclass(frozen=True)
class SitePages:
    """The pages below `/sites`."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/sites", self.list),
            Route("/sites/{site}", self.show),
            *(
                Route(f"/sites/{{site}}/{order.__name__}", order, methods=["POST"])
                for order in (self.exclude, self.admit, self.forget, self.regroup)
            ),
        ]

    def list(self, request: Request) -> Response:
        """All sites, those with problems first."""
        infos = {info.site: info for info in self.operator.sites()}
        rows = sites(infos.values(), None, ended=False)
        page = Page.of(request.query_params.get("page", ""), len(rows), SITES_SHOWN)
        page_rows = [(infos[row.site], row) for row in page.cut(rows)]
        working = any(info.status == "working" for info in infos.values())
        return find_shell(request).page(request, "sites.html.j2", {"sites": page_rows, "page": page, "going": working})

    def show(self, request: Request) -> Response:
        """One site, and what can be ordered."""
        info = self._info(request)
        (row,) = sites([info], None, ended=False)
        context = {"info": info, "row": row, "machine": machine_line(row.telemetry)}
        return find_shell(request).page(request, "site.html.j2", context)

    def exclude(self, request: Request) -> Response:
        """Have rounds no longer wait for it."""
        reason = read_form(request).get("reason") or "by the operator"
        info = self.operator.exclude(_name(request), reason)
        return self._done(request, f"{info.site}: excluded ({info.excluded})")

    def admit(self, request: Request) -> Response:
        """Admit it again."""
        info = self.operator.admit(_name(request))
        return self._done(request, f"{info.site}: admitted")

    def forget(self, request: Request) -> Response:
        """Remove it from the list."""
        _confirmed(request, "forget the site")
        info = self.operator.forget(_name(request))
        return find_shell(request).done("/sites", f"{info.site}: forgotten")

    def regroup(self, request: Request) -> Response:
        """Dissolve its group of secure aggregation."""
        _confirmed(request, "dissolve the group")
        info = self.operator.regroup(_name(request))
        partners = ", ".join(other for other in info.group if other != info.site)
        return self._done(
            request,
            f"{info.site}, {partners}: dissolved; now `protofed client consortium --forget-group` at each of "
            f"{partners}",
        )

    def _done(self, request: Request, text: str) -> Response:
        return find_shell(request).done(f"/sites/{_name(request)}", printable(text))

    def _info(self, request: Request) -> pb.SiteInfo:
        name = _name(request)
        for info in self.operator.sites():
            if info.site == name:
                return info
        raise ConfigError(f"the server knows no site '{short(name)}'")


def _name(request: Request) -> str:
    site: str = request.path_params["site"]
    return site


def _confirmed(request: Request, what: str) -> None:
    """Refuse an order that cannot be taken back unless its box was ticked.

    Raises:
        ConfigError: it was not.
    """
    if read_form(request).get("sure") != "yes":
        raise ConfigError(f"tick the box to {what}: that cannot be taken back; nothing was done")


SHOWN: Final = 50
PARTIES: Final = (Party.SITE, Party.OPERATOR, Party.SERVER)
KEPT: Final = ("request", "party", "name", "code", "days", "renewal", "trainer", "evaluator")  # never the passphrase
DEFAULT_DAYS, MAX_DAYS = 365, 3650
WHERE: Final = "the pasted request"


@dataclass(frozen=True)
class Signed:
    """A bundle that was signed here, to be sent to its party.

    Attributes:
        roles, renewal: of its registration, for another try.
    """

    bundle: Bundle
    pem: bytes
    roles: tuple[str, ...]
    renewal: bool


@dataclass(frozen=True)
class CertificatePages:
    """The pages below `/certificates`.

    Attributes:
        ca: folder of the CA; None: it is elsewhere.
        signed: by fingerprint, what was signed since this process began. None of this is secret.
    """

    operator: Operator
    ca: Path | None
    signed: dict[str, Signed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ca is not None:
            files.read(self.ca / AUTHORITIES)  # a folder without a CA is refused before the page is there

    @property
    def signs(self) -> bool:
        """Whether requests can be signed here."""
        return self.ca is not None

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        viewing = [
            Route("/certificates", self.list),
            Route("/certificates/{fingerprint}/revoke", self.ask_revoke),
            Route("/certificates/{fingerprint}/revoke", self.revoke, methods=["POST"]),
        ]
        signing = [
            Route("/certificates/sign", self.ask_sign),
            Route("/certificates/sign", self.sign, methods=["POST"]),
            Route("/certificates/signed/{fingerprint}", self.show_signed),
            Route("/certificates/signed/{fingerprint}/bundle.pem", self.download),
            Route("/certificates/signed/{fingerprint}/register", self.register, methods=["POST"]),
        ]
        return [*signing, *viewing] if self.signs else viewing

    def list(self, request: Request) -> Response:
        """All that the server knows, the newest first."""
        rows = sorted(self.operator.certificates(), key=lambda one: one.added_at, reverse=True)
        page = Page.of(request.query_params.get("page", ""), len(rows), SHOWN)
        context = {"rows": page.cut(rows), "page": page, "soon": time.time() + CERTIFICATE_SOON_S}
        return find_shell(request).page(request, "certificates.html.j2", context)

    def ask_revoke(self, request: Request) -> Response:
        """Ask why, before it is done for good."""
        return find_shell(request).page(request, "revoke.html.j2", {"one": self._known(request)})

    def revoke(self, request: Request) -> Response:
        """Revoke one certificate."""
        reason = read_form(request).get("reason", "")
        if not reason:
            raise ConfigError("expected a reason: it is shown to whoever still uses the certificate")
        revoked = self.operator.revoke(self._known(request).fingerprint, reason)
        text = "\n".join(f"revoked: {one.party} '{one.name}', from its next call on: {reason}" for one in revoked)
        return find_shell(request).done("/certificates", text)

    def ask_sign(self, request: Request) -> Response:
        """The empty form."""
        return self._form(request, {})

    def sign(self, request: Request) -> Response:
        """Check a request, sign it, and register the certificate; the passphrase is forgotten with the request."""
        form = read_form(request)
        try:
            signed = self._sign(form, read_secret_field(request, "passphrase"))
        except ConfigError as error:
            return self._form(request, form, str(error))
        fingerprint = signed.bundle.certificate.fingerprint
        self.signed[fingerprint] = signed
        return self._register(request, signed, fingerprint)

    def show_signed(self, request: Request) -> Response:
        """The bundle, to be sent to its party."""
        signed = self._signed(request)
        context = {"signed": signed, "text": signed.pem.decode(), "authorities": _authorities(signed.bundle)}
        return find_shell(request).page(request, "signed.html.j2", context)

    def download(self, request: Request) -> Response:
        """The bundle as a file."""
        signed = self._signed(request)
        one = signed.bundle.certificate
        disposition = f'attachment; filename="{one.party}-{one.name}.bundle.pem"'  # ids, so no quotes
        return Response(signed.pem, media_type="application/x-pem-file", headers={"Content-Disposition": disposition})

    def register(self, request: Request) -> Response:
        """Try again to register what was signed."""
        return self._register(request, self._signed(request), request.path_params["fingerprint"])

    def _sign(self, form: Mapping[str, str], passphrase: str) -> Signed:
        """As `protofed certs sign`, in its order: everything is checked before anything is signed."""
        assert self.ca is not None  # noqa: S101  (without a CA there is no route to here)
        party = _party(form.get("party", ""))
        chosen = [role for role in ("trainer", "evaluator") if form.get(role) == "yes"]
        roles = (OPERATOR,) if party is Party.OPERATOR else check_roles(party, chosen)
        days = _days(form.get("days", ""))
        to_sign = read_request(form.get("request", "").encode(), WHERE)
        check_addressee(to_sign, party, form.get("name", ""), WHERE)
        check_key(to_sign, form.get("code", ""), WHERE)
        if files.is_encrypted(self.ca / CA_KEY) and not passphrase:
            raise ConfigError("the CA's key is encrypted; expected its passphrase")
        authority = read_authority(self.ca, passphrase.encode() or None)
        renewal = form.get("renewal") == "yes"
        pem = sign_request(to_sign, authority, days, renewal=renewal)
        return Signed(read_bundle(pem, "the bundle"), pem, roles, renewal)

    def _register(self, request: Request, signed: Signed, fingerprint: str) -> Response:
        shell, certificate = find_shell(request), signed.bundle.certificate
        where = f"/certificates/signed/{fingerprint}"
        if certificate.party is Party.SERVER:
            return shell.done(where, f"signed: {certificate}; a server's certificate needs no registration")
        try:
            info = self.operator.register(signed.bundle.certificate_pem.decode(), signed.roles, renewal=signed.renewal)
        except ProtofedError as error:  # it is signed: signing again would issue a second one
            shell.access.notify(f"signed, but not registered: {error}", error=True)
            return shell.done(where)
        return shell.done(where, f"signed and registered as {' and '.join(info.roles)}: {certificate}")

    def _form(self, request: Request, form: Mapping[str, str], problem: str = "") -> Response:
        assert self.ca is not None  # noqa: S101  (as above)
        values = {key: form.get(key, "") for key in KEPT}
        values["days"] = values["days"] or str(DEFAULT_DAYS)
        context = {
            "values": values,
            "problem": problem,
            "encrypted": files.is_encrypted(self.ca / CA_KEY),
            "parties": PARTIES,
        }
        return find_shell(request).page(request, "sign.html.j2", context, status=400 if problem else 200)

    def _known(self, request: Request) -> pb.CertificateInfo:
        fingerprint = request.path_params["fingerprint"]
        for one in self.operator.certificates():
            if one.fingerprint == fingerprint:
                return one
        raise ConfigError(f"the server knows no certificate '{short(fingerprint)}'")

    def _signed(self, request: Request) -> Signed:
        signed = self.signed.get(request.path_params["fingerprint"])
        if signed is None:
            raise ConfigError("that was not signed since this page was started; `protofed certs list --ca` has all")
        return signed


def _party(text: str) -> Party:
    if text not in PARTIES:
        raise ConfigError(f"party '{short(text)}': expected site, operator or server")
    return Party(text)


def _days(text: str) -> int:
    days = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"days '{short(text)}': expected a number from 1 to {MAX_DAYS}")
    return days


def _authorities(bundle: Bundle) -> Sequence[str]:
    """Names and codes of the CAs that the party will trust, to be read to it."""
    return [authority_name(authority) for authority in bundle.authorities]
