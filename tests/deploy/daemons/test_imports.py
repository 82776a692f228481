"""What commands import: a hospital's daemon nothing of the server, and the help nothing that takes long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protofed.deploy import shipped

SCRIPT = """
import sys
from protofed.deploy.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("exit", end.code)
print(*sorted(name for name in sys.modules if name.startswith(BANNED)))
"""
SERVERS = ("protofed.server", "sqlalchemy", "alembic")
COMPILER = ("torchvision", "torch._dynamo", "torch._inductor", "sympy", "triton")  # seconds, of which nothing is used
OTHERS = ("PIL", "sklearn", "scipy", "pandas", "torchmetrics", "onnx", "matplotlib", "ray", "mlflow", "tensorboard")


def ended_and_loaded(banned: tuple[str, ...], arguments: list[str]) -> tuple[str, list[str]]:
    """How the command ended, and which of the banned modules it had imported by then."""
    script = SCRIPT.replace("BANNED", repr(banned))
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    *_, ended, loaded = done.stdout.splitlines()
    return ended, loaded.split()


def test_a_client_daemon_starts_without_the_server_and_the_compiler(tmp_path: Path, unused_port: int) -> None:
    """The whole start, up to a server that is not there."""
    settings = shipped.folder("sites") / "digits.toml"
    arguments = [
        *("client", "start", f"--settings={settings}", "--site=site-1", "--partition-index=0", "--identity=none"),
        *(f"--policy={shipped.folder('policies') / 'open.toml'}", f"--state={tmp_path / 'state'}"),
        *(f"--server=127.0.0.1:{unused_port}", "--give-up-after=1"),
    ]
    assert ended_and_loaded((*SERVERS, *COMPILER, *OTHERS), arguments) == ("exit 69", [])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_site_trains_without_the_compiler(optimizer: str) -> None:
    words = ["simulate", "digits-fednh", "--set=rounds=1", f'--set=plan.optimizer="{optimizer}"']
    assert ended_and_loaded(COMPILER, words) == ("exit 0", [])


def test_a_wrong_setting_is_reported_before_pytorch_and_grpc_are_imported(tmp_path: Path) -> None:
    settings = shipped.folder("sites") / "digits.toml"
    arguments = [
        *("client", "start", f"--settings={settings}", "--site=site-1", "--partition-index=0"),  # no identity
        *(f"--policy={shipped.folder('policies') / 'open.toml'}", f"--state={tmp_path / 'state'}"),
    ]
    assert ended_and_loaded(("torch", "grpc"), arguments) == ("exit 78", [])


@pytest.mark.parametrize("words", [["--help"], ["client", "start", "--help"], ["runs", "--help"]], ids=" ".join)
def test_the_help_comes_before_what_only_commands_need(words: list[str]) -> None:
    """The shell imports the command line at each Tab, too."""
    libraries = ("torch", "grpc", "sqlalchemy", "cryptography", "numpy", "structlog", "asyncio")
    pydantic = ("pydantic",) if words == ["--help"] else ()  # Typer reads the options of a command with it
    assert ended_and_loaded((*libraries, *pydantic), words) == ("exit 0", [])
