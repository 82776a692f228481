"""Why the server cannot be reached, in one sentence with a remedy.

gRPC says `Socket closed` for almost everything, so this connects by itself, as a call would. It goes through the proxy
if there is one, by TLS 1.3 with the site's certificate. No request is sent.
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
    """How far a connection came."""

    FINE = "fine"
    OWN_IDENTITY = "identity-unreadable"  # TLS cannot be set up with this side's files: nothing is sent
    OWN_CERTIFICATE = "own-certificate"  # of this side, expired or not valid yet: found before anything is sent
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
    REFUSED = "certificate-refused"  # this side's, by the server
    BUSY = "busy"


# Another server may answer at the address.
UNTRUSTED = frozenset({DiagnosisCode.SERVER_AUTHORITY, DiagnosisCode.SERVER_NAME, DiagnosisCode.SERVER_DATES})
# Waiting does not help. SERVER_DATES is not among them: the operator may renew the certificate, or a clock be set.
LASTING = frozenset(
    {
        DiagnosisCode.OWN_IDENTITY,
        DiagnosisCode.OWN_CERTIFICATE,
        DiagnosisCode.SERVER_AUTHORITY,
        DiagnosisCode.SERVER_NAME,
        DiagnosisCode.PROXY_PASSWORD,
    }
)


@dataclass(frozen=True)
class ConnectionDiagnosis:
    """The result of `diagnose`.

    Attributes:
        text: what is wrong and what to do, for the log and the screen.
        server_fingerprint: SHA-256 of the certificate that the server showed; None: it showed none.
    """

    kind: DiagnosisCode
    text: str
    server_fingerprint: str | None = None


class DiagnosisError(Exception):
    """Ends `diagnose`, from whatever depth."""

    def __init__(self, kind: DiagnosisCode, text: str, server_fingerprint: str | None = None) -> None:
        super().__init__(text)
        self.diagnosis = ConnectionDiagnosis(kind, text, server_fingerprint)


STEP_TIMEOUT_S = 10.0  # for the connection, and for each read
_EXPIRED, _TOO_EARLY, _WRONG_NAMES = 10, 9, (62, 64)  # OpenSSL's X509_V_ERR_…


def diagnose(
    address: str,
    identity: Identity | None,
    proxy: Proxy | None = None,
    clock: Callable[[], datetime] = utc_now,
    *,
    ignore_own_dates: bool = False,
) -> ConnectionDiagnosis:
    """Connect to the server and say how far that goes; takes up to `STEP_TIMEOUT_S` for each step.

    Args:
        address: host:port.
        identity: this side's; None: plain text, where only the TCP connection is tried.
        clock: the current time, UTC.
        ignore_own_dates: use the own certificate even if this clock, which may be wrong, says that it is not valid.
    """
    try:
        if identity is None:
            _connect(address, proxy).close()
            return ConnectionDiagnosis(DiagnosisCode.FINE, f"something listens at {address}")
        if not ignore_own_dates:
            _check_own_dates(identity, clock())
        return _handshake(address, identity, proxy, clock)
    except DiagnosisError as error:
        return error.diagnosis


def _check_own_dates(identity: Identity, now: datetime) -> None:
    try:
        check_dates(identity.certificate, identity.folder, now)
    except ConfigError as error:
        raise DiagnosisError(DiagnosisCode.OWN_CERTIFICATE, str(error)) from error


def _connect(address: str, proxy: Proxy | None) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if proxy is None:
        return _dial(host, int(port), f"the server {address}", DiagnosisCode.NOTHING_LISTENS, DiagnosisCode.NO_ANSWER)
    line = _dial(proxy.host, proxy.port, f"the proxy {proxy}", DiagnosisCode.PROXY_AWAY, DiagnosisCode.PROXY_AWAY)
    try:
        status = proxy.connect(line, host, int(port))
    except OSError:
        status = 0
    if status // 100 != 2:
        line.close()
        raise _explain_proxy_status(status, proxy, address)
    return line


def _dial(host: str, port: int, target: str, if_refused: DiagnosisCode, if_unanswered: DiagnosisCode) -> socket.socket:
    """A TCP connection to the server or the proxy; `target` names it in the errors."""
    try:
        return socket.create_connection((host, port), STEP_TIMEOUT_S)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a label that IDNA cannot encode
        kind = DiagnosisCode.NO_NAME if if_unanswered is DiagnosisCode.NO_ANSWER else if_unanswered
        text = f"the name '{host}' of {target} does not resolve; correct it, or ask who runs this network's DNS"
        raise DiagnosisError(kind, text) from error
    except ConnectionRefusedError as error:
        text = f"nothing listens at {target}; start it, or correct address and port"
        raise DiagnosisError(if_refused, text) from error
    except OSError as error:
        text = f"{target} does not answer ({error}); look for a firewall in between, or correct the address"
        raise DiagnosisError(if_unanswered, text) from error


def _explain_proxy_status(status: int, proxy: Proxy, address: str) -> DiagnosisError:
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


def _handshake(
    address: str, identity: Identity, proxy: Proxy | None, clock: Callable[[], datetime]
) -> ConnectionDiagnosis:
    host = address.rpartition(":")[0].strip("[]")
    try:
        context = _context(identity)
    except (OSError, ValueError) as error:  # ssl.SSLError among them: before a connection, so it is not the server's
        text = f"TLS cannot be set up with the identity in {identity.folder} ({error}); install its bundle again"
        raise DiagnosisError(DiagnosisCode.OWN_IDENTITY, text) from error
    with _connect(address, proxy) as line:
        try:
            tls = context.wrap_socket(line, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise _explain_untrusted(error, address, host, identity, proxy, clock()) from error
        except (OSError, ValueError) as error:
            raise _explain_no_handshake(error, address) from error
        with tls:
            certificate = tls.getpeercert(binary_form=True) or b""
            return _await_server(tls, address, identity, fingerprint(_pem(certificate)))


def _context(identity: Identity) -> ssl.SSLContext:
    context = _tls_1_3()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=identity.authorities_pem.decode("ascii", "replace"))
    # load_cert_chain takes a path only, and the files on disk may be newer than this identity: so by a memfd.
    with open(os.memfd_create("identity"), "wb") as file:
        file.write(identity.certificate_pem + b"\n" + identity.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _tls_1_3() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    return context


def _await_server(tls: ssl.SSLSocket, address: str, identity: Identity, server: str) -> ConnectionDiagnosis:
    # In TLS 1.3 the client's handshake ends before the server has checked the client's certificate: whether it is
    # accepted shows only in the first byte that follows, HTTP/2's SETTINGS, or an alert.
    try:
        first = tls.recv(1)
    except TimeoutError:
        text = f"{address} accepts connections and does not answer: it is busy, or hangs. Look into the server's log"
        return ConnectionDiagnosis(DiagnosisCode.BUSY, text, server)
    except OSError as error:
        return ConnectionDiagnosis(DiagnosisCode.REFUSED, _refusal_text(address, identity.certificate, error), server)
    if not first:
        return ConnectionDiagnosis(DiagnosisCode.REFUSED, _refusal_text(address, identity.certificate, None), server)
    return ConnectionDiagnosis(DiagnosisCode.FINE, f"{address} answers, and accepts the {identity.certificate}", server)


def _refusal_text(address: str, own: Certificate, error: OSError | None) -> str:
    reason = str(getattr(error, "reason", "") or "").lower()
    alert = f" ({reason.rpartition('alert_')[2].replace('_', ' ')})" if "alert" in reason else ""
    return (
        f"{address} does not accept the {own} (fingerprint {own.fingerprint[:16]}…, valid until "
        f"{stamp(own.not_after)}){alert}. Its CA may be unknown there, or the server's clock wrong. Ask the "
        "operator for the server's log"
    )


def _explain_no_handshake(error: Exception, address: str) -> DiagnosisError:
    reason = str(getattr(error, "reason", "") or "")
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "RECORD" in reason:
        return DiagnosisError(
            DiagnosisCode.NOT_TLS, f"{address} does not speak TLS; correct the port, or give the server --identity"
        )
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return DiagnosisError(
            DiagnosisCode.OLD_TLS,
            f"{address} does not speak TLS 1.3. Upgrade the server, or the gateway in front of it",
        )
    text = (
        f"{address} ends the connection during the TLS handshake ({error}): it has too many connections, or a "
        "firewall ends them"
    )
    return DiagnosisError(DiagnosisCode.BUSY, f"{text}. Look into the server's log")


def _explain_untrusted(
    error: ssl.SSLCertVerificationError, address: str, host: str, identity: Identity, proxy: Proxy | None, now: datetime
) -> DiagnosisError:
    # OpenSSL's error does not have the certificate that it rejects: fetch it by a second connection.
    pem = _fetch_certificate(address, host, proxy)
    server = fingerprint(pem) if pem else None
    shows = f"{address} shows a certificate (fingerprint {server[:16]}…)" if server else f"{address} shows one"
    if error.verify_code in _WRONG_NAMES:
        text = (
            f"{shows} of {_hosts(pem)}, not of '{host}'; nothing was sent. Correct the address, or ask the operator "
            "for a certificate with this name"
        )
        return DiagnosisError(DiagnosisCode.SERVER_NAME, text, server)
    if error.verify_code in (_EXPIRED, _TOO_EARLY):
        text = (
            f"{shows} {_dates(pem)}; it is {stamp(now)} here. Is the clock right? If so, the operator must renew "
            "the server's certificate"
        )
        return DiagnosisError(DiagnosisCode.SERVER_DATES, text, server)
    text = (
        f"{shows} that the CAs in {identity.folder / 'ca.pem'} do not confirm ({error.verify_message}); nothing was "
        "sent. It may be another server. Correct the address, or install the bundle that the operator sent"
    )
    return DiagnosisError(DiagnosisCode.SERVER_AUTHORITY, text, server)


def _fetch_certificate(address: str, host: str, proxy: Proxy | None) -> bytes:
    """The server's certificate in PEM, unverified; empty if there is none. This side's certificate is not shown."""
    context = _tls_1_3()
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
    except ConfigError:  # not one that protofed issued
        return "other hosts"


def _dates(pem: bytes) -> str:
    try:
        certificate = read_certificate(pem, "")
    except ConfigError:
        return "that is not valid now"
    return f"valid from {stamp(certificate.not_before)} until {stamp(certificate.not_after)}"
