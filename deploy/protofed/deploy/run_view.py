"""A run as people see it: its record, from a ledger or over the wire, and statements about it.

Reports, model cards and the console's figures show parts of the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Protocol

from protofed.client.policy.rules import is_own
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import ConfigError, count, short
from protofed.common.protocol.messages import score_family
from protofed.common.protocol.scores import Spread, lower_is_better, recorded_spreads

NOISE_KEEPS = "no PM(V), and no other score or loss of sites' own: they have no noise, and stay there (plan.dp)"
NOT_IN_A_SUM = "–"  # a secure aggregation tells neither a deviation nor the worst
MAX_SITES = 3  # sites' own models that are named: a run may have hundreds
ABOUT_INTERVALS = (
    "In brackets: the 95 % bootstrap interval over the test set's patients, or over its images if it has no patients. "
    "It does not say how much another training would differ."
)


@dataclass(frozen=True)
class BestSnapshot:
    """The best round by the score that judges a run's rounds.

    Attributes:
        kept: the best of the rounds whose states are kept; None: none is.
    """

    round: int
    score: str
    value: float
    kept: int | None


def score_text(value: float, digits: int = 4) -> str:
    """A score with so many decimals, or with three digits where they would hide it, as an error in a small range."""
    return f"{value:.3g}" if 0 < abs(value) < 10.0 ** (1 - digits) else f"{value:.{digits}f}"


def best_sentence(best: BestSnapshot) -> str:
    """The best round in a line."""
    text = f"best: round {best.round}, {best.score} {score_text(best.value)} (chosen by this score: optimistic)"
    if best.kept == best.round:
        return text
    alternative = "none is kept" if best.kept is None else f"the best that is kept is round {best.kept}"
    return f"{text}; its state is no longer kept, {alternative}"


def kept_best(run: str, best: BestSnapshot | None) -> int:
    """The number of the best round, whose state is to be taken.

    Raises:
        ConfigError: there is none, or its state is no longer kept.
    """
    if best is None:
        raise ConfigError(
            f"run '{short(run)}' has no best round: no round has a score that judges it (see federation.best_by); give "
            "a round's number"
        )
    if best.kept != best.round:
        instead = (
            "" if best.kept is None else f"; the best round with a kept state is round {best.kept}: give this number"
        )
        raise ConfigError(
            f"the best round of run '{short(run)}' is {best.round} ({best.score} {score_text(best.value)}), and its "
            f"state is no longer kept{instead}"
        )
    return best.round


def from_sum(sites: int) -> str:
    """Where the scores come from if no site's own score is known; without a full stop."""
    return f"mean over {count(sites, 'site')}, from a secure aggregation; no site sent its own score alone"


def aggregated_sentence(sites: int) -> str:
    """What scores are that a table shows with `NOT_IN_A_SUM`."""
    return f"scores without std and worst: {from_sum(sites)}"


def kept_sentence(sites: int, of: int | None = None) -> str:
    """For people who would look for these scores, without a full stop. The reason is known at the sites alone.

    Args:
        of: the number of sites that might have sent some; None: it is not told.
    """
    sites_text = count(sites, "site") if of is None else "The sites" if sites == of else f"{sites} of {of} sites"
    models = "its own model" if sites_text == "1 site" else "their own models"
    return f"{sites_text} sent no scores of {models} (a policy may keep them)"


class Warned(Protocol):
    """A warning of a server, or one that a server sent."""

    @property
    def code(self) -> str:
        """The code under which the runbook explains the warning."""

    @property
    def site(self) -> str | None:
        """Whose own model it is; None or empty: the global one."""

    @property
    def text(self) -> str:
        """One sentence."""


def warning_lines(warnings: Sequence[Warned], option: str = "--json") -> list[str]:
    """A line for each thing that speaks against the global model, and for the first few sites' own models.

    Args:
        option: the option of the command that shows all.
    """
    of_global = [warning for warning in warnings if not warning.site]
    own = [warning for warning in warnings if warning.site]
    lines = [f"{warning.code}: {warning.text}" for warning in (*of_global, *own[:MAX_SITES])]
    return lines + ([f"and {count(len(own) - MAX_SITES, 'own model')} more: {option}"] if own[MAX_SITES:] else [])


GROUPS = ("many", "medium", "few", "groups")
READ_THERE = "each site reads its own by `protofed client runs`"


