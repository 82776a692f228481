"""Requests for a certificate (CSR): a party makes one, the operator of the CA reads it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from protofed.common.errors import ConfigError, short
from protofed.common.ids import check_id
from protofed.common.pki.certificate import SCHEME, UNREADABLE, Party, read_names
from protofed.deploy.certs.files import key_fingerprint, refuse_keys

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")
KINDS = (x509.UniformResourceIdentifier, x509.DNSName, x509.IPAddress)


@dataclass(frozen=True)
class Request:
    """All that the CA takes from a request; usages and dates are its own to decide.

    Attributes:
        hosts: DNS names and IP addresses, of a server only.
    """

    party: Party
    name: str
    hosts: tuple[str, ...]
    key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        """The public key's, to be compared over the telephone."""
        return key_fingerprint(self.key)

    @property
    def names(self) -> x509.SubjectAlternativeName:
        """As they stand in a certificate."""
        return alternative_names(self.party, self.name, self.hosts)


def make_request(party: Party, name: str, hosts: Sequence[str], key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request as PEM text, signed by the key that it is for.

    Raises:
        ConfigError: the name is no id, or the hosts are none.
    """
    checked = check_hosts(party, hosts)
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(check_id(party, name)))
    made = builder.add_extension(alternative_names(party, name, checked), critical=False).sign(key, SHA256())
    told = f"protofed: request for a certificate of {party} '{name}'\nkey: {key_fingerprint(key.public_key())}\n"
    return told.encode() + made.public_bytes(Encoding.PEM)


def read_request(pem: bytes, where: str) -> Request:
    """A request, checked.

    Raises:
        ConfigError: it is none, its signature is wrong, its key is no ECDSA P-256 key, or it names nobody.
    """
    refuse_keys(pem, where)
    try:
        found = x509.load_pem_x509_csr(pem)
        signed, key = found.is_signature_valid, found.public_key()
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    except UNREADABLE as error:
        raise ConfigError(
            f"{where} cannot be read as a request; expected what `protofed certs request` wrote"
        ) from error
    if not signed:
        raise ConfigError(f"{where}: the request is not signed by its own key: it was changed; ask for it again")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        kind = f"{type(key).__name__} of {getattr(key, 'key_size', '?')} bits"
        raise ConfigError(f"{where}: the key is a {kind}; expected ECDSA P-256, as `protofed certs request` makes it")
    party, name, hosts = read_names(names, where)
    if not all(isinstance(name, KINDS) for name in names):
        raise ConfigError(f"{where} names more than a {party} has; expected what `protofed certs request` wrote")
    return Request(party, name, check_hosts(party, hosts), key)


def check_hosts(party: Party, hosts: Sequence[str]) -> tuple[str, ...]:
    """A server's hosts, in lower case and each once; nobody else has any.

    Raises:
        ConfigError: a server has none, another party has some, or one is neither a DNS name nor an address.
    """
    if party is not Party.SERVER and hosts:
        raise ConfigError(f"a {party} has no hosts; only a server's certificate names them")
    if party is Party.SERVER and not hosts:
        raise ConfigError("a server's certificate names its hosts; give --host, such as fl.example.org, for each")
    return tuple(dict.fromkeys(_host(host) for host in hosts))


def alternative_names(party: Party, name: str, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Party and name as a URI, then the hosts."""
    uri = x509.UniformResourceIdentifier(f"{SCHEME}{party}/{name}")
    return x509.SubjectAlternativeName([uri, *(_general(host) for host in hosts)])


def subject(name: str) -> x509.Name:
    """For eyes only: who it is stands in the alternative names."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if _DNS.fullmatch(host.lower()):
            return host.lower()
    raise ConfigError(
        f"host {short(host)!r} is neither a DNS name nor an address; expected fl.example.org or 192.0.2.7, "
        "without port and wildcard"
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
