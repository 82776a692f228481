"""A site's identity for secure sums, tied to its certificate: the certificate's key signs the site and the identity.

The identity outlives certificates, which are renewed; who has pinned it needs the endorsement no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from protofed.common.errors import ConfigError, SecureSumError
from protofed.common.payload import SiteId
from protofed.common.pki.certificate import Party, has_usage, load, read_certificate, signer
from protofed.common.pki.identity import Identity

_PURPOSE = b"protofed secure sum identity"


@dataclass(frozen=True)
class Endorsement:
    """A site's certificate, PEM, and the signature by its key; both public."""

    certificate: bytes
    signature: bytes


def endorsed(identity: Identity, key: bytes) -> Endorsement:
    """The site's endorsement of its identity for sums. ECDSA draws at random: other bytes at each call.

    Args:
        key: public half of the identity, Ed25519, raw.

    Raises:
        ConfigError: the certificate's key is not of an elliptic curve.
    """
    private = load_pem_private_key(identity.key_pem, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"the key of the {identity.certificate} cannot endorse this site's identity for secure sums: expected one "
            "of an elliptic curve, as `protofed certs request` makes it"
        )
    signature = private.sign(_statement(identity.certificate.name, key), ec.ECDSA(SHA256()))
    return Endorsement(identity.certificate_pem, signature)


def check_endorsement(endorsement: Endorsement, site: SiteId, key: bytes, authorities: bytes, now: datetime) -> None:
    """Check that the holder of a site's certificate has said that this is the site's identity.

    Args:
        key: as of `endorsed`.
        authorities: the CAs that this site trusts, PEM.

    Raises:
        SecureSumError: the certificate is not that site's, not valid now or of another CA; or its key did not sign.
    """
    try:
        certificate = read_certificate(endorsement.certificate, f"the certificate in the name of {site}")
        x509 = load(endorsement.certificate, "certificate")[0]
        trusted = signer(x509, load(authorities, "ca.pem")) is not None
    except ConfigError as error:
        raise _unendorsed(site, str(error)) from error
    if (certificate.party, certificate.name) != (Party.SITE, site) or not has_usage(x509, Party.SITE):
        raise _unendorsed(site, f"it comes with the {certificate}")
    if not trusted or not certificate.not_before <= now <= certificate.not_after:
        raise _unendorsed(site, f"the {certificate} is of another CA than this site's, or not valid now")
    public = x509.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise _unendorsed(site, "its certificate's key is not of an elliptic curve")
    try:
        public.verify(endorsement.signature, _statement(site, key), ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise _unendorsed(site, "its certificate's key did not sign it") from error


def _statement(site: SiteId, key: bytes) -> bytes:
    return b"\0".join((_PURPOSE, site.encode(), key))  # no site's id has a zero byte, and keys have one length


def _unendorsed(site: SiteId, why: str) -> SecureSumError:
    return SecureSumError("unendorsed", f"the identity in the name of {site} is not endorsed by that site: {why}")
