"""`protofed certs` as operators and sites type it, with a stand-in for the server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import pytest
import typer
from tests.support.command_line import called

from protofed.common.address import NO_TLS, IdentityChoice
from protofed.common.errors import UnavailableError
from protofed.common.pki.certificate import code
from protofed.common.pki.identity import Party, fingerprint, read_certificate, read_identity
from protofed.deploy.certs.lifecycle import install, make_authority, request, sign_request
from protofed.deploy.certs.request import read_request
from protofed.deploy.operator import connection

REVOKED = datetime(2030, 5, 1, 12, tzinfo=UTC)


@dataclass
class CertificateInfo:
    """A server's message about a certificate."""

    party: str
    name: str
    fingerprint: str
    not_before: float
    not_after: float
    revoked_at: float = 0.0
    reason: str = ""
    roles: Sequence[str] = ()


@dataclass
class OperatorStub:
    """What `certs` needs of an operator's connection."""

    address: str
    identity: IdentityChoice
    known: ClassVar[dict[str, CertificateInfo]] = {}
    dialled: ClassVar[list[tuple[str, IdentityChoice]]] = []
    down: ClassVar[bool] = False
    renewals: ClassVar[list[bool]] = []  # what each registration said

    def __enter__(self) -> OperatorStub:
        self.dialled.append((self.address, self.identity))
        if OperatorStub.down:
            raise UnavailableError(f"no server at {self.address}")
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def register(self, pem: str, roles: Sequence[str] = (), *, renewal: bool = False) -> CertificateInfo:
        one = read_certificate(pem.encode(), "pem")
        dates = one.not_before.timestamp(), one.not_after.timestamp()
        info = CertificateInfo(one.party, one.name, one.fingerprint, *dates, roles=roles or ["trainer"])
        self.known[one.fingerprint] = info
        self.renewals.append(renewal)
        return info

    def revoke(self, name_or_fingerprint: str, reason: str) -> list[CertificateInfo]:
        found = [one for one in self.known.values() if name_or_fingerprint in (one.name, one.fingerprint)]
        for one in found:
            one.revoked_at, one.reason = REVOKED.timestamp(), reason
        return found

    def certificates(self) -> list[CertificateInfo]:
        return list(self.known.values())


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> type[OperatorStub]:
    monkeypatch.setattr(connection, "Operator", OperatorStub)
    monkeypatch.setattr(OperatorStub, "known", {})
    monkeypatch.setattr(OperatorStub, "dialled", [])
    monkeypatch.setattr(OperatorStub, "down", False)
    monkeypatch.setattr(OperatorStub, "renewals", [])
    for name in ("PROTOFED_OPERATOR_SERVER", "PROTOFED_OPERATOR_IDENTITY"):
        monkeypatch.delenv(name, raising=False)
    return OperatorStub


@pytest.fixture
def certs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs `protofed certs` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        code, out, err = called(capfd, "certs", *arguments)
        assert "PRIVATE" not in out + err
        assert "Traceback" not in err
        return code, out, err

    return run


def done(answer: tuple[int, str, str]) -> str:
    code, out, err = answer
    assert code == 0, err
    return out


def refused(answer: tuple[int, str, str], *phrases: str, code: int = 78) -> None:
    assert answer[0] == code, answer
    for phrase in phrases:
        assert phrase in answer[2]


@pytest.fixture
def hospital(certs: Cli) -> Path:
    """A CA in `ca`, and a site in `a`."""
    authority = make_authority(Path("ca"))
    asked = read_request(request(Path("a"), Party.SITE, "hospital-a"), "request")
    install(Path("a"), sign_request(asked, authority))
    return Path("a")


def fingerprint_of(path: str) -> str:
    """The key's fingerprint, as the party reads it out."""
    return read_request(Path(path).read_bytes(), path).fingerprint


def signing(path: str, party: str, name: str, ca: str = "ca") -> tuple[str, ...]:
    """`sign` as typed by somebody who knows the party and has telephoned."""
    return ("sign", path, "--ca", ca, f"--{party}", name, "--fingerprint", fingerprint_of(path))


