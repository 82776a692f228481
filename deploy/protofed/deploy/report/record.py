"""A run record as a report reads it: scores, tasks and bytes, picked out and added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from protofed.common.statistics import Spread, lower_is_better, spreads

LABELS = {
    "accuracy": "accuracy on the shared test set",
    "balanced_accuracy": "balanced accuracy on the shared test set",
    "pm_v": "accuracy on the classes that the site has, PM(V)",
    "pm_l": "accuracy by how common the classes are at the site, PM(L)",
    "local.accuracy": "accuracy on the sites' own test sets",
    "local.balanced_accuracy": "balanced accuracy on the sites' own test sets",
    "auroc": "area under the ROC curve",
    "local.auroc": "area under the ROC curve on the sites' own test sets",
    "ece": "calibration error (ECE; lower is better)",
    "local.ece": "calibration error on the sites' own test sets (lower is better)",
}
GROUPS = ("many", "medium", "few", "groups")
MANY_ROUNDS = 40  # of more, a table has some


@dataclass(frozen=True)
class RunRecord:
    """What a run record says; see `protofed.server.operator.run_record`."""

    record: Mapping[str, Any]

    @property
    def run(self) -> Mapping[str, Any]:
        """Name, status, reason, dates."""
        found: Mapping[str, Any] = self.record["run"]
        return found

    @property
    def recipe(self) -> Mapping[str, Any]:
        """As the run was begun."""
        found: Mapping[str, Any] = self.record["recipe"]
        return found

    @property
    def classes(self) -> int:
        """C."""
        return int(self.recipe["classes"])

    def name(self, c: int) -> str:
        """Of a class, as the run calls it; else its number."""
        class_names = self.recipe.get("class_names") or ()
        return str(class_names[c]) if class_names else str(c)

    @property
    def names(self) -> list[str]:
        """Of all classes, [C]."""
        return [self.name(c) for c in range(self.classes)]

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """At all rounds."""
        found: Sequence[Mapping[str, Any]] = self.record["rounds"]
        return found

    @property
    def rounds(self) -> list[Mapping[str, Any]]:
        """The attempts that published a state which still counts, without round 0: it makes the first model."""
        return [one for one in self.attempts if one["round"] and one["outcome"] in ("published", "degraded")]

    @property
    def sites(self) -> list[str]:
        """That were ever asked to train; where there are none yet, that are known as trainers."""
        asked = {task["site"] for _, task in self.tasks() if task["kind"] == "fit"}
        return sorted(asked or {site for site, of in self.record["sites"].items() if "trainer" in of["roles"]})

    @property
    def evaluators(self) -> list[str]:
        """That scored the global model on the test set that all share."""
        return [site for site, of in self.record["sites"].items() if "evaluator" in of["roles"]]

    def tasks(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Every invitation with its attempt."""
        return ((one, task) for one in self.attempts for task in one["tasks"])

    @cached_property
    def scores(self) -> dict[int, dict[str, dict[str, float]]]:
        """By round, site and name, without those of single classes."""
        return {one["round"]: one["sites"] for one in self.record["scores"]}

    @cached_property
    def spreads(self) -> dict[int, dict[str, Spread]]:
        """By round and name, over the sites."""
        return {number: spreads(sites) for number, sites in self.scores.items()}

    @property
    def newest(self) -> int | None:
        """The newest scored round."""
        return max(self.scores, default=None)

    @property
    def last(self) -> Mapping[str, Spread]:
        """The newest scores over the sites, by name."""
        return {} if self.newest is None else self.spreads[self.newest]

    def own(self, name: str) -> dict[str, float]:
        """A newest score by site."""
        sites = {} if self.newest is None else self.scores[self.newest]
        return {site: told[name] for site, told in sites.items() if name in told}

    def worst(self, name: str) -> tuple[str, float]:
        """The site that does worst by a newest score that there is, and its value."""
        pick = max if lower_is_better(name) else min
        return pick(self.own(name).items(), key=lambda pair: pair[1])

    def series(self, name: str) -> dict[int, list[float]]:
        """A score's values over sites, by round."""
        values = {n: [told[name] for told in sites.values() if name in told] for n, sites in self.scores.items()}
        return {number: found for number, found in values.items() if found}

    def losses(self) -> dict[int, list[float]]:
        """Of training, over sites, by round."""
        values = {
            one["round"]: [task["loss"] for task in one["tasks"] if task["loss"] is not None] for one in self.rounds
        }
        return {number: found for number, found in values.items() if found}

    def by_class(self, which: str, family: str) -> dict[int, dict[str, float]]:
        """Of the `newest` or the `best` round, a family such as `global.recall`: by class and site."""
        found: dict[int, dict[str, float]] = {}
        for site, told in self.record["classes"][which]["sites"].items():
            for name, value in told.items():
                stem, _, number = name.rpartition(".")
                if stem == family:
                    found.setdefault(int(number), {})[site] = value
        return dict(sorted(found.items()))

    def round_of(self, which: str) -> int | None:
        """Of the `newest` or the `best` scores by class."""
        number: int | None = self.record["classes"][which]["round"]
        return number

    def statistics(self, name: str) -> dict[int, float]:
        """One of the statistics that are recorded with rounds, such as `prototype_shift`."""
        return {one["round"]: one["statistics"][name] for one in self.rounds if name in one["statistics"]}

    def bytes_by(self, key: str) -> dict[Any, tuple[int, int]]:
        """Bytes received from and sent to sites; by `site`, or by `round` over all of its attempts."""
        moved: dict[Any, tuple[int, int]] = {}
        for one, task in self.tasks():
            place = task["site"] if key == "site" else one["round"]
            received, sent = moved.get(place, (0, 0))
            moved[place] = received + task["received"], sent + task["sent"]
        return {place: both for place, both in sorted(moved.items()) if any(both)}


def percent(share: float) -> str:
    """One decimal: 0.928 is 92.8 %."""
    return f"{100 * share:.1f} %"


def shown(name: str, value: float) -> str:
    """A score as people read it; shares in percent, errors of calibration and losses as they are."""
    return f"{value:.3f}" if name.rpartition(".")[2] in ("ece", "loss", "auroc") else f"{100 * value:.1f}"


def label(name: str) -> str:
    """A score's name without whose model it is of, in words."""
    rest = name.partition(".")[2]
    return LABELS.get(rest, rest)


def day(seconds: float | None) -> str:
    """UTC, RFC 3339."""
    return "–" if not seconds else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def lasted(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, left = divmod(minutes, 60)
    return f"{minutes} min" if hours < 2 else f"{hours} h {left} min" if hours < 48 else f"{hours / 24:.1f} days"


def megabytes(count: float) -> str:
    """1 MB is 10^6 bytes."""
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def some(numbers: Sequence[int], most: int = MANY_ROUNDS) -> list[int]:
    """At most so many of them, evenly, with the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]
