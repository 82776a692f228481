"""`protofed client budget`: what a site has spent of its privacy, from its state folder; the daemon may be running."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.deploy.cli.options import AsJson
from protofed.deploy.cli.options import Policy as PolicyOption
from protofed.deploy.tables import BOXED, Column, terminal

console = Console()
NONE_YET = "nothing: this site has begun no fit of a run with noise (plan.dp)"
PUBLIC = "Epsilon is arithmetic of the recipes and of how many rounds began: it tells nothing of the site's images."


def budget(
    state: Annotated[Path, typer.Option(help="The state folder of the site's daemon.")],
    policy: PolicyOption = None,
    delta: Annotated[
        float, typer.Option(min=1e-12, max=1e-2, help="Delta at which epsilon is given, unless the policy names one.")
    ] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Show what the site has spent of its privacy: by run, and of all runs together beside the policy's budget.

    Fits of runs without noise are not in it: nothing bounds what these told.

    Example: `protofed client budget --state /var/lib/protofed --policy policy.toml`
    """
    from protofed.client.privacy.policy import Policy
    from protofed.client.state.dp_ledger import FILE, read
    from protofed.deploy import shipped
    from protofed.deploy.site import decide
    from protofed.deploy.site.privacy_spent import privacy_spent

    decide.check_state(state)
    allowed = None if policy is None else Policy.read(shipped.policy(policy)).rules.dp
    found = asdict(privacy_spent(read(state / FILE), allowed, delta))
    if as_json:
        print(json.dumps(found, indent=2))  # noqa: T201
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    if not found["runs"] and not found["torn"]:
        _say(NONE_YET)
    else:
        console.print(terminal(RUNS, found["runs"], BOXED), highlight=False)
        if found["torn"]:
            _say(f"half-written lines, each counted as the largest fit: {found['torn']}")
    of = "" if found["budget"] is None else f" of {found['budget']:g} for each {found['unit']}"
    _say(f"spent by all together: epsilon {_text(found['epsilon'])}{of}, at delta {found['delta']:g}")
    _say(PUBLIC)


def _text(epsilon: float | None) -> str:
    return "beyond all use" if epsilon is None else f"{epsilon:.3g}"


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


CELLS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "run": lambda run: run["run"],
    "fits": lambda run: str(run["fits"]),
    "rounds": lambda run: str(run["rounds"]),
    "first (UTC)": lambda run: run["first"],
    "last (UTC)": lambda run: run["last"],
    "epsilon alone": lambda run: _text(run["epsilon"]),
}
RUNS = [Column(head, cell, wraps=True, overflow="ellipsis") for head, cell in CELLS.items()]