def known(folder: Path) -> dict[str, CertificateInfo]:
    """A site that a server has let in."""
    one = read_identity(folder, Party.SITE, datetime.now(UTC)).certificate
    dates = one.not_before.timestamp(), one.not_after.timestamp()
    return {one.fingerprint: CertificateInfo(one.party, one.name, one.fingerprint, *dates)}


def test_the_whole_way_of_a_site(server: type[OperatorStub], certs: Cli) -> None:
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "olga", "--operator", "olga"))
    done(certs(*signing("olga/operator-olga.request.pem", "operator", "olga")))
    done(certs("install", "olga/operator-olga.bundle.pem", "--identity", "olga"))
    done(certs("request", "--identity", "a", "--site", "hospital-a"))
    online = ("--server", "fl.example.org:7443", "--identity", "olga")
    done(certs(*signing("a/site-hospital-a.request.pem", "site", "hospital-a"), *online))
    done(certs("install", "a/site-hospital-a.bundle.pem", "--identity", "a"))
    found = read_identity(Path("a"), Party.SITE, datetime.now(UTC))
    assert server.dialled == [("fl.example.org:7443", Path("olga"))]
    assert list(server.known) == [found.certificate.fingerprint] == [fingerprint(found.certificate_pem)]


def test_requests_say_what_to_send_and_what_to_compare(certs: Cli) -> None:
    out = done(certs("request", "--identity", "s", "--server", "main", "--host", "fl.example.org", "--host", "::1"))
    assert "s/server-main.request.pem" in out
    key = next(line.removeprefix("key:").strip() for line in out.splitlines() if line.startswith("key:"))
    assert key == code(fingerprint_of("s/server-main.request.pem"))
    done(certs("init", "--ca", "ca"))
    told = done(certs(*signing("s/server-main.request.pem", "server-name", "main"), "--out", "answer.pem"))
    assert key in told
    assert "server 'main' fl.example.org ::1" in told
    assert "valid until" in told
    assert "needs no registration" in told
    told = done(certs("install", "answer.pem", "--identity", "s"))
    assert "valid until" in told
    assert "trusted: protofed CA" in told


def test_a_request_and_a_signature_are_for_one_party(certs: Cli) -> None:
    for given in ((), ("--site", "a", "--operator", "b")):
        refused(certs("request", "--identity", "a", *given), "expected exactly one of --site ID")
        assert not Path("a").exists()
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "a", "--site", "a"))
    for named in ((), ("--site", "a", "--server-name", "a"), ("--server", "h:1")):
        refused(certs("sign", "a/site-a.request.pem", "--ca", "ca", *named), "expected exactly one of --site ID")
    assert not list(Path("ca/issued").iterdir())


@pytest.mark.parametrize(
    ("asked", "hosts"), [(("operator", "a"), ()), (("site", "b"), ()), (("server", "a"), ("--host", "fl.example.org"))]
)
def test_a_request_that_is_for_somebody_else_is_not_signed(
    asked: tuple[str, str], hosts: tuple[str, ...], certs: Cli
) -> None:
    """What a hospital sends as its own may name an operator, another hospital or the server."""
    party, name = asked
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "x", f"--{party}", name, *hosts, "--out", "sent.pem"))
    refused(
        certs(*signing("sent.pem", "site", "a"), "--server", "127.0.0.1:7443", "--identity=none"),
        f"sent.pem is a request for {party} '{name}'; expected one for site 'a'",
    )
    assert not list(Path("ca/issued").iterdir())
    assert not OperatorStub.known


