"""`protofed runs …` and `protofed sites …`: the commands of a server's operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import ProtofedError
from protofed.deploy.cli import completion
from protofed.deploy.cli.completion import connected
from protofed.deploy.cli.options import SELDOM, AsJson, DryRun, Set, Yes, confirm, print_json, say, show_dry_run

if TYPE_CHECKING:
    from types import ModuleType

    from protofed.deploy.operator.connection import Operator

runs = typer.Typer(no_args_is_help=True, help="Start, watch, pause, abort, roll back and verify the runs of a server.")
sites = typer.Typer(no_args_is_help=True, help="List, exclude, admit, forget and regroup the sites of a server.")
console = Console(soft_wrap=True)
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line at every change.")]
Run = Annotated[str, typer.Argument(help="The run's name, as in `runs show`.", autocompletion=completion.runs)]
SomeRun = Annotated[
    str | None, typer.Argument(help="The run's name; default: all runs.", autocompletion=completion.runs)
]

Site = Annotated[str, typer.Argument(help="The site's id, as in `sites list`.", autocompletion=completion.sites)]


class VerificationError(ProtofedError):
    """A published state could not be reproduced: its digest differs."""

    exit_code = 1


@connected(runs, "start")
def start(
    operator: Operator,
    recipe: Annotated[
        str, typer.Argument(help="A recipe's file, or the name of a shipped one.", autocompletion=completion.recipes)
    ],
    name: Annotated[str | None, typer.Option(help="The run's name; default: the recipe's.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch it until it ends.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Queue it although the server does not know its model or sites."),
    ] = False,
    as_json: AsJson = False,
    assignments: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Queue a run. It starts when the runs before it have ended.

    Refused if the registered sites are too few for a round, or if a site of required_sites is not registered.

    Example: `protofed runs start recipe.toml --watch`
    """
    from protofed.common import plugins
    from protofed.common.ids import check_id
    from protofed.deploy import shipped
    from protofed.deploy.operator.tables import start_notes
    from protofed.deploy.simulation.start_check import check_queue
    from protofed.deploy.site.plan_request import planned_lines

    loaded = shipped.recipe(recipe, assignments or ())
    if name is not None:
        loaded = loaded.model_copy(update={"name": check_id("run", name)})
    if dry_run:
        plugins.allow(loaded.names)
        check_queue([loaded], known_models=False)
        show_dry_run([loaded], simulated=False)
        return
    privacy = planned_lines(loaded)  # first: a method that does not work with noise is refused
    info = operator.start(loaded, force=force)
    for note in start_notes(loaded):
        say(f"note: {note}", remark=True)
    for line in privacy:
        say(f"privacy: {line}", remark=True)
    for warning in info.unmet:
        say(f"warning: {warning}", remark=True)
    if not (watch and as_json):  # then every line of the output is one object of the watch
        _show_status(info, as_json, f"{info.run}: {info.status}")
    if watch:
        _watch(operator, loaded.name, as_json)


