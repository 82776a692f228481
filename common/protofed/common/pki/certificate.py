"""Certificates: whom one names, until when, and whether it can be used as what it is given for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from protofed.common.errors import ConfigError
from protofed.common.ids import check_id

SCHEME = "protofed://"
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


class Party(StrEnum):
    """As what somebody takes part; a site's roles (trainer, evaluator) are something else."""

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
    """What a certificate says.

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
    """What the one certificate in `pem` says; neither dates nor signature are checked.

    Args:
        where: what errors call it, such as the path.

    Raises:
        ConfigError: it is no certificate, there are several, or it names nobody whom protofed knows.
    """
    found = load(pem, where)
    if len(found) != 1:
        raise ConfigError(f"{where}: {len(found)} certificates; expected exactly one")
    try:
        names = found[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *UNREADABLE):
        names = x509.SubjectAlternativeName([])
    party, name, hosts = read_names(names, where)
    begins, ends = found[0].not_valid_before_utc, found[0].not_valid_after_utc
    return Certificate(party, name, found[0].fingerprint(hashes.SHA256()).hex(), begins, ends, hosts)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the DER form of the first certificate in `pem`, 64 hexadecimal digits.

    Raises:
        ConfigError: it is no certificate.
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
    """Party, name and hosts in the alternative names of a certificate or of a request for one.

    Raises:
        ConfigError: they are not protofed's.
    """
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    party, _, name = uris[0].removeprefix(SCHEME).partition("/") if len(uris) == 1 else ("", "", "")
    if party not in set(Party) or not uris[0].startswith(SCHEME):
        raise ConfigError(
            f"{where} names nobody whom protofed knows; expected one alternative name such as {SCHEME}site/a, "
            "as `protofed certs request` writes it"
        )
    dns = names.get_values_for_type(x509.DNSName)
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return Party(party), check_id(party, name), (*dns, *addresses)


def signer(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> x509.Certificate | None:
    """Which of the authorities signed the certificate itself; there are none in between."""
    return next((one for one in authorities if is_authority(one) and _signed(certificate, one)), None)


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it may sign others: a CA by its basic constraints and by its key usage."""
    try:
        found = certificate.extensions
        constraints = found.get_extension_for_class(x509.BasicConstraints).value
        return constraints.ca and found.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except (x509.ExtensionNotFound, *UNREADABLE):
        return False


def has_usage(certificate: x509.Certificate, party: Party) -> bool:
    """Whether it is made for dialling (site, operator) or for answering (server)."""
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
