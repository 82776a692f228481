"""`protofed server`, as a process: how it is spoken to, and what it says of that.

The recipes of `server start`: files, and names of those that come with protofed.
"""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.support.pki import Authority

from protofed.common.address import NO_TLS
from protofed.common.clock import stamp
from protofed.common.config.settings import ServerSettings, read_settings
from protofed.common.errors import ConfigError
from protofed.common.pki.identity import Party
from protofed.deploy import shipped
from protofed.deploy.daemons.server import read_recipes
from protofed.deploy.operator.connection import Operator


class ServerProcess:
    """A server's process in a folder with its identity."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority, self.ends = folder, Authority.make(), datetime.now(UTC) + timedelta(days=20)
        self.identity = self.authority.issue(folder / "hub", Party.SERVER, "hub", ends=self.ends)
        self.boss = self.authority.issue(folder / "boss", Party.OPERATOR, "boss")
        (self.identity / "operators").mkdir()
        (self.identity / "operators" / "boss.pem").write_bytes((self.boss / "cert.pem").read_bytes())
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Any command line of `protofed server`."""
        command = [sys.executable, "-m", "protofed.deploy.cli", "server", "start", f"--state={self.folder / 'state'}"]
        with (self.folder / "log").open("ab") as log:
            self.running.append(subprocess.Popen([*command, *arguments], stdout=log, stderr=log))
        return self.running[-1]

    def serve(self, *arguments: str) -> str:
        path = self.folder / "state" / "address"
        path.unlink(missing_ok=True)
        process, until = self.start(*arguments, "--listen=127.0.0.1:0"), time.monotonic() + 60
        while not path.exists():
            assert process.poll() is None, self.log()
            assert time.monotonic() < until
            time.sleep(0.05)
        return path.read_text("utf-8")

    def stop(self) -> None:
        self.running[-1].send_signal(signal.SIGTERM)
        assert self.running[-1].wait(timeout=60) == 0, self.log()

    def refused(self, *arguments: str) -> str:
        """What it says when it cannot start."""
        assert self.start(*arguments).wait(timeout=60) == 78, self.log()
        return self.log().splitlines()[-1]

    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8")


def test_it_tells_how_it_is_spoken_to_and_when_its_certificate_ends(server: ServerProcess) -> None:
    address = server.serve(f"--identity={server.identity}")
    with Operator(address, server.boss) as operator:
        assert operator.runs() == []
        (boss,) = operator.certificates()
    server.stop()
    assert (
        f"listening on {address} (TLS 1.3 as 'hub', certificate until {stamp(server.ends)}), state in" in server.log()
    )
    assert server.log().count("this server's certificate ends soon") == 1
    assert boss.party == "operator"
    assert (server.folder / "state" / "audit.jsonl").read_bytes()


def test_plain_text_says_what_it_means_and_a_crash_would_dump_no_memory(server: ServerProcess) -> None:
    address = server.serve("--identity=none")
    with Operator(address, NO_TLS) as operator:
        assert operator.certificates() == []
    assert resource.prlimit(server.running[-1].pid, resource.RLIMIT_CORE) == (0, 0)
    server.stop()
    assert f"listening on {address} (plain text: any program on this machine may call" in server.log()
    assert re.search(r"stopping.*SIGTERM", server.log()), "and that it was stopped"


def test_a_connection_that_nobody_chose_or_that_cannot_be_is_refused_before_anything_is_made(
    server: ServerProcess,
) -> None:
    assert "expected --identity FOLDER" in server.refused()
    assert "expected a server's" in server.refused(f"--identity={server.boss}")
    (server.identity / "key.pem").chmod(0o644)
    assert "can be read or changed by others" in server.refused(f"--identity={server.identity}")
    assert not (server.folder / "state").exists()


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def exchanged(file: Path) -> None:
    kept = file.read_bytes()
    file.unlink()
    file.write_bytes(kept)


@pytest.mark.parametrize(
    ("lose", "what"),
    [
        (lambda state: moved(state), "lock"),
        (lambda state: shutil.rmtree(state), "lock"),
        (lambda state: exchanged(state / "lock"), "lock"),
        (lambda state: exchanged(state / "journal.jsonl"), "journal.jsonl"),
        (lambda state: exchanged(state / "audit.jsonl"), "audit.jsonl"),
    ],
    ids=["moved", "deleted", "lock", "journal", "audit"],
)
def test_a_state_that_is_moved_or_replaced_under_a_server_ends_it_though_nobody_calls(
    server: ServerProcess, lose: Callable[[Path], None], what: str
) -> None:
    server.serve("--identity=none")
    lose(server.folder / "state")
    assert server.running[-1].wait(timeout=60) == 74, server.log()
    assert f"{what} was moved, removed or replaced" in server.log()


def test_a_server_that_is_hung_up_ends_in_good_order_and_a_supervisor_restarts_it(server: ServerProcess) -> None:
    server.serve("--identity=none")
    server.running[-1].send_signal(signal.SIGHUP)
    assert server.running[-1].wait(timeout=60) == 129, server.log()
    assert re.search(r"stopping.*SIGHUP", server.log())


def test_a_server_says_at_its_start_that_its_audit_log_is_gone(server: ServerProcess) -> None:
    state = server.folder / "state"
    for _ in range(2):
        address = server.serve("--identity=none")
        with Operator(address, NO_TLS) as operator:
            operator.certificates()
        server.stop()
    assert "was cut" not in server.log(), "nothing was"
    (state / "audit.jsonl").unlink()
    server.serve("--identity=none")
    server.stop()
    assert server.log().count("the audit log was cut or removed while no server used it") == 1


def test_a_server_that_may_open_too_few_files_to_serve_sites_says_how_many_it_needs(server: ServerProcess) -> None:
    """With 64 it called itself ready, and served one site."""
    process = server.start("--identity=none", "--listen=127.0.0.1:0")
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
    assert process.wait(timeout=60) == 78, server.log()
    assert "may open 64 files: too few to serve sites. Let it open 4352" in server.log()


def test_a_server_takes_shipped_recipes_by_name(tmp_path: Path) -> None:
    (own := tmp_path / "own.toml").write_text(shipped.resolved("digits-fednh"))
    read = read_settings(ServerSettings, None, {"recipes": ["digits-fedavg", str(own)]})
    assert [recipe.name for recipe in read_recipes(read, ())] == ["digits-fedavg", "digits-fednh"]
    read = read_settings(ServerSettings, None, {"recipes": ["digits-fednhh"]})
    with pytest.raises(ConfigError, match="did you mean 'digits-fednh'"):
        read_recipes(read, ())
