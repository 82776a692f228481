"""Tables and JSON of runs, and `simulate` with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protofed.client.device import pick_device
from protofed.client.policy.policy import Policy
from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import RunFailedError, count
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Scores
from protofed.common.protocol.scores import JUDGED_BY, Spread, is_share, spreads
from protofed.deploy.progress import progress
from protofed.deploy.run_view import BestSnapshot, best_sentence, warning_lines
from protofed.deploy.simulation.simulation import NewPool, held_out_scores, simulation
from protofed.deploy.tables import BOXED, Column, terminal
from protofed.server.operator.run_record import Overview, find_best, overview
from protofed.server.rounds.machine.phases import (
    Aggregating,
    Collecting,
    Evaluating,
    FinishedPhase,
    Idle,
    Phase,
    Refining,
    Summing,
)
from protofed.server.rounds.scores.model_warnings import ModelWarning
from protofed.server.rounds.scores.scoring import find_warnings


class RunLine(NamedTuple):
    """A run in a table, as far as it is; `phase` in words."""

    recipe: Recipe
    view: Overview | None
    phase: str = ""

    @property
    def started(self) -> Overview | None:
        """The run, once a round was opened."""
        return self.view if self.view is not None and self.view.began else None


def progress_table(recipes: Sequence[Recipe], views: Mapping[str, Overview | None], title: str) -> Table:
    """One row per run: its phase, its newest mean scores in percent, its traffic in MB (10^6 bytes) and its seconds."""
    lines, waiting = list[RunLine](), False  # runs execute one by one: the first unstarted run waits for sites
    for recipe in recipes:
        view = views.get(recipe.name)
        waiting = waiting or (view is not None and view.began and not view.ended)
        queued = view is None or (waiting and not view.began)
        lines.append(RunLine(recipe, view, "queued" if queued or view is None else view.phase))
        waiting = waiting or view is None or not view.began
    return terminal(PROGRESS, lines, BOXED, title)


def scores_table(recipes: Sequence[Recipe], views: Mapping[str, Overview | None], title: str) -> Table:
    """One row per run: its final scores in percent."""
    samples = {most for recipe in recipes if (most := recipe.evaluation.personal_test_images) is not None}
    sampled = "".join(
        f" Own models: on a stratified sample, at most {most:,} images, of the test set." for most in sorted(samples)
    )
    lines = [RunLine(recipe, view) for recipe in recipes if (view := views.get(recipe.name)) is not None]
    aggregated = any(spread.std is None for line in lines if line.view for spread in line.view.scores.values())
    of_classes = all(recipe.task.name == CLASSIFICATION for recipe in recipes)
    columns = SCORES if of_classes else [SCORES[0], *_score_columns(recipes)]
    caption = CAPTION if of_classes else OTHER_CAPTION
    return terminal(columns, lines, BOXED, title, caption + sampled + ONLY_MEAN * aggregated)


def _score_columns(recipes: Sequence[Recipe]) -> list[Column[RunLine]]:
    """Of tasks other than classification: what is taken of the global model, and by what own models are judged."""
    families = {name: family for recipe in recipes for name, family in recipe.score_names().families.items()}
    names = [name for name, family in families.items() if family.indexed == "none"]
    judged = [name for name in JUDGED_BY if name in names and name.startswith("personal.")]
    of_all = [name for name in names if name.startswith("global.") and name.count(".") == 1]
    own = [_score(name.replace("personal", "own").replace(".", "\n"), name, "mean", "std") for name in judged]
    return [*(_score(name.partition(".")[2].replace("_", "\n"), name, "mean") for name in of_all), *own]


def _method(line: RunLine) -> str:
    degraded = line.view.degraded if line.view else 0
    return line.recipe.method.name + (f" ({degraded} rounds degraded)" if degraded else "")


def _number(head: str, read: Callable[[Overview], str]) -> Column[RunLine]:
    def cell(line: RunLine) -> str:
        return "–" if line.started is None else read(line.started)

    return Column(head, cell, right=True, overflow="ellipsis")


def _score(head: str, name: str, *fields: str) -> Column[RunLine]:
    return Column(
        head,
        lambda line: _shown(line.view and line.view.scores.get(name), *fields, percent=is_share(name)),
        right=True,
        overflow="ellipsis",
    )


RELEASES_ALL = (
    "Simulated sites release all scores, their own too. What a server gets under a policy of hospitals, for example: "
    "protofed simulate digits-trio --policy standard."
)
KEEPS_OWN = "With [plan.dp] simulated sites keep losses and scores of their own, as all sites do: these have no noise."
FILE_WIDTH = 120  # of a table that goes into a file
HEADLINES = ("global.accuracy", "personal.pm_v", "personal.pm_l")
CAPTION = (
    "GM: the global model on the shared test set, and the mean over its classes. PM(V): each site's own model on the "
    "classes that the site has. PM(L): the same, weighted by the site's class frequencies. Own balanced: on all "
    "classes. In %, mean ± standard deviation over sites."
)
OTHER_CAPTION = (
    "The global model's scores on the shared test set. Own: each site's own model, on the shared test set or (local) "
    "on its own. Shares in %, others as they are; mean ± standard deviation over sites."
)

AGGREGATED = " *"  # a mean that is alone
ONLY_MEAN = " *: a mean over sites, from a secure aggregation, which tells of no site alone."


def scores_json(views: Sequence[Overview]) -> list[dict[str, Any]]:
    """Runs as JSON-ready data; scores are fractions, not percent."""
    return [asdict(view) for view in views]


def rates(view: Overview, recipe: Recipe) -> str:
    """What a model reaches without having learnt anything, for a comparison with its scores; empty: not known."""
    if recipe.task.name != CLASSIFICATION:
        return "Chance: auroc 50.0." if "global.auroc" in recipe.score_names().families else ""
    majority = view.scores.get("global.majority")
    common = "" if majority is None else f"; always the most common class: GM {_percent(majority, 'mean')}"
    return f"Chance: balanced {100 / recipe.classes:.1f}{common}."


class Simulated(NamedTuple):
    """A run that `simulate` has shown.

    Attributes:
        warnings: what speaks against its models.
        held_out: as of `held_out_scores`.
    """

    view: Overview
    warnings: list[ModelWarning]
    held_out: Mapping[SiteId, Scores]


def simulate_with_progress(
    recipe: Recipe,
    state: Path | None,
    device: str,
    policy: Path | None = None,
    pool: NewPool | None = None,
    *,
    as_json: bool = False,
) -> Simulated:
    """Simulate a recipe behind a progress bar, then show its scores, and what speaks against its models.

    Args:
        state: folder that keeps the simulation; None: in memory.
        device: auto, cpu, cuda or cuda:N.
        policy: file with the policy of all sites; None: everything that the method sends may leave.
        pool: as in `simulation`.
        as_json: standard output is for the caller's JSON: the scores are shown on standard error, as the bar is.

    Raises:
        PolicyViolationError: there is no such policy.
        ConfigError, DataError: the recipe or its data cannot be used.
        RunFailedError: the run failed, or its workers were killed.
        UnavailableError: there are no workers to hire.
    """
    torch.set_num_threads(1)  # as each worker: the last bits of a sum depend on it, and on nothing else of the machine
    site_policy = None if policy is None else Policy.read(policy)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30)
    )  # 30: warnings only, the bar shows the progress
    with (
        progress(recipe.name, recipe.rounds, "rounds", stays=True) as bar,
        simulation(recipe, state, pick_device(device), policy=site_policy, pool=pool) as running,
    ):
        done, _ = status(running.run.phase, recipe.rounds)
        bar.to(done, f"continuing after round {done}" if done else "making the model")
        running.go(on_task=lambda: bar.to(*status(running.run.phase, recipe.rounds)))
        view, best = overview(running.ledger, recipe.name), find_best(running.ledger, running.blobs, recipe.name)
        warnings, refused = find_warnings(running.ledger, recipe.name), running.refused
        assert view is not None  # noqa: S101  (it was just run)
        held_out = {} if view.failed else held_out_scores(running)
        bar.to(view.round, view.phase)  # which may be fewer than planned
    console = Console(stderr=as_json, width=None if as_json or sys.stdout.isatty() else FILE_WIDTH)
    console.print(scores_table([recipe], {recipe.name: view}, recipe.name))
    if chance := rates(view, recipe):
        console.print(chance, highlight=False)
    if view.phase != "completed" and not view.failed:
        console.print(f"{view.run}: {view.phase}", markup=False, highlight=False, soft_wrap=True)
    if best is not None:
        console.print(best_sentence(BestSnapshot(**best)), markup=False, highlight=False, soft_wrap=True)
    if recipe.plan.dp is not None:  # under any policy, and in sums, too
        console.print(KEEPS_OWN, style="dim", highlight=False, markup=False)
    elif policy is None and not recipe.federation.secure:
        console.print(RELEASES_ALL, style="dim", highlight=False, markup=False)
    if held_out:
        console.print(held_out_sentence(held_out), highlight=False, markup=False, soft_wrap=True)
    for line in warning_lines(warnings):
        console.print(Text(line, "bold yellow"))
    if view.failed:
        raise RunFailedError(f"run failed: {view.run}: {view.phase}{refused}")
    return Simulated(view, warnings, held_out)


def held_out_sentence(scores: Mapping[SiteId, Scores]) -> str:
    """What sites that took no part reach with the run's last model and one round of their own training."""
    over_sites = spreads(scores)
    labels = {"PM(V)": "personal.pm_v", "PM(L)": "personal.pm_l", "on their local tests": "personal.local.accuracy"}
    reached = [f"{label} {_percent(over_sites[name], 'mean')}" for label, name in labels.items() if name in over_sites]
    sites = count(len(scores), "held-out site")
    return f"{sites}, after one round of their own training: {', '.join(reached) or 'no scores'}."


