"""`protofed client scores`: a site's own scores, from its state folder; the daemon may be running."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType

from protofed.deploy.tables import BOXED, Column, terminal

if TYPE_CHECKING:
    from protofed.client.state.own_scores import ScoredRound
    from protofed.deploy.audit.handed_in import HandedIn

console = Console()
NONE_YET = "none yet: the site has taken part in no round, or in none since this version keeps its scores"


def scores(
    state: Annotated[Path, typer.Option(help="The state folder of the site's daemon.")],
    run: Annotated[str | None, typer.Argument(help="A run; default: the one that was scored last.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON, with the scores of single classes.")
    ] = False,
) -> None:
    """Show the site's own scores by round, what each means, and which of them left the site and which stayed.

    Only what `metrics` of the site's policy names is sent, and what `summed_metrics` names in a secure sum; what was
    sent is read from the site's audit log. Scores of single classes are in --json only.

    Example: `protofed client scores --state /var/lib/protofed`
    """
    from protofed.client.state.own_scores import FOLDER, OwnScores
    from protofed.client.transport.audit import FILE
    from protofed.deploy.audit.handed_in import HandedIn, handed_in
    from protofed.deploy.site import decide

    decide.check_state(state)
    kept = OwnScores(state / FOLDER)
    if run is None:
        run = next(reversed(kept.runs()), None)
    rounds = [] if run is None else kept.rounds(run)
    sent = HandedIn() if run is None else handed_in(state / FILE, run)
    if as_json:
        print(json.dumps(plain(run, rounds, sent), indent=2))  # noqa: T201
    elif run is None:
        console.print(NONE_YET, highlight=False)
    else:
        console.print(f"[bold]{run}[/bold]", highlight=False)
        for shown in tables(rounds, console.width):
            console.print(shown)
        for line in legend(rounds, sent):
            console.print(line, highlight=False, markup=False)


def plain(run: str | None, rounds: Sequence[ScoredRound], sent: HandedIn) -> dict[str, Any]:
    """For programs: each round with the names that left (None: too many for the log), and what the names mean.

    `left` has those that left by themselves, `left_in_sums` those that left in a secure sum alone.
    """
    from protofed.common.protocol.messages import score_family
    from protofed.deploy.audit.handed_in import UNLISTED
    from protofed.deploy.site.score_words import meaning

    gone = {scored.round: sent.names.get(scored.round, set()) for scored in rounds}
    rows = [
        {
            **asdict(scored),
            "left": None if UNLISTED in gone[scored.round] else sorted(gone[scored.round] & scored.scores.keys()),
            "left_in_sums": sorted(sent.summed.get(scored.round, set()) & scored.scores.keys()),
        }
        for scored in rounds
    ]
    families = sorted({score_family(name) for scored in rounds for name in scored.scores})
    return {"run": run, "rounds": rows, "meanings": {name: meaning(name) for name in families}}


def tables(rounds: Sequence[ScoredRound], width: int) -> Iterator[RenderableType]:
    """One row a round, one column a score; as many tables as it takes for no number to be cut."""
    from protofed.deploy.site.score_words import names_of

    names = names_of(rounds)
    heads = [name.replace(".", ".\n").replace("balanced_", "balanced_\n") for name in names]
    widest = max((len(word) for head in heads for word in head.splitlines()), default=0)
    most = max(1, (width - len("│ round │")) // (widest + 3))
    for first in range(0, max(len(names), 1), most):
        columns: list[Column[ScoredRound]] = [Column("round", lambda scored: str(scored.round), right=True, wraps=True)]
        for name, head in zip(names[first : first + most], heads[first : first + most], strict=True):
            columns.append(Column(head, partial(_score, name), right=True, wraps=True))
        yield terminal(columns, rounds, BOXED)


def _score(name: str, scored: ScoredRound) -> str:
    return f"{scored.scores[name]:.4f}" if name in scored.scores else "–"


def legend(rounds: Sequence[ScoredRound], sent: HandedIn) -> Iterator[str]:
    """What each column means, and whether it left: by itself, in a secure sum, or not at all."""
    from protofed.deploy.audit.handed_in import UNLISTED, rounds_text
    from protofed.deploy.site.score_words import meaning, names_of

    for name in names_of(rounds):
        yield f"{name}: {meaning(name)}"
    kept = {scored.round for scored in rounds}
    gone, summed = _rounds_by_name(rounds, sent.names), _rounds_by_name(rounds, sent.summed)
    stayed = [name for name in gone if not gone[name] and not summed[name]]
    for name, numbers in gone.items():
        if numbers:
            yield f"left this site (the policy names it): {name}, rounds {rounds_text(numbers)}"
    for name, numbers in summed.items():
        if numbers:
            yield f"left in a secure sum, as part of a mean over sites: {name}, rounds {rounds_text(numbers)}"
    if unlisted := {number for number in kept if UNLISTED in sent.names.get(number, ())}:
        yield f"rounds {rounds_text(unlisted)}: more scores left than the audit log lists; the policy names them"
    elif sent.gap:
        yield sent.gap
    elif stayed:
        yield f"stayed at this site: {'all of them' if len(stayed) == len(gone) else ', '.join(stayed)}"


def _rounds_by_name(rounds: Sequence[ScoredRound], left: Mapping[int, set[str]]) -> dict[str, set[int]]:
    """In which of the rounds each column is among the names that left."""
    from protofed.deploy.site.score_words import names_of

    return {
        name: {scored.round for scored in rounds if name in left.get(scored.round, ())} for name in names_of(rounds)
    }
