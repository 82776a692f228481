"""What a hospital decides: `protofed client runs`, `withdraw`, `deny`, `pause` and `resume`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.clock import utc_now
from protofed.deploy.cli.confirmation import Yes, confirm
from protofed.deploy.cli.options import AsJson

if TYPE_CHECKING:
    from protofed.deploy.audit.handed_in import HandedIn

console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
Run = Annotated[str, typer.Argument(help="An offered run; `protofed client runs` lists them.")]


def runs(state: State, as_json: AsJson = False) -> None:
    """List the runs that the server offered to this site, and who approved, denied or left each, and when.

    Example: `protofed client runs --state /var/lib/protofed`
    """
    from protofed.client.secure_aggregation.partners import Partners
    from protofed.deploy.site import offered_runs, orders
    from protofed.deploy.site.partners import PartnersView

    rows = offered_runs.all_runs(orders.approvals_of(state))
    if as_json:
        print(json.dumps(rows, indent=2))  # noqa: T201
        return
    if not rows:
        _say("none: the server has offered no run yet, or the daemon of this folder has not reached it")
    for row in rows:
        for line in offered_runs.run_lines(row, console.width):
            _say(line)
    reads = Partners(state).problem(required=False) or PartnersView.of(state).who_reads(3)
    _say(textwrap.fill(f"in runs with secure sums: {reads}", max(console.width, 60), subsequent_indent="  "))
    if (pause := orders.pause_of(state).current()) is not None:
        _say(f"this site is {pause}: it takes no task of any run")


def withdraw(run: Run, state: State, yes: Yes = False) -> None:
    """Leave a run now: a fit in progress stops, and nothing more of the run leaves this site, until `client approve`.

    What was handed in before stays with the server; the command lists it. The daemon may be running, or not.

    Example: `protofed client withdraw lesions --state /var/lib/protofed`
    """
    _leave(run, state, yes=yes)


def deny(run: Run, state: State, yes: Yes = False) -> None:
    """Refuse a run, whatever the policy says, until `client approve`. A run that has begun is left: see `withdraw`.

    Example: `protofed client deny lesions --state /var/lib/protofed`
    """
    _leave(run, state, yes=yes)


def pause(
    state: State,
    until: Annotated[
        str | None,
        typer.Option(help="When it ends by itself: 18:00 or 2026-11-24T06:00 (UTC), or 90m, 2h30m, 3d."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for the site's own audit log; nothing sends it.")] = "",
) -> None:
    """Take no task until `client resume`, or until a time. A fit in progress is finished and sent; the daemon stays
    connected.

    To free the machine at once, stop the daemon: its fit begins anew at the next start, or goes on after the last epoch
    if the recipe has plan.checkpoint.

    Example: `protofed client pause --state /var/lib/protofed --until 18:00`
    """
    from protofed.deploy.site import orders
    from protofed.deploy.site.pause_end import pause_end

    end = None if until is None else pause_end(until, utc_now())
    tail = "this site takes no new task; a fit in progress is finished and sent"
    _say(orders.noticed_text(orders.pause(state, end, reason, lambda begun: _say(f"{begun}: {tail}"))))


def resume(state: State) -> None:
    """Take tasks again after `client pause`.

    Example: `protofed client resume --state /var/lib/protofed`
    """
    from protofed.deploy.site import orders

    noticed = orders.resume(state, lambda ended: _say(f"resumed; this site was {ended}"))
    _say("this site is not paused; nothing to do" if noticed is None else orders.noticed_text(noticed))


def _leave(run: str, state: Path, *, yes: bool) -> None:
    from protofed.client.transport.audit import FILE
    from protofed.deploy.audit.handed_in import handed_in
    from protofed.deploy.site import decide, orders

    def begun(took_part: bool) -> None:
        word = "left" if took_part else "denied"
        _say(f"{word}: run {offer.run}; nothing more of it leaves this site, until `protofed client approve`")

    approvals = orders.approvals_of(state)
    offer = approvals.offer(run)
    if orders.is_out(approvals, offer):
        _say(f"this site was out of run {offer.run} already")
        decide.act_as_owner(state)
    else:
        if approvals.took_part(run) and not yes:
            confirm(f"Leave run {offer.run} now? A fit in progress stops, and what it has computed is lost.")
        _say(orders.noticed_text(orders.leave(state, offer, begun)))
    for line in _handed_in_lines(handed_in(state / FILE, offer.run), state, offer.run):
        _say(line)


def _handed_in_lines(sent: HandedIn, state: Path, run: str) -> list[str]:
    from protofed.deploy.audit.handed_in import rounds_text

    updates, scores, unanswered = sent.updates - {0}, sent.scores, sent.unanswered
    lines = []
    if updates:
        lines.append(f"  updates, rounds {rounds_text(updates)}")
    if 0 in sent.updates:
        lines.append("  the first model, which is made from the recipe and contains nothing of this site's data")
    if unanswered:
        lines.append(f"  perhaps the updates of rounds {rounds_text(unanswered)}: sent, and never answered")
    if scores:
        lines.append(f"  scores, rounds {rounds_text(scores)}")
    if summed := {number for number, names in sent.summed.items() if names}:
        lines.append(f"  scores in a secure sum, as part of a mean over sites, rounds {rounds_text(summed)}")
    gap = [sent.gap] if sent.gap else []
    if not lines:
        return gap or ["nothing of it was handed in before, by the audit log"]
    more = f"each message: protofed audit show {state} --run {run}"
    return [
        "handed in before, by the audit log; it stays with the server, in the models made with it:",
        *lines,
        *gap,
        more,
    ]


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
