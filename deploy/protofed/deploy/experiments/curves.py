"""Scores over rounds, bytes or epochs, for the pictures of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofed.deploy.experiments.experiment import Result
from protofed.deploy.experiments.summary import Cost, costs, over_sites
from protofed.deploy.plots import Curve, NotebookFigure, lines, save

FAMILIES = {
    "global.accuracy": "Global model, accuracy on the test set (GM)",
    "global.balanced_accuracy": "Global model, balanced accuracy",
    "personal.pm_v": "Sites' own models on their own classes, PM(V)",
    "personal.pm_l": "Sites' own models by their own class frequencies, PM(L)",
    "personal.balanced_accuracy": "Sites' own models, balanced accuracy on all classes",
    "personal.local.accuracy": "Sites' own models on their local tests, mean over sites",
    "global.local.accuracy": "Global model on the sites' local tests, mean over sites",
}
UNKNOWN = Cost(None, None)
SAME = 0.05  # share by which steps of one axis may differ and be called equal


@dataclass(frozen=True)
class Curves:
    """One picture: a score of all recipes that have it.

    Attributes:
        series: by recipe.
    """

    score: str
    title: str
    axis: Axis
    series: Mapping[str, Curve]

    @property
    def figure(self) -> NotebookFigure:
        """Drawn anew."""
        return lines(self.series, self.title, self.axis.label)

    @property
    def stem(self) -> str:
        """Of the files' names."""
        return _stem(self.score, self.axis)


def draw(curves: Sequence[Curves], out: Path) -> list[Path]:
    """Write each as `curve-<score>.png` and `.svg`, those over bytes and epochs as `curve-<score>-bytes` …; the paths.

    Those of an earlier call that are not drawn any more are removed.
    """
    paths = [path for one in curves for path in save(one.figure, out, one.stem)]
    drawable = {
        out / f"{_stem(name, axis)}.{suffix}" for name in FAMILIES for axis in AXES for suffix in ("png", "svg")
    }
    for old in drawable - set(paths):  # by name: people keep pictures of their own beside these
        old.unlink(missing_ok=True)
    return paths


def _stem(score: str, axis: Axis) -> str:
    return "-".join(["curve", score.replace(".", "-"), *([] if axis is ROUNDS else [axis.key])])


def collect_curves(results: Mapping[str, Sequence[Result]]) -> list[Curves]:
    """One for each family of scores that the results have; of the papers' scores over bytes and epochs, too.

    Not where a round is the same step for all recipes: the curves over rounds say as much.

    Args:
        results: by recipe, one for each seed.
    """
    all_curves = []
    for name, title in FAMILIES.items():
        for axis in AXES if name in OVER_COST else (ROUNDS,):
            of = {label: over_axis(seeds, name, axis) for label, seeds in results.items()}
            series = {label: curve for label, curve in of.items() if curve is not None}
            if series and (axis is ROUNDS or not _is_rescaled(results, name, axis)):
                all_curves.append(Curves(name, title, axis, series))
    return all_curves


@dataclass(frozen=True)
class Axis:
    """What scores are drawn over; `read` gives its value after a round, by the cost up to it, if that is known."""

    key: str
    label: str
    read: Callable[[int, Cost], float | None]


ROUNDS = Axis("rounds", "round", lambda number, _: number)
AXES = (
    ROUNDS,
    Axis("bytes", "MB (10^6 bytes) between server and sites, up to the round", lambda _, cost: cost.megabytes),
    Axis("epochs", "local epochs, up to the round", lambda _, cost: cost.epochs),
)
OVER_COST = ("global.accuracy", "personal.pm_v", "personal.local.accuracy", "global.local.accuracy")


def over_axis(results: Sequence[Result], name: str, axis: Axis) -> tuple[list[float], NDArray[np.float64]] | None:
    """As `over_rounds`, with the mean over seeds of the axis in place of rounds; None: also where it is not known."""
    if (curve := over_rounds(results, name)) is None:
        return None
    rounds, values = curve
    by_seed = [costs(result) for result in results]
    places = [[axis.read(number, of_seed.get(number, UNKNOWN)) for number in rounds] for of_seed in by_seed]
    known = [[place for place in of_seed if place is not None] for of_seed in places]
    if any(len(of_seed) < len(rounds) for of_seed in known):
        return None
    return np.array(known, dtype=float).mean(0).tolist(), values


def _is_rescaled(results: Mapping[str, Sequence[Result]], name: str, axis: Axis) -> bool:
    """Whether a round is the same step on this axis for all recipes, so that the picture over rounds says as much."""
    steps = []
    for seeds in results.values():
        over, of_rounds = over_axis(seeds, name, axis), over_rounds(seeds, name)
        if over is not None and of_rounds is not None:
            steps += [place / number for place, number in zip(over[0], of_rounds[0], strict=True)]
    return bool(steps) and max(steps) <= (1 + SAME) * min(steps)


def over_rounds(results: Sequence[Result], name: str) -> tuple[list[int], NDArray[np.float64]] | None:
    """Rounds that all seeds have the score of, and its mean over sites, [seeds, rounds]; None if there are none."""
    by_seed = [over_sites(result.scores, result.sums).items() for result in results]
    means = [{number: of[name].mean for number, of in rounds if name in of} for rounds in by_seed]
    rounds = sorted(set.intersection(*map(set, means))) if means else []
    return (rounds, np.array([[of_seed[r] for r in rounds] for of_seed in means])) if rounds else None
