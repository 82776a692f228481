"""Entry point and command tree of `protofed`. Errors are one or two lines and an exit code; --debug adds tracebacks."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from protofed.common import failpoint
from protofed.common.deprecated import rename_command
from protofed.common.errors import ConfigError, ProtofedError
from protofed.common.version import VERSION, install_hint
from protofed.deploy.cli import export, operator, simulate
from protofed.deploy.cli.audit import audit
from protofed.deploy.cli.certs import certs
from protofed.deploy.cli.client import client
from protofed.deploy.cli.compare import compare
from protofed.deploy.cli.consortium import consortium
from protofed.deploy.cli.options import SELDOM, health
from protofed.deploy.cli.pages import console as console_page
from protofed.deploy.cli.report import report
from protofed.deploy.cli.server import server, tracking
from protofed.deploy.cli.shipped import files, new, policies, recipes


class _AudienceOrder(TyperGroup):
    """Lists commands by audience; by default Typer lists all commands before all groups."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=list(COMMANDS).index)


HOSPITAL, COORDINATOR, RESEARCHER = "Hospital", "Coordinator", "Researcher"
# In the order of `--help`: commands of the hospital, then of the coordinator, then of the researcher.
COMMANDS: Final[Mapping[str, tuple[str, typer.Typer | Callable[..., None]]]] = {
    "client": (HOSPITAL, client),
    "policies": (HOSPITAL, policies),
    "server": (COORDINATOR, server),
    "runs": (COORDINATOR, operator.runs),
    "sites": (COORDINATOR, operator.sites),
    "certs": (COORDINATOR, certs),
    "consortium": (COORDINATOR, consortium),
    "console": (COORDINATOR, console_page),
    "audit": (COORDINATOR, audit),
    "report": (COORDINATOR, report),
    "export": (COORDINATOR, export.export),
    "predict": (COORDINATOR, export.predict),
    "health": (COORDINATOR, health),
    "files": (COORDINATOR, files),
    "simulate": (RESEARCHER, simulate.simulate),
    "recipes": (RESEARCHER, recipes),
    "compare": (RESEARCHER, compare),
    "figures": (RESEARCHER, simulate.figures),
    "new": (RESEARCHER, new),
    "demo": (RESEARCHER, simulate.demo),
    "tracking": (SELDOM, tracking),
}
MEANT = {  # words that people try, too unlike their command for Click's own suggestion
    "runs stop": "runs abort` (for good) or `protofed runs pause",
    "runs cancel": "runs abort",
    "runs end": "runs abort",
    "runs status": "runs show",
    "runs list": "runs show",
    "client withdraw": "client deny",
    "sites remove": "sites exclude` or `protofed sites forget",
}
HELP = ("-h", "--help")
console = Console()
# Commands whose files are made to be shown. All others write state, keys, archives or what names sites.
SHOWN = ("files", "policies", "recipes", "simulate", "compare", "figures", "tracking", "new", "demo")


def _version(requested: bool) -> None:
    if requested:
        console.print(f"protofed {VERSION}")
        raise typer.Exit


