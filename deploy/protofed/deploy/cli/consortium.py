"""`protofed consortium …` and `protofed client consortium …`: the list of partners, as offered and as confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError, StateError
from protofed.deploy.cli.completion import connected
from protofed.deploy.cli.options import AsJson, Yes, confirm, print_json, say

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator
    from protofed.protos.v1 import operator_pb2 as pb

consortium = typer.Typer(no_args_is_help=True, help="Show and offer the list of partners that sites are summed with.")


@connected(consortium, "show")
def show(operator: Operator, as_json: AsJson = False) -> None:
    """Show the list that is offered, who has confirmed it, and the next step.

    Example: `protofed consortium show`
    """
    _show(operator.consortium(), as_json)


@connected(consortium, "offer")
def offer(
    operator: Operator,
    coordinator: Annotated[str, typer.Option(help="The institution that runs this server.")] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Offer a list of all sites that may train, each with the key that its daemon has. Asks first.

    Those that have confirmed it are aggregated: the others wait. A hospital that joins, leaves or has a new key
    takes a new list, which all of them confirm.

    Example: `protofed consortium offer --coordinator "Adler University"`
    """
    from protofed.common.protocol.consortium import changes, read
    from protofed.deploy.site.partners import described

    info = operator.consortium(coordinator)
    if not info.proposed:
        raise ConfigError(f"no list can be offered: {info.problem}")
    listed, before = read(info.proposed), read(info.offered) if info.offered else None
    if not as_json:
        say("\n".join([*described(listed), *changes(before, listed)]))
    if not yes:
        confirm("Offer this list? Secure aggregation stops until each hospital has confirmed it.")
    _show(operator.offer_consortium(info.proposed), as_json)


def _show(info: pb.ConsortiumInfo, as_json: bool) -> None:
    from protofed.common.protocol.consortium import read
    from protofed.deploy.site.partners import described, plain

    listed = read(info.offered) if info.offered else None
    if as_json:
        offered = None if listed is None else plain(listed)
        fields = {"offered": offered, "confirmed": list(info.confirmed), "waiting": list(info.waiting)}
        print_json({**fields, "problem": info.problem})
        return
    if listed is None:
        say("\n".join(filter(None, ["no list is offered: `protofed consortium offer` makes one", info.problem])))
        return
    say("\n".join([*described(listed), f"confirmed: {', '.join(info.confirmed) or 'nowhere'}"]))
    if info.waiting:
        say(
            f"waiting: {', '.join(info.waiting)}\n"
            f"Read {listed.code} out to all hospitals in one telephone conference. Each says that it is there, and "
            f"runs `protofed client consortium confirm {listed.code} --state STATE`."
        )


State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
client_consortium = typer.Typer(
    no_args_is_help=True, help="Show and confirm the partners that this site is summed with in secure aggregation."
)


@client_consortium.command("show")
def show_partners(state: State, as_json: AsJson = False) -> None:
    """Show the list of partners that the server offers, the one confirmed here, and this site's group.

    Example: `protofed client consortium show --state /var/lib/protofed`
    """
    from protofed.deploy.site import orders
    from protofed.deploy.site.partners import PartnersView

    orders.act_as_owner(state)
    view = PartnersView.of(state)
    if as_json:
        print_json(view.plain())
        return
    for line in view.lines():
        say(line)


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
    from protofed.deploy.site import orders
    from protofed.deploy.site.partners import PartnersView

    orders.act_as_owner(state)
    view = PartnersView.of(state)
    Partners(state).confirmable(view.own, code)
    for line in view.asked():
        say(line)
    if not yes:
        confirm("Do you know each of these hospitals, and did all of them hear this code?")
    noticed = orders.confirm_partners(state, code)
    say(f"confirmed; {orders.noticed_text(noticed)}")


@client_consortium.command("forget-group")
def forget(state: State, yes: Yes = False) -> None:
    """Forget the group: this site is summed in whichever its server puts it into next. Asks first.

    For a study that needs larger groups, once each other site of the group has agreed to do the same. It tells
    something: the server can compare sums over both groups.

    Example: `protofed client consortium forget-group --state /var/lib/protofed`
    """
    from protofed.client.secure_aggregation.sessions import FOLDER, forget_group, pinned_in
    from protofed.client.state.decisions import Act, Decision
    from protofed.deploy.site import orders
    from protofed.deploy.site.partners import TOLD

    orders.act_as_owner(state)
    try:
        pin = pinned_in(state / FOLDER)
        if pin is None:
            raise ConfigError(
                "this site has no group yet: it is in one from its first secure aggregation on, in all runs"
            )
        sites, since = ", ".join(pin.group), f", since {pin.at}"
    except StateError:  # damaged: which one it was, the audit log's lines of opened sums say
        sites, since = "that cannot be read", ""
    if not yes:
        confirm(f"{TOLD} Forget the group {sites}{since}?")
    forget_group(state / FOLDER)
    orders.record(state, Decision(Act.FORGET_GROUP, stamp(utc_now()), orders.user_name(), group=sites))
    say(f"forgotten: {sites}; the next secure aggregation pins the group that it is over")