def test_the_key_is_the_one_that_was_read_out(certs: Cli) -> None:
    done(certs("init", "--ca", "ca"))
    out = done(certs("request", "--identity", "a", "--site", "a"))
    done(certs("request", "--identity", "evil", "--site", "a", "--out", "sent.pem"))
    read_out = next(line.removeprefix("key:").strip() for line in out.splitlines() if line.startswith("key:"))
    asked = ("sign", "sent.pem", "--ca", "ca", "--site", "a", "--fingerprint")
    refused(certs(*asked, read_out), "sent.pem has the key", code(fingerprint_of("sent.pem")), "do not sign")
    for malformed in ("", read_out[:9], read_out + " 00", "z" * 64):
        refused(certs(*asked, malformed), "expected four groups of four")
    assert not list(Path("ca/issued").iterdir())
    own = ("sign", "a/site-a.request.pem", "--ca", "ca", "--site", "a", "--fingerprint")
    done(certs(*own, read_out.lower().replace("-", " ")))
    digits = fingerprint_of("a/site-a.request.pem")
    grouped = ":".join(digits[at : at + 4] for at in range(0, 64, 4)).upper()
    done(certs(*own, f"SHA256:{grouped}", "--renewal"))


def test_roles_go_to_the_server_and_foreign_ones_are_refused_before_signing(
    certs: Cli, server: type[OperatorStub]
) -> None:
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "eva", "--site", "eva"))
    asked, online = (
        signing("eva/site-eva.request.pem", "site", "eva"),
        ("--server", "127.0.0.1:7443", "--identity=none"),
    )
    refused(certs(*asked, *online, "--role", "operator"), "role 'operator' is none of a site")
    assert not list(Path("ca/issued").iterdir())
    out = done(certs(*asked, *online, "--role", "evaluator", "--role", "trainer"))
    assert "registered at 127.0.0.1:7443 as trainer and evaluator: certificate of site 'eva'" in out
    done(certs("register", "eva/site-eva.bundle.pem", "--role", "evaluator", *online))
    [row] = json.loads(done(certs("list", "--json", *online)))
    assert row["roles"] == ["evaluator"]
    assert "evaluator" in done(certs("list", *online))
    refused(certs("register", "eva/site-eva.bundle.pem", "--role", "spy", *online), "role 'spy' is none of a site")
    done(certs("request", "--identity", "olga", "--operator", "olga"))
    done(certs(*signing("olga/operator-olga.request.pem", "operator", "olga"), *online))
    assert [list(one.roles) for one in server.known.values()] == [["evaluator"], ["operator"]]
    assert server.renewals == [False] * 3


def test_nothing_is_signed_unless_somebody_compared(certs: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "a", "--site", "a"))
    asked = ("sign", "a/site-a.request.pem", "--ca", "ca", "--site", "a")
    refused(certs(*asked), "no terminal to ask on", "--fingerprint")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    right = code(fingerprint_of("a/site-a.request.pem"))
    wrong = right[:5] + ("0" if right[5] != "0" else "1") + right[6:]
    monkeypatch.setattr(typer, "prompt", Typist([wrong, "what?", wrong]))
    refused(certs(*asked), "group 2 differs")
    monkeypatch.setattr(typer, "prompt", Typist([]))
    assert certs(*asked)[0] == 1
    assert not list(Path("ca/issued").iterdir())
    monkeypatch.setattr(typer, "prompt", Typist([wrong, right]))
    done(certs(*asked))
    assert len(list(Path("ca/issued").iterdir())) == 1


@dataclass
class Typist:
    """Types these answers, then presses Ctrl-C."""

    answers: list[str]

    def __call__(self, question: str, *, err: bool) -> str:
        assert err
        assert "telephone" in question
        if not self.answers:
            raise typer.Abort
        return self.answers.pop(0)


def test_a_renewal_and_its_installation(hospital: Path, server: type[OperatorStub], certs: Cli) -> None:
    before = read_identity(hospital, Party.SITE, datetime.now(UTC))
    assert "--renewal" in done(certs("request", "--renew", "--identity", "a", "--out", "again.pem"))
    asked = (*signing("again.pem", "site", "hospital-a"), "--days", 30, "--out", "bundle.pem")
    refused(certs(*asked), "--renewal")
    online = ("--server", "127.0.0.1:7443", "--identity=none")
    done(certs(*asked, "--renewal", *online))
    assert server.renewals == [True]
    done(certs("install", "bundle.pem", "--identity", "a"))
    after = read_identity(hospital, Party.SITE, datetime.now(UTC))
    assert after.key_pem != before.key_pem
    assert after.certificate.not_after < before.certificate.not_after


