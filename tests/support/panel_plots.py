"""Panels of a dashboard drawn by matplotlib, with the same units, colours and thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from tests.support.panel_values import HEX, INK, colour_of, mapped, shown

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
    """Newest values side by side."""
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
    """A bar with its thresholds."""
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
    """Lines over time."""
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
