"""/metrics, /healthz and /readyz of `protofed server`, as a process."""

from __future__ import annotations

import http.client
import socket
import ssl
from pathlib import Path

import pytest
from tests.deploy.daemons.test_server import ServerProcess


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("a2c4e6\n", encoding="ascii")
    return path


def get(url: str, path: str, trust: bytes, **headers: str) -> tuple[int, str]:
    context = ssl.create_default_context(cadata=trust.decode())
    connection = http.client.HTTPSConnection(url.rpartition("/")[2], timeout=10, context=context)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_https_and_a_token_by_the_settings_and_the_port_by_the_command_line(server: ServerProcess, token: Path) -> None:
    settings = server.folder / "server.toml"
    settings.write_text(
        f'[metrics]\nlisten = "192.0.2.1:9"\nidentity = "{server.identity}"\ntoken = "{token}"\n', encoding="utf-8"
    )
    address = server.serve(f"--identity={server.identity}", f"--settings={settings}", "--metrics=127.0.0.1:0")
    file = server.folder / "state" / "metrics-address"
    url, trust = file.read_text("utf-8"), server.authority.pem
    assert url.startswith("https://127.0.0.1:")
    assert get(url, "/readyz", trust) == (200, "ready\n")
    assert get(url, "/healthz", trust) == (200, "alive\n")
    assert get(url, "/metrics", trust)[0] == 401
    status, text = get(url, "/metrics", trust, Authorization="Bearer a2c4e6")
    assert status == 200
    assert 'protofed_cert_expiry_timestamp_seconds{name="hub",role="server"} ' in text
    assert 'protofed_cert_expiry_timestamp_seconds{name="boss",role="operator"} ' in text
    assert "process_resident_memory_bytes " in text
    assert str(server.folder) not in text
    server.stop()
    told = f"listening on {address} (TLS 1.3 as 'hub', certificate until "
    assert told in server.log()
    assert f"), metrics on {url}/metrics, state in" in server.log()
    assert not file.exists()


def test_without_metrics_there_is_no_other_port(server: ServerProcess) -> None:
    server.serve(f"--identity={server.identity}")
    assert not (server.folder / "state" / "metrics-address").exists()
    server.stop()
    assert ", metrics on" not in server.log()


def test_a_port_that_is_taken_ends_the_start(server: ServerProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        process = server.start("--identity=none", "--listen=127.0.0.1:0", f"--metrics={taken}")
        assert process.wait(timeout=60) == 69
    assert f"cannot answer /metrics on {taken}: " in server.log()
    assert "free the port or take another" in server.log()


def test_what_cannot_be_used_is_refused_before_anything_is_made(server: ServerProcess, token: Path) -> None:
    settings = server.folder / "server.toml"
    settings.write_text(f'[metrics]\nlisten = "127.0.0.1:0"\ntoken = "{token}"\n', encoding="utf-8")
    token.chmod(0o644)
    assert "can be read or changed by others" in server.refused("--identity=none", f"--settings={settings}")
    assert not (server.folder / "state").exists()
