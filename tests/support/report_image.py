"""docs/assets/report.png, the top of a report in a browser: `python -m tests.support.report_image`, a minute."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.support.provoked_runs import BROWSERS, picture

from protofed.deploy import shipped
from protofed.deploy.cli.report import read_run_record
from protofed.deploy.report.report import write_report
from protofed.deploy.simulation.simulation import simulation

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "report.png"
SIZE = "1200,1500"


def main() -> None:
    """Simulate the run of the tutorial and draw its report."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        with simulation(shipped.recipe("digits-fednh"), state) as running:
            running.go()
        page = write_report(read_run_record(state, None), Path(folder) / "report.html")
        picture(browser, page, Path(folder) / "report.png", SIZE)
        shutil.copy(Path(folder) / "report.png", PICTURE)


if __name__ == "__main__":
    main()
