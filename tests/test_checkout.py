"""A checkout that nobody has installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

from tests.checkout import ROOT

SCRIPT = """
import importlib.metadata, sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path]  # nothing is installed
import tests.checkout
print(importlib.metadata.version("protofed"), sys.path[0])
import protofed.common.address
"""


def test_it_is_importable_and_knows_its_version() -> None:
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){SCRIPT}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [metadata.version("protofed"), str(ROOT / "server")]
