"""`protofed export` writes a run's model to a folder; `protofed predict` predicts with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from protofed.common.address import choose_identity
from protofed.common.errors import ConfigError, DataError, count, short
from protofed.deploy.cli import completion
from protofed.deploy.cli.completion import LOCAL, Identity, Server
from protofed.deploy.cli.options import SELDOM, AsJson, DryWrite, Set, needs_recipe, print_json, say

if TYPE_CHECKING:
    from protofed.common.config.data import Data
    from protofed.common.config.recipe import Recipe
    from protofed.deploy.export.export import Exported, ExportRequest
    from protofed.deploy.export.predict import Predicted

Allowed = Annotated[
    list[str] | None,
    typer.Option("--allow-plugin", help="Plug-in, or package.module:attribute, whose code may run. May be repeated."),
]


class ExportImagesError(DataError):
    """Some images could not be read; the others have their rows."""


def export(
    run: Annotated[str, typer.Argument(help="The run's name.", autocompletion=completion.runs)],
    model: Annotated[str, typer.Option(help="global, class:N (cwfedavg) or personal (on the site's machine).")],
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    output: Annotated[
        Literal["safetensors", "onnx", "both"], typer.Option("--format", help="Format of the weights.")
    ] = "both",
    round_: Annotated[
        str,
        typer.Option(
            "--round",
            metavar="N|best|newest",
            help="Round whose model to take; best: the best by the score that judges rounds (it is then optimistic).",
        ),
    ] = "newest",
    state: Annotated[
        Path | None, typer.Option(help="Read this state folder of a server or of `simulate`; connect to no server.")
    ] = None,
    server: Server = LOCAL,
    identity: Identity = None,
    site_state: Annotated[Path | None, typer.Option(help="With personal: state folder of the site's daemon.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="With personal and cwfedavg-private: the daemon's --settings, for its data.")
    ] = None,
    partition_index: Annotated[
        int | None, typer.Option(min=0, help="With --settings: the daemon's --partition-index.", rich_help_panel=SELDOM)
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="The run's recipe, if no given folder has it.", rich_help_panel=SELDOM)
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(help="Text file with the class names, one per line.", rich_help_panel=SELDOM)
    ] = None,
    allow_plugin: Allowed = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model in --out.")] = False,
    as_json: AsJson = False,
    assignments: Set = None,
    dry_run: DryWrite = False,
) -> None:
    """Export a run's model: weights, ONNX and a model card. A personal model is built at the site and sent nowhere.

    Example: `protofed export RUN --model global --out model`
    """
    from protofed.deploy.export.export import ExportRequest

    request = ExportRequest(
        run=_run(run),
        kind=model,
        out=out,
        format=output,
        round=_round(round_),
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
        _show_exported(_export_with_progress(request), as_json, dry_run=dry_run)
        return
    from dataclasses import replace

    from protofed.deploy.operator.connection import Operator

    with Operator(server, choose_identity(identity)) as operator:
        _show_exported(_export_with_progress(replace(request, operator=operator)), as_json, dry_run=dry_run)


def predict(
    model: Annotated[Path, typer.Argument(help="Folder that `protofed export` wrote.")],
    images: Annotated[
        Path, typer.Argument(help="Folder of images, searched recursively; one image; a .csv of paths; or an .npz.")
    ],
    out: Annotated[Path, typer.Option(help="CSV file to write.")],
    series: Annotated[
        Literal["folder"] | None,
        typer.Option(help="folder: the DICOM files of each folder, IMAGES itself included, are one volume."),
    ] = None,
    tile_size: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="With a .csv: side of the tile at a row's x and y, at full resolution."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.", rich_help_panel=SELDOM)] = 64,
    runtime: Annotated[
        Literal["auto", "onnx", "torch"], typer.Option(help="Inference runtime.", rich_help_panel=SELDOM)
    ] = "auto",
    allow_plugin: Allowed = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Exit code 0 even if some images cannot be read.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict labels of images with an exported model. Exit code 65 if some cannot be read; the others have rows.

    Example: `protofed predict model images --out predictions.csv`
    """
    from protofed.deploy.export import predict as work
    from protofed.deploy.export.images import ImageSource

    allowed = frozenset(allow_plugin or ())
    source = ImageSource(images, series is not None, tile_size)
    request = work.PredictRequest(model, source, out, runtime, device, batch, allowed, not as_json)
    result = work.predict(request)
    unreadable_count = len(result.unreadable)
    if as_json:
        unreadable = [vars(image) for image in result.unreadable]
        print_json({"out": str(out), "images": result.image_count, "runtime": result.runtime, "unreadable": unreadable})
    else:
        _list_unreadable(result, work.SHOWN)
        say(f"{result.image_count} images by {result.runtime}, {unreadable_count} unreadable: {out}")
    if unreadable_count and not skip_unreadable:
        raise ExportImagesError(
            f"{unreadable_count} of {unreadable_count + result.image_count} images cannot be read, such as "
            f"{result.unreadable[0].path}; repair or remove them, or add --skip-unreadable"
        )


