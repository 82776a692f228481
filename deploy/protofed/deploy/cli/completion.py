"""The server and operator's identity as options of a command, and what the shell offers on Tab.

On Tab it offers recipes, and the runs and sites of the server that the line names. Nothing of this may fail or keep a
person waiting: where there is no answer, nothing is offered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from protofed.common.address import choose_identity
from protofed.common.errors import ProtofedError

if TYPE_CHECKING:
    from protofed.deploy.operator.connection import Operator

LOCAL = "127.0.0.1:7443"
WAIT_DISPLAY_DELAY_S = 2.0  # quick answers show no 'waiting for …' line
Server = Annotated[str, typer.Option(envvar="PROTOFED_OPERATOR_SERVER", help="host:port of the server.")]
Identity = Annotated[
    str | None,
    typer.Option(
        envvar="PROTOFED_OPERATOR_IDENTITY",
        metavar="FOLDER|none",
        help="Folder with the operator's certificate; none: no TLS, on this machine only.",
    ),
]
OPTIONS: dict[str, tuple[Any, object]] = {  # name -> (type, default); they follow a command's own options
    "server": (Server, LOCAL),
    "identity": (Identity, None),
}


def connected(
    group: typer.Typer, name: str, *, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first argument is an `Operator`: see `with_operator`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        group.command(name, rich_help_panel=panel)(with_operator(function))
        return function

    return register


def with_operator(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose first argument is an `Operator`. The command line has the connection options instead.

    gRPC is imported only when the command runs, so that `--help` stays fast.
    """

    def run_command(*, server: str, identity: str | None, **options: object) -> None:
        from protofed.deploy.operator.connection import Operator
        from protofed.deploy.progress import progress

        with Operator(server, choose_identity(identity)) as operator:
            visible = not options.get("as_json")
            operator.waiting_display = progress(f"waiting for {server}", visible=visible, after_s=WAIT_DISPLAY_DELAY_S)
            function(operator, **options)

    # `Operator` is imported for type checking only, so the name cannot be resolved here; its type is not needed.
    hints = get_type_hints(function, localns={"Operator": object}, include_extras=True)
    _, *parameters = inspect.signature(function).parameters.values()
    own = [each.replace(annotation=hints[each.name]) for each in parameters]
    return with_options(run_command, own, OPTIONS, function.__doc__)


def with_options(
    command: Callable[..., None],
    own: Sequence[inspect.Parameter],
    more: Mapping[str, tuple[Any, object]],
    doc: str | None,
) -> Callable[..., None]:
    """A command with these parameters on the command line, and more options behind them: (type, default) by name."""
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in more.items()
    ]
    # Typer reads the signature and the annotations separately; both must name the same parameters.
    target: Any = command
    target.__signature__ = inspect.Signature([*own, *options])
    target.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
    target.__doc__ = doc
    return command


WAIT_S = 1.0  # for a server's answer


def recipes(incomplete: str) -> list[str]:
    """Shipped recipes by name, recipe files and folders by path."""
    from protofed.deploy import shipped

    return _beginning(incomplete, [*shipped.files("recipes"), *_recipe_paths(incomplete)])


def policies(incomplete: str) -> list[str]:
    """Shipped policies by name."""
    from protofed.deploy import shipped

    return _beginning(incomplete, shipped.files("policies"))


def runs(context: typer.Context, incomplete: str) -> list[str]:
    """The server's runs, the newest first."""
    return _beginning(incomplete, reversed(_asked(context, lambda operator: [r.run for r in operator.runs(WAIT_S)])))


def sites(context: typer.Context, incomplete: str) -> list[str]:
    """The server's sites."""
    return _beginning(incomplete, _asked(context, lambda operator: [s.site for s in operator.sites(WAIT_S)]))


def _recipe_paths(incomplete: str) -> list[str]:
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") else typed.parent
    try:
        entries = [(path, path.is_dir()) for path in sorted(folder.iterdir())]
    except OSError:
        return []
    return [
        f"{path}/" if is_folder else str(path)
        for path, is_folder in entries
        if (is_folder or path.suffix == ".toml") and (typed.name.startswith(".") or not path.name.startswith("."))
    ]


def _asked(context: typer.Context, question: Callable[[Operator], list[str]]) -> list[str]:
    from protofed.deploy.operator.connection import Operator

    options = context.params
    try:
        with Operator(options.get("server") or LOCAL, choose_identity(options.get("identity"))) as operator:
            return question(operator)
    except (ProtofedError, OSError):
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
