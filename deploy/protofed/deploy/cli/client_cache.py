"""`protofed client cache`: the decoded images on a site's disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from protofed.common.clock import stamp
from protofed.common.errors import ConfigError, unknown
from protofed.deploy.cli.options import AsJson, Yes, confirm, print_json, say
from protofed.deploy.tables import BOXED, Column, terminal

if TYPE_CHECKING:
    from protofed.client.data.image_cache import CacheEntry

cache = typer.Typer(no_args_is_help=True, help="The decoded images on this site's disk.")
console = Console()
Settings = Annotated[Path | None, typer.Option(help="The daemon's settings file (TOML).")]
NONE = "none: images are decoded onto the disk once those of a run are larger than cache.memory_mb"


@cache.command("list")
def show(settings: Settings = None, as_json: AsJson = False) -> None:
    """List the decoded images on the disk: one row for each way to prepare them.

    Example: `protofed client cache list --settings site.toml`
    """
    from protofed.client.data.image_cache import list_caches

    root = _root(settings)
    rows = [_row(entry) for entry in list_caches(root)]
    if as_json:
        print_json({"folder": str(root), "caches": rows})
        return
    say(f"folder: {root}")
    if rows:
        console.print(terminal(COLUMNS, rows, BOXED), highlight=False)
    else:
        say(NONE)


@cache.command("clear")
def clear(
    settings: Settings = None,
    name: Annotated[str | None, typer.Argument(help="One of `client cache list`; default: all.")] = None,
    yes: Yes = False,
) -> None:
    """Remove decoded images from the disk. The next run that needs them decodes them again.

    A daemon that trains on them may go on.

    Example: `protofed client cache clear --settings site.toml`
    """
    from protofed.client.data.image_cache import clear_cache, list_caches

    root = _root(settings)
    entries = list_caches(root)
    chosen = [entry for entry in entries if name in (None, entry.name)]
    if name is not None and not chosen:
        raise ConfigError(str(unknown("cache", name, [entry.name for entry in entries])))
    if not chosen:
        say(NONE)
        return
    if not yes:
        confirm(f"remove {sum(entry.images or 0 for entry in chosen):,} decoded images from {root}?")
    for entry in chosen:
        done = clear_cache(root, entry.name)
        say(f"{entry.name}: {'removed' if done else 'kept, a process is adding images to it; stop it, then try again'}")


def _root(settings: Path | None) -> Path:
    from protofed.client.data.image_cache import default_folder
    from protofed.common.config.settings import ClientSettings, read_settings
    from protofed.deploy.daemons.client import cache_folder

    return default_folder() if settings is None else cache_folder(read_settings(ClientSettings, settings, {}))


def _row(entry: CacheEntry) -> dict[str, Any]:
    prepared = {key: value for key, value in entry.preparation["input"].items() if key != "shape"}
    return {
        "name": entry.name,
        "prepared": prepared,
        "images": entry.images,
        "bytes": entry.nbytes,
        "used": stamp(datetime.fromtimestamp(entry.used, UTC)),
    }


CELLS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "name": lambda row: str(row["name"]),
    "images": lambda row: "damaged" if row["images"] is None else f"{row['images']:,}",
    "on the disk": lambda row: decimal(row["bytes"]),
    "last used (UTC)": lambda row: str(row["used"]),
    "prepared by": lambda row: ", ".join(f"{key} = {value}" for key, value in row["prepared"].items()) or "size alone",
}
COLUMNS = [Column(head, cell, wraps=True, overflow="fold") for head, cell in CELLS.items()]
