"""`protofed client …`: a hospital's commands for its daemon, its data and the runs it takes part in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofed.common.errors import PolicyViolationError
from protofed.deploy.cli import client_decisions as decisions
from protofed.deploy.cli import doctor
from protofed.deploy.cli.client_budget import budget
from protofed.deploy.cli.client_check import check
from protofed.deploy.cli.client_consortium import client_consortium
from protofed.deploy.cli.client_page import page
from protofed.deploy.cli.client_plan import PlanView, plan_view
from protofed.deploy.cli.client_scores import scores
from protofed.deploy.cli.confirmation import Yes, confirm
from protofed.deploy.cli.init import init_client
from protofed.deploy.cli.options import AsJson, Metrics, Settings, UntilFinished, health, log_as_daemon
from protofed.deploy.cli.options import Policy as PolicyOption
from protofed.deploy.cli.options import State as StateOption
from protofed.deploy.cli.overrides import Set

client = typer.Typer(no_args_is_help=True, help="For hospitals: run the site's daemon, check its data, approve runs.")
console = Console()
State = Annotated[Path, typer.Option(help="The state folder of the site's daemon.")]
Examples = Annotated[
    int | None, typer.Option(min=1, help="Training examples here, for what depends on them; `check` counts them.")
]


client.command("init")(init_client)


@client.command("start")
def start(
    context: typer.Context,
    settings: Settings = None,
    site: Annotated[str | None, typer.Option(help="This site's id.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the server.")] = None,
    policy: PolicyOption = None,
    state: StateOption = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer or evaluator. Repeat for both.")] = None,
    partition_index: Annotated[
        int | None, typer.Option(help="This site's index in the partition of the data, from 0.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    identity: Annotated[Path | None, typer.Option(help="Folder with the site's cert.pem, key.pem and ca.pem.")] = None,
    plaintext: Annotated[bool, typer.Option("--plaintext", help="No TLS; only on this machine.")] = False,
    proxy: Annotated[
        str | None, typer.Option(help="http://host:port. With a password: PROTOFED_CLIENT_PROXY or --settings.")
    ] = None,
    metrics: Metrics = None,
    until_finished: UntilFinished = False,
    give_up_after: Annotated[
        float | None, typer.Option(help="Exit after this many seconds without an answer; default: never.")
    ] = None,
) -> None:
    """Run the site's daemon: it waits for runs of the server and trains on the site's data.

    Example: `protofed client start --settings site.toml`
    """
    from protofed.common.quick_imports import quick_imports

    with quick_imports():
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
    daemon_settings = read_settings(ClientSettings, settings, given)
    run_client(daemon_settings, until_finished=until_finished, give_up_after_s=give_up_after)


client.command("check")(check)


@client.command("preview")
def preview(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that comes with protofed.")],
    policy: PolicyOption = None,
    examples: Examples = None,
    state: Annotated[
        Path | None,
        typer.Option(help="The site's state folder: its partners, and what of its privacy budget is spent."),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor by name, not only one row per part.")
    ] = False,
    as_json: AsJson = False,
    assignments: Set = None,
) -> None:
    """Show what a recipe asks, beside the policy's limits, and what a site would send, receive and keep.

    Reads no data. Exit code 77 if the policy refuses.

    Example: `protofed client preview digits-fednh-secure --policy standard`
    """
    from protofed.deploy import shipped

    read = shipped.recipe(recipe, assignments or ())
    view = plan_view(read, policy, examples=examples, progress_shown=not as_json, state=state)
    _show_plan(view, tensors=tensors, as_json=as_json)


@client.command("approve")
def approve(
    run: Annotated[str, typer.Argument(help="An offered run; `protofed client runs` lists them.")],
    state: State,
    policy: PolicyOption = None,
    examples: Examples = None,
    yes: Yes = False,
) -> None:
    """Show what a run asks and what it would send, then approve it: this recipe only; a changed one must be again.

    Takes back `client deny` and `client withdraw`, too.

    Exit code 77 if the policy refuses.

    Example: `protofed client approve lesions --state state --policy policy.toml`
    """
    from protofed.deploy.site import orders
    from protofed.deploy.site.offered_runs import recipe_of

    offer = orders.approvals_of(state).offer(run)
    _show_plan(plan_view(recipe_of(offer), policy, examples=examples, offer=offer, state=state))
    about = f"run {offer.run}, recipe {offer.digest[:16]}…, offered {offer.at}"
    if not yes:
        confirm(f"Take part in {about}?")
    orders.approve(state, offer)
    console.print(f"approved: {about}; the daemon continues within seconds", highlight=False)


client.command("runs")(decisions.runs)
client.command("withdraw")(decisions.withdraw)
client.command("deny")(decisions.deny)
client.command("pause")(decisions.pause)
client.command("resume")(decisions.resume)
client.command("scores")(scores)
client.command("budget")(budget)
client.command("page")(page)
client.add_typer(client_consortium, name="consortium")


def _show_plan(view: PlanView, *, tensors: bool | None = None, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(view.plain(), indent=2))  # noqa: T201
    else:
        view.show(console, tensors=tensors)
    if view.refused:
        raise typer.Exit(PolicyViolationError.exit_code)


client.command("doctor")(doctor.of_client(start))
client.command("health")(health)
