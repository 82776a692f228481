"""`protofed client …`: what a hospital types: its daemon, its data, and the runs that it takes part in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protofed.common import plugins
from protofed.common.errors import ConfigError, PolicyViolationError, short
from protofed.deploy.cli import doctor
from protofed.deploy.cli.client_check import check
from protofed.deploy.cli.options import Metrics, Settings, UntilFinished, health, log_as_daemon
from protofed.deploy.cli.options import State as StateOption
from protofed.deploy.cli.overrides import Set

if TYPE_CHECKING:
    from protofed.client.privacy.approval import Approvals, Offer
    from protofed.client.privacy.policy import Policy
    from protofed.common.config.recipe import Recipe

client = typer.Typer(no_args_is_help=True, help="A hospital's site: its daemon, its data, the runs it takes part in.")
console = Console()
PolicyFile = Annotated[Path | None, typer.Option("--policy", help="The site's policy: it says what of this may leave.")]
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@client.command("start")
def start(
    context: typer.Context,
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(help="This site's id.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The site's policy: what may leave.")] = None,
    state: StateOption = None,
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

    log_as_daemon(context)
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


client.command("check")(check)


@client.command("preview")
def preview(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    policy: PolicyFile = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor by name, not only a row a part.")] = False,
    as_json: AsJson = False,
    assignments: Set = None,
) -> None:
    """What a site would send, receive and keep for a recipe; no data is touched. 77 if the policy would refuse."""
    from protofed.deploy import shipped

    _show(shipped.recipe(recipe, assignments or ()), policy, tensors=tensors, as_json=as_json)


@client.command("approve")
def approve(
    run: Annotated[str, typer.Argument(help="A run that the server offers: see `protofed client runs`.")],
    state: State,
    policy: PolicyFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Show what a run would send, then let the site take part in it: with this recipe, and no other.

    77 if the policy would refuse.
    """
    approvals = _approvals(state)
    offer = approvals.offer(run)
    _show(_recipe(offer), policy, tensors=False, as_json=False)
    about = f"run {offer.run}, recipe {offer.digest[:16]}…, offered {offer.at}"
    if not yes:
        typer.confirm(f"Take part in {about}?", abort=True)
    approvals.approve(offer)
    console.print(f"approved: {about}; the daemon goes on within seconds", highlight=False)


@client.command("runs")
def runs(state: State, as_json: AsJson = False) -> None:
    """The runs that the server offered to this site, and which of them are approved (if the policy asks for that)."""
    approvals = _approvals(state)
    rows = [_row(approvals, offer) for offer in approvals.offers()]
    if as_json:
        print(json.dumps(rows, indent=2))  # noqa: T201
        return
    table = Table()
    for name in ("run", "method", "model", "rounds", "offered", "approval"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row[name])) for name in ("run", "method", "model", "rounds", "offered", "approval")))
    console.print(table)


@client.command("deny")
def deny(
    run: Annotated[str, typer.Argument(help="A run that the server offers: see `protofed client runs`.")], state: State
) -> None:
    """Take no part in a run, whatever the policy says, until `protofed client approve`. A fit under way still ends."""
    approvals = _approvals(state)
    offer = approvals.offer(run)
    approvals.deny(offer)
    console.print(f"denied: run {offer.run}; its daemon takes no more tasks of it", highlight=False)


def _show(recipe: Recipe, file: Path | None, *, tensors: bool, as_json: bool) -> None:
    from protofed.deploy.console.progress import progress

    with progress(f"building {recipe.model.name}", shown=not as_json):
        from protofed.deploy.site import plan_table  # with PyTorch, which takes seconds
        from protofed.deploy.site.plan import plain, site_plan

        policy = None if file is None else _policy(file)
        plan = site_plan(recipe, policy)
    if as_json:
        print(json.dumps(plain(plan), indent=2))  # noqa: T201
    else:
        plan_table.show(plan, console, tensors=tensors, policy=None if file is None else file.stem)
    if plan.refusals:
        raise typer.Exit(PolicyViolationError.exit_code)


def _policy(file: Path) -> Policy:
    from protofed.client.privacy.policy import Policy

    policy = Policy.read(file)
    plugins.allow(policy.rules.plugins)
    return policy


def _approvals(state: Path) -> Approvals:
    from protofed.client.privacy.approval import FOLDER, Approvals

    if not state.is_dir():
        raise ConfigError(f"there is no folder {state}; expected the --state of the site's daemon")
    return Approvals(state / FOLDER)


def _recipe(offer: Offer) -> Recipe:
    from protofed.client.agent.site import read
    from protofed.common.protocol.messages import Assignment

    return read(Assignment(offer.run, offer.recipe))


def _row(approvals: Approvals, offer: Offer) -> dict[str, str | int]:
    row = {"run": offer.run, "offered": offer.at, "recipe": offer.digest}
    status = approvals.status(offer.run, offer.recipe).value
    try:
        recipe = _recipe(offer)
    except ConfigError as error:
        return {**row, "method": "", "model": "", "rounds": 0, "approval": f"cannot be used: {short(str(error))}"}
    chosen = {"method": _printable(recipe.method.name), "model": _printable(recipe.model.name)}
    return {**row, **chosen, "rounds": recipe.rounds, "approval": status}


def _printable(name: str) -> str:
    return "".join(letter for letter in name if letter.isprintable())


client.command("doctor")(doctor.of_client(start))
client.command("health")(health)
