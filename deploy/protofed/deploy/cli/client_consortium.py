"""`protofed client consortium …`: with whom this site is summed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, StateError
from protofed.common.forms import stamp, utc_now
from protofed.deploy.cli.options import AsJson, Yes, confirm

console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
client_consortium = typer.Typer(
    no_args_is_help=True, help="Show and confirm the partners that this site is summed with in secure sums."
)


@client_consortium.command("show")
def show(state: State, as_json: AsJson = False) -> None:
    """Show the list of partners that the server offers, the one confirmed here, and this site's group.

    Example: `protofed client consortium show --state /var/lib/protofed`
    """
    from protofed.deploy.site import decide
    from protofed.deploy.site.partners import PartnersView

    decide.act_as_owner(state)
    view = PartnersView.of(state)
    if as_json:
        print(json.dumps(view.plain(), indent=2))  # noqa: T201
        return
    for line in view.lines():
        _say(line)


@client_consortium.command("confirm")
def confirm_(
    code: Annotated[str, typer.Argument(help="As it is read out to all hospitals in one telephone conference.")],
    state: State,
    yes: Yes = False,
) -> None:
    """Confirm the offered list of partners by its code: from then on this site is summed with these alone.

    Asks first. Confirm a list only if you know each hospital in it and all of them heard the same code.

    Example: `protofed client consortium confirm K7QF-2M4X-9RTA-HWZC --state /var/lib/protofed`
    """
    from protofed.client.secure_aggregation.partners import Partners
    from protofed.deploy.site import decide, orders
    from protofed.deploy.site.partners import PartnersView

    decide.act_as_owner(state)
    view = PartnersView.of(state)
    Partners(state).confirmable(view.own, code)
    for line in view.asked():
        _say(line)
    if not yes:
        confirm("Do you know each of these hospitals, and did all of them hear this code?")
    noticed = orders.confirm_partners(state, code)
    _say(f"confirmed; {orders.noticed_text(noticed)}")


@client_consortium.command("forget-group")
def forget(state: State, yes: Yes = False) -> None:
    """Forget the group: this site is summed in whichever its server puts it into next. Asks first.

    For a study that needs larger groups, once each other site of the group has agreed to do the same. It tells
    something: the server can compare sums over both groups.

    Example: `protofed client consortium forget-group --state /var/lib/protofed`
    """
    from protofed.client.secure_aggregation.sessions import FOLDER, forget_group, pinned_in
    from protofed.client.state.decisions import Act, Decision
    from protofed.deploy.site import decide
    from protofed.deploy.site.partners import TOLD

    decide.act_as_owner(state)
    try:
        found = pinned_in(state / FOLDER)
        if found is None:
            raise ConfigError("this site has no group yet: it is in one from its first secure sum on, in all runs")
        sites, since = ", ".join(found.group), f", since {found.at}"
    except StateError:  # damaged: which one it was, the audit log's lines of opened sums say
        sites, since = "that cannot be read", ""
    if not yes:
        confirm(f"{TOLD} Forget the group {sites}{since}?")
    forget_group(state / FOLDER)
    decide.record(state, Decision(Act.FORGET_GROUP, stamp(utc_now()), decide.user_name(), group=sites))
    _say(f"forgotten: {sites}; the next secure sum pins the group that it is over")


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
