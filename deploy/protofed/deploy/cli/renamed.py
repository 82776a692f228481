"""Commands that were called otherwise before 0.2: whoever types an old word is told the new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

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


def now_called(arguments: Sequence[str]) -> str | None:
    """What an old command line is called now, in a sentence; None: it is no old one."""
    words = [word for word in arguments if word != "--debug"]
    for old, new in COMMANDS.items():
        if tuple(words[: len(old)]) == old:
            return f"`protofed {' '.join(old)}` is now `protofed {new}`"
    if len(words) > 1 and words[0] in GROUPS and words[1].startswith("-") and words[1] != "--help":
        return f"`protofed {words[0]}` with options is now `protofed {words[0]} start`"
    for word in words:
        name = word.partition("=")[0]
        if name in OPTIONS:
            return f"{name} is now {OPTIONS[name]}"
    return None
