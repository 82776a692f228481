"""`protofed client …`: a hospital's commands for its daemon, its data and the runs it takes part in."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from protofed.common.clock import utc_now
from protofed.common.errors import PolicyViolationError
from protofed.deploy.cli import doctor
from protofed.deploy.cli.client_cache import cache
from protofed.deploy.cli.client_check import PlanView, check, plan_view
from protofed.deploy.cli.consortium import client_consortium
from protofed.deploy.cli.init import init_client
from protofed.deploy.cli.options import (
    SELDOM,
    AsJson,
    Metrics,
    Set,
    Settings,
    UntilFinished,
    Yes,
    confirm,
    log_as_daemon,
    print_json,
    say,
)
from protofed.deploy.cli.options import Policy as PolicyOption
from protofed.deploy.cli.options import State as StateOption
from protofed.deploy.cli.pages import page
from protofed.deploy.tables import BOXED, Column, terminal

if TYPE_CHECKING:
    from protofed.deploy.audit.reader import HandedIn

client = typer.Typer(no_args_is_help=True, help="For hospitals: run the site's daemon, check its data, approve runs.")
console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
Examples = Annotated[
    int | None, typer.Option(min=1, help="Training examples here, for what depends on them; `check` counts them.")
]


client.command("init")(init_client)


@client.command("start")
def start(
    context: typer.Context,
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(help="This site's id.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    policy: PolicyOption = None,
    state: StateOption = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer or evaluator. Repeat for both.")] = None,
    partition_index: Annotated[
        int | None, typer.Option(help="This site's index in the partition of the data, from 0.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|none",
            help="Folder with the site's cert.pem, key.pem and ca.pem; none: no TLS, on this machine only.",
        ),
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="http://host:port. With a password: PROTOFED_CLIENT_PROXY or --settings.", rich_help_panel=SELDOM
        ),
    ] = None,
    metrics: Metrics = None,
    until_finished: UntilFinished = False,
    give_up_after: Annotated[
        float | None,
        typer.Option(help="Exit after this many seconds without an answer; default: never.", rich_help_panel=SELDOM),
    ] = None,
) -> None:
    """Run the site's daemon: it waits for runs of the server and trains on the site's data.

    Example: `protofed client start --settings site.toml`
    """
    from protofed.common.process import quick_imports

    with quick_imports():
        from protofed.common.config.settings import ClientSettings, read_settings
        from protofed.common.process import keep_memory
        from protofed.deploy.daemons.client import run_client

    log_as_daemon(context)
    keep_memory()
    options: dict[str, Any] = {"site": site, "server": server, "policy": policy, "state": state, "roles": role}
    options |= {
        "partition_index": partition_index,
        "device": device,
        "identity": identity,
        "proxy": proxy,
    }
    options |= {"metrics": metrics}
    daemon_settings = read_settings(ClientSettings, settings, options)
    run_client(daemon_settings, until_finished=until_finished, give_up_after_s=give_up_after)


client.command("check")(check)
client.command("consortium")(client_consortium)


@client.command("preview")
def preview(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    policy: PolicyOption = None,
    examples: Examples = None,
    state: Annotated[
        Path | None,
        typer.Option(help="The site's state folder: its partners, and what of its privacy budget is spent."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor by name, not only one row per part.")
    ] = False,
    as_json: AsJson = False,
    assignments: Set = None,
) -> None:
    """Show what a recipe asks, beside the policy's limits, and what a site would send, receive and keep.

    Reads no data. Exit code 77 if the policy refuses.

    Example: `protofed client preview digits-fednh-secure --policy standard`
    """
    from protofed.deploy import shipped

    read = shipped.recipe(recipe, assignments or ())
    view = plan_view(read, policy, examples=examples, progress_shown=not as_json, state=state)
    _show_plan(view, tensors=tensors, as_json=as_json)


@client.command("approve")
def approve(
    run: Annotated[str, typer.Argument(help="An offered run; `protofed client runs` lists them.")],
    state: State,
    policy: PolicyOption = None,
    examples: Examples = None,
    yes: Yes = False,
) -> None:
    """Show what a run asks and what it would send, then approve this recipe. A changed one needs a new approval.

    Takes back `client deny`, too.

    Exit code 77 if the policy refuses.

    Example: `protofed client approve lesions --state state --policy policy.toml`
    """
    from protofed.deploy.site import orders
    from protofed.deploy.site.offered_runs import parse_offer

    offer = orders.open_approvals(state).offer(run)
    _show_plan(plan_view(parse_offer(offer), policy, examples=examples, offer=offer, state=state))
    about = f"run {offer.run}, recipe {offer.digest[:16]}…, offered {offer.at}"
    if not yes:
        confirm(f"Take part in {about}?")
    orders.approve(state, offer)
    console.print(f"approved: {about}; the daemon continues within seconds", highlight=False)


def _show_plan(view: PlanView, *, tensors: bool | None = None, as_json: bool = False) -> None:
    if as_json:
        print_json(view.plain())
    else:
        view.show(console, tensors=tensors)
    if view.refused:
        raise typer.Exit(PolicyViolationError.exit_code)


Run = Annotated[str, typer.Argument(help="An offered run; `protofed client runs` lists them.")]


@client.command("runs")
def runs(
    state: State,
    run: Annotated[str | None, typer.Argument(help="A run, for its scores; default: list all.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as JSON; of a run with the scores of single classes.")
    ] = False,
) -> None:
    """List the runs that the server offered, and who approved, denied or left each; or one run's scores of this site.

    Only what `metrics` of the site's policy names is sent, and in a secure aggregation `aggregated_metrics`. What was
    sent is read from the site's audit log.

    Example: `protofed client runs --state /var/lib/protofed`
    """
    if run is not None:
        _show_scores(state, run, as_json)
        return
    from protofed.client.secure_aggregation.partners import Partners
    from protofed.deploy.site import offered_runs, orders
    from protofed.deploy.site.partners import PartnersView

    rows = offered_runs.all_runs(orders.open_approvals(state))
    if as_json:
        print_json(rows)
        return
    if not rows:
        say("none: the server has offered no run yet, or the daemon of this folder has not reached it")
    for row in rows:
        for line in offered_runs.run_lines(row, console.width):
            say(line)
    reads = Partners(state).problem(required=False) or PartnersView.of(state).who_reads()
    say(textwrap.fill(f"in runs with secure aggregation: {reads}", max(console.width, 60), subsequent_indent="  "))
    if (pause := orders.open_pause(state).current()) is not None:
        say(f"this site is {pause}: it takes no task of any run")


@client.command("deny")
def deny(run: Run, state: State, yes: Yes = False) -> None:
    """Refuse a run, whatever the policy says, or leave one that has started. `client approve` takes it back.

    A fit in progress stops, and nothing more of the run is sent. What was sent before stays with the server; the
    command lists it. The daemon may run or not.

    Example: `protofed client deny lesions --state /var/lib/protofed`
    """
    _leave(run, state, yes=yes)


@client.command("pause")
def pause(
    state: State,
    until: Annotated[
        str | None,
        typer.Option(help="When it ends by itself: 18:00 or 2026-11-24T06:00 (UTC), or 90m, 2h30m, 3d."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the site's own audit log. It is not sent.")] = "",
) -> None:
    """Take no task until `client resume`, or until a time.

    The daemon finishes and sends a fit in progress, and stays connected. To free the machine at once, stop the daemon.
    At the next start the fit begins again. If the recipe has plan.checkpoint, it goes on after the last epoch instead.

    Example: `protofed client pause --state /var/lib/protofed --until 18:00`
    """
    from protofed.deploy.site import orders
    from protofed.deploy.site.orders import pause_end

    end = None if until is None else pause_end(until, utc_now())
    tail = "this site takes no new task; a fit in progress is finished and sent"
    say(orders.noticed_text(orders.pause(state, end, reason, lambda order: say(f"{order}: {tail}"))))


@client.command("resume")
def resume(state: State) -> None:
    """Take tasks again after `client pause`.

    Example: `protofed client resume --state /var/lib/protofed`
    """
    from protofed.deploy.site import orders

    noticed = orders.resume(state, lambda ended: say(f"resumed; this site was {ended}"))
    say("this site is not paused; nothing to do" if noticed is None else orders.noticed_text(noticed))


def _leave(run: str, state: Path, *, yes: bool) -> None:
    from protofed.client.transport.audit import FILE
    from protofed.deploy.audit.reader import handed_in
    from protofed.deploy.site import orders

    def started(took_part: bool) -> None:
        word = "left" if took_part else "denied"
        say(f"{word}: run {offer.run}; this site sends nothing more for it until `protofed client approve`")

    approvals = orders.open_approvals(state)
    offer = approvals.offer(run)
    if orders.is_out(approvals, offer):
        say(f"this site was out of run {offer.run} already")
        orders.act_as_owner(state)
    else:
        if approvals.took_part(run) and not yes:
            confirm(f"Leave run {offer.run} now? A fit in progress stops, and its result is lost.")
        say(orders.noticed_text(orders.leave(state, offer, started)))
    for line in _handed_in_lines(handed_in(state / FILE, offer.run), state, offer.run):
        say(line)


def _handed_in_lines(sent: HandedIn, state: Path, run: str) -> list[str]:
    lines = [f"  {line}" for line in sent.lines()]
    gap = [sent.gap] if sent.gap else []
    if not lines:
        return gap or ["by the audit log, this site sent nothing for the run before"]
    more = f"each message: protofed audit show {state} --run {run}"
    return [
        "sent before, by the audit log; the server keeps it in the models made with it:",
        *lines,
        *gap,
        more,
    ]


NO_SCORES = "none yet: the site has taken part in no round, or in none since this version keeps its scores"


def _show_scores(state: Path, run: str, as_json: bool) -> None:
    from protofed.client.state.own_scores import FOLDER, OwnScores
    from protofed.client.transport.audit import FILE
    from protofed.deploy.audit.reader import handed_in
    from protofed.deploy.site import offered_runs, orders
    from protofed.deploy.site.own_scores import ScoresView

    orders.check_state(state)
    stored = OwnScores(state / FOLDER)
    rows = [row for row in offered_runs.all_runs(orders.open_approvals(state)) if row["run"] == run]
    no_scores = bool(rows) and run not in stored.runs()
    view = ScoresView([] if no_scores else stored.rounds(run), handed_in(state / FILE, run))
    if as_json:
        print_json({"run": run, **view.plain()})
        return
    if not rows:  # offered to an earlier state folder of this site
        say(run)
    for row in rows:
        for line in offered_runs.run_lines(row, console.width):
            say(line)
    if no_scores:
        say(NO_SCORES)
        return
    for table in view.tables(console.width):
        console.print(table)
    for line in view.legend():
        console.print(line, highlight=False, markup=False)


NOTHING_SPENT = "nothing: this site has started no fit of a run with noise (plan.dp)"
PUBLIC = "Epsilon is arithmetic of the recipes and of how many rounds began: it tells nothing of the site's images."


@client.command("budget")
def budget(
    state: Annotated[Path, typer.Option(help="The state folder of the site's daemon.")],
    policy: PolicyOption = None,
    delta: Annotated[
        float, typer.Option(min=1e-12, max=1e-2, help="Delta at which epsilon is given, unless the policy names one.")
    ] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Show what the site has spent of its privacy: by run, and of all runs together beside the policy's budget.

    Fits of runs without noise do not count: there is no bound on what these told.

    Example: `protofed client budget --state /var/lib/protofed --policy policy.toml`
    """
    from protofed.client.policy.policy import Policy
    from protofed.client.state.dp_ledger import FILE, read
    from protofed.deploy import shipped
    from protofed.deploy.site import orders
    from protofed.deploy.site.privacy import privacy_spent

    orders.check_state(state)
    allowed = None if policy is None else Policy.read(shipped.policy(policy)).rules.dp
    spending = asdict(privacy_spent(read(state / FILE), allowed, delta))
    if as_json:
        print_json(spending)
    else:
        _show(spending)


