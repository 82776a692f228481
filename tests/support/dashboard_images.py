"""`python -m tests.support.dashboard_images`: docs/assets/dashboard-*.png, of a pilot and a real Prometheus.

Grafana draws them better. These show what a pilot looks like, drawn from the same queries in the same places.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image
from tests.support.dashboards import NAMES, NO_DATA_HERE, dashboard, of_panel
from tests.support.monitored_pilot import Pilot, pilot, recipe
from tests.support.prometheus import Prometheus

HEX = {
    "green": "#3E9B37",
    "red": "#D92A40",
    "dark-red": "#8C1C2E",
    "orange": "#F07A0A",
    "yellow": "#DDB100",
    "blue": "#3274D9",
    "super-light-blue": "#8AB8FF",
    "purple": "#A352CC",
    "text": "#9AA0A6",
}
INK = "#24292E"


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """A number with its unit, as Grafana would write it, roughly."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %" if decimals is None else f"{100 * value:.{decimals}f} %"
    if unit in ("decbytes", "Bps"):
        return _scaled(value, "B/s" if unit == "Bps" else "B")
    if unit == "s":
        return _time(value)
    if unit == "d":
        return f"{value:.0f} days"
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.3g}"


def _scaled(value: float, unit: str) -> str:
    power = min(4, int(math.log10(abs(value)) / 3)) if abs(value) >= 1 else 0
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}{unit}"


def _time(value: float) -> str:
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if abs(value) < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def colour_of(value: float, defaults: dict[str, Any]) -> str:
    steps = defaults.get("thresholds", {}).get("steps", [{"color": "green", "value": None}])
    chosen = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    return HEX.get(chosen, INK)


def mapped(value: float, defaults: dict[str, Any]) -> tuple[str, str] | None:
    """Text and colour of a value that stands for a word."""
    for mapping in defaults.get("mappings", []):
        if (found := mapping["options"].get(f"{value:.0f}")) is not None:
            return found["text"], HEX[found["color"]]
    return None


PALETTE = ("#3274D9", "#F07A0A", "#3E9B37", "#A352CC", "#D92A40", "#4BB7C8", "#DDB100", "#7A5195", "#8C6D4F", "#55606B")
FAINT = "#DADDE1"
ROW = 0.32  # inches of one line of the grid
GAP_S = 5.0  # a line breaks where nothing was told for longer
Interval = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One series of a panel."""

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]
    query: int  # which of the panel's

    @property
    def last(self) -> float:
        return self.points[-1][1]


def draw_stat(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], _interval: Interval) -> None:
    axes.axis("off")
    defaults, options = panel["fieldConfig"]["defaults"], panel["options"]
    width = 1 / max(1, len(lines))
    for place, line in enumerate(lines):
        text, colour = mapped(line.last, defaults) or (
            shown(line.last, defaults.get("unit", "none"), defaults.get("decimals")),
            _fixed(panel, line.name) or colour_of(line.last, defaults),
        )
        mode, middle = options.get("textMode"), (place + 0.5) * width
        text, name = (line.name, "") if mode == "name" else (text, line.name if mode == "value_and_name" else "")
        size = min(21.0, axes.bbox.width * width / len(text))  # points are about as wide as pixels here
        axes.text(
            middle, 0.36 if name else 0.45, text, size=size, color=colour, ha="center", va="center", weight="bold"
        )
        axes.text(middle, 0.84, name, size=8, color=INK, ha="center", va="center")


def draw_gauge(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], _interval: Interval) -> None:
    axes.axis("off")
    defaults, value = panel["fieldConfig"]["defaults"], lines[0].last
    colour = colour_of(value, defaults)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.text(
        0.5, 0.62, shown(value, defaults["unit"], 0), size=20, color=colour, ha="center", va="center", weight="bold"
    )
    axes.add_patch(Rectangle((0.05, 0.1), 0.9, 0.16, color=FAINT, lw=0))
    axes.add_patch(Rectangle((0.05, 0.1), 0.9 * min(1.0, value), 0.16, color=colour, lw=0))
    for step in defaults["thresholds"]["steps"][1:]:
        axes.plot([0.05 + 0.9 * step["value"]] * 2, [0.06, 0.3], color=HEX[step["color"]], lw=2)


def draw_bars(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], _interval: Interval) -> None:
    """A horizontal bar for each series."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [line.last for line in lines]
    axes.barh(range(len(lines)), values, color=[colour_of(value, defaults) for value in values], height=0.62)
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.15)
    for place, value in enumerate(values):
        axes.text(value, place, f" {shown(value, defaults['unit'])}", va="center", size=8, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)


def draw_table(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], _interval: Interval) -> None:
    """A row for each site, a column for each query."""
    axes.axis("off")
    (organize,) = (one["options"] for one in panel["transformations"] if one["id"] == "organize")
    columns = [organize["renameByName"][f"Value #{target['refId']}"] for target in panel["targets"]]
    rows = sorted({line.labels["site"] for line in lines})
    overrides = {
        one["matcher"]["options"]: {p["id"]: p["value"] for p in one["properties"]} for one in _overrides(panel)
    }
    for x, column in enumerate(("site", *columns)):
        axes.text(x + 0.05, -0.1, column, size=9, color=INK, weight="bold", va="center")
    for y, row in enumerate(rows, 1):
        axes.plot([0, len(columns) + 1], [y - 0.5] * 2, color=FAINT, lw=0.8)
        axes.text(0.05, y, row, size=9, color=INK, va="center")
        for line in lines:
            if line.labels["site"] == row:
                column = columns[line.query]
                _cell(axes, line.query + 1.05, y, line.last, overrides.get(column, {}))
    axes.set_xlim(0, len(columns) + 1)
    axes.set_ylim(max(len(rows), 3) + 0.6, -0.6)


