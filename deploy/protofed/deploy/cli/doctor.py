"""`protofed client doctor` and `server doctor`: check a daemon's prerequisites, with the options of its `start`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console

from protofed.deploy.cli.completion import with_options
from protofed.deploy.cli.options import AsJson, Set, needs_recipe, print_json

if TYPE_CHECKING:
    from protofed.deploy.doctor.checks import Check

console = Console()
# Options of `start` that doctor accepts and ignores, so that a daemon's command line can be copied as it is.
NOT_SETTINGS = ("until_finished", "recover", "give_up_after", "dry_run")
LISTED = ("settings", "site", "server", "policy", "state", "identity", "recipe", "listen")
KEYS = {"recipe": "recipes", "role": "roles"}  # option -> settings key, where the two differ
Strict = Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")]
Quick = Annotated[bool, typer.Option("--quick", help="Open the data but do not load them.")]
Notify = Annotated[bool, typer.Option("--notify", help="Send a test message by each channel of the table `notify`.")]
ForRecipe = Annotated[
    str | None, typer.Option("--recipe", help="Compare the data with this recipe: a file, or a shipped name.")
]


def of_server(start: Callable[..., None]) -> Callable[..., None]:
    """The doctor command with the options of `server start` and its own."""
    extra_options: dict[str, tuple[Any, object]] = {
        "notify": (Notify, False),
        "strict": (Strict, False),
        "as_json": (AsJson, False),
    }
    return _with_daemon_options(start, _check_server, extra_options)


def of_client(start: Callable[..., None]) -> Callable[..., None]:
    """The doctor command with the options of `client start` and its own."""
    extra_options = {"for_recipe": (ForRecipe, None), "assignments": (Set, None), "quick": (Quick, False)}
    extra_options |= {"strict": (Strict, False)}
    return _with_daemon_options(start, _check_client, {**extra_options, "as_json": (AsJson, False)})


def _with_daemon_options(
    start: Callable[..., None], check: Callable[..., None], extra_options: dict[str, tuple[Any, object]]
) -> Callable[..., None]:
    """A command with the options of `start` and extra ones; `check` gets the former as a table of settings."""
    hints = get_type_hints(start, include_extras=True)
    shared = [parameter for parameter in inspect.signature(start).parameters.values() if parameter.name != "context"]

    def run_command(*, settings: Path | None, **values: Any) -> None:
        import structlog

        own_options = {option: values.pop(option) for option in extra_options}
        for option in NOT_SETTINGS:
            values.pop(option, None)
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(50)
        )  # CRITICAL only: the table shows the results
        check(settings, options(values), **own_options)

    own = [each.replace(annotation=_listed(each.name, hints), kind=inspect.Parameter.KEYWORD_ONLY) for each in shared]
    return with_options(run_command, own, extra_options, check.__doc__)


def _listed(name: str, hints: dict[str, Any]) -> Any:
    """The annotation of an option; but for the first ones `--help` does not repeat those of `start`."""
    if name in LISTED:
        return hints[name]
    kind, *metadata = get_args(hints[name])
    own = [copy(each) for each in metadata]
    for each in own:
        each.hidden = True
    return Annotated[kind, *own]


def options(values: dict[str, Any]) -> dict[str, Any]:
    """Settings from a daemon's options: settings keys, and None for flags that were not given."""
    if listen := values.get("metrics"):
        values = {**values, "metrics": {"listen": listen}}
    return {KEYS.get(name, name): value or None if value is False else value for name, value in values.items()}


def _check_server(file: Path | None, values: dict[str, Any], *, notify: bool, strict: bool, as_json: bool) -> None:
    """Check the server's identity, operators, recipes, state folder, ledger, port and limits. Starts nothing.

    Takes every option of `server start`, too.

    Example: `protofed server doctor --settings server.toml`
    """
    from protofed.common.config.settings import ServerSettings, read_settings
    from protofed.deploy.doctor.server import ServerDoctor

    assignments = values.pop("assignments", None) or ()
    read = partial(read_settings, ServerSettings, file, values)
    doctor = ServerDoctor(read, assignments=assignments, notify=notify)
    _report_checks(doctor.checks(), strict=strict, as_json=as_json)


def _check_client(
    file: Path | None,
    values: dict[str, Any],
    *,
    for_recipe: str | None,
    assignments: Sequence[str] | None,
    quick: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check the site's identity, connection to the server, policy, device and data. Does not enroll.

    Takes every option of `client start`, too.

    Example: `protofed client doctor --settings site.toml`
    """
    from protofed.common.config.settings import ClientSettings, read_settings
    from protofed.deploy import shipped
    from protofed.deploy.doctor.client import ClientDoctor
    from protofed.deploy.doctor.site import SiteUnderCheck

    if for_recipe is None:
        needs_recipe(assignments, "--recipe")
    site = SiteUnderCheck(None if for_recipe is None else lambda: shipped.recipe(for_recipe, assignments or ()), quick)
    doctor = ClientDoctor(lambda: read_settings(ClientSettings, file, values), site)
    _report_checks(doctor.checks(), strict=strict, as_json=as_json)


def _report_checks(checks: Sequence[Check], *, strict: bool, as_json: bool) -> None:
    from protofed.deploy.doctor.checks import first_finding, plain, run_checks, table, verdict

    with Console(stderr=True).status("checking") as status:
        rows = list(run_checks(checks, lambda name: status.update(f"checking {name}")))
    if as_json:
        print_json(plain(rows, strict=strict), ascii=False)
    else:
        console.print(table(rows))
        console.print(verdict(rows, strict=strict), highlight=False)
    if (worst := first_finding(rows, strict=strict)) is not None:
        raise typer.Exit(worst.code)
