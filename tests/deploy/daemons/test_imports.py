"""What commands import: a hospital's daemon nothing of the server, and the help nothing that takes long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from protofed.deploy import shipped

SCRIPT = """
import sys
from protofed.deploy.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("exit", end.code)
servers = ("protofed.server", "sqlalchemy", "alembic")
print(*sorted(name for name in sys.modules if name.startswith(servers)))
"""


def test_a_client_daemon_imports_nothing_of_the_server(tmp_path: Path, unused_port: int) -> None:
    """The whole start, up to a server that is not there."""
    settings = shipped.folder("sites") / "digits.toml"
    arguments = [
        *("client", "start", f"--settings={settings}", "--site=site-1", "--partition-index=0", "--plaintext"),
        *(f"--policy={shipped.folder('policies') / 'open.toml'}", f"--state={tmp_path / 'state'}"),
        *(f"--server=127.0.0.1:{unused_port}", "--give-up-after=1"),
    ]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    ended, *loaded = done.stdout.splitlines()
    assert ended == "exit 69", done.stderr
    assert loaded == [""]


def test_a_wrong_setting_is_reported_before_pytorch_and_grpc_are_imported(tmp_path: Path) -> None:
    """They take seconds."""
    settings = shipped.folder("sites") / "digits.toml"
    arguments = [
        *("client", "start", f"--settings={settings}", "--site=site-1", "--partition-index=0"),  # no identity
        *(f"--policy={shipped.folder('policies') / 'open.toml'}", f"--state={tmp_path / 'state'}"),
    ]
    script = SCRIPT.replace('("protofed.server", "sqlalchemy", "alembic")', '("torch", "grpc")')
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    ended, loaded = done.stdout.splitlines()
    assert ended == "exit 78", done.stderr
    assert loaded == ""


def test_the_help_comes_before_what_only_commands_need() -> None:
    """The shell imports the command line at each Tab, too."""
    libraries = ("torch", "grpc", "sqlalchemy", "cryptography", "pydantic", "numpy")
    script = SCRIPT.replace('("protofed.server", "sqlalchemy", "alembic")', repr(libraries))
    done = subprocess.run([sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["exit 0", ""]
