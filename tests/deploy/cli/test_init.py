"""`client init` and `server init`: what they write can be used, is closed to others, and takes nobody's file away."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.support.command_line import Answers, called

from protofed.client.policy.policy import Policy
from protofed.common.config.data import SOURCES
from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.common.pki.identity import Party, read_identity
from protofed.common.protocol.messages import Role
from protofed.deploy import shipped
from protofed.deploy.certs import files as certs_files
from protofed.deploy.certs.lifecycle import make_authority, request, sign_request
from protofed.deploy.certs.request import read_request
from protofed.deploy.doctor.checks import CheckRow, run_checks
from protofed.deploy.doctor.client import ClientDoctor
from protofed.deploy.doctor.server import ServerDoctor
from protofed.deploy.doctor.site import SiteUnderCheck
from protofed.deploy.templates.new import layouts

Cli: TypeAlias = Callable[..., tuple[int, str, str]]
SITE = ("client", "init", "--site", "north", "--server", "hub.example:7443")


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command line in this process, in a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    return partial(called, capfd)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(rows: Iterable[CheckRow]) -> set[str]:
    """Of all findings, warnings aside: the disk of the machine that runs the tests may be nearly full."""
    return {row.diagnosis.name for row in rows if row.diagnosis is not None and not row.diagnosis.warns}


def every_key(text: str) -> str:
    """The settings with all keys that are shown as comments."""
    return re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shown", [False, True], ids=["as it is written", "with all that it shows"])
def test_settings_of_each_layout_can_be_read(source: str, shown: bool, protofed: Cli, tmp_path: Path) -> None:
    assert protofed(*SITE, "--data", source)[0] == 0
    file = tmp_path / "site.toml"
    if shown:
        file.write_text(every_key(file.read_text()))
    settings = read_settings(ClientSettings, file, {})
    assert (settings.site, settings.server, settings.data.source) == ("north", "hub.example:7443", source)
    policy, identity, state = str(tmp_path / "policy.toml"), tmp_path / "identity", tmp_path / "state"
    assert (settings.policy, settings.identity, settings.state) == (policy, identity, state)
    assert (settings.proxy is not None) == shown


def test_each_key_has_a_comment_and_files_are_the_owners_alone(protofed: Cli, tmp_path: Path) -> None:
    for source in layouts():
        protofed(*SITE, "--data", "cifar10" if source == "set" else source, "--into", source)
        lines = (tmp_path / source / "site.toml").read_text().splitlines()
        assert [line for line in lines if re.match(r"(# )?\w+ = ", line) and not line.partition(" # ")[2]] == []
    protofed(*SITE, "--data", "folder")
    protofed("server", "init", "--into", "srv")
    assert {mode(tmp_path / name) for name in ("site.toml", "policy.toml", "srv/server.toml")} == {0o600}
    folders = ("identity", "state", "srv/identity", "srv/identity/operators", "srv/state")
    assert {mode(tmp_path / name) for name in folders} == {0o700}


def test_what_is_given_is_what_is_written(protofed: Cli, tmp_path: Path) -> None:
    labels = ("--label", "Melanoma=mel", "--label", 'N"ae = vus=nv')
    roles = ("--role", "evaluator", "--data", "manifest", "--root", "/data/a  # b\x7f.csv", "--policy", "open")
    assert protofed(*SITE, *roles, *labels)[0] == 0
    settings = read_settings(ClientSettings, tmp_path / "site.toml", {})
    assert settings.roles == {Role.EVALUATOR}
    assert settings.data.root == Path("/data/a  # b\x7f.csv")
    assert settings.data.label_map == {"Melanoma": "mel", 'N"ae = vus': "nv"}
    assert settings.data.local_test_fraction is None  # an evaluator has no model of its own to score
    assert (tmp_path / "policy.toml").read_bytes() == (shipped.folder("policies") / "open.toml").read_bytes()
    Policy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize("taken", ["site.toml", "policy.toml"])
def test_nothing_is_overwritten_and_then_nothing_is_written(taken: str, protofed: Cli, tmp_path: Path) -> None:
    (tmp_path / taken).write_text("mine")
    (tmp_path / "identity").mkdir(mode=0o750)
    code, _, err = protofed(*SITE, "--data", "folder")
    assert (code, taken in err) == (78, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["identity", taken])
    assert (tmp_path / taken).read_text() == "mine"
    (tmp_path / taken).unlink()
    assert protofed(*SITE, "--data", "folder")[0] == 0
    assert mode(tmp_path / "identity") == 0o750


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("client", "init"), "--site"),
        ((*SITE[:4],), "--server"),
        ((*SITE, "--data", "foldr"), "did you mean 'folder'?"),
        ((*SITE, "--data", "folder", "--policy", "standart"), "did you mean 'standard'?"),
        ((*SITE, "--data", "folder", "--label", "Melanoma"), "OWN=RUN"),
        ((*SITE, "--data", "folder", "--site", "South Clinic"), "site"),
        ((*SITE, "--data", "folder", "--server", "https://hub"), "host:port"),
        ((*SITE, "--data", "folder", "--role", "trainr"), "roles"),
        ((*SITE, "--data", "folder", "--root", "L\udce4sionen"), "UTF-8"),  # as Python reads a path in ISO-8859-1
        (("server", "init", "--listen", "7443"), "host:port"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    words: tuple[str, ...], names: str, protofed: Cli, tmp_path: Path
) -> None:
    code, _, err = protofed(*words)
    assert (code, names in err) == (78, True), err
    assert list(tmp_path.iterdir()) == []


def test_at_a_terminal_it_asks_for_what_is_not_given(
    protofed: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Answers("hub.example:7443\nmanifest\nlist.csv\n\n"))
    code, out, _ = protofed("client", "init", "--site", "north")
    assert code == 0
    [offered] = re.findall(r"Layout of the data \(([^)]*)\)", out)
    assert offered.split(", ") == list(SOURCES), "each of them can be answered"
    settings = read_settings(ClientSettings, tmp_path / "site.toml", {})
    assert (settings.server, settings.data.source, settings.data.root) == (
        "hub.example:7443",
        "manifest",
        tmp_path / "list.csv",
    )
    assert (tmp_path / "policy.toml").read_bytes() == (shipped.folder("policies") / "standard.toml").read_bytes()


def test_a_bundle_names_the_site_and_is_installed(protofed: Cli, tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca")
    code_of_ca = certs_files.key_code(authority.certificate.public_key())
    for party, name in ((Party.SITE, "north"), (Party.OPERATOR, "ada")):
        asked = read_request(request(tmp_path / name / "identity", party, name), "request")
        (tmp_path / f"{name}.bundle").write_bytes(sign_request(asked, authority))
    init = ("client", "init", "--server", "hub.example:7443", "--data", "folder", "--bundle")
    for refused in (
        ("north.bundle", "--into", "north", "--site", "south"),
        ("ada.bundle", "--into", "ada"),
        ("north.bundle", "--into", "elsewhere"),  # whose key is not there
        ("north.bundle", "--into", "north", "--ca-code", "0000-0000-0000-0000"),
    ):
        assert protofed(*init, *refused)[0] == 78
    assert [path.name for path in (tmp_path / "north").iterdir()] == ["identity"]
    assert not list(tmp_path.glob("*/identity/cert.pem"))
    (tmp_path / "north" / "policy.toml").write_text("mine")
    assert protofed(*init, "north.bundle", "--into", "north")[0] == 78
    assert not list(tmp_path.glob("*/identity/cert.pem"))
    (tmp_path / "north" / "policy.toml").unlink()
    code, out, _ = protofed(*init, "north.bundle", "--into", "north", "--ca-code", code_of_ca)
    assert (code, code_of_ca in out, "certs request" in out) == (0, True, False)
    assert read_settings(ClientSettings, tmp_path / "north" / "site.toml", {}).site == "north"
    assert read_identity(tmp_path / "north" / "identity", Party.SITE, datetime.now(UTC)).certificate.name == "north"


def test_doctor_misses_only_what_comes_from_elsewhere(protofed: Cli, tmp_path: Path, unused_port: int) -> None:
    protofed(*SITE, "--data", "folder")
    read = read_settings(ClientSettings, tmp_path / "site.toml", {"metrics": {"listen": f"127.0.0.1:{unused_port}"}})
    rows = run_checks(ClientDoctor(lambda: read, SiteUnderCheck(quick=True)).checks())
    assert names(rows) == {"identity-missing", "data-unusable"}
    protofed("server", "init", "--into", "srv")
    monitoring = {"metrics": {"listen": f"127.0.0.1:{unused_port}"}, "listen": f"127.0.0.1:{unused_port}"}
    told = read_settings(ServerSettings, tmp_path / "srv" / "server.toml", monitoring)
    rows = run_checks(ServerDoctor(lambda: told).checks())
    assert names(rows) == {"identity-missing"}
