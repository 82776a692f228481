"""How a panel shows a number: its unit, the colour of its threshold, or the word that it stands for."""

from __future__ import annotations

import math
from typing import Any

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
    """By thresholds."""
    steps = defaults.get("thresholds", {}).get("steps", [{"color": "green", "value": None}])
    chosen = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    return HEX.get(chosen, INK)


def mapped(value: float, defaults: dict[str, Any]) -> tuple[str, str] | None:
    """Text and colour of a value that stands for a word."""
    for mapping in defaults.get("mappings", []):
        if (found := mapping["options"].get(f"{value:.0f}")) is not None:
            return found["text"], HEX[found["color"]]
    return None
