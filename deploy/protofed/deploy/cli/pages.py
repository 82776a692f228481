"""What the commands that serve pages in a browser have in common: their options, and what they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.common.version import install_hint

output = Console(soft_wrap=True, highlight=False)
Listen = Annotated[str, typer.Option(help="host:port of this machine's loopback; port 0 picks a free one.")]
OpenBrowser = Annotated[bool, typer.Option("--browser", help="Open the address in this machine's browser.")]
ANY_PORT = "127.0.0.1:0"


@contextmanager
def pages_installed() -> Iterator[None]:
    """Imports of the pages; ConfigError with what to install, where they lack a library."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed, which the pages need: {install_hint('pages')}") from error


def announce(*, browser: bool) -> Callable[[str], None]:
    """Prints the address that opens the pages.

    Args:
        browser: open it, too.
    """

    def started(address: str) -> None:
        output.print(f"open {address}", markup=False)
        output.print("it works once, in one browser; Ctrl-C ends the page, and nothing else", markup=False)
        if browser:
            typer.launch(address)

    return started
