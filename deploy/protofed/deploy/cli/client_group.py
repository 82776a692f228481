"""`protofed client group …`: with whom this site is summed in secure sums."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.clock import stamp, utc_now
from protofed.common.errors import ConfigError, StateError
from protofed.deploy.cli.confirmation import Yes, confirm
from protofed.deploy.cli.options import AsJson

console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
NONE = "no group yet: the site is in one from its first secure sum on, in all runs"
TOLD = (
    "What is the same in all runs, such as which classes a site holds, its server can then compute of the sites in "
    "which the two groups differ, by subtracting sums: of a single one, if only one differs."
)
group = typer.Typer(no_args_is_help=True, help="Show and forget the sites that this one is summed with in secure sums.")


@group.command("show")
def show(state: State, as_json: AsJson = False) -> None:
    """Show the group of sites that this one is summed in, whatever the run, and since when.

    Example: `protofed client group show --state /var/lib/protofed`
    """
    from protofed.client.sums.sessions import FOLDER, pinned_in
    from protofed.deploy.site import decide

    decide.act_as_owner(state)
    found = pinned_in(state / FOLDER)
    if as_json:
        print(json.dumps(None if found is None else asdict(found), indent=2))  # noqa: T201
    elif found is None:
        _say(NONE)
    else:
        _say(f"{', '.join(found.group)}  since {found.at}, run {found.run}")


@group.command("forget")
def forget(state: State, yes: Yes = False) -> None:
    """Forget the group: this site is summed in whichever its server puts it into next. Asks first.

    For a site of the group that has left for good, or a study that needs larger groups, once each other site of the
    group has agreed to do the same. It tells something: the server can compare sums over both groups.

    Example: `protofed client group forget --state /var/lib/protofed`
    """
    from protofed.client.state.decisions import Act, Decision
    from protofed.client.sums.sessions import FOLDER, forget_group, pinned_in
    from protofed.deploy.site import decide

    decide.act_as_owner(state)
    try:
        found = pinned_in(state / FOLDER)
        if found is None:
            raise ConfigError(f"this site has {NONE}")
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