def _export_with_progress(request: ExportRequest) -> Exported:
    from protofed.deploy.export.export import export as work
    from protofed.deploy.progress import progress

    with progress(f"exporting {request.kind}"):
        return work(request)


def _show_exported(exported: Exported, as_json: bool, *, dry_run: bool) -> None:
    from protofed.common.config.tasks import output_noun
    from protofed.common.protocol.scores import JUDGED_BY
    from protofed.deploy.run_view import score_text

    facts = exported.facts
    if as_json:
        table = facts.model_dump(mode="json")
        print_json(
            {
                "folder": str(exported.folder),
                "dry_run": dry_run,
                "files": dict(exported.files),
                "difference": exported.difference,
                "choice": exported.choice,
                "warnings": [text for _, text in exported.warnings],
                **table,
            }
        )
        return
    origin, shape, names = facts.origin, list(facts.model.input.shape), facts.model.classes
    of_site = f" of site {origin.site}" if origin.site else ""
    lines = [
        f"{exported.folder}: {origin.kind} model{of_site}, run {origin.run}, round {origin.round}, input [N, "
        f"{', '.join(map(str, shape))}], {count(len(names), output_noun(facts.model.task.name))}"
    ]
    lines += [f"  {name}: {size / 1e6:.2f} MB" for name, size in exported.files.items()]
    if exported.difference is not None:
        lines.append(f"  ONNX Runtime and PyTorch differ by at most {exported.difference:.1e} in predictions")
    lines += [f"  warning: {text}" for _, text in exported.warnings]
    lines += [f"  {exported.choice}"] if exported.choice else []
    if dry_run:
        lines.insert(0, "dry run: nothing was written")
    shown = {name.rpartition(".")[2] for name in JUDGED_BY}
    scores = {name: value for name, value in facts.scores.values.items() if name.rpartition(".")[2] in shown}
    lines += [f"  {name}: {score_text(value)}" for name, value in scores.items()] or [f"  no scores: {facts.scores.of}"]
    say("\n".join(lines))


def _list_unreadable(result: Predicted, limit: int) -> None:
    for image in result.unreadable[:limit]:
        say(f"unreadable: {image.path}: {image.why}", remark=True)
    if (more := len(result.unreadable) - limit) > 0:
        say(f"and {more} more", remark=True)


def _run(name: str) -> str:
    from protofed.common.ids import check_id

    return check_id("run", name)


def _round(text: str) -> int | Literal["best"] | None:
    if text == "best":
        return "best"
    if text == "newest":
        return None
    if text.isascii() and text.isdecimal():
        return int(text)
    raise ConfigError(f"--round {short(text)}: expected a number, best or newest")


def _recipe(name: str | None, assignments: list[str] | None) -> Recipe | None:
    from protofed.deploy import shipped

    if name is None:
        needs_recipe(assignments, "--recipe")
        return None
    return shipped.recipe(name, assignments or ())


def _site_data(file: Path | None, partition_index: int | None) -> tuple[Data, int] | None:
    """The data of the site's daemon and its partition index, from the daemon's settings file."""
    from protofed.common.config.data import Data
    from protofed.common.config.recipe import parse
    from protofed.common.config.toml_files import read_table

    if file is None:
        if partition_index is not None:
            raise ConfigError("--partition-index needs --settings, which define the partition; add it")
        return None
    table = read_table(file)
    data = parse(dict(table.get("data", {})), Data, f"{file}, [data]")
    number = table.get("partition_index") if partition_index is None else partition_index
    if number is None and data.partition.kind != "whole":
        raise ConfigError(
            "--settings partitions its data into several sites; add the --partition-index of the site's daemon"
        )
    return data, int(number or 0)
