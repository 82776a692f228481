"""`protofed audit …`: what left a site, or came to a server; and whether its log is as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

audit = typer.Typer(no_args_is_help=True, help="The audit log of a site or a server: check it, read it.")
console = Console()


@audit.command("verify")
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Audit logs, or state folders that have one.")],
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HASH",
            help="A newest hash that this printed earlier: a log that was cut off at its end or written anew since "
            "then does not have it. Keep it where nobody can write who can write the log.",
        ),
    ] = None,
) -> None:
    """Check every record of a log against the one before. Exit code 1, naming the first bad one, if there is one."""
    from protofed.deploy.audit import verify as audit
    from protofed.deploy.audit.view import status_lines

    wanted = [audit.read_hash(text) for text in expect or []]
    good: list[audit.AuditStatus] = []
    bad: list[str] = []
    for path in [audit.log_file(path) for path in paths]:
        try:
            status = audit.verify(path, wanted)
        except audit.AuditError as error:
            bad.append(str(error))
            continue
        good.append(status)
        for line in status_lines(status, wanted):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    bad += [audit.missing(one, good) for one in wanted if not any(one in status.numbers for status in good)]
    if bad:
        raise audit.AuditError("\n".join(bad))


@audit.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="An audit log, or a state folder that has one.")],
    run: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    round: Annotated[int | None, typer.Option(min=0, help="Only of this round; 0: of none.")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="Every message, not only their sums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What left a site, or what came to a server and was answered: by run and round."""
    from protofed.deploy.audit import verify as audit
    from protofed.deploy.audit import view
    from protofed.deploy.audit.reader import summarize

    summary = summarize(audit.log_file(path), run=run, round=round, messages=messages, shown=not as_json)
    if as_json:
        print(json.dumps(view.plain(summary, messages=messages), indent=2))  # noqa: T201
        return
    for part in view.summary_parts(summary, messages=messages):
        console.print(part)
