"""The systemd units start what the command line takes, come back when they should, and are shut in."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from protofed.common import errors
from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.deploy.cli import main

SYSTEMD = Path(__file__).parents[3] / "deploy" / "systemd"
SERVER, CLIENT = SYSTEMD / "protofed-server.service", SYSTEMD / "protofed-client@.service"
PATHS = {SERVER: SYSTEMD / "protofed-server.path", CLIENT: SYSTEMD / "protofed-client@.path"}
PLACES = {"%i": "north", "%S": "/var/lib", "%C": "/var/cache"}
NEWER = ("RestartSteps", "RestartMaxDelaySec")  # than Debian 12's systemd, which says that it ignores them
EXPOSED = {SERVER: 15, CLIENT: 20}  # tenths of `systemd-analyze security`, at most
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze (apt: systemd)")


def keys(unit: Path) -> dict[str, list[str]]:
    """Every key of a unit with its values, in order, as the instance north has them."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[key].append(re.sub("%[iSC]", lambda place: PLACES[place[0]], value))
    return found


def parsed(unit: Path, name: str) -> dict[str, object]:
    """What the command line makes of the unit's own."""
    program, command, start, *arguments = keys(unit)["ExecStart"][0].split()
    assert (program, command, start) == ("/opt/protofed/bin/protofed", name, "start")
    group = typer.main.get_command(main.app)
    assert isinstance(group, TyperGroup)
    daemon = group.commands[name]
    assert isinstance(daemon, TyperGroup)
    return daemon.commands["start"].make_context("start", list(arguments)).params


def own(environment: str) -> None:
    """An example of an environment file has lines that systemd takes."""
    lines = (SYSTEMD / "examples" / environment).read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"(# )?PROTOFED_[A-Z_]+=\S+|# .+", line) for line in lines)


def test_the_server_is_started_with_options_and_settings_that_it_takes() -> None:
    said = parsed(SERVER, "server")
    given = {key: said[key] for key in ("identity", "state")}
    settings = read_settings(ServerSettings, SYSTEMD / "examples/server.toml", given)
    assert (settings.listen, settings.state) == ("0.0.0.0:7443", Path("/var/lib/protofed/server"))
    assert said["settings"] == Path("/etc/protofed/server/settings.toml")
    own("server.environment")


def test_a_site_is_started_with_settings_that_it_takes_in_folders_of_the_units() -> None:
    said = parsed(CLIENT, "client")
    given = {key: said[key] for key in ("site", "policy", "identity", "state")}
    settings = read_settings(ClientSettings, SYSTEMD / "examples/client.toml", given)
    assert (settings.site, settings.state) == ("north", Path("/var/lib/protofed/client/north"))
    assert (settings.policy, settings.identity) == (
        "/etc/protofed/client/north/policy.toml",
        Path("/etc/protofed/client/north/identity"),
    )
    own("client.environment")
    made = [line.split() for line in (SYSTEMD / "tmpfiles.d/protofed.conf").read_text(encoding="utf-8").splitlines()]
    modes = {line[1]: (line[2], line[3]) for line in made if line[0] == "d"}
    assert modes["/etc/protofed/server/identity"] == ("0700", "protofed")
    assert modes["/etc/protofed/server"] == modes["/etc/protofed/client"] == ("0750", "root")
    assert (SYSTEMD / "sysusers.d/protofed.conf").read_text(encoding="utf-8").startswith("u protofed ")


@pytest.mark.parametrize("unit", [SERVER, CLIENT], ids=lambda unit: unit.stem)
def test_a_unit_writes_its_state_folder_alone_and_is_tried_again_for_ever(unit: Path) -> None:
    said = keys(unit)
    state = parsed(unit, "server" if unit == SERVER else "client")["state"]
    assert said["ProtectSystem"] == ["strict"]
    assert "ReadWritePaths" not in said
    assert Path("/var/lib") / said["StateDirectory"][0] == state
    assert said["StateDirectoryMode"] == ["0700"]
    stays = {int(code) for code in said["RestartPreventExitStatus"][0].split()}
    again = (errors.DataError, errors.UnavailableError, errors.StateError, errors.ProtofedError)
    assert said["Restart"] == ["on-failure"]
    assert said["StartLimitIntervalSec"] == ["0"]
    assert not stays & {error.exit_code for error in again}
    assert {2, errors.ConfigError.exit_code, errors.PolicyViolationError.exit_code} <= stays
    watch, identity = keys(PATHS[unit]), parsed(unit, "server" if unit == SERVER else "client")["identity"]
    instance = "north" if unit == CLIENT else ""
    assert watch["PathChanged"] == [f"{identity}/cert.pem"]
    assert watch["PartOf"] == [unit.name.replace("@", f"@{instance}")]
    assert PATHS[unit].name.replace("@", f"@{instance}") in keys(unit)["Wants"][0].split()
    assert "ExecStartPre" not in keys(unit)


def test_a_daemon_can_use_a_gpu_dumps_no_images_and_pushes_no_other_out() -> None:
    assert str(errors.FencedError.exit_code) in keys(CLIENT)["RestartPreventExitStatus"][0].split()
    said = keys(CLIENT)
    assert said["DeviceAllow"] == ["char-nvidia* rw"]
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "ProcSubset"} & set(said)
    assert said["LimitCORE"] == ["0"]


def installed(unit: Path, folder: Path) -> Path:
    """The unit as an instance in a folder, with a program that is there."""
    for source in (unit, PATHS[unit]):
        text = source.read_text(encoding="utf-8").replace("/opt/protofed/bin/protofed", "/bin/true")
        (folder / source.name.replace("@", "@north")).write_text(text, encoding="utf-8")
    return folder / unit.name.replace("@", "@north")


@analyze
@pytest.mark.parametrize("unit", [SERVER, CLIENT], ids=lambda unit: unit.stem)
def test_systemd_understands_every_line_and_finds_it_well_shut_in(unit: Path, tmp_path: Path) -> None:
    service = installed(unit, tmp_path)
    verify = ["systemd-analyze", "verify", "--man=no", str(service), str(service.with_suffix(".path"))]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    failed = [line for line in done.stderr.splitlines() if not any(f"'{key}'" in line for key in NEWER)]
    assert (done.returncode, failed) == (0, [])
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSED[unit]}", "--no-pager"]
    done = subprocess.run([*security, str(service)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
