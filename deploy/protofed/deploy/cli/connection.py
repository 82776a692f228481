"""What all commands have in common that talk to a server as its operator: where it is, and who one is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

LOCAL = "127.0.0.1:7443"
PATIENCE_S = 2.0  # before it is said that the server has not answered yet
Server = Annotated[str, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Identity = Annotated[
    Path | None, typer.Option(envvar="PROTOFED_OPERATOR_IDENTITY", help="Folder with the operator's certificate.")
]
Plaintext = Annotated[
    bool, typer.Option("--plaintext", envvar="PROTOFED_OPERATOR_PLAINTEXT", help="No TLS; only on this machine.")
]
OPTIONS: dict[str, tuple[Any, object]] = {  # type and default, as they stand behind a command's own
    "server": (Server, LOCAL),
    "identity": (Identity, None),
    "plaintext": (Plaintext, False),
}


def connected(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is an `Operator`; in its place the command line has the options of a connection.

    gRPC is imported only when the command runs: `--help` is quick.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def act(*, server: str, identity: Path | None, plaintext: bool, **given: object) -> None:
            from protofed.deploy.console.progress import progress
            from protofed.deploy.operator.connection import Operator

            with Operator(server, identity, plaintext) as operator:
                shown = not given.get("as_json")
                operator.waiting_display = progress(f"waiting for {server}", shown=shown, after_s=PATIENCE_S)
                function(operator, **given)

        command: Any = act
        parameters = _parameters(function)
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__doc__ = function.__doc__
        group.command(name)(command)
        return function

    return register


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    """As Typer reads them: the function's own but for the operator, then those of a connection."""
    hints = get_type_hints(function, localns={"Operator": object}, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in OPTIONS.items()
    ]
    return [*(one.replace(annotation=hints[one.name]) for one in own), *more]
