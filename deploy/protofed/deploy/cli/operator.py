"""`protofed runs …` and `protofed sites …`: what the operator of a server asks of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ProtofedError
from protofed.deploy.cli.connection import connected
from protofed.deploy.cli.overrides import DryRun, Set, show_dry_run

if TYPE_CHECKING:
    from types import ModuleType

    from protofed.deploy.operator.connection import Operator

runs = typer.Typer(no_args_is_help=True, help="The runs of a server: start, look, pause, end, go back.")
sites = typer.Typer(no_args_is_help=True, help="The sites of a server.")
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print an object a line, whenever something changed.")]
Run = Annotated[str, typer.Argument(help="The run's name, as in `runs list`.")]


class VerificationError(ProtofedError):
    """A published state does not come out again."""

    exit_code = 1


@connected(runs, "start")
def start(
    operator: Operator,
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    name: Annotated[str | None, typer.Option(help="The run's name; else the recipe's.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch it.")] = False,
    as_json: AsJson = False,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Queue a run; it begins when those before it have ended."""
    from protofed.common.ids import check_id
    from protofed.deploy import shipped

    read = shipped.recipe(recipe, assignments or ())
    if name is not None:
        read = read.model_copy(update={"name": check_id("run", name)})
    if dry_run:
        show_dry_run([read], simulated=False)
        return
    info = operator.start(read)
    if not (watch and as_json):  # each line of which is an object
        _tell(info, as_json, f"{info.run}: {info.status}")
    if watch:
        _watch(operator, read.name, as_json)


@connected(runs, "list")
def list_runs(operator: Operator, as_json: AsJson = False) -> None:
    """All runs, in the order of the queue."""
    found = operator.runs()
    if as_json:
        _print([_plain(info) for info in found])
    else:
        console.print(_view().runs_table(found))


@connected(runs, "show")
def show(
    operator: Operator,
    run: Run,
    everything: Annotated[bool, typer.Option("--all", help="Every round and site, not only what failed.")] = False,
    as_json: AsJson = False,
) -> None:
    """One run: its rounds, what became of every site, and the newest scores."""
    detail = operator.show(run, None if everything or as_json else _view().SHOWN_ROUNDS)
    if as_json:
        _print(_plain(detail))
    else:
        for part in _view().run_parts(detail, everything=everything):
            console.print(part)


@connected(runs, "watch")
def watch(operator: Operator, run: Run, as_json: JsonLines = False) -> None:
    """Follow a run until it ends, also while the server is restarted. Exit code 1 if it fails, 130 at Ctrl-C.

    Live on a terminal; a line a change elsewhere.
    """
    _watch(operator, run, as_json)


@connected(runs, "pause")
def pause(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Open no round from now on; one that is open goes on to its end."""
    info = operator.pause(run)
    _tell(info, as_json, f"{info.run}: {info.status}, after round {info.round} no other is opened")


@connected(runs, "resume")
def resume(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Open rounds again."""
    info = operator.resume(run)
    _tell(info, as_json, f"{info.run}: {info.status}")


@connected(runs, "abort")
def abort(
    operator: Operator,
    run: Run,
    reason: Annotated[str, typer.Option(help="Why; sites and the ledger are told.")] = "aborted by the operator",
    as_json: AsJson = False,
) -> None:
    """End a run; its sites stop training within seconds. Everything that was published stays."""
    info = operator.abort(run, reason)
    _tell(info, as_json, f"{info.run}: {info.status} in round {info.round}: {info.reason}")


@connected(runs, "rollback")
def rollback(
    operator: Operator,
    run: Run,
    to: Annotated[int, typer.Argument(min=0, help="The round whose state to go on from.")],
    as_json: AsJson = False,
) -> None:
    """Go on from the state that a round published, with the sites' memory of that round; a run that had ended is queued
    again.
    """
    info = operator.roll_back(run, to)
    _tell(info, as_json, f"{info.run}: goes on after round {to} ({info.status})")


@connected(runs, "verify")
def verify(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Compute every published state again, on the server, from its ledger and blobs, and compare the digests.

    Rounds older than keep_rounds cannot be computed again and are listed as not-kept. Exit code 1 if a state differs.
    """
    from protofed.deploy.console.progress import each

    rows = [row for row in operator.show(run).rounds if row.state]
    bar = each(rows, "verifying", "rounds", shown=not as_json)
    found = [(row, operator.verify(run, row)) for row in bar]
    if as_json:
        _print([{"round": row.round, "attempt": row.attempt, **_plain(reply)} for row, reply in found])
    else:
        console.print(_view().verification_table(run, found))
    if bad := [row.round for row, reply in found if reply.finding not in ("same", "not-kept")]:
        raise VerificationError(f"run {run}: the states of rounds {', '.join(map(str, bad))} do not come out again")


@connected(sites, "list")
def list_sites(operator: Operator, as_json: AsJson = False) -> None:
    """All sites that ever enrolled: what they do, and since when there was no progress."""
    found = operator.sites()
    if as_json:
        _print([_plain(info) for info in found])
    else:
        console.print(_view().sites_table(found))


@connected(sites, "exclude")
def exclude(
    operator: Operator,
    site: Annotated[str, typer.Argument(help="The site's id.")],
    reason: Annotated[str, typer.Option(help="Why; the site is told.")] = "by the operator",
    as_json: AsJson = False,
) -> None:
    """Keep a site out from now on: nobody waits for it, and it stops training. What it handed in before counts."""
    info = operator.exclude(site, reason)
    _tell(info, as_json, f"{info.site}: excluded ({info.excluded})")


@connected(sites, "admit")
def admit(
    operator: Operator, site: Annotated[str, typer.Argument(help="The site's id.")], as_json: AsJson = False
) -> None:
    """Let an excluded site in again; its daemon comes back by itself."""
    info = operator.admit(site)
    _tell(info, as_json, f"{info.site}: admitted")


def _plain(message: Any) -> dict[str, Any]:
    from protofed.deploy.operator.connection import plain

    return plain(message)


def _view() -> ModuleType:
    from protofed.deploy.operator import tables

    return tables


def _watch(operator: Operator, run: str, as_json: bool) -> None:
    from protofed.deploy.operator.watch import Watcher, watch

    watch(Watcher(operator, run), console, as_json=as_json)


def _tell(info: Any, as_json: bool, text: str) -> None:
    if as_json:
        _print(_plain(info))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print(found: Any) -> None:
    print(json.dumps(found, indent=2))  # noqa: T201