def _global(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and debug logs.")] = False,
    version: Annotated[  # noqa: ARG001  (its callback prints and exits)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if not context.obj:
        from protofed.deploy import logs

        logs.configure(debug=debug)
    if context.invoked_subcommand not in SHOWN:
        umask = os.umask(0o077)
        context.call_on_close(lambda: os.umask(umask))  # tests run commands in their own process


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`protofed` with these of its commands: Typer reads the options of all of them before it runs one."""
    program = typer.Typer(
        cls=_AudienceOrder,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": HELP},
        help="Federated learning for sites whose classes are skewed.",
        epilog="Exit codes: 0 done · 1 a run failed, or not ready · 2 wrong arguments · 65 data · 69 server or port "
        "unavailable · 70 internal · 74 state folder · 76 protocol or version · 77 policy · 78 recipe or setting · "
        "130 interrupted · 10 to 63, 80 to 97: found by doctor or check",
    )
    program.callback()(_global)
    for name in names:
        panel, command = COMMANDS[name]
        if isinstance(command, typer.Typer):
            program.add_typer(command, name=name, rich_help_panel=panel)
        else:
            program.command(name, rich_help_panel=panel)(command)
    return program


app = command_line()


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `protofed`; always ends in SystemExit.

    Args:
        arguments: the words after `protofed`; None: those of the process. Tests pass their own.
    """
    _end_on_sigterm()
    _replace_what_the_terminal_cannot_show()
    try:
        failpoint.arm(os.environ.get(failpoint.VARIABLE))
        words = sys.argv[1:] if arguments is None else arguments
        refuse_passwords(words)
        words = rename_command(words)
        if (meant := MEANT.get(" ".join(words[:2]))) is not None:
            message = f"there is no `protofed {' '.join(words[:2])}`; did you mean `protofed {meant}`?"
            _report_error(message, ConfigError(message), 2)
            sys.exit(2)
        program = command_line(words[:1]) if words and words[0] in COMMANDS else app
        program(words, obj=_asks_for_help(words))
    except KeyboardInterrupt:
        sys.exit(130)
    except ProtofedError as error:
        _report_error(str(error), error, error.exit_code)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        # A server-only installation lacks PyTorch; commands import what they need when they run, so it shows up here.
        needed = f"which sites and simulations need: {install_hint('client')}"
        _report_error(f"{error.name} is not installed, {needed}", error, 78)
        sys.exit(78)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python wraps one that comes while a class is being made
            sys.exit(130)
        _report_error(f"internal error: {type(error).__name__}: {error}; run again with --debug for details", error, 70)
        sys.exit(70)


def _end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does; a daemon later sets its own handler.

    Process 1 ignores every signal that it has no handler for. Importing PyTorch can take longer than the 10 s after
    which a container's engine kills it.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def _asks_for_help(words: list[str]) -> bool:
    """Whether nothing but help is wanted: it logs nothing, and logging takes a third of its time to import."""
    *before, last = words or [""]
    return last in HELP and not any(word.startswith("-") for word in before)


def _replace_what_the_terminal_cannot_show() -> None:
    # A terminal of ISO-8859-1 has no "…": a question mark in its place is better than no answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _report_error(message: str, error: Exception, exit_code: int) -> None:
    # A daemon reports its exit in its log, as one more JSON line; everything else prints it.
    from protofed.deploy import logs

    if not logs.log_exit(message, exit_code, error):
        print(f"protofed: {message}", file=sys.stderr)  # noqa: T201


INSTEAD: Final[Mapping[str, str]] = {  # option -> where its value may have a password
    "--proxy": "the environment variable PROTOFED_CLIENT_PROXY, or `proxy` in the --settings file",
    "--mlflow": "the environment variable PROTOFED_TRACKING_MLFLOW",
}
ELSEWHERE: Final = "an environment variable (PROTOFED_SERVER_LEDGER, PROTOFED_SERVER_MLFLOW, …) or the --settings file"
_CREDENTIALS = re.compile(
    r"://[^/@\s:]*:(?!\d{1,5}/)[^@\s]+@"  # user:password@, but for a port and a path with an @
    r"|://\S*[?&][\w.-]*(password|passwd|secret|token|api_?key)=[^&\s]",
    re.IGNORECASE,
)


def refuse_passwords(arguments: Sequence[str]) -> None:
    """Refuse a command line with a URL that has a password or a token.

    Args:
        arguments: the words after `protofed`.

    Raises:
        ConfigError: there is one; the text does not repeat it.
    """
    option = ""
    for word in arguments:
        name, assigned, _ = word.partition("=")
        is_option = word.startswith("--")
        option = name if is_option else option
        if _CREDENTIALS.search(word):
            raise ConfigError(
                f"{option or 'an argument'} has a URL with a password or a token. Everybody on this machine can read "
                f"the command line. Put the URL into {INSTEAD.get(option, ELSEWHERE)}, and change the password"
            )
        option = "" if not is_option or assigned else option
