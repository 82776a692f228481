"""Why the server cannot be reached, in one sentence and with a remedy; without gRPC, which says `Socket closed`.

A connection is made as a call would make it, by TLS 1.3 and through the proxy if there is one, and nothing is sent.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from protofed.client.transport.proxy import Proxy
from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError
from protofed.common.pki.certificate import Certificate, fingerprint, read_certificate
from protofed.common.pki.identity import Identity, check_dates


class DiagnosisCode(StrEnum):
    """What was found."""

    FINE = "fine"
    OWN_CERTIFICATE = "own-certificate"  # missing, expired, not valid yet: this side says so
    NO_NAME = "name-unknown"
    NOTHING_LISTENS = "nothing-listens"
    NO_ANSWER = "no-answer"
    PROXY_AWAY = "proxy-away"
    PROXY_PASSWORD = "proxy-password"  # noqa: S105  (a finding)
    PROXY_REFUSES = "proxy-refuses"
    NOT_TLS = "not-tls"
    OLD_TLS = "old-tls"
    SERVER_AUTHORITY = "server-authority"
    SERVER_NAME = "server-name"
    SERVER_DATES = "server-dates"
    REFUSED = "certificate-refused"  # ours, by the server
    BUSY = "busy"


UNTRUSTED = frozenset(
    {DiagnosisCode.SERVER_AUTHORITY, DiagnosisCode.SERVER_NAME, DiagnosisCode.SERVER_DATES}
)  # somebody else may be there
LASTING = frozenset(
    {
        DiagnosisCode.OWN_CERTIFICATE,
        DiagnosisCode.SERVER_AUTHORITY,
        DiagnosisCode.SERVER_NAME,
        DiagnosisCode.PROXY_PASSWORD,
    }
)


@dataclass(frozen=True)
class ConnectionDiagnosis:
    """What is wrong, and what to do; of a server that showed a certificate, the fingerprint of that."""

    kind: DiagnosisCode
    text: str
    server_fingerprint: str | None = None


class DiagnosisError(Exception):
    """Ends a probe."""

    def __init__(self, kind: DiagnosisCode, text: str, server_fingerprint: str | None = None) -> None:
        super().__init__(text)
        self.finding = ConnectionDiagnosis(kind, text, server_fingerprint)


PATIENCE_S = 10.0  # of each step
_EXPIRED, _TOO_EARLY, _WRONG_NAMES = 10, 9, (62, 64)  # OpenSSL's X509_V_ERR_…


def diagnose(
    address: str,
    identity: Identity | None,
    proxy: Proxy | None = None,
    clock: Callable[[], datetime] = utc_now,
    *,
    whatever_own_dates: bool = False,
) -> ConnectionDiagnosis:
    """Connect and say how far that goes.

    Args:
        address: host:port.
        identity: this side's; None: plain text, of which only the connection is tried.
        whatever_own_dates: show the own certificate also if it is not valid by this clock, which may be wrong.
    """
    try:
        if identity is None:
            _connect(address, proxy).close()
            return ConnectionDiagnosis(DiagnosisCode.FINE, f"something listens at {address}")
        if not whatever_own_dates:
            _check_own(identity, clock())
        return _shake_hands(address, identity, proxy, clock)
    except DiagnosisError as found:
        return found.finding


def _check_own(identity: Identity, now: datetime) -> None:
    try:
        check_dates(identity.certificate, identity.folder, now)
    except ConfigError as error:
        raise DiagnosisError(DiagnosisCode.OWN_CERTIFICATE, str(error)) from error


def _connect(address: str, proxy: Proxy | None) -> socket.socket:
    """A connection to the server."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if proxy is None:
        return _dial(host, int(port), f"the server {address}", DiagnosisCode.NOTHING_LISTENS, DiagnosisCode.NO_ANSWER)
    line = _dial(proxy.host, proxy.port, f"the proxy {proxy}", DiagnosisCode.PROXY_AWAY, DiagnosisCode.PROXY_AWAY)
    try:
        status = proxy.ask(line, host, int(port))
    except OSError:
        status = 0
    if status // 100 != 2:
        line.close()
        raise _refusal(status, proxy, address)
    return line


def _dial(host: str, port: int, who: str, nothing: DiagnosisCode, silent: DiagnosisCode) -> socket.socket:
    try:
        return socket.create_connection((host, port), PATIENCE_S)
    except (socket.gaierror, UnicodeError) as error:
        kind = DiagnosisCode.NO_NAME if silent is DiagnosisCode.NO_ANSWER else silent
        text = f"the name '{host}' of {who} does not resolve; correct it, or ask who runs this network's DNS"
        raise DiagnosisError(kind, text) from error
    except ConnectionRefusedError as error:
        raise DiagnosisError(nothing, f"nothing listens at {who}; start it, or correct address and port") from error
    except OSError as error:
        text = f"{who} does not answer ({error}); look for a firewall in between, or correct the address"
        raise DiagnosisError(silent, text) from error


def _refusal(status: int, proxy: Proxy, address: str) -> DiagnosisError:
    match status:
        case 407:
            text = f"the proxy {proxy} wants another user and password (407); correct the setting `proxy`"
            return DiagnosisError(DiagnosisCode.PROXY_PASSWORD, text)
        case 403 | 405:
            text = f"the proxy {proxy} does not allow connections to {address} ({status}); ask its owner to"
            return DiagnosisError(DiagnosisCode.PROXY_REFUSES, text)
        case 0:
            text = f"the proxy {proxy} ends the connection; is it an HTTP proxy? Correct the setting `proxy`"
            return DiagnosisError(DiagnosisCode.PROXY_AWAY, text)
    text = f"the proxy {proxy} cannot connect to {address} ({status}); start the server, or correct its address"
    return DiagnosisError(DiagnosisCode.PROXY_REFUSES, text)