def status(phase: Phase, rounds: int) -> tuple[int, str]:
    """The number of complete rounds, and the current activity in words."""
    match phase:
        case Collecting():
            return max(phase.round - 1, 0), f"training {len(phase.reported)}/{len(phase.cohort)}"
        case Summing():
            return max(phase.round - 1, 0), f"summing: {phase.step}"
        case Refining():
            return max(phase.round - 1, 0), "refining"
        case Evaluating():
            return phase.round - 1, f"scoring, {len(phase.awaited)} to go"
        case Idle() | Aggregating():
            return max(phase.round - 1, 0), "aggregating"
        case FinishedPhase():
            return rounds, phase.reason


def _percent(value: Spread | None, *fields: str) -> str:
    return _shown(value, *fields)


def _shown(value: Spread | None, *fields: str, percent: bool = True) -> str:
    numbers = [getattr(value, field, None) for field in fields]
    if numbers[0] is None:
        return "–"  # not scored yet; or of a secure aggregation, which has no worst site
    text = " ± ".join(f"{100 * number:.1f}" if percent else f"{number:.3g}" for number in numbers if number is not None)
    return text + AGGREGATED * (None in numbers)


PROGRESS: Sequence[Column[RunLine]] = (
    Column("method", lambda line: line.recipe.method.name, overflow="ellipsis"),
    Column(
        "round", lambda line: f"{line.started.round if line.started else 0}/{line.recipe.rounds}", overflow="ellipsis"
    ),
    Column("phase", lambda line: line.phase, overflow="ellipsis"),
    Column(
        "sites",
        lambda line: f"{line.started.reported}/{line.started.invited}" if line.started else "–",
        overflow="ellipsis",
    ),
    *(_score(head, name, "mean") for head, name in zip(("GM", "PM(V)", "PM(L)"), HEADLINES, strict=True)),
    _number("MB", lambda view: f"{(view.received + view.sent) / 1e6:.1f}"),
    _number("s", lambda view: f"{view.seconds:.0f}"),
)
SCORES: Sequence[Column[RunLine]] = (
    Column("method", _method, overflow="ellipsis"),
    _score("GM", "global.accuracy", "mean"),
    _score("GM\nbalanced", "global.balanced_accuracy", "mean"),
    _score("PM(V)", "personal.pm_v", "mean", "std"),
    _score("worst\nsite", "personal.pm_v", "worst"),
    _score("PM(L)", "personal.pm_l", "mean", "std"),
    _score("own\nbalanced", "personal.balanced_accuracy", "mean", "std"),
)
