"""`protofed consortium …` and `protofed client consortium …`: the list of partners, as offered and as confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError, StateError
from protofed.deploy.cli.completion import with_operator
from protofed.deploy.cli.options import AsJson, Yes, confirm, print_json, say

if TYPE_CHECKING:
    from protofed.common.protocol.consortium import Consortium
    from protofed.deploy.operator.connection import Operator
    from protofed.protos.v1 import operator_pb2 as pb


def _consortium(
    operator: Operator,
    offer: Annotated[
        bool, typer.Option("--offer", help="Offer a new list: all sites that may train, each with its daemon's key.")
    ] = False,
    coordinator: Annotated[str, typer.Option(help="With --offer: the institution that runs this server.")] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the list of partners that sites are aggregated with, who has confirmed it, and the next step; or offer one.

    --offer asks first. Sites that have confirmed the list are aggregated; the others wait. A hospital that joins,
    leaves or has a new key takes a new list, which all of them confirm.

    Example: `protofed consortium --offer --coordinator "Adler University"`
    """
    if offer:
        _offer(operator, coordinator, yes=yes, as_json=as_json)
    elif coordinator:
        raise ConfigError("--coordinator names the institution of a new list; give --offer with it")
    else:
        _show(operator.consortium(), as_json)


consortium = with_operator(_consortium)


def _offer(operator: Operator, coordinator: str, *, yes: bool, as_json: bool) -> None:
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
        say("\n".join(filter(None, ["no list is offered: `protofed consortium --offer` makes one", info.problem])))
        return
    say("\n".join([*described(listed), f"confirmed: {', '.join(info.confirmed) or 'nowhere'}"]))
    if info.waiting and (rekeyed := _rekeyed(listed, read(info.proposed) if info.proposed else None)):
        say(
            f"waiting: {', '.join(info.waiting)}\n"
            f"with another key than the list says: {', '.join(rekeyed)}. Nobody there can confirm the list. Ask why. "
            "If the state folder there is new, have the old one put back. If that is lost, offer a new list: `protofed "
            "consortium --offer`."
        )
    elif info.waiting:
        say(
            f"waiting: {', '.join(info.waiting)}\n"
            f"Read {listed.code} out to all hospitals in one telephone conference. Each says that it is there, and "
            f"runs `protofed client consortium --confirm {listed.code} --state STATE`."
        )


def _rekeyed(listed: Consortium, proposed: Consortium | None) -> list[str]:
    """Sites that have another key now than the offered list says."""
    now = {} if proposed is None else proposed.identities
    return sorted(site for site, identity in listed.identities.items() if now.get(site, identity) != identity)


State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]


def client_consortium(
    state: State,
    confirm_code: Annotated[
        str | None,
        typer.Option(
            "--confirm", metavar="CODE", help="Confirm the offered list by its code, which all hospitals heard."
        ),
    ] = None,
    forget_group: Annotated[
        bool, typer.Option("--forget-group", help="Forget this site's group: for a study of larger groups.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the list of partners that the server offers, the one confirmed here, and this site's group; or confirm it.

    --confirm asks first. From then on this site is aggregated with these partners alone. Confirm a list only if you
    know each hospital in it and all of them heard the same code in one telephone conference.

    --forget-group asks first. The next secure aggregation pins whichever group the server forms. Do it only once each
    other site of the group has agreed to do the same: the server can compare sums over both groups.

    Example: `protofed client consortium --confirm K7QF-2M4X-9RTA-HWZC --state /var/lib/protofed`
    """
    if confirm_code is not None and forget_group:
        raise ConfigError("--confirm and --forget-group are two decisions; give one of them")
    if confirm_code is not None:
        _confirm(state, confirm_code, yes=yes)
    elif forget_group:
        _forget(state, yes=yes)
    else:
        _show_partners(state, as_json)


def _show_partners(state: Path, as_json: bool) -> None:
    from protofed.deploy.site import orders
    from protofed.deploy.site.partners import PartnersView

    orders.act_as_owner(state)
    view = PartnersView.of(state)
    if as_json:
        print_json(view.plain())
        return
    for line in view.lines():
        say(line)


def _confirm(state: Path, code: str, *, yes: bool) -> None:
    from protofed.client.secure_aggregation.partners import Partners
    from protofed.deploy.site import orders
    from protofed.deploy.site.partners import PartnersView

    orders.act_as_owner(state)
    view = PartnersView.of(state)
    Partners(state).confirmable(view.own, code)
    for line in view.asked():
        say(line)
    if not yes:
        confirm("Do you know every hospital of the list, and did all of them hear this code?")
    noticed = orders.confirm_partners(state, code)
    say(f"confirmed; {orders.noticed_text(noticed)}")


def _forget(state: Path, *, yes: bool) -> None:
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
