"""From a request to a handshake: what the CA signs, what it refuses, and what installing leaves at every instant."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.pki import key_pem

from protofed.common.errors import ConfigError
from protofed.common.pki.identity import Party
from protofed.deploy.certs import files, lifecycle
from protofed.deploy.certs.lifecycle import Authority, make_authority
from protofed.deploy.certs.request import read_request

NOW = datetime.now(UTC).replace(microsecond=0)
HOSTNAME_MISMATCH, UNKNOWN_ISSUER, WRONG_PURPOSE = 62, 20, 26  # of X509_V_ERR_* in openssl/x509_vfy.h
RSA_512 = b"""-----BEGIN CERTIFICATE REQUEST-----
MIH1MIGgAgEAMAwxCjAIBgNVBAMMAWEwXDANBgkqhkiG9w0BAQEFAANLADBIAkEA
y6ibv5vZg9pdkSLv7/+relcYuKZcgaWdBugfnUkf7wmp7Uequ3Z6yb4x9/xkS9tp
UwnuM9j2cKrFWef9t9k+uwIDAQABoC8wLQYJKoZIhvcNAQkOMSAwHjAcBgNVHREE
FTAThhFwcm90b2ZlZDovL3NpdGUvYTANBgkqhkiG9w0BAQsFAANBAIGdrOkvZLB0
Jg2IwMw7tUdOda8GWFuJT0VZRQBg68sGt94Ow7MT0K23+pcXvDhO9HhRV7KYOXnM
WusN2Ls5Hhs=
-----END CERTIFICATE REQUEST-----
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority") / "ca")


def approved(asked: bytes, authority: Authority, days: int = 365) -> bytes:
    return lifecycle.sign_request(read_request(asked, "request"), authority, days, renewal=True)


def joined(folder: Path, authority: Authority, party: Party = Party.SITE, name: str = "a") -> Path:
    """An identity folder, made as users make theirs."""
    hosts = ("localhost", "127.0.0.1") if party is Party.SERVER else ()
    lifecycle.install(folder, approved(lifecycle.request(folder, party, name, hosts), authority))
    return folder


def custom(uri: str, *names: x509.GeneralName, key: ec.EllipticCurvePrivateKey | None = None) -> bytes:
    """A request that protofed itself would not make."""
    all_names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri), *names])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=3), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signer = key or ec.generate_private_key(ec.SECP256R1())
    return builder.add_extension(all_names, critical=False).sign(signer, SHA256()).public_bytes(Encoding.PEM)


