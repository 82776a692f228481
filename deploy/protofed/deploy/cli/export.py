"""`protofed export` and `protofed predict`: a model leaves a run, and is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from protofed.common.errors import ConfigError, DataError
from protofed.deploy.cli.connection import LOCAL, Identity, Plaintext, Server
from protofed.deploy.cli.overrides import DryWrite, Set, needs_recipe

if TYPE_CHECKING:
    from protofed.common.config.recipe import Data, Recipe
    from protofed.deploy.export.export import Exported, ExportRequest
    from protofed.deploy.export.predict import Predicted

console = Console()
told = Console(stderr=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Allowed = Annotated[
    list[str] | None,
    typer.Option("--allow-plugin", help="Plug-in, or package.module:attribute, whose code may be run."),
]


class UnreadableImagesError(DataError):
    """Some images could not be read; the others were done."""


def export(
    run: Annotated[str, typer.Argument(help="The run's name.")],
    model: Annotated[str, typer.Option(help="global, class:N (of cwfedavg) or personal (on the site's machine).")],
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    output: Annotated[
        Literal["safetensors", "onnx", "both"], typer.Option("--format", help="Of the weights.")
    ] = "both",
    round_: Annotated[int | None, typer.Option("--round", min=0, help="Else the newest that is kept.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Read this state folder of a server or of `simulate`, and ask no server.")
    ] = None,
    server: Server = LOCAL,
    identity: Identity = None,
    plaintext: Plaintext = False,
    site_state: Annotated[Path | None, typer.Option(help="personal: state folder of the site's daemon.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="personal, with cwfedavg-private: the daemon's --settings, for its data.")
    ] = None,
    partition_index: Annotated[
        int | None, typer.Option(min=0, help="With --settings: the daemon's --partition-index.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="The run's recipe, where no folder has it.")] = None,
    classes: Annotated[Path | None, typer.Option(help="Text file with the classes' names, one a line.")] = None,
    allow_plugin: Allowed = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is in --out.")] = False,
    as_json: AsJson = False,
    assignments: Set = None,
    dry_run: DryWrite = False,
) -> None:
    """Export a model of a run: weights, ONNX and a model card. A personal one is made at the site and sent nowhere."""
    from protofed.deploy.export.export import ExportRequest

    wanted = ExportRequest(
        run=_run(run),
        kind=model,
        out=out,
        format=output,
        round=round_,
        state=state,
        site_state=site_state,
        site_data=_site_data(settings, partition_index),
        recipe=_recipe(recipe, assignments),
        classes=classes,
        allowed=frozenset(allow_plugin or ()),
        force=force,
        dry_run=dry_run,
    )
    if state is not None or model == "personal":
        _say(_exported(wanted), as_json, dry_run=dry_run)
        return
    from dataclasses import replace

    from protofed.deploy.operator.connection import Operator

    with Operator(server, identity, plaintext) as operator:
        _say(_exported(replace(wanted, operator=operator)), as_json, dry_run=dry_run)


def predict(
    model: Annotated[Path, typer.Argument(help="Folder of `protofed export`.")],
    images: Annotated[Path, typer.Argument(help="Folder with images (all levels), or an .npz.")],
    out: Annotated[Path, typer.Option(help="The table, CSV.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 64,
    runtime: Annotated[Literal["auto", "onnx", "torch"], typer.Option(help="What computes.")] = "auto",
    allow_plugin: Allowed = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="End with 0 although some images cannot be read.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Classify images with an exported model. 65 if some cannot be read; the others are done all the same."""
    from protofed.deploy.export import predict as work

    asked = work.PredictRequest(model, images, out, runtime, device, batch, frozenset(allow_plugin or ()), not as_json)
    found = work.predict(asked)
    bad = len(found.unreadable)
    if as_json:
        unreadable = [vars(one) for one in found.unreadable]
        _print({"out": str(out), "images": found.done, "runtime": found.runtime, "unreadable": unreadable})
    else:
        _list(found, work.SHOWN)
        console.print(
            f"{found.done} images by {found.runtime}, {bad} unreadable: {out}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if bad and not skip_unreadable:
        raise UnreadableImagesError(
            f"{bad} of {bad + found.done} images cannot be read, such as {found.unreadable[0].path}; repair or remove "
            "them, or add --skip-unreadable"
        )


def _exported(wanted: ExportRequest) -> Exported:
    from protofed.deploy.console.progress import progress
    from protofed.deploy.export.export import export as work

    with progress(f"exporting {wanted.kind}"):
        return work(wanted)


def _say(made: Exported, as_json: bool, *, dry_run: bool) -> None:
    facts = made.facts
    if as_json:
        table = facts.model_dump(mode="json")
        _print(
            {
                "folder": str(made.folder),
                "dry_run": dry_run,
                "files": dict(made.files),
                "difference": made.difference,
                **table,
            }
        )
        return
    origin, shape = facts.origin, list(facts.model.input.shape)
    whose = f" of site {origin.site}" if origin.site else ""
    lines = [
        f"{made.folder}: {origin.kind} model{whose}, run {origin.run}, round {origin.round}, input [N, "
        f"{', '.join(map(str, shape))}], {len(facts.model.classes)} classes"
    ]
    lines += [f"  {name}: {size / 1e6:.2f} MB" for name, size in made.files.items()]
    if made.difference is not None:
        lines.append(f"  ONNX Runtime and PyTorch differ by at most {made.difference:.1e} in probabilities")
    if dry_run:
        lines.insert(0, "dry run: nothing was written")
    scores = {name: value for name, value in facts.scores.values.items() if name.endswith("accuracy")}
    lines += [f"  {name}: {value:.4f}" for name, value in scores.items()] or [f"  no scores: {facts.scores.of}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _list(found: Predicted, most: int) -> None:
    for one in found.unreadable[:most]:
        told.print(f"unreadable: {one.path}: {one.why}", markup=False, highlight=False, soft_wrap=True)
    if (more := len(found.unreadable) - most) > 0:
        told.print(f"and {more} more")


def _run(name: str) -> str:
    from protofed.common.ids import check_id

    return check_id("run", name)


def _recipe(name: str | None, assignments: list[str] | None) -> Recipe | None:
    from protofed.deploy import shipped

    if name is None:
        needs_recipe(assignments, "--recipe")
        return None
    return shipped.recipe(name, assignments or ())


def _site_data(file: Path | None, partition_index: int | None) -> tuple[Data, int] | None:
    """What the site's daemon trains on, by its settings' file."""
    from protofed.common.config.recipe import Data, parse, read_table

    if file is None:
        if partition_index is not None:
            raise ConfigError("--partition-index goes with --settings, which say of what it is a share; add them")
        return None
    table = read_table(file)
    data = parse(dict(table.get("data", {})), Data, f"{file}, [data]")
    number = table.get("partition_index") if partition_index is None else partition_index
    if number is None and data.partition.kind != "whole":
        raise ConfigError(
            "--settings cuts its data into several sites; add --partition-index, as the site's daemon is given it"
        )
    return data, int(number or 0)


def _print(found: object) -> None:
    print(json.dumps(found, indent=2))  # noqa: T201
