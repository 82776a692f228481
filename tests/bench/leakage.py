"""What a server can infer about sites from what they send it: `make leakage`; nine tables, and the same as markdown.

First, simulations on the digits, attacked with the scores of `attacks`, which know the truth only to be judged. They
are simple ones: what they find is there, and a stronger one may find more. Second, `leakage_means`, features that
gradients tell of. Third, `leakage_numbers`, of a regression. Then `leakage_attacks`, by which a server or a site gets
at more than it is sent; then, what comes out of a secure aggregation of that; `leakage_blind`, what sums tell of sites
that a body tells little; last, `leakage_questions`, what sums of scores tell, and what sums tell with others who are
not partners.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from rich.console import Console
from rich.table import Table
from tests.attacks.hostile_server import MULTI_LABEL
from tests.bench import attacks, leakage_attacks, leakage_blind, leakage_means, leakage_numbers, leakage_questions
from tests.bench.leakage_runs import SCORED, Case, attacked
from tests.bench.leakage_scores import Found, of_all, strongest, told_to_a_batch, tried

from protofed.deploy import shipped

ATTACKS = "attacks"
FEW: dict[str, Any] = {"min_samples_per_class": 10}
AGGREGATED = ("fedavg", "fednh", "fedprp", "fedproc", "creff", "cwfedavg-private", "scaffold", "fednova")
FINDINGS = ("fedavg", "fedrep", "scaffold")
CASES = (
    Case("digits-fedavg"),
    Case("digits-fedavg", method={"weighting": "examples"}),
    *(
        Case("digits-fedavg", plan=plan)
        for plan in (
            {"loss": "balanced-softmax"},
            {"loss": "logit-adjustment", "tau": 20.0},
            {"sampling": "class-balanced"},
        )
    ),
    *(Case(f"digits-{name}", rules) for name in ("fednh", "fedprp", "fedproc", "creff") for rules in ({}, FEW)),
    *(Case(f"digits-{name}") for name in ("fedper", "fedrep", "fedbabu", "fedrod", "scaffold", "fednova")),
    *(Case(f"digits-{name}") for name in ("fedamp", "fedfomo", "apple", "cfl", "ifca")),
    *(Case(f"digits-{name}", by_sites=True) for name in ("fedfomo", "apple")),  # which send models on as they are
    Case("digits-cwfedavg"),
    Case("digits-cwfedavg-private"),
    Case("digits-cwfedavg-private", FEW),
    *(Case(f"digits-{name}", secure=True) for name in AGGREGATED),
    *(Case(f"digits-{name}", secure=secure, task=MULTI_LABEL) for name in FINDINGS for secure in (False, True)),
    Case("digits-cwfedavg", method={"shares": "true"}, secure=True),
)


@dataclass(frozen=True)
class Outcome:
    """One case over all seeds: what the attacks came to, and the models' mean scores."""

    case: Case
    by_class: list[Found]
    model: list[Found]
    with_data: list[Found]
    scores: Mapping[str, float]
    of_all: list[Found] = field(default_factory=list)
    examples: tuple[int, int] | None = None  # of how many sites, of all, their number is told to within a batch


