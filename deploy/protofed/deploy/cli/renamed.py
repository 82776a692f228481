"""Commands that were called otherwise before 0.2: whoever types an old word is told the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from typer.main import get_command

COMMANDS: Final[Mapping[tuple[str, ...], str]] = {  # the first words of an old command line -> the command now
    ("site", "check"): "client check",
    ("site", "plan"): "client preview",
    ("site", "runs"): "client runs",
    ("site", "approve"): "client approve",
    ("site",): "client",
    ("doctor", "client"): "client doctor",
    ("doctor", "server"): "server doctor",
    ("doctor",): "client doctor` or `protofed server doctor",
    ("ready",): "client health` or `protofed server health",
    ("certs", "approve"): "certs sign",
    ("pictures",): "figures",
    ("track",): "tracking sync",
}
GROUPS: Final = ("client", "server")  # these were commands: options stood where a command stands now
OPTIONS: Final[Mapping[str, str]] = {"--share": "--partition-index"}


def now_called(arguments: Sequence[str], app: typer.Typer) -> str | None:
    """What an old command line is called now, in a sentence; None: it is no old one.

    Args:
        app: the commands of today, which say what options take a value.
    """
    words = [word for word in arguments if word != "--debug"]
    for old, new in COMMANDS.items():
        if tuple(words[: len(old)]) == old:
            return f"`protofed {' '.join(old)}` is now `protofed {new}`"
    if len(words) > 1 and words[0] in GROUPS and words[1].startswith("-") and words[1] != "--help":
        return f"`protofed {words[0]}` with options is now `protofed {words[0]} start`"
    if not OPTIONS.keys() & {word.partition("=")[0] for word in words}:
        return None
    for name in _options(words, get_command(app)):
        if name in OPTIONS:
            return f"{name} is now {OPTIONS[name]}"
    return None


def _options(words: Sequence[str], command: Any) -> Iterator[str]:
    """The names of the options among the words, read as Click reads them: what follows an option can be its value."""
    rest = iter(words)
    for word in rest:
        name, assigned, _ = word.partition("=")
        if word == "--":
            return
        if not word.startswith("-"):
            command = getattr(command, "commands", {}).get(word, command)
            continue
        yield name
        taking = any(
            name in one.opts and not one.is_flag and not one.count for one in command.params if _is_option(one)
        )
        if taking and not assigned:
            next(rest, None)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")
