"""`protofed client check`: whether a site's data fit a run, before its daemon is started."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from rich.console import Console

from protofed.common import plugins
from protofed.common.errors import DataError, StateError
from protofed.deploy.cli.overrides import Set, needs_recipe

if TYPE_CHECKING:
    from protofed.common.config.recipe import Recipe
    from protofed.common.config.settings import ClientSettings
    from protofed.deploy.console.progress import Bar
    from protofed.deploy.site.check_result import SiteCheck

console = Console()
_UNSAID = "unsaid"  # of a daemon's settings that the data have nothing to do with


def check(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's file, or a name; without one: what is there.")
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="The daemon's settings: TOML with a table [data].")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="The site's policy: below which number a class is absent.")
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer, evaluator or both (twice).")] = None,
    partition_index: Annotated[
        int | None, typer.Option(help="Which of data.partition's sites this is, from 0.")
    ] = None,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="A picture to write: some images a class, as the model sees them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, with all files by name.")] = False,
    assignments: Set = None,
) -> None:
    """Look at a site's data as a run would have them; nothing is sent. 65 if the daemon would take no part."""
    from protofed.deploy import shipped

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # what it says tells enough
    if recipe is None:
        needs_recipe(assignments, "a recipe")
    wanted = None if recipe is None else shipped.recipe(recipe, assignments or ())
    said = _settings(settings, {"policy": policy, "roles": role, "partition_index": partition_index})
    with _bar(shown=not as_json) as bar:
        from protofed.deploy.site import check_table  # with PyTorch, which takes seconds

        found = _look(said, wanted, bar)
        if contact_sheet is not None:
            bar.say("drawing the contact sheet")
            _draw(found, contact_sheet)
    if as_json:
        print(json.dumps(check_table.plain(found), indent=2, ensure_ascii=False))  # noqa: T201
    else:
        check_table.show(found, console)
        if contact_sheet is not None:
            console.print(f"\ncontact sheet: {contact_sheet} (it shows the site's images)", highlight=False)
    if found.refusal is not None:
        raise typer.Exit(DataError.exit_code)


def _settings(file: Path | None, given: dict[str, Any]) -> ClientSettings:
    """A daemon's; what has nothing to do with data need not be said."""
    from protofed.common.config.recipe import read_table
    from protofed.common.config.settings import ClientSettings, read_settings

    said = {} if file is None else read_table(file)
    for name in ("site", "policy", "state"):
        if given.get(name) is None and name not in said and f"PROTOFED_CLIENT_{name.upper()}" not in os.environ:
            given = {**given, name: _UNSAID}
    return read_settings(ClientSettings, file, given)


def _look(settings: ClientSettings, recipe: Recipe | None, bar: Bar) -> SiteCheck:
    from protofed.client.privacy.policy import Policy
    from protofed.deploy.site.check import site_check

    known = settings.policy != Path(_UNSAID)
    rules = Policy.read(settings.policy).rules if known else None
    plugins.allow(rules.plugins if rules else ())
    return site_check(settings, recipe, rules.min_samples_per_class if rules else None, bar)


def _draw(found: SiteCheck, file: Path) -> None:
    """For this user only.

    Raises:
        StateError: it cannot be written.
    """
    from protofed.deploy.site.contact_sheet import sheet

    wanted = found.request
    run = "own labels" if wanted.recipe is None else f"run {wanted.recipe.name}"
    shape = " x ".join(map(str, wanted.input.shape))
    names = [wanted.name(index) for index in range(wanted.classes)]
    picture = sheet(found.survey, names, f"{run}: images as the model sees them, {shape}")
    try:
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(picture)
    except OSError as error:
        raise StateError(f"cannot write {file}: {error.strerror}; give --contact-sheet a place in a folder") from error


@contextmanager
def _bar(*, shown: bool) -> Iterator[Bar]:
    from protofed.deploy.console.progress import progress

    with progress("looking at images", unit="images", shown=shown) as bar:
        yield bar
