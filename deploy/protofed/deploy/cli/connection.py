"""The connection options that all operator commands share: the server's address and the operator's identity."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

LOCAL = "127.0.0.1:7443"
WAIT_DISPLAY_DELAY_S = 2.0  # quick answers show no 'waiting for …' line
Server = Annotated[str, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Identity = Annotated[
    Path | None, typer.Option(envvar="PROTOFED_OPERATOR_IDENTITY", help="Folder with the operator's certificate.")
]
Plaintext = Annotated[
    bool, typer.Option("--plaintext", envvar="PROTOFED_OPERATOR_PLAINTEXT", help="No TLS; only on this machine.")
]
OPTIONS: dict[str, tuple[Any, object]] = {  # name -> (type, default); they follow a command's own options
    "server": (Server, LOCAL),
    "identity": (Identity, None),
    "plaintext": (Plaintext, False),
}


def connected(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first argument is an `Operator`; the command line has the connection options instead.

    gRPC is imported only when the command runs, so that `--help` stays fast.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def run_command(*, server: str, identity: Path | None, plaintext: bool, **given: object) -> None:
            from protofed.deploy.console.progress import progress
            from protofed.deploy.operator.connection import Operator

            with Operator(server, identity, plaintext) as operator:
                shown = not given.get("as_json")
                operator.waiting_display = progress(f"waiting for {server}", shown=shown, after_s=WAIT_DISPLAY_DELAY_S)
                function(operator, **given)

        # Typer reads the signature and the annotations separately; both must name the same parameters.
        command: Any = run_command
        parameters = _parameters(function)
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = function.__doc__
        group.command(name)(command)
        return function

    return register


def _parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    """The function's parameters without the operator, then the connection options."""
    # `Operator` is imported for type checking only, so the name cannot be resolved here; its type is not needed.
    hints = get_type_hints(function, localns={"Operator": object}, include_extras=True)
    own_parameters = list(inspect.signature(function).parameters.values())[1:]
    connection_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in OPTIONS.items()
    ]
    return [*(each.replace(annotation=hints[each.name]) for each in own_parameters), *connection_parameters]
