"""Certificate signing requests (CSR): a party makes one, the operator of the CA checks and signs it."""

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
from protofed.common.pki.certificate import SCHEME, UNREADABLE, Party, code, differences, read_names
from protofed.deploy.certs.files import key_code, key_fingerprint, refuse_keys

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!\d+$){_LABEL}")
KINDS = (x509.UniformResourceIdentifier, x509.DNSName, x509.IPAddress)


@dataclass(frozen=True)
class Request:
    """All that the CA adopts from a request; it decides usages and dates itself, whatever the request says.

    Attributes:
        hosts: a server's DNS names and IP addresses; empty for other parties.
    """

    party: Party
    name: str
    hosts: tuple[str, ...]
    key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        """The public key's fingerprint, 64 hexadecimal digits."""
        return key_fingerprint(self.key)

    @property
    def code(self) -> str:
        """The public key's short code, to be compared over the telephone."""
        return code(self.fingerprint)

    @property
    def names(self) -> x509.SubjectAlternativeName:
        """Party, name and hosts as a certificate's subject alternative names."""
        return alternative_names(self.party, self.name, self.hosts)


def make_request(party: Party, name: str, hosts: Sequence[str], key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request as PEM text, signed by the key that it is for.

    Raises:
        ConfigError: the name is no id, or the hosts are invalid.
    """
    checked = check_hosts(party, hosts)
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(check_id(party, name)))
    request = builder.add_extension(alternative_names(party, name, checked), critical=False).sign(key, SHA256())
    header = f"protofed: request for a certificate of {party} '{name}'\nkey: {key_code(key.public_key())}\n"
    return header.encode() + request.public_bytes(Encoding.PEM)


def read_request(pem: bytes, where: str) -> Request:
    """Parse a request and check it; `where` names it in errors.

    Raises:
        ConfigError: it is no request, its signature is wrong, its key is not ECDSA P-256, or it names no party.
    """
    refuse_keys(pem, where)
    try:
        csr = x509.load_pem_x509_csr(pem)
        signed, key = csr.is_signature_valid, csr.public_key()
        names = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:  # `read_names` below refuses it in its own words
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


def check_addressee(request: Request, party: Party, name: str, where: str) -> None:
    """Check that a request is for whom its signer means, since whoever sent it wrote the name into it.

    Raises:
        ConfigError: it is for another party or name.
    """
    if (request.party, request.name) != (party, check_id(party, name)):
        raise ConfigError(
            f"{where} is a request for {request.party} '{request.name}'; expected one for {party} '{name}': do not "
            "sign it, and ask who sent it"
        )


def check_key(request: Request, expected: str, where: str) -> None:
    """Check that a request has the key whose code, or fingerprint, its party read out.

    Raises:
        ConfigError: it has another one, or `expected` is neither.
    """
    if not (different := differences(expected, request.fingerprint)):
        return
    groups = f"{'group' if len(different) == 1 else 'groups'} {', '.join(map(str, different))}"
    raise ConfigError(
        f"{where} has the key {request.code}, but the party read out {short(expected)}: {groups} differ"
        f"{'s' if len(different) == 1 else ''}. Let the party read the code again. If any group still differs, do not "
        "sign: somebody else made the request, or the party made a newer one"
    )


def check_hosts(party: Party, hosts: Sequence[str]) -> tuple[str, ...]:
    """A server's hosts in lower case, without duplicates; empty for other parties.

    Raises:
        ConfigError: a server has no host, another party has some, or a host is neither a DNS name nor an IP address.
    """
    if party is not Party.SERVER and hosts:
        raise ConfigError(f"a {party} has no hosts; only a server's certificate names them")
    if party is Party.SERVER and not hosts:
        raise ConfigError("a server's certificate names its hosts; give --host, such as fl.example.org, for each")
    return tuple(dict.fromkeys(_host(host) for host in hosts))


def alternative_names(party: Party, name: str, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Subject alternative names: party and name as a URI, then the hosts."""
    uri = x509.UniformResourceIdentifier(f"{SCHEME}{party}/{name}")
    return x509.SubjectAlternativeName([uri, *(_general(host) for host in hosts)])


def subject(name: str) -> x509.Name:
    """The subject, which only people read: programs take party and name from the alternative names."""
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
