"""`protofed client doctor` and `server doctor`: the options of the daemons, and what keeps these from working."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import structlog
import typer
from rich.console import Console

from protofed.deploy.cli.overrides import Set, needs_recipe

if TYPE_CHECKING:
    from protofed.deploy.doctor.checks import Check

console = Console()
NOT_SETTINGS = (
    "until_finished",
    "recover",
    "give_up_after",
    "dry_run",
)  # taken, so that a daemon's command line can be copied
KEYS = {"recipe": "recipes", "role": "roles"}  # of the settings, where an option has another name
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Strict = Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")]
Quick = Annotated[bool, typer.Option("--quick", help="Open the data, but do not load them.")]
ForRecipe = Annotated[
    str | None, typer.Option("--recipe", help="Of a run, whose data shape is compared: a file, or a name.")
]


def of_server(start: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `server start`."""
    return _like(start, _look_at_server, {"strict": (Strict, False), "as_json": (AsJson, False)})


def of_client(start: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `client start`."""
    more = {"for_recipe": (ForRecipe, None), "assignments": (Set, None), "quick": (Quick, False)}
    more |= {"strict": (Strict, False)}
    return _like(start, _look_at_client, {**more, "as_json": (AsJson, False)})


def _like(
    start: Callable[..., None], look: Callable[..., None], more: dict[str, tuple[Any, object]]
) -> Callable[..., None]:
    """A command with a daemon's options and some of its own, which gets the first ones as a table."""
    hints = get_type_hints(start, include_extras=True)
    shared = [one for one in inspect.signature(start).parameters.values() if one.name != "context"]

    def act(*, settings: Path | None, **given: Any) -> None:
        own = {option: given.pop(option) for option in more}
        for option in NOT_SETTINGS:
            given.pop(option, None)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the table tells enough
        look(settings, options(given), **own)

    parameters = [
        *(one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in shared),
        *(
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in more.items()
        ),
    ]
    command: Any = act
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__doc__ = look.__doc__
    return act


def options(given: dict[str, Any]) -> dict[str, Any]:
    """What a daemon's command line gives to its settings."""
    if listen := given.get("metrics"):
        given = {**given, "metrics": {"listen": listen}}
    return {KEYS.get(name, name): value or None if value is False else value for name, value in given.items()}


def _look_at_server(file: Path | None, given: dict[str, Any], *, strict: bool, as_json: bool) -> None:
    """What the server needs: identity, operators, recipes, state folder, ledger, port, limits. Nothing is started."""
    from protofed.common.config.settings import ServerSettings, read_settings
    from protofed.deploy.doctor.server import ServerDoctor

    assignments = given.pop("assignments", None) or ()
    found = ServerDoctor(lambda: read_settings(ServerSettings, file, given), assignments=assignments)
    _tell(found.checks(), strict=strict, as_json=as_json)


def _look_at_client(
    file: Path | None,
    given: dict[str, Any],
    *,
    for_recipe: str | None,
    assignments: Sequence[str] | None,
    quick: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """What a site's daemon needs: identity, the way to the server, policy, device, data. It does not enroll."""
    from protofed.common.config.settings import ClientSettings, read_settings
    from protofed.deploy import shipped
    from protofed.deploy.doctor.client import ClientDoctor
    from protofed.deploy.doctor.site import SiteUnderCheck

    if for_recipe is None:
        needs_recipe(assignments, "--recipe")
    site = SiteUnderCheck(None if for_recipe is None else lambda: shipped.recipe(for_recipe, assignments or ()), quick)
    found = ClientDoctor(lambda: read_settings(ClientSettings, file, given), site)
    _tell(found.checks(), strict=strict, as_json=as_json)


def _tell(checks: Sequence[Check], *, strict: bool, as_json: bool) -> None:
    from protofed.deploy.doctor import table
    from protofed.deploy.doctor.checks import first_finding, run_checks, verdict

    with Console(stderr=True).status("checking") as status:
        rows = list(run_checks(checks, lambda name: status.update(f"checking {name}")))
    if as_json:
        print(json.dumps(table.plain(rows, strict=strict), indent=2, ensure_ascii=False))  # noqa: T201
    else:
        console.print(table.table(rows))
        console.print(verdict(rows, strict=strict), highlight=False)
    if (worst := first_finding(rows, strict=strict)) is not None:
        raise typer.Exit(worst.code)
