"""`protofed consortium …`: the list of partners that a server offers to its sites."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.deploy.cli.connection import connected
from protofed.deploy.cli.options import AsJson, Yes, confirm

if TYPE_CHECKING:
    from protofed.common.protocol.consortium import Consortium
    from protofed.deploy.operator.connection import Operator
    from protofed.protos.v1 import operator_pb2 as pb

consortium = typer.Typer(no_args_is_help=True, help="Show and offer the list of partners that sites are summed with.")
console = Console(soft_wrap=True)


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

    Secure sums are of those that have confirmed it: the others wait. A hospital that joins, leaves or has a new key
    takes a new list, which all of them confirm.

    Example: `protofed consortium offer --coordinator "Adler University"`
    """
    from protofed.common.protocol.consortium import changes, read

    found = operator.consortium(coordinator)
    if not found.proposed:
        raise ConfigError(f"no list can be offered: {found.problem}")
    listed, before = read(found.proposed), read(found.offered) if found.offered else None
    if not as_json:
        _say([*_described(listed), *changes(before, listed)])
    if not yes:
        confirm("Offer this list? Secure sums stop until each hospital has confirmed it.")
    _show(operator.offer_consortium(found.proposed), as_json)


def _show(found: pb.ConsortiumInfo, as_json: bool) -> None:
    from protofed.common.protocol.consortium import read
    from protofed.deploy.site.partners import plain

    listed = read(found.offered) if found.offered else None
    if as_json:
        offered = None if listed is None else plain(listed)
        told = {"offered": offered, "confirmed": list(found.confirmed), "waiting": list(found.waiting)}
        print(json.dumps({**told, "problem": found.problem}, indent=2))  # noqa: T201
        return
    if listed is None:
        _say(["no list is offered: `protofed consortium offer` makes one", *filter(None, [found.problem])])
        return
    _say([*_described(listed), f"confirmed: {', '.join(found.confirmed) or 'nowhere'}"])
    if found.waiting:
        _say(
            [
                f"waiting: {', '.join(found.waiting)}",
                f"Read {listed.code} out to all hospitals in one telephone conference. Each says that it is there, and "
                f"runs `protofed client consortium confirm {listed.code} --state STATE`.",
            ]
        )


def _described(listed: Consortium) -> list[str]:
    from protofed.deploy.site.partners import described

    return described(listed)


def _say(lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)
