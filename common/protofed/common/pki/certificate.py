"""X.509 certificates: whom they name, how long they are valid, and what they may be used for.

Of public keys there are short codes, to be read out over the telephone. A code is the first 80 bits of the key's
fingerprint in Crockford's base32 (https://www.crockford.com/base32.html): 16 of 0-9 and A-Z without I, L, O and U, in
four groups. Whoever swaps a request on its way must find a key with the same code, a second preimage: about 2**80 keys.
A code of six digits would take a million keys, which one core makes in half a minute. Such codes are safe only where
both sides commit to their keys before either sees the other's.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from protofed.common.errors import ConfigError, short
from protofed.common.ids import check_id

SCHEME = "protofed://"  # of the URI among the alternative names: protofed://PARTY/NAME
UNREADABLE = (  # what `cryptography` raises on a certificate or key that is damaged or of an unknown kind
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


class Party(StrEnum):
    """Whom a certificate is for. Not to be confused with a site's roles (trainer, evaluator)."""

    SERVER = "server"
    SITE = "site"
    OPERATOR = "operator"


USAGES = {
    Party.SERVER: ExtendedKeyUsageOID.SERVER_AUTH,
    Party.SITE: ExtendedKeyUsageOID.CLIENT_AUTH,
    Party.OPERATOR: ExtendedKeyUsageOID.CLIENT_AUTH,
}


@dataclass(frozen=True)
class Certificate:
    """The fields of a certificate that protofed uses.

    Attributes:
        name: a site's id, or the name of an operator or a server.
        fingerprint: SHA-256 of the DER form, 64 hexadecimal digits.
        not_before, not_after: UTC.
        hosts: DNS names and IP addresses; a server's only.
    """

    party: Party
    name: str
    fingerprint: str
    not_before: datetime
    not_after: datetime
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"certificate of {self.party} '{self.name}'"


def read_certificate(pem: bytes, where: str) -> Certificate:
    """The only certificate in `pem`; neither dates nor signature are checked.

    Args:
        where: its name in errors, such as the path.

    Raises:
        ConfigError: `pem` is no certificate, or several, or its alternative names are not protofed's.
    """
    certificates = load(pem, where)
    if len(certificates) != 1:
        raise ConfigError(f"{where}: {len(certificates)} certificates; expected exactly one")
    certificate = certificates[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        names = x509.SubjectAlternativeName([])
    party, name, hosts = read_names(names, where)
    not_before, not_after = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Certificate(party, name, certificate.fingerprint(hashes.SHA256()).hex(), not_before, not_after, hosts)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the DER form of the first certificate in `pem`, 64 hexadecimal digits.

    Raises:
        ConfigError: `pem` is no certificate.
    """
    return load(pem, "certificate")[0].fingerprint(hashes.SHA256()).hex()


def load(pem: bytes, where: str) -> list[x509.Certificate]:
    """All certificates in `pem`, at least one.

    Raises:
        ConfigError: there is none, or one cannot be read.
    """
    try:
        return x509.load_pem_x509_certificates(pem)
    except UNREADABLE as error:
        raise ConfigError(
            f"{where} cannot be read as a certificate; expected PEM text from -----BEGIN CERTIFICATE----- on"
        ) from error


def read_names(names: x509.SubjectAlternativeName, where: str) -> tuple[Party, str, tuple[str, ...]]:
    """Party, name and hosts from the alternative names of a certificate or of a signing request.

    Raises:
        ConfigError: they have not exactly one URI, or it is not of the form protofed://PARTY/NAME.
    """
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    party, _, name = uris[0].removeprefix(SCHEME).partition("/") if len(uris) == 1 else ("", "", "")
    if party not in set(Party) or not uris[0].startswith(SCHEME):
        raise ConfigError(
            f"{where} names nobody whom protofed knows. Expected one alternative name such as {SCHEME}site/a, as "
            "`protofed certs request` writes it"
        )
    dns = names.get_values_for_type(x509.DNSName)
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return Party(party), check_id(party, name), (*dns, *addresses)


def signer(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> x509.Certificate | None:
    """The authority that signed the certificate directly, if one did; intermediate CAs are not supported."""
    return next((ca for ca in authorities if is_authority(ca) and _signed(certificate, ca)), None)


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it may sign certificates: a CA by its basic constraints and by its key usage."""
    try:
        extensions = certificate.extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
        return constraints.ca and extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except (x509.ExtensionNotFound, *UNREADABLE):
        return False


def has_usage(certificate: x509.Certificate, party: Party) -> bool:
    """Whether its extended key usage fits the party: a TLS client's (site, operator) or server's (server)."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        return False
    return USAGES[party] in usages


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, *UNREADABLE):
        return False
    return True


BYTES = 10  # 80 bits
GROUP = 4
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ENCODE = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET)  # from RFC 4648's alphabet
_FOLD = str.maketrans("OIL", "011")
_CODE, _HEX = re.compile(f"[{_ALPHABET}]{{16}}"), re.compile("[0-9a-f]{64}")


def code(fingerprint: str) -> str:
    """The code of a SHA-256 fingerprint of 64 hexadecimal digits, such as K7QF-2M4X-9RTA-HWZC."""
    letters = base64.b32encode(bytes.fromhex(fingerprint)[:BYTES]).decode("ascii").translate(_ENCODE)
    return "-".join(_groups(letters))


def differences(text: str, fingerprint: str) -> list[int]:
    """The groups, counted from 1, in which what somebody read out differs from a fingerprint; none: it is that one.

    Args:
        text: a code in upper or lower case, with or without hyphens, O, I and L for 0, 1 and 1; or all 64 hexadecimal
            digits, with or without spaces, colons and `SHA256:`.
        fingerprint: 64 hexadecimal digits.

    Raises:
        ConfigError: `text` is neither.
    """
    digits = re.sub(r"[\s:-]", "", text.lower().removeprefix("sha256:"))
    letters = digits.upper().translate(_FOLD)
    if _HEX.fullmatch(digits):
        pairs = zip(_groups(digits), _groups(fingerprint), strict=True)
    elif _CODE.fullmatch(letters):
        pairs = zip(_groups(letters), code(fingerprint).split("-"), strict=True)
    else:
        raise ConfigError(
            f"code {short(text)!r}: expected four groups of four, such as K7QF-2M4X-9RTA-HWZC. `protofed certs "
            "request` prints it where the key is, and so does `protofed consortium --offer`. Or give the "
            "fingerprint's 64 hexadecimal digits"
        )
    return [number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs]


def _groups(text: str) -> list[str]:
    return [text[at : at + GROUP] for at in range(0, len(text), GROUP)]