def shake_hands(server: Path, client: Path, host: str) -> dict[str, dict[str, object]]:
    """A TLS 1.3 handshake in memory, by another library; what each end says of the other."""
    wires = {"up": ssl.MemoryBIO(), "down": ssl.MemoryBIO()}
    contexts = {"server": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "client": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    for folder, context in zip((server, client), contexts.values(), strict=True):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        context.load_verify_locations(folder / "ca.pem")
    ends = {
        "client": contexts["client"].wrap_bio(wires["down"], wires["up"], server_hostname=host),
        "server": contexts["server"].wrap_bio(wires["up"], wires["down"], server_side=True),
    }
    for end in (*ends.values(), *ends.values()):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return {name: dict(end.getpeercert() or {}) for name, end in ends.items()}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("party", [Party.SITE, Party.OPERATOR])
def test_what_was_issued_shakes_hands_in_another_library(
    party: Party, host: str, authority: Authority, tmp_path: Path
) -> None:
    server = joined(tmp_path / "server", authority, Party.SERVER, "main")
    seen = shake_hands(server, joined(tmp_path / "client", authority, party, "hospital-a"), host)
    assert ("URI", f"protofed://{party}/hospital-a") in seen["server"]["subjectAltName"]  # type: ignore[operator]
    assert ("DNS", "localhost") in seen["client"]["subjectAltName"]  # type: ignore[operator]


def test_another_library_refuses_another_ca_another_host_and_another_use(authority: Authority, tmp_path: Path) -> None:
    server = joined(tmp_path / "server", authority, Party.SERVER, "main")
    client = joined(tmp_path / "client", authority)
    stranger = joined(tmp_path / "stranger", make_authority(tmp_path / "other"))
    (stranger / "ca.pem").write_bytes(authority.pem)
    with pytest.raises(ssl.SSLCertVerificationError) as host:
        shake_hands(server, client, "example.org")
    with pytest.raises(ssl.SSLCertVerificationError) as issuer:
        shake_hands(server, stranger, "localhost")
    with pytest.raises(ssl.SSLCertVerificationError) as purpose:
        shake_hands(server, server, "localhost")
    codes = [error.value.verify_code for error in (host, issuer, purpose)]
    assert codes == [HOSTNAME_MISMATCH, UNKNOWN_ISSUER, WRONG_PURPOSE]


def test_keys_are_for_their_owner_only_and_leave_in_no_file(authority: Authority, tmp_path: Path) -> None:
    asked = lifecycle.request(tmp_path / "a", Party.SITE, "a")
    bundle = approved(asked, authority)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert (authority.folder / "ca-key.pem").stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE KEY" not in asked + bundle
    assert "PRIVATE" not in repr(authority)
    assert "key=" not in repr(authority)


def test_the_ca_decides_usage_and_dates_and_keeps_a_copy(authority: Authority) -> None:
    bundle = lifecycle.read_bundle(approved(custom("protofed://site/a"), authority, days=10), "bundle")
    made = x509.load_pem_x509_certificate(bundle.certificate_pem)
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usages = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert timedelta(days=9, hours=23) < bundle.certificate.not_after - datetime.now(UTC) <= timedelta(days=10)
    assert bundle.certificate.not_before < datetime.now(UTC), "clocks that are a little late see it as valid"
    copy = authority.folder / "issued" / f"site-a-{bundle.certificate.fingerprint[:16]}.pem"
    assert copy.read_bytes() == bundle.certificate_pem


def test_a_name_with_a_valid_certificate_gets_another_as_a_renewal_only(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca", now=NOW)
    asked = read_request(lifecycle.request(tmp_path / "a", Party.SITE, "a"), "request")
    other = read_request(lifecycle.request(tmp_path / "b", Party.SITE, "a-1"), "request")
    lifecycle.sign_request(asked, authority, days=30, now=NOW)
    with pytest.raises(ConfigError, match=r"site 'a' that is valid until .*--renewal"):
        lifecycle.sign_request(asked, authority, now=NOW + timedelta(days=29))
    lifecycle.sign_request(other, authority, now=NOW)  # another name, though it begins alike
    assert len(list((tmp_path / "ca" / "issued").iterdir())) == 2
    lifecycle.sign_request(asked, authority, now=NOW + timedelta(days=31))


def test_nothing_outlives_its_ca(tmp_path: Path) -> None:
    short = make_authority(tmp_path / "ca", days=5)
    made = lifecycle.read_bundle(approved(custom("protofed://site/a"), short), "bundle").certificate
    assert made.not_after == short.certificate.not_valid_after_utc
    request = read_request(custom("protofed://site/a"), "request")
    for off in (-timedelta(days=1), timedelta(days=6)):  # a clock that is wrong, and a CA that has ended
        with pytest.raises(ConfigError, match=r"the CA in .* is valid from .* until .*certs init"):
            lifecycle.sign(short, request, 1, datetime.now(UTC) + off)


def changed_signature() -> bytes:
    der = x509.load_pem_x509_csr(custom("protofed://site/a")).public_bytes(Encoding.DER)
    der = der.replace(b"protofed://site/a", b"protofed://site/b")
    return ssl.DER_cert_to_PEM_cert(der).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()


BAD_REQUESTS: list[tuple[str, bytes | Callable[[], bytes], str]] = [
    ("garbage", b"\0\xff\xfe", "cannot be read as a request"),
    ("empty", b"", "cannot be read as a request"),
    ("RSA", RSA_512, "the key is a .*RSAPublicKey of 512 bits; expected ECDSA P-256"),
    ("other curve", lambda: custom("protofed://site/a", key=ec.generate_private_key(ec.SECP384R1())), "384 bits"),
    ("changed", changed_signature, "not signed by its own key: it was changed"),
    ("path", lambda: custom("protofed://site/../../x"), "is no id"),
    ("nobody", lambda: custom("https://example.org"), "names nobody whom protofed knows"),
    ("CA", lambda: custom("protofed://ca/a"), "names nobody whom protofed knows"),
    ("hosts of a site", lambda: custom("protofed://site/a", x509.DNSName("example.org")), "a site has no hosts"),
    ("no hosts", lambda: custom("protofed://server/a"), "give --host"),
    ("wildcard", lambda: custom("protofed://server/a", x509.DNSName("*.example.org")), "neither a DNS name nor"),
    ("mail", lambda: custom("protofed://site/a", x509.RFC822Name("a@example.org")), "names more than a site has"),
    ("key", lambda: custom("protofed://site/a") + key_pem(ec.generate_private_key(ec.SECP256R1())), "private key"),
]


@pytest.mark.parametrize(("data", "said"), [case[1:] for case in BAD_REQUESTS], ids=[case[0] for case in BAD_REQUESTS])
def test_a_request_that_cannot_be_signed_says_why(data: bytes | Callable[[], bytes], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        read_request(data if isinstance(data, bytes) else data(), "request.pem")
    assert str(found.value).startswith(("request.pem", "site", "a ", "host "))
    assert "BEGIN" not in str(found.value)


@pytest.mark.parametrize("host", ["", "fl.example.org:7443", "-a", "a..b", "a" * 64, "1.2.3.400", "ä.org", "a b"])
def test_a_host_that_is_none_is_refused_before_a_key_is_made(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a DNS name nor an address"):
        lifecycle.request(tmp_path / "s", Party.SERVER, "main", [host])
    assert not (tmp_path / "s").exists()


def test_hosts_are_taken_once_and_a_ca_is_made_once(authority: Authority, tmp_path: Path) -> None:
    asked = lifecycle.request(tmp_path, Party.SERVER, "main", ["FL.example.org", "fl.example.org", "2001:DB8:0::7"])
    assert read_request(asked, "request").hosts == ("fl.example.org", "2001:db8::7")
    with pytest.raises(ConfigError, match="has a CA already"):
        make_authority(authority.folder)


def test_a_key_is_asked_for_again_and_with_a_certificate_renewed_not_replaced(
    tmp_path: Path, authority: Authority
) -> None:
    first, second = (read_request(lifecycle.request(tmp_path, Party.SITE, "a"), "request") for _ in range(2))
    assert first.fingerprint == second.fingerprint
    key = (joined(tmp_path, authority) / "key.pem").read_bytes()
    with pytest.raises(ConfigError, match="has a certificate already; `protofed certs request --renew --identity"):
        lifecycle.request(tmp_path, Party.SITE, "a")
    assert (tmp_path / "key.pem").read_bytes() == key


def test_a_ca_with_a_passphrase_needs_it(tmp_path: Path) -> None:
    made = make_authority(tmp_path, passphrase=b"open sesame")
    assert files.is_encrypted(tmp_path / "ca-key.pem")
    assert lifecycle.read_authority(tmp_path, b"open sesame").pem == made.pem
    for wrong in (None, b"closed"):
        with pytest.raises(ConfigError, match="its passphrase is missing, wrong or not needed") as found:
            lifecycle.read_authority(tmp_path, wrong)
        assert "sesame" not in str(found.value)


def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path) -> None:
    make_authority(tmp_path)
    (tmp_path / "ca-key.pem").chmod(0o644)
    with pytest.raises(ConfigError, match=r"mode 0644\); expected 0600: `chmod 600"):
        lifecycle.read_authority(tmp_path)