@connected(runs, "show")
def show(
    operator: Operator,
    run: SomeRun = None,
    everything: Annotated[bool, typer.Option("--all", help="Every round and site, not only failures.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all runs in queue order, or one: its rounds, the outcome at every site, and the newest scores.

    Example: `protofed runs show lesions --all`
    """
    if run is None:
        rows = operator.runs()
        if as_json:
            print_json([_plain(info) for info in rows])
        else:
            console.print(_tables().runs_table(rows))
        return
    detail = operator.show(run, None if everything or as_json else _tables().SHOWN_ROUNDS)
    if as_json:
        print_json(_plain(detail))
    else:
        for part in _tables().run_parts(detail, everything=everything):
            console.print(part)


@connected(runs, "watch")
def watch(operator: Operator, run: Run, as_json: JsonLines = False) -> None:
    """Follow a run until it ends, across server restarts. Exit code 1 if it fails, 130 on Ctrl-C.

    Live on a terminal; elsewhere one line per change.

    Example: `protofed runs watch lesions`
    """
    _watch(operator, run, as_json)


@connected(runs, "pause")
def pause(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Pause a run: the open round completes, and no new one opens.

    Example: `protofed runs pause lesions`
    """
    info = operator.pause(run)
    _show_status(info, as_json, f"{info.run}: {info.status}, no round opens after round {info.round}")


@connected(runs, "resume")
def resume(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Resume a paused run.

    Example: `protofed runs resume lesions`
    """
    info = operator.resume(run)
    _show_status(info, as_json, f"{info.run}: {info.status}")


@connected(runs, "abort")
def abort(
    operator: Operator,
    run: Run,
    reason: Annotated[
        str, typer.Option(help="Why; sent to the sites and kept in the ledger.")
    ] = "aborted by the operator",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End a run. Its sites stop training within seconds; everything published is kept. Asks first.

    Example: `protofed runs abort lesions --reason "the classes are wrong"`
    """
    if not yes:
        now = _where(operator, run)
        confirm(f"End run {run} ({now})? Its sites stop training. Its published models are kept.")
    info = operator.abort(run, reason)
    _show_status(info, as_json, f"{info.run}: {info.status} in round {info.round}: {info.reason}")


@connected(runs, "rollback")
def rollback(
    operator: Operator,
    run: Run,
    to: Annotated[str, typer.Argument(metavar="ROUND", help="The round whose state to continue from, or `best`.")],
    force: Annotated[
        bool, typer.Option("--force", help="Go back more than 5 rounds, because the sites' policies allow it.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Continue from the state that a round published, with the sites' state of that round. Asks first.

    You cannot go forward again to the later rounds. A run that had ended is queued again. Sites keep their own state of
    the newest rounds only (keep_rounds). They decline to go back further than their policies' max_rollback_rounds: 5 in
    standard, 2 in strict.

    Example: `protofed runs rollback lesions 71`
    """
    from protofed.deploy.operator.rollback import SITES_GO, plan_rollback

    planned = plan_rollback(operator, run, to)
    planned.check(force=force, by="give --force")
    if not yes:
        now, back = _where(operator, run), planned.rounds_back
        confirm(
            f"Take run {run} ({now}) back to round {planned.to}, {back} round{'' if back == 1 else 's'} back? "
            f"{SITES_GO} Later rounds no longer count, and cannot be gone forward to again."
        )
    info = operator.roll_back(run, planned.to)
    _show_status(info, as_json, f"{info.run}: continues after round {planned.to} ({info.status})")


@connected(runs, "verify")
def verify(operator: Operator, run: Run, as_json: AsJson = False) -> None:
    """Recompute every published state on the server, from its ledger and blobs, and compare the digests.

    Rounds older than keep_rounds cannot be recomputed and are listed as not-kept. Exit code 1 if a state differs.

    Example: `protofed runs verify lesions`
    """
    from protofed.deploy.progress import each

    rows = [row for row in operator.show(run).rounds if row.state]
    bar = each(rows, "verifying", "rounds", visible=not as_json)
    results = [(row, operator.verify(run, row)) for row in bar]
    if as_json:
        print_json([{"round": row.round, "attempt": row.attempt, **_plain(reply)} for row, reply in results])
    else:
        console.print(_tables().verification_table(run, results))
    if differing := [row.round for row, reply in results if reply.finding not in ("same", "not-kept")]:
        rounds = ", ".join(map(str, differing))
        raise VerificationError(f"run {run}: the states of rounds {rounds} cannot be reproduced")


@connected(sites, "list")
def list_sites(operator: Operator, as_json: AsJson = False) -> None:
    """List all sites that ever enrolled: what each does, and the time since its last progress.

    Example: `protofed sites list`
    """
    rows = operator.sites()
    if as_json:
        print_json([_plain(info) for info in rows])
    else:
        console.print(_tables().sites_table(rows))


@connected(sites, "exclude")
def exclude(
    operator: Operator,
    site: Site,
    reason: Annotated[str, typer.Option(help="Why; sent to the site.")] = "by the operator",
    as_json: AsJson = False,
) -> None:
    """Exclude a site: rounds no longer wait for it, and it stops training. Its earlier updates still count.

    Example: `protofed sites exclude north --reason "its scanner was replaced"`
    """
    info = operator.exclude(site, reason)
    _show_status(info, as_json, f"{info.site}: excluded ({info.excluded})")


@connected(sites, "admit")
def admit(operator: Operator, site: Site, as_json: AsJson = False) -> None:
    """Admit an excluded site again. Its daemon reconnects by itself.

    Example: `protofed sites admit north`
    """
    info = operator.admit(site)
    _show_status(info, as_json, f"{info.site}: admitted")


def _where(operator: Operator, run: str) -> str:
    """Where a run is, in words; fails as the command itself would if there is no such run."""
    info = operator.show(run, 1).info
    return f"{info.status}, round {info.round} of {info.rounds}"


@connected(sites, "forget", panel=SELDOM)
def forget(operator: Operator, site: Site, as_json: AsJson = False) -> None:
    """Remove a site that is gone from `sites list`, with its exclusion. What it did in runs stays.

    Refused while its daemon is alive, or while it has a valid certificate: revoke that first.

    Example: `protofed sites forget norht`
    """
    info = operator.forget(site)
    lifted = f", and its exclusion with it ({info.excluded})" if info.excluded else ""
    _show_status(info, as_json, f"{info.site}: forgotten{lifted}")


@connected(sites, "regroup", panel=SELDOM)
def regroup(operator: Operator, site: Site, yes: Yes = False, as_json: AsJson = False) -> None:
    """Dissolve the group of a site; the next secure aggregation forms groups of the sites without one. Asks first.

    For a run of larger groups; a hospital that has left takes a new list, `protofed consortium --offer`. The group's
    other sites refuse another group until a person at each runs `protofed client consortium --forget-group`. Refused
    while a secure aggregation is open: pause the run before.

    Example: `protofed sites regroup north`
    """
    if not yes:
        group = next((", ".join(info.group) for info in operator.sites() if info.site == site), f"of {site}")
        confirm(
            f"Dissolve the group {group}? A person at each of its sites has to run `protofed client "
            "consortium --forget-group` then, which lets this server compare sums over both groups."
        )
    info = operator.regroup(site)
    other_sites = ", ".join(other for other in info.group if other != site)
    _show_status(
        info,
        as_json,
        f"{site}, {other_sites}: dissolved; now `protofed client consortium --forget-group` at {other_sites}",
    )


def _plain(message: Any) -> dict[str, Any]:
    from protofed.deploy.operator.connection import plain

    return plain(message)


def _tables() -> ModuleType:
    from protofed.deploy.operator import tables

    return tables


def _watch(operator: Operator, run: str, as_json: bool) -> None:
    from protofed.deploy.operator.watch import Watcher, watch

    watch(Watcher(operator, run), console, as_json=as_json)


def _show_status(info: Any, as_json: bool, text: str) -> None:
    if as_json:
        print_json(_plain(info))
    else:
        say(text)