def _cell(axes: Axes, x: float, y: float, value: float, field: dict[str, Any]) -> None:
    text, colour = mapped(value, field) or (shown(value, field.get("unit", "none"), field.get("decimals")), INK)
    if "thresholds" in field:
        colour = colour_of(value, field)
    if field.get("custom.cellOptions", {}).get("type") == "gauge":
        axes.add_patch(Rectangle((x, y - 0.22), 0.5, 0.44, color=FAINT, lw=0))
        axes.add_patch(Rectangle((x, y - 0.22), 0.5 * value, 0.44, color=HEX["green"], lw=0))
        x, text = x + 0.54, f"{100 * value:.0f} %"
    axes.text(x, y, text, size=9, color=colour, va="center")


def draw_states(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], interval: Interval) -> None:
    """What was when, a row for each series."""
    defaults = panel["fieldConfig"]["defaults"]
    for row, line in enumerate(lines):
        for at, value in line.points:
            found = mapped(value, defaults)
            assert found is not None
            axes.add_patch(Rectangle((at, row - 0.38), 1.02, 0.76, color=found[1], lw=0))
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    _times(axes, interval)
    axes.tick_params(axis="y", length=0)
    options = defaults["mappings"][0]["options"].values()
    _legend(axes, [(one["text"], HEX[one["color"]], "s") for one in options])


def draw_lines(axes: Axes, panel: dict[str, Any], lines: Sequence[Line], interval: Interval) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], defaults["unit"]
    named = []
    for place, line in enumerate(lines):
        colour = _fixed(panel, line.name) or PALETTE[place % len(PALETTE)]
        x, y = _broken(line.points)
        step = "steps-post" if custom.get("lineInterpolation") == "stepAfter" else "default"
        dash = "--" if _dashed(panel, line.name) else "-"
        axes.plot(x, y, color=colour, lw=1.5, drawstyle=step, linestyle=dash, zorder=3)
        named.append((line.name, colour, "_"))
    axes.margins(y=0.12)
    highest = max(value for line in lines for _, value in line.points)
    if "min" in defaults:
        axes.set_ylim(defaults["min"], defaults.get("max", 1.12 * highest or 1))
    low, high = axes.get_ylim()
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["color"] in HEX and step["value"] is not None and "thresholdsStyle" in custom:
            axes.axhline(step["value"], color=HEX[step["color"]], lw=1, linestyle="--", zorder=2)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=defaults.get("decimals") == 0))
    axes.yaxis.set_major_formatter(FuncFormatter(_ticks(unit)))
    axes.grid(axis="y", color="#ECEEF0", lw=0.8, zorder=0)
    _times(axes, interval)
    if any(line.name for line in lines):
        _legend(axes, named)


def _ticks(unit: str) -> Callable[[float, float], str]:
    return lambda value, _place: "0" if value == 0 else shown(value, unit)


def _broken(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """With a hole where nothing was told for a while."""
    x, y, before = list[float](), list[float](), math.inf
    for at, value in points:
        if at - before > GAP_S:
            x.append(before)
            y.append(math.nan)
        x.append(at)
        y.append(value)
        before = at
    return x, y


def _legend(axes: Axes, named: Sequence[tuple[str, str, str]]) -> None:
    """Below the times, in as few rows as there is room for."""
    widest = max(len(name) for name, _, _ in named)
    columns = max(1, min(len(named), int(axes.bbox.width / (5.6 * widest + 26))))
    place = axes.get_position()
    more = 15 * (math.ceil(len(named) / columns) - 1) / axes.bbox.height * place.height
    axes.set_position((place.x0, place.y0 + more, place.width, place.height - more))
    handles = [axes.plot([], [], color=colour, marker=mark, lw=0 if mark == "s" else 2)[0] for _, colour, mark in named]
    axes.legend(
        handles,
        [name for name, _, _ in named],
        loc="upper left",
        bbox_to_anchor=(-0.01, -16 / axes.bbox.height),
        ncols=columns,
        frameon=False,
        fontsize=7.5,
        handlelength=1,
        columnspacing=1.1,
        handletextpad=0.4,
    )


def _times(axes: Axes, interval: Interval) -> None:
    axes.set_xlim(interval[0], interval[1])
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _place: f"{datetime.fromtimestamp(at, UTC):%H:%M}"))
    axes.tick_params(labelsize=7.5, color=FAINT, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(FAINT)


def _overrides(panel: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = panel["fieldConfig"]["overrides"]
    return found


def _fixed(panel: dict[str, Any], name: str) -> str | None:
    for one in _overrides(panel):
        for prop in one["properties"]:
            if one["matcher"]["options"].strip() == name and prop["id"] == "color":
                return HEX[prop["value"]["fixedColor"]]
    return None


def _dashed(panel: dict[str, Any], name: str) -> bool:
    return any(
        prop["id"] == "custom.lineStyle"
        for one in _overrides(panel)
        if one["matcher"]["options"] == name
        for prop in one["properties"]
    )


DRAWN = {
    "stat": draw_stat,
    "gauge": draw_gauge,
    "bargauge": draw_bars,
    "table": draw_table,
    "state-timeline": draw_states,
    "timeseries": draw_lines,
}


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
