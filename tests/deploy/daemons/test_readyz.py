"""`protofed health`, against real monitors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from tests.support.pki import Authority

from protofed.common.config.settings import Monitoring
from protofed.common.monitoring import Monitor
from protofed.common.pki.identity import Party
from protofed.deploy.cli.main import main
from protofed.deploy.daemons import readyz
from protofed.deploy.daemons.metrics_endpoint import METRICS_FILE, serve_metrics
from protofed.deploy.daemons.readyz import missing

Answering = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def daemon(tmp_path: Path) -> Answering:
    """What a daemon does around its work, lacking what is given."""

    def answer(*lacks: str, listen: str = "127.0.0.1:0", **where: Path) -> AbstractContextManager[str]:
        monitor = Monitor(Monitoring(listen=listen, **where), CollectorRegistry(), lambda: lacks)
        return serve_metrics(monitor, tmp_path)

    return answer


def ended(*arguments: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(["health", *arguments])
    return end.value.code


def test_a_daemon_can_work_or_says_what_it_lacks(
    daemon: Answering, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_logs(), daemon():
        assert ended("--state", str(tmp_path)) == 0
    assert capsys.readouterr().out == "ready\n"
    with capture_logs(), daemon("not enrolled", "the data cannot be read"):
        assert ended("--state", str(tmp_path)) == 1
    assert capsys.readouterr().out == "not enrolled; the data cannot be read\n"
    with capture_logs(), daemon("not enrolled"):
        assert ended("--state", str(tmp_path), "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"ready": False, "missing": ["not enrolled"], "paused": None}


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::1]:0", "[::]:0", "localhost:0"])
def test_wherever_it_listens(daemon: Answering, tmp_path: Path, listen: str) -> None:
    with daemon(listen=listen):
        assert missing(tmp_path) == []
    with daemon("one thing", listen=listen):
        assert missing(tmp_path) == ["one thing"]


def test_https_and_a_token_need_nothing_more(daemon: Answering, tmp_path: Path) -> None:
    identity = Authority.make().issue(tmp_path / "identity", Party.SERVER, "hub", ["somewhere.example"])
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_bytes(b"a2c4e6")
    with daemon("one thing", identity=identity, token=token) as url:
        assert url.startswith("https://")
        assert missing(tmp_path) == ["one thing"]
    with daemon(identity=identity, token=token):
        assert missing(tmp_path) == []


def test_no_daemon_or_one_that_was_killed(tmp_path: Path) -> None:
    assert "no daemon with --metrics" in missing(tmp_path)[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (tmp_path / METRICS_FILE).write_text(f"http://127.0.0.1:{port}")
    assert "no answer" in missing(tmp_path)[0]


@pytest.mark.parametrize("written", [b"", b"http://127.0.0.1:port", b"\xff", b"http://[::1"])
def test_a_file_that_says_nothing(tmp_path: Path, written: bytes) -> None:
    (tmp_path / METRICS_FILE).write_bytes(written)
    assert len(missing(tmp_path)) == 1


@pytest.mark.parametrize("said", [b"SSH-2.0-other\r\n", b"", b"HTTP/1.1 204 No Content\r\n\r\n"])
def test_another_program_on_its_port(tmp_path: Path, said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        (tmp_path / METRICS_FILE).write_text(f"http://127.0.0.1:{other.getsockname()[1]}")
        asking = subprocess.Popen(
            [sys.executable, "-I", "-m", "protofed.deploy.daemons.readyz", tmp_path], stdout=subprocess.PIPE, text=True
        )
        peer, _ = other.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(said)
        told, _ = asking.communicate(timeout=30)
    assert asking.returncode == 1
    assert len(told.splitlines()) == 1


def test_one_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readyz, "WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / METRICS_FILE).write_text(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "timed out" in missing(tmp_path)[0]


def test_the_images_health_check_does_without_the_command_line(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from protofed.deploy.daemons import readyz
readyz.missing(Path({str(tmp_path)!r}))
print(*sys.modules)
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "structlog", "pydantic", "grpc", "numpy", "prometheus_client"} & set(loaded)
