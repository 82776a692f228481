"""A report as a browser shows and prints it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from protofed.common.config.recipe import Recipe
from protofed.deploy.cli import report
from protofed.deploy.report.report import write_report
from protofed.deploy.simulation.simulation import simulation

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, recipe_of: Callable[..., Recipe]) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with simulation(
        recipe_of("fednh", evaluation={"frequency_groups": True, "probabilities": True}), folder
    ) as running:
        running.go()
    return write_report(report.read_run_record(folder, None), folder / "report.html")


def browse(page: Path, folder: Path, *options: str) -> str:
    """What a browser without a network says that opens the page."""
    alone = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    cut_off = ("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}")
    command = [str(BROWSER), *alone, *cut_off, *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [1200, 500])
def test_it_is_shown_and_not_blank(width: int, written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "shown.png"
    browse(written, tmp_path, f"--window-size={width},4000", f"--screenshot={picture}")
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (4000, width)
    dark = (pixels.max(axis=2) < 0.5).any(axis=1)  # rows with ink
    assert all(part.any() for part in np.array_split(dark, 8))
    assert (pixels == 1).all(axis=2).mean() > 0.5
    assert len(np.unique((pixels * 255).astype(int).reshape(-1, 3), axis=0)) > 100
    right = pixels[:, -4:]
    assert (right == 1).all()  # nothing runs over the edge


def test_it_is_printed_on_pages(written: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed.pdf"
    browse(written, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    data = printed.read_bytes()
    assert data.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 5 <= pages <= 20
    boxes = {tuple(round(float(v)) for v in box.split()) for box in re.findall(rb"/MediaBox\s*\[([^\]]+)\]", data)}
    assert boxes == {(0, 0, 595, 842)} or boxes == {(0, 0, 596, 842)} or boxes == {(0, 0, 594, 842)}  # A4, in points
