"""`protofed audit …`: list what left a site or reached a server, and check that the log was not altered."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from protofed.common.errors import ConfigError
from protofed.deploy.cli.options import SELDOM, AsJson, print_json, say

Archive = Annotated[Path | None, typer.Option(help="Folder to which `audit archive` moved the log's oldest files.")]
audit = typer.Typer(no_args_is_help=True, help="Check and read the audit log of a site or a server.")
console = Console(soft_wrap=True)


@audit.command("verify")
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Audit logs, or state folders with one.")],
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HASH",
            help="A newest hash that `verify` printed earlier. A log truncated or rewritten since then lacks it. "
            "Keep the hash where those who can write the log cannot.",
        ),
    ] = None,
    archive: Archive = None,
    as_json: AsJson = False,
) -> None:
    """Check the hash chain of audit logs. Exit code 1, with the first broken record, if a log was altered.

    With --archive, one log is checked from its first record in the archive to its newest one.

    Example: `protofed audit verify /var/lib/protofed`
    """
    from protofed.deploy.audit import log as audit
    from protofed.deploy.audit.view import status_lines

    if archive is not None and len(paths) > 1:
        raise ConfigError(f"--archive {archive} belongs to one log: expected one PATH, and not {len(paths)}")
    expected = [audit.read_hash(text) for text in expect or []]
    intact: list[audit.AuditStatus] = []
    problems: list[str] = []
    for path in [audit.log_file(path) for path in paths]:
        try:
            status = audit.verify(path, expected, archive=archive, visible=not as_json)
        except audit.AuditError as error:
            problems.append(str(error))
            continue
        intact.append(status)
        if not as_json:
            say("\n".join(status_lines(status, expected)))
    # A hash need not be in every log: several logs may be checked against the hashes of all of them at once.
    problems += [audit.missing(newest, intact) for newest in expected if not any(newest in s.numbers for s in intact)]
    if as_json:
        logs = [asdict(status) | {"path": str(status.path)} for status in intact]
        print_json({"intact": not problems, "logs": logs, "problems": problems})
    if problems:
        raise audit.AuditError("\n".join(problems))


@audit.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="An audit log, or a state folder with one.")],
    run: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    round: Annotated[
        int | None, typer.Option(min=0, help="Only this round; 0: the first model, and messages of no round (–).")
    ] = None,
    messages: Annotated[bool, typer.Option("--messages", help="List every message, not only totals.")] = False,
    bases: Annotated[
        bool, typer.Option("--bases", help="Print only `run round task digest` of each model that the server gave.")
    ] = False,
    archive: Archive = None,
    as_json: AsJson = False,
) -> None:
    """List what a site sent and which tasks it got, or what a server received and sent, by run and round.

    Two sites that were given the same models print the same with --bases. Methods that make one for each site, or for a
    cluster, are cwfedavg (without secure aggregation), fedamp, fedfomo and cfl.

    Example: `protofed audit show /var/lib/protofed --run RUN --messages`
    """
    from protofed.deploy.audit import log as audit
    from protofed.deploy.audit import view
    from protofed.deploy.audit.reader import summarize

    visible = not (as_json or bases)
    summary = summarize(audit.log_file(path), archive, run=run, round=round, messages=messages, visible=visible)
    if as_json:
        print_json(view.plain(summary, messages=messages))
        return
    if bases:
        print(*view.base_lines(summary), sep="\n")  # noqa: T201
        return
    for part in view.summary_parts(summary, messages=messages):
        console.print(part)


@audit.command("archive", rich_help_panel=SELDOM)
def archive(
    path: Annotated[Path, typer.Argument(metavar="STATE", help="State folder with an audit log.")],
    into: Annotated[Path, typer.Option(metavar="FOLDER", help="Archive of this log alone; made if it is missing.")],
    as_json: AsJson = False,
) -> None:
    """Move all files of an audit log but the newest to an archive, compressed. The daemon may run.

    The log is verified first. The command removes a file from the state folder once the archive has it durably.

    Example: `protofed audit archive /var/lib/protofed --into /archive/north`
    """
    from protofed.deploy.audit import archive as archives
    from protofed.deploy.audit import log as audit
    from protofed.deploy.audit.view import moved_lines

    moved = archives.archive(audit.log_file(path), into, visible=not as_json)
    if as_json:
        rows = [asdict(one) | {"file": str(one.file)} for one in moved]
        print_json({"moved": rows})
        return
    for line in moved_lines(moved, path, into):
        say(line)
