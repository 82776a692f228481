"""Rules of the house that no linter knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLIC_FACE = r"(?s)from protofed\.client\.method import \([^)]*\)\n"
# What a half says of itself beside its algorithm: its declaration, what a round costs under noise, what is summed.
DECLARED = r"(?s)\n    def (?:dp_cost|sum_form)\(.*?(?=\n    def |\n\n\n|\Z)|\n    declares: .*?\n    \)"
SOURCES = ("server", "client", "common", "deploy", "protos")


def test_nobody_ends_the_namespace() -> None:
    found = [root for root in SOURCES if (ROOT / root / "protofed" / "__init__.py").exists()]
    assert not found, "protofed is a namespace package in five folders: an __init__.py would hide the other four"


def test_a_client_half_fits_on_a_page() -> None:
    for path in (ROOT / "client/protofed/client/methods").glob("*.py"):
        code = re.sub(PUBLIC_FACE, "", path.read_text(encoding="utf-8"))  # the formatter gives each name a line
        code = re.sub(DECLARED, "", code)
        assert len(code.splitlines()) <= 65, path


def test_what_all_tests_share_imports_neither_pytorch_nor_a_server() -> None:
    """A test of a pure function starts within a second."""
    script = "import sys, tests.conftest; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = ("torch", "sqlalchemy", "grpc", "protofed.server", "protofed.client")
    assert [name for name in heavy if name in made.stdout.split()] == []
