"""The command line. Errors are one or two lines and an exit code; tracebacks only with --debug."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common import failpoint
from protofed.common.errors import ProtofedError
from protofed.common.version import VERSION
from protofed.deploy.cli import audit as cli_audit
from protofed.deploy.cli import certs as cli_certs
from protofed.deploy.cli import doctor as cli_doctor
from protofed.deploy.cli import export as cli_export
from protofed.deploy.cli import operator as cli_operate
from protofed.deploy.cli import report as cli_report
from protofed.deploy.cli import site as cli_site
from protofed.deploy.cli.compare import compare
from protofed.deploy.cli.ready import ready
from protofed.deploy.cli.track import TensorBoard, track
from protofed.deploy.daemons.pid1 import end_when_told
from protofed.deploy.logs import setup as logs

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning for sites whose classes are skewed.",
    epilog="Exit codes: 0 done · 1 a run failed, or not ready · 2 wrong arguments · 65 data · 69 server or port not "
    "to be had · 70 internal · 74 state folder · 76 protocol or version · 77 policy · 78 recipe or setting · "
    "130 interrupted · 10 to 63, 80 to 82: findings of doctor",
)
app.add_typer(cli_site.site, name="site")
app.add_typer(cli_operate.runs, name="runs")
app.add_typer(cli_operate.sites, name="sites")
app.add_typer(cli_audit.audit, name="audit")
app.add_typer(cli_certs.certs, name="certs")
app.command("compare")(compare)
app.command("export")(cli_export.export)
app.command("predict")(cli_export.predict)
app.command("ready")(ready)
app.command("report")(cli_report.report)
app.command("track")(track)
console = Console()
State = Annotated[Path | None, typer.Option(help="Folder for everything that must survive.")]
Settings = Annotated[Path | None, typer.Option(help="TOML file; the environment and these options override it.")]
Metrics = Annotated[str | None, typer.Option(help="host:port of /metrics, /healthz, /readyz; port 0 takes a free one.")]
UntilFinished = Annotated[bool, typer.Option("--until-finished", help="End when no run is left.")]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"protofed {VERSION}")
        raise typer.Exit


@app.callback()
def _global(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks and debug logs.")] = False,
    version: Annotated[  # noqa: ARG001  (answered by its callback)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    logs.configure(debug=debug, daemon=context.invoked_subcommand in ("server", "client"))


@app.command()
def server(
    settings: Settings = None,
    recipe: Annotated[list[Path] | None, typer.Option(help="Recipe of a run; several run one after the other.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port; port 0 takes a free one.")] = None,
    identity: Annotated[
        Path | None, typer.Option(help="Folder with the server's cert.pem, key.pem and ca.pem, and operators/*.pem.")
    ] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="No TLS; only on this machine.")] = False,
    state: State = None,
    metrics: Metrics = None,
    tensorboard: TensorBoard = None,
    until_finished: UntilFinished = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Go on although the ledger has lost some of what it promised.")
    ] = False,
) -> None:
    """Run the aggregation server; runs are begun by --recipe, or any time later by `protofed runs start`."""
    from protofed.common.config.settings import ServerSettings, read_settings
    from protofed.common.malloc import keep_memory
    from protofed.deploy.daemons.server import run_server

    keep_memory()
    given: dict[str, Any] = {"recipes": recipe, "listen": listen, "state": state, "metrics": metrics}
    given |= {"identity": identity, "plaintext": plaintext or None, "tensorboard": tensorboard}
    said = read_settings(ServerSettings, settings, given)
    run_server(
        said,
        until_finished=until_finished,
        recover=recover,
        started=lambda where: console.print(f"listening on {where}, state in {said.state}", soft_wrap=True),
    )


@app.command()
def client(
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(help="This site's id.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The site's policy: what may leave.")] = None,
    state: State = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer, evaluator or both (twice).")] = None,
    partition_index: Annotated[
        int | None, typer.Option(help="Which of data.partition's sites this is, from 0.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    identity: Annotated[Path | None, typer.Option(help="Folder with the site's cert.pem, key.pem and ca.pem.")] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="No TLS; only on this machine.")] = False,
    proxy: Annotated[
        str | None, typer.Option(help="http://host:port; with a password better in the --settings file.")
    ] = None,
    metrics: Metrics = None,
    until_finished: UntilFinished = False,
    give_up_after: Annotated[
        float | None, typer.Option(help="Seconds without an answer after which to end; else never.")
    ] = None,
) -> None:
    """Run one site's client daemon."""
    from protofed.common.config.settings import ClientSettings, read_settings
    from protofed.common.malloc import keep_memory
    from protofed.deploy.daemons.client import run_client

    keep_memory()
    given: dict[str, Any] = {"site": site, "server": server, "policy": policy, "state": state, "roles": role}
    given |= {
        "partition_index": partition_index,
        "device": device,
        "identity": identity,
        "plaintext": plaintext or None,
        "proxy": proxy,
    }
    given |= {"metrics": metrics}
    said = read_settings(ClientSettings, settings, given)
    run_client(said, until_finished=until_finished, give_up_after_s=give_up_after)