def test_another_ca_must_be_meant(hospital: Path, certs: Cli) -> None:
    done(certs("init", "--ca", "ca2", "--name", "second"))
    done(certs("request", "--renew", "--identity", "a", "--out", "again.pem"))
    done(certs(*signing("again.pem", "site", "hospital-a", "ca2"), "--also", "ca/ca.pem", "--out", "b.pem"))
    refused(certs("install", "b.pem", "--identity", "a"), "changes which CAs", "new: second ", "--new-ca")
    assert "trusted: second " in done(certs("install", "b.pem", "--identity", "a", "--new-ca"))


def test_a_server_that_is_down_leaves_a_bundle_to_register_later(
    certs: Cli, server: type[OperatorStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    done(certs("init", "--ca", "ca"))
    done(certs("request", "--identity", "a", "--site", "a"))
    monkeypatch.setattr(server, "down", True)
    online = ("--server", "127.0.0.1:7443", "--identity=none")
    answer = certs(*signing("a/site-a.request.pem", "site", "a"), "--role", "evaluator", "--renewal", *online)
    command = "protofed certs register a/site-a.bundle.pem --role evaluator --renewal"
    refused(answer, "not registered: no server", command, code=69)
    monkeypatch.setattr(server, "down", False)
    assert "registered at 127.0.0.1:7443" in done(certs("register", "a/site-a.bundle.pem", *online))
    assert [one.name for one in server.known.values()] == ["a"]
    assert server.dialled[-1] == ("127.0.0.1:7443", NO_TLS)


def test_a_revocation_is_shown_with_its_reason(hospital: Path, certs: Cli) -> None:
    online = ("--server", "fl.example.org:7443", "--identity", "olga")
    OperatorStub.known.update(known(hospital))
    out = done(certs("revoke", "hospital-a", "--reason", "laptop stolen", *online))
    assert out.startswith("revoked: site 'hospital-a', fingerprint ")
    assert "laptop stolen" in out
    [row] = json.loads(done(certs("list", "--json", *online)))
    assert row["revoked"] == "2030-05-01T12:00:00Z: laptop stolen"
    assert row["fingerprint"] == read_identity(hospital, Party.SITE, datetime.now(UTC)).certificate.fingerprint


def test_what_a_command_lacks_is_named(certs: Cli, tmp_path: Path) -> None:
    refused(certs("revoke", "a", "--reason", "x"), "expected --server host:port")
    refused(certs("revoke", "a", "--server", "127.0.0.1:1"), "--reason", code=2)
    refused(certs("list"), "expected --identity FOLDER, --ca FOLDER, or --server")
    refused(certs("list", "--ca", tmp_path), "ca.pem", "No such file")
    refused(certs("list", "--identity", tmp_path), "cert.pem", "No such file")
    (tmp_path / "long.pem").write_bytes(b"x" * (300 << 10))
    refused(certs("install", "long.pem", "--identity", "a"), "long.pem is longer than 256 KiB")


def test_lists_of_a_folder_and_of_a_ca(hospital: Path, server: type[OperatorStub], certs: Cli) -> None:
    own = json.loads(done(certs("list", "--identity", "a", "--json")))
    assert [(row["party"], row["days_left"]) for row in own] == [("site", 364), ("ca", 3649)]
    signed = json.loads(done(certs("list", "--ca", "ca", "--json")))
    assert [row["party"] for row in signed] == ["ca", "site"]
    shown = done(certs("list", "--identity", "a"))
    for row in own:
        assert row["key_code"] == code(row["key_fingerprint"])
        assert row["key_code"] in shown
        assert row["not_after"][:10] in shown
    assert own[0]["key_fingerprint"] == signed[1]["key_fingerprint"]
    assert own[0]["fingerprint"][:16] not in shown
    assert server.dialled == [], "no server is asked for what is in a folder"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_dates_and_codes_are_whole_on_a_narrow_terminal(
    columns: int, hospital: Path, certs: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = json.loads(done(certs("list", "--ca", "ca", "--json")))
    shown = done(certs("list", "--ca", "ca"))
    for row in rows:
        assert row["not_after"][:10] in shown
        assert row["key_code"] in shown
        assert f" {row['days_left']}\n" in shown
    OperatorStub.known.update(known(hospital))
    online = ("--server", "127.0.0.1:7443", "--identity=none")
    assert rows[1]["fingerprint"][:16] in done(certs("list", *online)), "what `revoke` takes"


def test_the_coordinators_identities_are_made_with_the_ca(certs: Cli) -> None:
    named = ("--server-name", "hub", "--host", "hub.example", "--operator", "ada")
    made = json.loads(done(certs("init", "--ca", "ca", *named, "--json")))
    now = datetime.now(UTC)
    server, operator = (
        read_identity(Path("identity"), Party.SERVER, now),
        read_identity(Path("operator"), Party.OPERATOR, now),
    )
    assert server.certificate.hosts == ("hub.example",)
    assert Path("identity/operators/ada.pem").read_bytes() == operator.certificate_pem
    assert [one["fingerprint"] for one in made["issued"]] == [
        server.certificate.fingerprint,
        operator.certificate.fingerprint,
    ]
    assert not list(Path("identity/operators").glob("*key*")), "a key stays where it is used"
    assert Path("ca/ca-key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--server-name", "hub"), "give --host"),
        (("--host", "hub.example"), "--server-name"),
        (("--operator", "Ada Lovelace"), "is no id"),
        (("--server-name", "hub", "--host", "hub.example", "--identity", "a"), "a has a certificate already"),
        (
            ("--server-name", "hub", "--host", "hub.example", "--operator", "ada", "--identity", "operator"),
            "a folder of its own",
        ),
    ],
)
def test_a_ca_is_not_made_unless_all_that_was_asked_for_can_be(
    given: tuple[str, ...], said: str, hospital: Path, certs: Cli
) -> None:
    refused(certs("init", "--ca", "new", *given), said)
    assert not Path("new").exists()


