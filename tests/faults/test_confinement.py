"""Row 93: a daemon takes part that may do nothing: read-only root, no capability, no HOME, no name server."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.audit_logs import audit
from tests.support.pki import Authority
from tests.support.policies import standard_with_plain_updates
from tests.support.processes import Processes
from tests.support.sandbox import USER, Sandbox, missing

from protofed.client.transport.grpc_link import GrpcLink
from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Finished, Task, TaskKind
from protofed.common.storage import journal
from protofed.deploy.simulation.simulation import build_agents, load_data

pytestmark = [pytest.mark.faults, pytest.mark.skipif(bool(missing()), reason=missing() or "possible")]
NAME = "fl.example.org"
NO_RIGHTS = {
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), f"{0:016x}"),
    **dict.fromkeys(("Uid", "Gid"), "\t".join([str(USER)] * 4)),
    "NoNewPrivs": "1",
}
CONFIG = ("--settings=/config/site.toml", "--policy=/config/policy.toml")
DAEMON = ("-m", "protofed.deploy.cli", "client", "start", *CONFIG)
TRY = f"""
import os, socket
for path in ("/x", "/usr/x", "/etc/x", "/tmp/x", "/config/x", "/identity/x", "/dev/x"):
    try:
        open(path, "w")
    except OSError:
        continue
    raise SystemExit(path + " can be written")
open("/state/x", "w").close()
assert socket.gethostbyname("{NAME}") == "127.0.0.1"
assert "HOME" not in os.environ and os.getuid() == {USER} and os.getgroups() == []
try:
    socket.gethostbyname("example.org")
except OSError:
    print("confined")
"""


@pytest.fixture
def recipe(quick_recipe: Callable[..., Recipe]) -> Recipe:
    return quick_recipe(rounds=2, plan={"batch_size": 32, "lr": 0.05, "momentum": 0.9})  # `standard.toml` wants to move


@pytest.fixture
def authority() -> Authority:
    return Authority.make()


@pytest.fixture
def sandbox(tmp_path: Path, recipe: Recipe, authority: Authority) -> Sandbox:
    """The machine of site-1."""
    Processes.of(tmp_path, recipe)  # its settings
    folders = {name: tmp_path / "machine" / name for name in ("root", "state", "config", "etc", "identity")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    (folders["etc"] / "hosts").write_text(f"127.0.0.1 {NAME}\n", encoding="ascii")
    (folders["etc"] / "resolv.conf").write_text("", encoding="ascii")
    shutil.copy("/etc/ld.so.cache", folders["etc"])
    shutil.copy(tmp_path / "site.toml", folders["config"])
    shutil.copy(standard_with_plain_updates(tmp_path), folders["config"] / "policy.toml")
    for file in authority.issue(folders["identity"], Party.SITE, "site-1").iterdir():
        os.chown(file, USER, USER)
    bound = {f"/{name}": folders[name] for name in ("config", "etc", "identity")}
    return Sandbox(folders["root"], folders["state"], bound)


def test_row_93_nothing_but_the_state_folder_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    log = tmp_path / "try.log"
    assert sandbox.start((sys.executable, "-c", TRY), log).wait(60) == 0, log.read_text()
    assert log.read_text() == "confined\n"


def test_row_93_the_daemon_works_without_any_right(
    sandbox: Sandbox, recipe: Recipe, authority: Authority, live_server: Callable[..., Any], tmp_path: Path
) -> None:
    server = live_server(
        recipe, identity=authority.issue(tmp_path / "server-id", Party.SERVER, "server", (NAME, "127.0.0.1"))
    )
    authority.issue(tmp_path / "site-2", Party.SITE, "site-2")
    for folder in (tmp_path / "machine" / "identity", tmp_path / "site-2"):
        server.operation.certificates.register((folder / "cert.pem").read_bytes())
    where = (f"--server={NAME}:{server.address.rpartition(':')[2]}", "--identity=/identity", "--state=/state")
    log = tmp_path / "daemon.log"
    daemon = sandbox.start(
        (sys.executable, *DAEMON, *where, "--site=site-1", "--partition-index=0", "--until-finished"), log
    )
    try:
        seen = other_site(server.address, recipe, tmp_path / "site-2", lambda: rights(daemon.pid))
        assert daemon.wait(60) == 0, log.read_text()
    finally:
        daemon.kill()
    assert seen == [NO_RIGHTS] * recipe.rounds
    statuses = {task.task_status for task in server.ledger.tasks(recipe.name, recipe.rounds) if task.site == "site-1"}
    assert statuses == {"reported"}
    assert journal.verify(tmp_path / "machine" / "state" / "audit.jsonl") > 0
    assert "Traceback" not in log.read_text()


def other_site(address: str, recipe: Recipe, identity: Path, look: Callable[[], Any]) -> list[Any]:
    """The other site's part, to the end of the run; what was seen after each fit of its own."""
    own, until, seen = LiveIdentity(identity, Party.SITE), time.monotonic() + 25, []
    with ExitStack() as held:

        def connect(site: str, roles: frozenset[Any]) -> GrpcLink:
            link = GrpcLink(address, site, "tested", roles, identity=own, audit=audit(), give_up_after_s=20)
            held.callback(link.close)
            return link

        (agent,) = build_agents(recipe, connect, data={"site-2": load_data(recipe)["site-2"]})
        while not isinstance(answer := agent.step(0.2), Finished):
            assert time.monotonic() < until, "the run does not end"
            if isinstance(answer, Task) and answer.kind is TaskKind.FIT:
                seen.append(look())
    return seen


def rights(pid: int) -> dict[str, str]:
    """Users and capabilities of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {name: said[name] for name in NO_RIGHTS}
