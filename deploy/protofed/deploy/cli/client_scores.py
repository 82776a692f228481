"""`protofed client scores`: a site's own scores, from its state folder; the daemon may be running."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import score_family

if TYPE_CHECKING:
    from protofed.client.state.own_scores import ScoredRound

console = Console()
NONE_YET = "none yet: the site has taken part in no round, or in none since this version keeps its scores"


def scores(
    state: Annotated[Path, typer.Option(help="The state folder of the site's daemon.")],
    run: Annotated[str | None, typer.Argument(help="A run; default: the one that was scored last.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON, with the scores of single classes.")
    ] = False,
) -> None:
    """Show the site's own scores by round: of its training, its own model, and its own test set. They stay here.

    Only what `metrics` of the site's policy names was sent, too.

    Example: `protofed client scores --state /var/lib/protofed`
    """
    from protofed.client.state.own_scores import FOLDER, OwnScores

    if not state.is_dir():
        raise ConfigError(f"there is no folder {state}; expected the --state of the site's daemon")
    kept = OwnScores(state / FOLDER)
    if run is None:
        run = next(reversed(kept.runs()), None)
    rounds = [] if run is None else kept.rounds(run)
    if as_json:
        print(json.dumps({"run": run, "rounds": [asdict(scored) for scored in rounds]}, indent=2))  # noqa: T201
    elif run is None:
        console.print(NONE_YET, highlight=False)
    else:
        console.print(f"[bold]{run}[/bold]", highlight=False)
        console.print(table(rounds))


def table(rounds: Sequence[ScoredRound]) -> Table:
    """One row a round, one column a score; those of single classes are in --json only."""
    names = sorted({name for scored in rounds for name in scored.scores if score_family(name) == name})
    shown = Table("round", *(name.replace(".", ".\n") for name in names))
    for column in shown.columns:
        column.justify, column.overflow = "right", "fold"
    for scored in rounds:
        cells = (f"{scored.scores[name]:.4f}" if name in scored.scores else "–" for name in names)
        shown.add_row(str(scored.round), *cells)
    return shown