def main() -> None:
    """Print the table, and write it."""
    arguments = _arguments()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    outcomes = []
    for case in CASES:
        if arguments.only in case.recipe:
            outcomes.append(outcome(case, seeds, arguments.rounds))
            Console(stderr=True).print(f"{case.recipe} {case.said}", highlight=False)
    rows = [cells(outcome) for outcome in outcomes]
    title = f"presence: area under the ROC curve; shares: correlation; seeds {seeds}"
    pages = [markdown(COLUMNS, rows), every_attack(outcomes)] if rows else []
    if rows:
        Console(width=170).print(table(COLUMNS, rows, title))
    further: list[tuple[Sequence[str], Sequence[Sequence[str]], str]] = []
    if arguments.only in leakage_means.CASE.recipe:
        told = leakage_means.rows(seeds, arguments.rounds)
        further += [(leakage_means.COLUMNS, told, f"what gradients by class tell; seeds {seeds}")]
    if arguments.only in leakage_numbers.CASE.recipe:
        told = leakage_numbers.rows(seeds, arguments.rounds)
        further += [(leakage_numbers.COLUMNS, told, f"what models tell of the mean number of a site; seeds {seeds}")]
    if arguments.only in ("", ATTACKS):
        further += [
            (leakage_attacks.COLUMNS, leakage_attacks.rows(), "what attacks recover, by policy"),
            (leakage_attacks.SUM_COLUMNS, leakage_attacks.sum_rows(), "images of three sites, and of a sum"),
            (leakage_blind.COLUMNS, leakage_blind.rows(), "shares of three sites, of sums over them"),
            (leakage_blind.COLUMNS, leakage_blind.rows(MULTI_LABEL), "shares of findings, of such sums"),
            (leakage_questions.COLUMNS, leakage_questions.rows(), "test sets of three sites, by sums of scores"),
            (leakage_questions.PARTNER_COLUMNS, leakage_questions.partner_rows(), "who else is in a group"),
        ]
    for columns, own, about in further:
        Console(width=170).print(table(columns, own, about))
        pages.append(markdown(columns, own))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(pages), encoding="utf-8")


def outcome(case: Case, seeds: Sequence[int], rounds: int) -> Outcome:
    """Simulate and attack it."""
    done = [attacked(case, seed, rounds) for seed in seeds]
    victims = [victim for victims, _ in done for victim in victims]
    means = {name: float(np.mean([scores[name] for _, scores in done])) for name in SCORED if name in done[0][1]}
    by_class = tried(attacks.BY_CLASS, victims)
    model, with_data = tried(attacks.MODEL, victims), tried(attacks.WITH_DATA, victims)
    examples = told_to_a_batch(victims, shipped.recipe(case.recipe).plan)
    return Outcome(case, by_class, model, with_data, means, of_all(victims), examples)


# Tables


COLUMNS = (
    "method",
    "policy",
    "sent by class",
    "model",
    "with examples",
    "shares",
    "shares, with examples",
    "presence, between sites",
    "shares, between sites",
    "examples, to a batch",
    "GM",
    "PM(V)",
)


JUDGED = {
    "auc": "AUC of presence",
    "correlation": "correlation with shares",
    "own_auc": "AUC between sites",
    "own_correlation": "correlation between sites",
}


def cells(outcome: Outcome) -> list[str]:
    """A row: the strongest attack of each kind."""
    without, name = outcome.by_class + outcome.model, outcome.case.recipe.removeprefix("digits-")
    kinds = [
        (outcome.by_class, "auc"),
        (outcome.model, "auc"),
        (outcome.with_data, "auc"),
        (without, "correlation"),
        (outcome.with_data, "correlation"),
        (without + outcome.with_data, "own_auc"),
        (without + outcome.with_data, "own_correlation"),
    ]
    examples = "–" if outcome.examples is None else "{} of {}".format(*outcome.examples)
    scores = [f"{100 * outcome.scores[name]:.1f}" if name in outcome.scores else "–" for name in SCORED]
    return [name, outcome.case.said, *(_cell(strongest(found, by), by) for found, by in kinds), examples, *scores]


def _cell(found: Found | None, by: str) -> str:
    return "–" if found is None else f"{getattr(found, by):.2f} {found.attack}, {found.rounds}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    """For the terminal."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column)
    for row in rows:
        made.add_row(*row)
    return made


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same, for a page."""
    return _lines([columns, ["---"] * len(columns), *rows])


def every_attack(outcomes: Sequence[Outcome]) -> str:
    """All that was tried, the weak ones too."""
    rows = [
        [*cells(outcome)[:2], found.attack, found.rounds, *(f"{getattr(found, by):.3f}" for by in JUDGED)]
        for outcome in outcomes
        for found in (*outcome.by_class, *outcome.model, *outcome.with_data, *outcome.of_all)
    ]
    head = ("method", "policy", "attack", "rounds", *JUDGED.values())
    return _lines([head, ["---"] * len(head), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/leakage.md"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="part of a recipe's name, or attacks: the other tables alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
