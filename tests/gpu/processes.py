"""Modules of this package as processes of their own: those that are killed, that join a group, that run for minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.checkout import ROOT

Process = subprocess.Popen[str]


@contextmanager
def started(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """`python -m tests.gpu.MODULE ARGUMENTS` within the `with` block; it is killed where it still runs at its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.gpu.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: Process, seconds: float) -> int:
    """Its exit code, minus the signal that killed it.

    Raises:
        TimeoutError: it did not end in time.
        RuntimeError: it ended with an error, whose last line this quotes.
    """
    try:
        _, errors = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{_name(process)} did not end within {seconds:.0f} s") from error
    if process.returncode > 0:
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        raise RuntimeError(f"{_name(process)} ended with {process.returncode}: {last}")
    return process.returncode


def _name(process: Process) -> str:
    assert isinstance(process.args, list)
    return " ".join(Path(argument).name for argument in map(str, process.args[1:]))