def test_a_party_of_the_cas_own_machine_in_one_step(certs: Cli, server: type[OperatorStub]) -> None:
    done(certs("init", "--ca", "ca"))
    own = ("issue", "--ca", "ca", "--site", "eva", "--identity", "eva", "--role", "evaluator")
    server_at = ("--server", "127.0.0.1:7443")
    online = (*server_at, "--operator-identity=none")
    refused(certs(*own[:-1], "operator"), "role 'operator' is none of a site")
    assert not Path("eva").exists()
    server.down = True
    refused(certs(*own, *online), "`protofed certs register eva/cert.pem --role evaluator`", code=69)
    server.down = False
    done(certs("register", "eva/cert.pem", "--role", "evaluator", *server_at, "--identity=none"))
    refused(certs(*own, *online), "eva has a certificate already")
    [known] = server.known.values()
    assert known.fingerprint == read_identity(Path("eva"), Party.SITE, datetime.now(UTC)).certificate.fingerprint
    assert list(known.roles) == ["evaluator"]
    refused(certs("issue", "--ca", "ca", "--site", "eva", "--identity", "two"), "--renewal")


def test_an_issued_identity_comes_with_its_next_step(certs: Cli) -> None:
    """Also the way on after an interrupted `init`, whose CA is there and whose operator no server accepts yet."""
    done(certs("init", "--ca", "ca"))
    issue = ("issue", "--ca", "ca")
    assert "certs register eva/cert.pem --server host:port" in done(certs(*issue, "--site", "eva", "--identity", "eva"))
    told = done(certs(*issue, "--operator", "ada", "--identity", "operator"))
    assert "certs register operator/cert.pem --server host:port --role operator" in told
    hub = ("--server-name", "hub", "--host", "hub.example", "--identity", "hub")
    assert "needs no registration" in done(certs(*issue, *hub))