def _show(spending: dict[str, Any]) -> None:
    if not spending["runs"] and not spending["torn"]:
        say(NOTHING_SPENT)
    else:
        console.print(terminal(RUNS, spending["runs"], BOXED), highlight=False)
        if spending["torn"]:
            say(f"half-written lines, each counted as the largest fit: {spending['torn']}")
    of = "" if spending["budget"] is None else f" of {spending['budget']:g} for each {spending['unit']}"
    say(f"spent by all together: epsilon {_text(spending['epsilon'])}{of}, at delta {spending['delta']:g}")
    say(PUBLIC)


def _text(epsilon: float | None) -> str:
    return "beyond all use" if epsilon is None else f"{epsilon:.3g}"


CELLS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "run": lambda run: run["run"],
    "fits": lambda run: str(run["fits"]),
    "rounds": lambda run: str(run["rounds"]),
    "first (UTC)": lambda run: run["first"],
    "last (UTC)": lambda run: run["last"],
    "epsilon alone": lambda run: _text(run["epsilon"]),
}
RUNS = [Column(head, cell, wraps=True, overflow="ellipsis") for head, cell in CELLS.items()]


client.command("page")(page)
client.add_typer(cache, name="cache", rich_help_panel=SELDOM)
client.command("doctor")(doctor.of_client(start))
