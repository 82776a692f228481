"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLIC_FACE = r"(?s)from protofed\.client\.method import \([^)]*\)\n"
# What a half says of itself beside its algorithm: its declaration, what a round costs under noise, what is summed.
DECLARED = r"(?s)\n    def (?:dp_cost|sum_form)\(.*?(?=\n    def |\n\n\n|\Z)|\n    declares: .*?\n    \)"
SOURCES = ("server", "client", "common", "deploy", "protos")
# Words of our own for which the field has one, as parts of names; tests/support/sentences.py has those of documents.
BANNED_NAMES = re.compile(r"(?i)secure_?sum|(?<!place)holders|crew|standstill|begun|set_aside")
BANNED_CONSTANTS = re.compile(r"^_?(MOST|FEWEST|LEAST)_")


def test_nobody_ends_the_namespace() -> None:
    found = [root for root in SOURCES if (ROOT / root / "protofed" / "__init__.py").exists()]
    assert not found, "protofed is a namespace package in five folders: an __init__.py would hide the other four"


def test_a_client_half_fits_on_a_page() -> None:
    for path in (ROOT / "client/protofed/client/methods").glob("*.py"):
        code = re.sub(PUBLIC_FACE, "", path.read_text(encoding="utf-8"))  # the formatter gives each name a line
        code = re.sub(DECLARED, "", code)
        assert len(code.splitlines()) <= 65, path


def test_a_source_file_has_600_lines_at_most() -> None:
    paths = [path for root in SOURCES[:-1] for path in (ROOT / root / "protofed").rglob("*.py")]
    assert {path.name: lines for path in paths if (lines := len(path.read_text("utf-8").splitlines())) > 600} == {}


def test_what_all_tests_share_imports_neither_pytorch_nor_a_server() -> None:
    """A test of a pure function starts within a second."""
    script = "import sys, tests.conftest; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = ("torch", "sqlalchemy", "grpc", "protofed.server", "protofed.client")
    assert [name for name in heavy if name in made.stdout.split()] == []


def test_names_use_the_fields_words() -> None:
    assert sorted({name for name in _names() if BANNED_NAMES.search(name) or BANNED_CONSTANTS.search(name)}) == []


def test_functions_are_named_by_verbs() -> None:
    """`names_of(run)` says less than `list_names(run)`."""
    functions = {node.name for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert sorted(name for name in functions if re.search(r"[a-z]_of$", name)) == []


def test_a_class_has_its_name_alone() -> None:
    names = Counter(node.name for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def _trees() -> Iterator[ast.Module]:
    for root in SOURCES[:-1]:
        for path in (ROOT / root / "protofed").rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"))


def _names() -> Iterator[str]:
    """Of functions, classes and arguments, and of constants."""
    for node in (node for tree in _trees() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
