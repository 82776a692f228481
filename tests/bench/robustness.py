"""Accuracy under attack by robust rule: `python -m tests.bench.robustness`; prints a table in markdown.

Simulations of the digits recipes, with 1 of 5 sites or 3 of 10 attacking in every round. The screen of norms is off
(`outlier_factor`, `max_relative_norm`), so that a column shows its rule alone.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import structlog
import torch
from rich.console import Console
from tests.support.attackers import BACKDOOR, CHANGES, Played, played

from protofed.common.config.recipe import Recipe, Robust
from protofed.common.payload import SiteId
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import site_names

RULES: tuple[Robust, ...] = get_args(Robust)
RECIPES = ("digits-fedavg", "digits-fednh")
COHORTS = {5: 1, 10: 3}  # sites, and how many of them attack
CLEAN = "nobody"


@dataclass(frozen=True)
class Cell:
    """One attack under one rule: means over seeds, in per cent."""

    accuracy: float
    worst: float
    unfinished: int
    fooled: float | None = None  # of a backdoor

    def __str__(self) -> str:
        if np.isnan(self.accuracy):
            return "ended"
        fooled = "" if self.fooled is None else f" / {self.fooled:.1f}"
        ended = f" ({self.unfinished} ended)" if self.unfinished else ""
        return f"{self.accuracy:.1f} / {self.worst:.1f}{fooled}{ended}"


def attacked(name: str, rule: Robust, sites: int, seed: int, rounds: int, *, mild: bool = False) -> Recipe:
    """A recipe for so many sites, scored at its end.

    Args:
        mild: without the long tail, and sites with most of the classes, in place of the recipe's strong skew.
    """
    recipe = shipped.recipe(name)
    assert recipe.data is not None
    data = recipe.data.model_dump() | {"seed": seed}
    data["partition"] |= {"sites": sites}
    if mild:
        data["long_tail"] = None
        data["partition"] |= {"beta": 1.0}
    rules: Mapping[str, Any] = {
        "min_sites": sites,
        "robust": rule,
        "max_bad_sites": COHORTS[sites] if rule in ("trimmed", "krum") else 1,
        "score_every": 0,
        "outlier_factor": None,
        "max_relative_norm": 1e9,
    }
    changed = {**recipe.model_dump(), "seed": seed, "rounds": rounds, "data": data}
    changed["federation"] |= rules
    changed["plan"] |= {"lr": 0.1} if mild else {}
    return Recipe.model_validate(changed)


def attackers(sites: int, seed: int) -> frozenset[SiteId]:
    """Who attacks: other sites with each seed, so other data."""
    names = site_names(sites)
    return frozenset(names[(seed + k * len(names) // COHORTS[sites]) % len(names)] for k in range(COHORTS[sites]))


def cell(name: str, rule: Robust, sites: int, attack: str, seeds: list[int], rounds: int, *, mild: bool) -> Cell:
    """Over all seeds."""
    runs: list[Played] = []
    for seed in seeds:
        recipe = attacked(name, rule, sites, seed, rounds, mild=mild)
        by = attackers(sites, seed)
        runs.append(played(recipe) if attack == CLEAN else played(recipe, attack, by))
    done = [run for run in runs if run.finished]
    accuracy = float(np.mean([run.accuracy for run in done])) if done else float("nan")
    worst = float(np.mean([run.worst for run in done])) if done else float("nan")
    fooled = 100 * float(np.mean([run.fooled for run in done])) if done and attack in (CLEAN, BACKDOOR) else None
    return Cell(100 * accuracy, 100 * worst, len(runs) - len(done), fooled)


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the tables."""
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for name in RECIPES:
        for sites, bad in COHORTS.items():
            if arguments.only not in f"{name}-{sites}":
                continue
            skew = ", mild skew" if arguments.mild else ""
            yield f"\n`{name}`{skew}, {bad} of {sites} sites, {arguments.rounds} rounds, seeds {arguments.seeds}\n"
            columns = RULES if arguments.rule is None else (arguments.rule,)
            yield f"| attack | {' | '.join(columns)} |"
            yield f"|---|{'---|' * len(columns)}"
            for attack in (CLEAN, *CHANGES) if arguments.attack is None else (CLEAN, arguments.attack):
                of_row = sites, attack, seeds, arguments.rounds
                cells = [str(cell(name, rule, *of_row, mild=arguments.mild)) for rule in columns]
                yield f"| {attack} | {' | '.join(cells)} |"


def main() -> None:
    """Print the tables, row by row as they come."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.robustness", description=__doc__)
    parser.add_argument("--only", default="", help="recipes and sites, such as fednh-10")
    parser.add_argument("--attack", choices=list(CHANGES), help="one attack, beside none")
    parser.add_argument("--rule", choices=RULES, help="one column")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mild", action="store_true", help="no long tail, and sites with most of the classes")
    parser.add_argument("--out", type=Path, default=Path(".bench/robustness.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    console = Console()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        for line in rows(arguments):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
            file.write(f"{line}\n")
            file.flush()


if __name__ == "__main__":
    main()