def test_an_installation_compares_the_code_of_every_ca(certs: Cli) -> None:
    done(certs("init", "--ca", "ca"))
    done(certs("init", "--ca", "ca2"))
    codes = [json.loads(done(certs("list", "--ca", ca, "--json")))[0]["key_code"] for ca in ("ca", "ca2")]
    done(certs("request", "--identity", "a", "--site", "a"))
    asked = signing("a/site-a.request.pem", "site", "a")
    assert codes[0] in done(certs(*asked, "--also", "ca2/ca.pem", "--out", "b.pem"))
    refused(certs("install", "b.pem", "--identity", "a", "--ca-code", codes[0]), codes[1], "do not install it")
    assert not Path("a/cert.pem").exists()
    out = done(certs("install", "b.pem", "--identity", "a", "--ca-code", codes[0].lower(), "--ca-code", codes[1]))
    assert all(one in out for one in codes)


def test_what_a_program_reads_has_the_hexadecimal_digits(certs: Cli, server: type[OperatorStub]) -> None:
    made = json.loads(done(certs("init", "--ca", "ca", "--json")))
    asked = json.loads(done(certs("request", "--identity", "a", "--site", "a", "--json")))
    assert asked["key_code"] == code(asked["key_fingerprint"])
    assert (asked["party"], asked["name"], asked["request"]) == ("site", "a", "a/site-a.request.pem")
    online = ("--server", "127.0.0.1:7443", "--identity=none")
    signed = json.loads(done(certs(*signing(asked["request"], "site", "a"), *online, "--json")))
    assert signed["key_fingerprint"] == asked["key_fingerprint"]
    assert (signed["registered"], signed["bundle"]) == (["trainer"], "a/site-a.bundle.pem")
    assert signed["authorities"][0]["key_fingerprint"] == made["key_fingerprint"]
    again = json.loads(done(certs("register", signed["bundle"], *online, "--json")))
    installed = json.loads(done(certs("install", signed["bundle"], "--identity", "a", "--json")))
    assert again["fingerprint"] == installed["fingerprint"] == signed["fingerprint"]
    renewed = json.loads(done(certs("request", "--renew", "--identity", "a", "--json")))
    assert renewed["key_fingerprint"] != asked["key_fingerprint"]
    revoked = json.loads(done(certs("revoke", "a", "--reason", "x", *online, "--json")))
    assert [one["fingerprint"] for one in revoked["revoked"]] == [signed["fingerprint"]]


def test_a_ca_with_a_passphrase(certs: Cli, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("open sesame\n", encoding="utf-8")
    (tmp_path / "empty").write_text("", encoding="utf-8")
    refused(certs("init", "--ca", "ca", "--passphrase-file", "empty"), "empty is empty; expected the passphrase")
    refused(certs("init", "--ca", "ca", "--passphrase-file", "none"), "cannot read none")
    out = done(certs("init", "--ca", "ca", "--passphrase-file", "word"))
    assert "not encrypted" not in out
    assert "sesame" not in out
    done(certs("request", "--identity", "a", "--site", "a"))
    asked = signing("a/site-a.request.pem", "site", "a")
    refused(certs(*asked), "is encrypted; give --passphrase-file")
    done(certs(*asked, "--passphrase-file", "word"))


def test_a_ca_is_never_overwritten(certs: Cli) -> None:
    assert "not encrypted" in done(certs("init", "--ca", "ca"))
    refused(certs("init", "--ca", "ca"), "ca has a CA already")
    Path("ca/ca.pem").unlink()
    refused(certs("init", "--ca", "ca"), "lacks its certificate ca.pem", "ca/ca-key.pem")
    refused(certs("sign", "none.pem", "--ca", "ca", "--site", "a"), "cannot read none.pem: No such file")


def test_a_folder_that_cannot_be_made_or_entered_is_named(certs: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").touch()
    refused(certs("request", "--site", "north", "--identity", "file/north"), "file/north", "a folder of yours", code=74)
    refused(certs("init", "--ca", "file/ca"), "file/ca", "a folder of yours", code=74)

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", closed)
    refused(certs("request", "--site", "north", "--identity", "theirs"), "theirs: Permission denied", code=74)