def _shake_hands(
    address: str, identity: Identity, proxy: Proxy | None, clock: Callable[[], datetime]
) -> ConnectionDiagnosis:
    host = address.rpartition(":")[0].strip("[]")
    with _connect(address, proxy) as line:
        try:
            tls = _context(identity).wrap_socket(line, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise _distrust(error, address, host, identity, proxy, clock()) from error
        except (OSError, ValueError) as error:
            raise _no_handshake(error, address) from error
        with tls:
            seen = tls.getpeercert(binary_form=True) or b""
            return _first_words(tls, address, identity, fingerprint(_pem(seen)))


def _context(identity: Identity) -> ssl.SSLContext:
    context = _bare()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=identity.authorities_pem.decode("ascii", "replace"))
    with open(os.memfd_create("identity"), "wb") as both:  # what was read, which on disk may be newer by now
        both.write(identity.certificate_pem + b"\n" + identity.key_pem)
        both.flush()
        context.load_cert_chain(f"/proc/self/fd/{both.fileno()}")
    return context


def _bare() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    return context


def _first_words(tls: ssl.SSLSocket, address: str, identity: Identity, server: str) -> ConnectionDiagnosis:
    """TLS 1.3: whether the server takes our certificate shows only in what it says next."""
    try:
        words = tls.recv(1)
    except TimeoutError:
        text = f"{address} has taken the connection and does not answer: it is busy, or hangs; look into its log"
        return ConnectionDiagnosis(DiagnosisCode.BUSY, text, server)
    except OSError as error:
        return ConnectionDiagnosis(DiagnosisCode.REFUSED, _refused(address, identity.certificate, error), server)
    if not words:
        return ConnectionDiagnosis(DiagnosisCode.REFUSED, _refused(address, identity.certificate, None), server)
    return ConnectionDiagnosis(DiagnosisCode.FINE, f"{address} answers, and takes the {identity.certificate}", server)


def _refused(address: str, own: Certificate, error: OSError | None) -> str:
    reason = str(getattr(error, "reason", "") or "").lower()
    alert = f" ({reason.rpartition('alert_')[2].replace('_', ' ')})" if "alert" in reason else ""
    return (
        f"{address} does not take the {own} (fingerprint {own.fingerprint[:16]}…, valid until {stamp(own.not_after)})"
        f"{alert}: its CA may be unknown there, or that machine's clock wrong; ask the operator for the server's log"
    )


def _no_handshake(error: Exception, address: str) -> DiagnosisError:
    reason = str(getattr(error, "reason", "") or "")
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "RECORD" in reason:
        return DiagnosisError(
            DiagnosisCode.NOT_TLS, f"{address} does not speak TLS; correct the port, or give the server --identity"
        )
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return DiagnosisError(
            DiagnosisCode.OLD_TLS, f"{address} does not speak TLS 1.3; bring it, or what stands before it, up to date"
        )
    text = f"{address} ends the connection before TLS stands ({error}): it has no room, or something in between does so"
    return DiagnosisError(DiagnosisCode.BUSY, f"{text}; look into the server's log")


def _distrust(
    error: ssl.SSLCertVerificationError, address: str, host: str, identity: Identity, proxy: Proxy | None, now: datetime
) -> DiagnosisError:
    """What is wrong with the certificate that the server showed."""
    pem = _shown(address, host, proxy)
    seen = fingerprint(pem) if pem else None
    shows = f"{address} shows a certificate (fingerprint {seen[:16]}…)" if seen else f"{address} shows one"
    if error.verify_code in _WRONG_NAMES:
        text = (
            f"{shows} of {_hosts(pem)}, not of '{host}'; nothing was sent. Correct the address, or have the server's "
        )
        text += "certificate made for it"
        return DiagnosisError(DiagnosisCode.SERVER_NAME, text, seen)
    if error.verify_code in (_EXPIRED, _TOO_EARLY):
        text = f"{shows} {_dates(pem)}; it is {stamp(now)} here. Is the clock right? If so, the operator must renew it"
        return DiagnosisError(DiagnosisCode.SERVER_DATES, text, seen)
    text = (
        f"{shows} that {identity.folder / 'ca.pem'} does not vouch for ({error.verify_message}); nothing was sent. "
        "It may be another server: correct the address, or install the bundle that the operator sent"
    )
    return DiagnosisError(DiagnosisCode.SERVER_AUTHORITY, text, seen)


def _shown(address: str, host: str, proxy: Proxy | None) -> bytes:
    """The certificate that the server shows to anybody; nothing of ours is shown to it."""
    context = _bare()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(address, proxy) as line, context.wrap_socket(line, server_hostname=host) as tls:
            return _pem(tls.getpeercert(binary_form=True) or b"")
    except (OSError, DiagnosisError):
        return b""


def _pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def _hosts(pem: bytes) -> str:
    try:
        return ", ".join(read_certificate(pem, "").hosts) or "no host"
    except ConfigError:  # nobody whom protofed knows
        return "others"


def _dates(pem: bytes) -> str:
    try:
        seen = read_certificate(pem, "")
    except ConfigError:
        return "that is not valid now"
    return f"valid from {stamp(seen.not_before)} until {stamp(seen.not_after)}"