app.add_typer(cli_doctor.doctor(server, client), name="doctor")


@app.command()
def simulate(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    state: Annotated[
        Path | None, typer.Option(help="Folder in which the simulation survives; an unfinished one in it goes on.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    policy: Annotated[Path | None, typer.Option(help="Of the sites; else all that the method sends leaves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Run a recipe in one process: the same coordinator, agents and methods without the network."""
    from protofed.common.malloc import keep_memory
    from protofed.deploy.simulation.run_tables import scores_json, simulate_with_progress

    keep_memory()
    view = simulate_with_progress(recipe, state, device, policy)
    if as_json:
        print(json.dumps(scores_json([view]), indent=2))  # noqa: T201


@app.command()
def pictures(
    folders: Annotated[
        list[Path], typer.Argument(help="Jobs of `compare`, its whole --out, or --state folders of `simulate`.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for .png and .svg; else FOLDER/pictures.")] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Of each FOLDER that is a state, in their order: a file, or a name.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(help="Of classes, such as vehicles:0,1,8,9;animals:2,3,4,5,6,7; else the data's own.")
    ] = None,
    ablation: Annotated[
        str | None, typer.Option(help="Draw --metric over this option instead, in which the runs differ: method.wdr.")
    ] = None,
    metric: Annotated[str, typer.Option(help="A score, as `compare` has it.")] = "global.accuracy",
) -> None:
    """Draw finished runs as the papers do: prototypes, embeddings, head norms, groups of classes, ablations."""
    from protofed.deploy import shipped
    from protofed.deploy.figures.figures import FiguresRequest, pictures

    recipes = [shipped.recipe(name) for name in recipe or []]
    for path in pictures(FiguresRequest(folders, out, recipes, groups, ablation, metric)):
        console.print(path, soft_wrap=True, highlight=False)


@app.command()
def demo(
    keep: Annotated[Path, typer.Option(help="Folder for the demo's state, logs and scores.")] = Path("runs/demo"),
) -> None:
    """A server and five sites on this machine: FedNH beside FedAvg and training alone, over gRPC."""
    from protofed.deploy.cli.demo import run_demo

    run_demo(keep, console)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `protofed`; always ends in SystemExit."""
    end_when_told()
    try:
        failpoint.arm(os.environ.get(failpoint.VARIABLE))
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except ProtofedError as error:
        _say(str(error), error, error.exit_code)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        _say(f"{error.name} is not installed: sites and simulations need pip install 'protofed[client]'", error, 78)
        sys.exit(78)
    except Exception as error:
        _say(f"internal error: {type(error).__name__}: {error}; run again with --debug for details", error, 70)
        sys.exit(70)


def _say(message: str, error: Exception, exit_code: int) -> None:
    if not logs.last_words(message, exit_code, error):
        print(f"protofed: {message}", file=sys.stderr)  # noqa: T201