@dataclass(frozen=True)
class RunView:
    """A run record, with the numbers that a report needs picked out and added up.

    Attributes:
        raw: the record's JSON; `protofed.server.operator.run_record` makes it and describes its keys.
    """

    raw: Mapping[str, Any]

    @property
    def run(self) -> Mapping[str, Any]:
        """Name, status, reason, dates."""
        run: Mapping[str, Any] = self.raw["run"]
        return run

    @property
    def reason(self) -> str:
        """Why it failed, was aborted or stopped early; empty where the status says it all."""
        reason: str = self.run["reason"]
        return "" if reason == self.run["status"] else reason

    @property
    def aborted_by(self) -> str:
        """The operator who aborted it; empty: nobody did, or the name is not known."""
        return next((one["operator"] for one in reversed(self.interventions) if one["action"] == "aborted"), "")

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe that the run was started with."""
        recipe: Mapping[str, Any] = self.raw["recipe"]
        return recipe

    @property
    def task(self) -> str:
        """What the run learns; a recipe says it only where that is not classes."""
        return str(self.recipe.get("task", {}).get("name", CLASSIFICATION))

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The groups of sites that secure aggregations were over."""
        groups: Sequence[Sequence[str]] = self.raw["groups"]
        return groups

    @property
    def partners(self) -> Mapping[str, Any] | None:
        """The list of partners: `coordinator`, `number` and `institutions` by site; None: none was offered."""
        partners: Mapping[str, Any] | None = self.raw["partners"]
        return partners

    @property
    def classes(self) -> int:
        """The number of classes, C."""
        return int(self.recipe["classes"])

    def name(self, c: int) -> str:
        """The name of class c, or its number if the run's classes have no names."""
        class_names = self.recipe.get("class_names") or ()
        return str(class_names[c]) if class_names else str(c)

    @property
    def names(self) -> list[str]:
        """The names of all classes, [C]."""
        return [self.name(c) for c in range(self.classes)]

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """All attempts at all rounds, in the ledger's order."""
        attempts: Sequence[Mapping[str, Any]] = self.raw["rounds"]
        return attempts

    @property
    def rounds(self) -> list[Mapping[str, Any]]:
        """The attempts that published a state which was not rolled back; not round 0, which makes the first model."""
        published = ("published", "degraded")
        return [attempt for attempt in self.attempts if attempt["round"] and attempt["outcome"] in published]

    @property
    def sites(self) -> list[str]:
        """Sites that were ever invited to train or, before the first round, that have the role of a trainer."""
        invited = {task["site"] for _, task in self.tasks() if task["kind"] == "fit"}
        return sorted(invited or self._sites_with_role("trainer"))

    @property
    def invited(self) -> list[str]:
        """Sites that were ever asked to train."""
        return sorted({task["site"] for _, task in self.tasks() if task["kind"] == "fit"})

    @property
    def contributors(self) -> list[str]:
        """Sites whose update was used in a round that counts; under masks, in its sum."""
        return self.contributors_until()

    def contributors_until(self, round: float = math.inf) -> list[str]:
        """Those of the rounds up to this one."""
        return sorted({site for one in self.rounds if one["round"] <= round for site in used_sites(one)})

    @property
    def secure(self) -> bool:
        """Whether the recipe asks for secure aggregation; one of before 0.2.1 has no such key."""
        return bool(self.recipe.get("federation", {}).get("secure", False))

    @property
    def sums(self) -> dict[int, int]:
        """Sites in the sum of each round that counts and had secure aggregation."""
        return {attempt["round"]: len(used_sites(attempt)) for attempt in self.rounds if is_masked(attempt)}

    @property
    def evaluators(self) -> list[str]:
        """Sites that sent scores of the global model on a test set of an evaluator, in the newest scored round.

        By what they sent, not by their roles: a role may have been granted, or taken, since.
        """
        sites = {} if self.newest is None else self.scores[self.newest]
        return sorted(site for site, names in sites.items() if not all(map(is_own, names)))

    @property
    def done(self) -> int:
        """Rounds that are finished and count; not round 0."""
        return len(self.rounds)

    @property
    def planned(self) -> int:
        """Rounds that the recipe asks for."""
        return int(self.recipe["rounds"])

    @property
    def current(self) -> Mapping[str, Any] | None:
        """The newest attempt that was not rolled back."""
        return next((attempt for attempt in reversed(self.attempts) if attempt["outcome"] != "rolled-back"), None)

    @property
    def warnings(self) -> Sequence[Mapping[str, Any]]:
        """Signs of a useless model, the server's own; none in the record of an older server, which looked for none."""
        rows: Sequence[Mapping[str, Any]] = self.raw.get("warnings", ())
        return rows

    @property
    def best(self) -> BestSnapshot | None:
        """The best round by the score that judges the run's rounds; None: none has it, or an older server."""
        best: Mapping[str, Any] | None = self.raw.get("best")
        return None if best is None else BestSnapshot(**best)

    @property
    def interventions(self) -> Sequence[Mapping[str, Any]]:
        """What operators did while the run went on; none in the record of an older server, which did not note it."""
        rows: Sequence[Mapping[str, Any]] = self.raw.get("interventions", ())
        return rows

    def tasks(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Every task with its attempt: (attempt, task)."""
        return ((attempt, task) for attempt in self.attempts for task in attempt["tasks"])

    # A frozen dataclass may have cached properties: they write into __dict__, past __setattr__.
    @cached_property
    def scores(self) -> dict[int, dict[str, dict[str, float]]]:
        """Scores by round, site and name, without those of single classes."""
        return {scored["round"]: scored["sites"] for scored in self.raw["scores"]}

    @cached_property
    def spreads(self) -> dict[int, dict[str, Spread]]:
        """Mean, std and worst over sites, by round and name of the score."""
        return {scored["round"]: recorded_spreads(scored) for scored in self.raw["scores"]}

    def means(self, name: str) -> dict[int, float]:
        """A score's mean over sites, by round; of a single class, of the newest and the best round alone."""
        spreads = self.spreads
        if score_family(name) != name:
            chosen = [self.raw["classes"][which] for which in ("newest", "best")]
            spreads = {one["round"]: recorded_spreads(one) for one in chosen if one["sites"] or one.get("sums")}
        return {number: by_name[name].mean for number, by_name in spreads.items() if name in by_name}

    @property
    def newest(self) -> int | None:
        """The newest scored round."""
        return max(self.scores, default=None)

    @property
    def latest_spreads(self) -> Mapping[str, Spread]:
        """The spreads of the newest scored round, by name of the score."""
        return {} if self.newest is None else self.spreads[self.newest]

    def site_scores(self, name: str) -> dict[str, float]:
        """A score of the newest scored round, by site."""
        sites = {} if self.newest is None else self.scores[self.newest]
        return {site: scores[name] for site, scores in sites.items() if name in scores}

    def worst(self, name: str) -> tuple[str, float] | None:
        """The site with the worst value of a score in the newest scored round, which must have it, and the value.

        None: it is known from a secure aggregation alone.
        """
        pick = max if lower_is_better(name) else min
        values = self.site_scores(name)
        return pick(values.items(), key=lambda pair: pair[1]) if values else None

    def is_aggregated(self, name: str) -> bool:
        """Whether a score of the newest scored round is known from a secure aggregation alone."""
        return (of := self.latest_spreads.get(name)) is not None and of.worst is None

    def series(self, name: str) -> dict[int, list[float]]:
        """A score's values over sites, by round; from a secure aggregation their mean alone."""
        values = {n: [scores[name] for scores in sites.values() if name in scores] for n, sites in self.scores.items()}
        means = {n: of[name].mean for n, of in self.spreads.items() if name in of}
        return {number: values[number] or [mean] for number, mean in means.items()}

    @cached_property
    def reported(self) -> dict[str, set[str]]:
        """Names of the scores that each site sent; of single classes, those of the newest and the best round."""
        by_class = [self.raw["classes"][which]["sites"] for which in ("newest", "best")]
        names: dict[str, set[str]] = {}
        for sites in (*self.scores.values(), *by_class):
            for site, scores in sites.items():
                names.setdefault(site, set()).update(scores)
        return names

    @cached_property
    def keeping(self) -> list[str]:
        """Sites that trained, answered a request for scores and sent none of their own."""
        trained, scored = (
            {task["site"] for _, task in self.tasks() if (task["kind"], task["task_status"]) == (kind, "reported")}
            for kind in ("fit", "score")
        )
        telling = {site for site, names in self.reported.items() if any(map(is_own, names))}
        # Under secure aggregation trainers are asked for a sum of theirs: those that score besides are evaluators.
        asked_for_sums = any(task["kind"] == "score-sum" for _, task in self.tasks())
        return [] if asked_for_sums else sorted(trained & scored - telling)

    @property
    def kept_by_noise(self) -> bool:
        """Whether rounds were published and no site's own score is there because the run has noise.

        It holds under secure aggregation, too, where sites are asked for a sum of theirs.
        """
        noisy = bool(self.recipe.get("plan", {}).get("dp"))
        return noisy and self.done > 0 and not any(is_own(name) for of in self.spreads.values() for name in of)

    @property
    def kept_scores(self) -> str | None:
        """That sites sent no scores of their own models though asked, or as the run has noise; None: neither is so."""
        if self.kept_by_noise:
            return f"{NOISE_KEEPS[0].upper()}{NOISE_KEEPS[1:]}; {READ_THERE}."
        return f"{kept_sentence(len(self.keeping), len(self.sites))}: {READ_THERE}." if self.keeping else None

    def losses(self) -> dict[int, list[float]]:
        """Training losses over sites, by round."""
        values = {
            attempt["round"]: [task["loss"] for task in attempt["tasks"] if task["loss"] is not None]
            for attempt in self.rounds
        }
        return {number: of_sites for number, of_sites in values.items() if of_sites}

    def by_class(self, which: str, family: str) -> dict[int, dict[str, float]]:
        """A family of scores such as `global.recall`, by class and site.

        Args:
            which: of the `newest` or of the `best` scored round.
        """
        values: dict[int, dict[str, float]] = {}
        for site, scores in self.raw["classes"][which]["sites"].items():
            for name, value in scores.items():
                stem, _, number = name.rpartition(".")
                if stem == family and number.isdigit():  # not an end of an interval
                    values.setdefault(int(number), {})[site] = value
        return dict(sorted(values.items()))

    def recalls(self, which: str, model: str) -> dict[int, float]:
        """Recall by class, the mean over sites; of the global model, over evaluators.

        Args:
            which: as in `by_class`.
            model: `global` or `personal`.
        """
        by_class = self.by_class(which, f"{model}.recall")
        names = ((name.rpartition("."), of) for name, of in self.raw["classes"][which].get("sums", {}).items())
        sums = {int(number): of["mean"] for (stem, _, number), of in names if stem == f"{model}.recall"}
        return sums | {c: fmean(of_sites.values()) for c, of_sites in by_class.items()}

    @property
    def chance(self) -> float:
        """The balanced accuracy of guessing on the evaluators' test sets, or of always naming one of their classes."""
        present = self.recalls("newest", "global")
        return 1 / (len(present) or self.classes)

    def find_round(self, which: str) -> int | None:
        """The round of the `newest` or the `best` scores by class."""
        number: int | None = self.raw["classes"][which]["round"]
        return number

    def statistics(self, name: str) -> dict[int, float]:
        """A statistic of the states, such as `prototype_shift`, by round."""
        return {
            attempt["round"]: attempt["statistics"][name] for attempt in self.rounds if name in attempt["statistics"]
        }

    def bytes_by(self, key: str) -> dict[Any, tuple[int, int]]:
        """Bytes (received from sites, sent to sites), by `site` or by `round` over all of its attempts."""
        totals: dict[Any, tuple[int, int]] = {}
        for attempt, task in self.tasks():
            group = task["site"] if key == "site" else attempt["round"]
            received, sent = totals.get(group, (0, 0))
            totals[group] = received + task["received"], sent + task["sent"]
        return {group: both for group, both in sorted(totals.items()) if any(both)}

    def _sites_with_role(self, role: str) -> list[str]:
        return [site for site, fields in self.raw["sites"].items() if role in fields["roles"]]


def is_masked(attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt came to masked numbers: those of FIT tasks are keys then, and no updates."""
    return any(task["kind"] == "mask" and is_of_update(task) for task in attempt["tasks"])


def is_of_update(task: Mapping[str, Any]) -> bool:
    """Whether a task's sum is of updates, and not of scores; a record of before there were sums has no such key."""
    return task.get("sum_of", "") in ("", "update")


def used_sites(attempt: Mapping[str, Any]) -> list[str]:
    """Sites whose updates an attempt that counts has used."""
    tasks = [task for task in attempt["tasks"] if is_of_update(task)]
    if is_masked(attempt):  # who sent numbers without its whole group is not in the sum, and not asked who is
        return [task["site"] for task in tasks if task["kind"] == "agree"]
    return [task["site"] for task in tasks if (task["kind"], task["task_status"]) == ("fit", "reported")]
