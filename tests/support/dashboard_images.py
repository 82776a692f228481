"""`python -m tests.support.dashboard_images`: docs/assets/dashboard-*.png, of a pilot and a real Prometheus.

Grafana draws them better. These show what a pilot looks like, drawn from the same queries in the same places.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from tests.support.dashboards import NAMES, NO_DATA_HERE, dashboard, of_panel
from tests.support.monitored_pilot import Pilot, pilot, recipe
from tests.support.panel_plots import DRAWN, ROW, Interval, Line
from tests.support.panel_values import INK
from tests.support.prometheus import Prometheus

DOCS = Path(__file__).parents[2] / "docs" / "assets"
WIDTH, HEAD, FOOT = 15.0, 0.45, 0.42  # inches
RATE_S = 15


def main() -> None:
    """Let a pilot run for some minutes and draw it."""
    with tempfile.TemporaryDirectory() as folder, pilot(Path(folder)) as here:
        start = time.time()
        story(here)
        end = time.time()
        for name in NAMES:
            found = answers(name, here.prometheus, (start, end))
            (DOCS / f"dashboard-{name}.png").write_bytes(png(draw(name, found, (start, end), told(here))))
            sys.stdout.write(f"docs/assets/dashboard-{name}.png\n")


def story(here: Pilot) -> None:
    """A run that loses a site for a while, one that lets in no update, and one that goes on at the end."""
    here.run(recipe("wing-fednh", "fednh", 16, epochs=20))
    here.until_round("wing-fednh", 5)
    here.lose("west", 70)
    here.until_ended("wing-fednh")
    time.sleep(8)
    here.run(recipe("too-strict", "fedavg", 3, max_update_norm=1e-6, max_attempts=2, deadline_s=8))
    here.until_ended("too-strict")
    time.sleep(8)
    here.run(recipe("wing-fedavg", "fedavg", 20, epochs=20))
    here.until_round("wing-fedavg", 12)


def told(here: Pilot) -> str:
    """What happened when."""
    return "; ".join(f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} {what}" for at, what in here.events)


def draw(name: str, found: Mapping[int, list[Line]], interval: Interval, events: str) -> Figure:
    """One dashboard, of what its panels' queries gave, by their ids."""
    made = dashboard(name)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in made["panels"])
    height = HEAD + rows * ROW + FOOT
    figure = Figure(figsize=(WIDTH, height), facecolor="#F2F3F5")
    FigureCanvasAgg(figure)
    figure.text(0.008, 1 - 0.29 / height, made["title"], size=14, color=INK, weight="bold", va="center")
    caption = (
        "The dashboard's queries, answered by a real Prometheus and drawn by matplotlib; Grafana draws them better."
    )
    figure.text(
        0.008, 0.27 / height, f"{caption} A server, an evaluator and three sites on one machine.", size=8, color=INK
    )
    figure.text(0.008, 0.1 / height, f"UTC: {events}.", size=8, color=INK)
    for panel in made["panels"]:
        place(figure, height, panel, found[panel["id"]], interval)
    return figure


def place(figure: Figure, height: float, panel: dict[str, Any], lines: list[Line], interval: Interval) -> None:
    """One panel, where the dashboard has it."""
    grid, kind = panel["gridPos"], panel["type"]
    x, width = grid["x"] / 24 * WIDTH + 0.05, grid["w"] / 24 * WIDTH - 0.1
    top = height - HEAD - grid["y"] * ROW - 0.05
    tall = grid["h"] * ROW - 0.1
    frame = FancyBboxPatch(
        (x / WIDTH, (top - tall) / height),
        width / WIDTH,
        tall / height,
        boxstyle="round,pad=0,rounding_size=0.002",
        transform=figure.transFigure,
        facecolor="white",
        edgecolor="#DADDE1",
        linewidth=0.8,
        zorder=-1,  # axes have 0
    )
    figure.add_artist(frame)
    figure.text((x + 0.1) / WIDTH, (top - 0.16) / height, panel["title"], size=9.5, color=INK, va="center")
    over_time = kind in ("timeseries", "state-timeline")
    left = {"stat": 0.1, "bargauge": 1.3}.get(kind, 0.85)
    left, bottom = (0.15, 0.1) if kind in ("table", "gauge") else (left, 0.58 if over_time else 0.1)
    inside = (x + left) / WIDTH, (top - tall + bottom) / height
    axes = figure.add_axes((*inside, (width - left - 0.2) / WIDTH, (tall - bottom - 0.4) / height))
    if lines:
        DRAWN[kind](axes, panel, lines, interval)
    else:
        axes.axis("off")
        on_gpu = panel["title"] in {title for of, title, _ in NO_DATA_HERE if of == "sites"}
        text = "no data: these sites train on a CPU" if on_gpu else "no data"
        axes.text(0.5, 0.5, text, size=9, color="#9AA0A6", ha="center")


def answers(name: str, prometheus: Prometheus, interval: Interval) -> dict[int, list[Line]]:
    """What the queries of a dashboard gave, by the ids of its panels."""
    return {panel["id"]: lines(name, panel, prometheus, interval) for panel in dashboard(name)["panels"]}


def lines(name: str, panel: dict[str, Any], prometheus: Prometheus, interval: Interval) -> list[Line]:
    """Of one panel."""
    start, end = interval
    found = []
    for number, query in enumerate(of_panel(name, panel)):
        asked = query.filled(int(end - start), RATE_S)
        given = prometheus.now(asked, end) if query.instant else prometheus.range(asked, start, end)
        found += [Line(query.label(one.labels), one.labels, one.points, number) for one in given if one.points]
    return found


def png(figure: Figure) -> bytes:
    """With a palette: a third of the bytes."""
    raw, out = BytesIO(), BytesIO()
    figure.savefig(raw, format="png", dpi=100)
    Image.open(raw).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
