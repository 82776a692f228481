"""Commands and options renamed in 0.2, and words that people try: the error names the command that there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import typer
from typer.main import get_command

COMMANDS: Final[Mapping[tuple[str, ...], str]] = {  # first words of an old command line -> today's command
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
SYNONYMS: Final[Mapping[tuple[str, str], str]] = {  # what there never was, too unlike its command for a suggestion
    ("runs", "stop"): "runs abort` (for good) or `protofed runs pause",
    ("runs", "cancel"): "runs abort",
    ("runs", "end"): "runs abort",
    ("runs", "status"): "runs show",
    ("sites", "remove"): "sites exclude` or `protofed sites forget",
}
GROUPS: Final = ("client", "server")  # commands before 0.2: options followed where a subcommand follows now
GONE: Final[Mapping[tuple[str, str, str], str]] = {  # command and option -> what to do in its place
    ("certs", "sign", "--yes"): "--fingerprint CODE, as the party reads it to you",
}
OPTIONS: Final[Mapping[str, str]] = {"--share": "--partition-index"}
HELP: Final = ("-h", "--help")


def replacement_message(arguments: Sequence[str], app: typer.Typer) -> str | None:
    """The message for a command line in old words; None if it is not one.

    Args:
        arguments: the words after `protofed`.
        app: today's commands; they define which options take a value.
    """
    words = [word for word in arguments if word != "--debug"]
    for old, new in COMMANDS.items():
        if tuple(words[: len(old)]) == old:
            return f"`protofed {' '.join(old)}` is now `protofed {new}`"
    for tried, meant in SYNONYMS.items():
        if tuple(words[:2]) == tried:
            return f"there is no `protofed {' '.join(tried)}`; did you mean `protofed {meant}`?"
    if len(words) > 1 and words[0] in GROUPS and words[1].startswith("-") and words[1] not in HELP:
        return f"`protofed {words[0]}` with options is now `protofed {words[0]} start`"
    for (*command, option), instead in GONE.items():
        if words[:2] == command and option in words:
            return f"{option} of `protofed {' '.join(command)}` is now {instead}"
    if not OPTIONS.keys() & {word.partition("=")[0] for word in words}:
        return None
    for name in _options(words, get_command(app)):
        if name in OPTIONS:
            return f"{name} is now {OPTIONS[name]}"
    return None


def _options(words: Sequence[str], command: Any) -> Iterator[str]:
    """The option names among the words, as Click parses them: the word after an option may be its value."""
    rest = iter(words)
    for word in rest:
        name, assigned, _ = word.partition("=")
        if word == "--":
            return
        if not word.startswith("-"):
            command = getattr(command, "commands", {}).get(word, command)
            continue
        yield name
        takes_value = any(
            name in option.opts and not option.is_flag and not option.count
            for option in command.params
            if _is_option(option)
        )
        if takes_value and not assigned:
            next(rest, None)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")
