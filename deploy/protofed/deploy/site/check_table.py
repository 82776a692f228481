"""The output of `protofed client check`: text for people, JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import Tensor

from protofed.client.data.hold_out import MIN_SCORED
from protofed.client.data.labels import advice
from protofed.common.config.tasks import CLASSIFICATION, output_noun
from protofed.common.errors import count as counted
from protofed.common.errors import plural, short
from protofed.common.payload import Array
from protofed.deploy.site.check import OWN_TEST, TEST, TRAIN, SiteCheck, nearest
from protofed.deploy.site.survey import DRAWN, SurveyedImage
from protofed.deploy.tables import BOXED, Column, terminal

T = TypeVar("T")
MAX_LISTED = 12  # lines of one list; --json has all
_SPLITS = {"train": "train", "val": "val (not used)", "test": "test", DRAWN: "images"}


def show(check: SiteCheck, console: Console) -> None:
    """Print the result, section by section, and the verdict first."""
    console.print(_heading(check), highlight=False)
    survey = check.survey
    data_sections = (
        ("Numbers", _numbers) if _is_number(check) else (plural(_noun(check)).capitalize(), _classes),
        ("Own labels", _labels),
        ("Files", _files),
        ("Groups", _groups),
        ("Duplicates", _duplicates),
        ("Pixels", _pixels),
        ("Memory", _memory),
    )
    has_data = survey.images or survey.unmapped or survey.ignored or check.misplaced
    sections = (("Verdict", _verdict), *(data_sections if has_data else ()), ("Preparation", _preprocessing))
    for title, section in sections:
        if (block := section(check)) is not None:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            console.print(block, highlight=False)


def plain(check: SiteCheck) -> dict[str, Any]:
    """The whole result for `--json`; it has counts of examples, so it is not to be sent to others."""
    request, names = check.request, [check.request.name(c) for c in range(check.request.classes)]
    return {
        "recipe": None if request.recipe is None else request.recipe.name,
        "source": check.source,
        "refusal": check.refusal,
        "but": [concern.text for concern in check.concerns],
        "scores_untrue": any(concern.untrue for concern in check.concerns),
        "classes": names,
        "stored": {("all" if split == DRAWN else split): counts.tolist() for split, counts in check.stored.items()},
        "taken": {name.replace(" ", "_"): counts.tolist() for name, counts in check.used.items()},
        "images": {name.replace(" ", "_"): len(targets) for name, targets in check.used_targets.items()},
        "below_min_samples_per_class": check.rare,
        "not_scored": {name.replace(" ", "_"): list(classes) for name, classes in check.unscored.items()},
        "unmapped": _unmapped(check),
        "ignored": dict(sorted(check.survey.ignored.items())),
        "unreadable": [{"file": image.name, "why": image.problem} for image in check.unreadable],
        "astray": list(check.misplaced),
        "left_out": list(check.left_out),
        "ambiguous": list(check.ambiguous),
        "formats": dict(_formats(check).most_common()),
        "sizes": dict(_sizes(check).most_common()),
        "groups": check.groups,
        "crossing": list(check.crossing),
        "ungrouped": list(check.ungrouped),
        "alike": [[_described(image) for image in duplicates] for duplicates in check.duplicates.sets],
        "alike_with_several_labels": check.duplicates.differing,
        "test_images_trained_on": check.duplicates.across,
        "mean": None if check.moments is None else check.moments[0],
        "std": None if check.moments is None else check.moments[1],
        "far_from_the_recipe": check.deviations,
        "memory_bytes": {"needed": check.memory[0], "available": check.memory[1]},
        "preprocessing_digest": None if request.recipe is None else request.recipe.preprocessing_digest(),
    }


def _unmapped(check: SiteCheck) -> dict[str, Any]:
    """The labels that no class has, each with its images and the class names that are spelt most like it."""
    return {
        label: {"images": images, "nearest": nearest(label, check.request.class_names)}
        for label, images in sorted(check.survey.unmapped.items())
    }


def _heading(check: SiteCheck) -> Text:
    recipe, shape = check.request.recipe, " x ".join(map(str, check.request.input.shape))
    run = "no run to compare with" if recipe is None else f"run {recipe.name}"
    # `Text`, here and below: names of classes, labels and files may have brackets, in which rich would read markup.
    return Text.assemble(
        (f"source {check.source}, {run}", "bold"),
        f": {counted(check.request.classes, _noun(check))}, images loaded as {shape} [channels, height, width]\n",
        ("Stays on this machine: it has numbers of examples, which no message to the server has.", "dim"),
    )


def _noun(check: SiteCheck) -> str:
    return output_noun(check.request.task_name)


def _is_number(check: SiteCheck) -> bool:
    """Whether a label is one number that is no class."""
    return any(targets.ndim == 1 and targets.is_floating_point() for targets in check.stored_targets.values())


def _shown(check: SiteCheck) -> dict[str, Tensor]:
    """Targets of images as stored, then of examples as the daemon uses them."""
    used = {name: targets for name, targets in check.used_targets.items() if not _repeats_a_split(check, name)}
    return {_SPLITS[split]: targets for split, targets in check.stored_targets.items()} | used


def _numbers(check: SiteCheck) -> RenderableType:
    names = ("images", "least", "median", "largest")
    of_sets = {
        name: (len(numbers), float(numbers.min()), float(numbers.median()), float(numbers.max()))
        for name, numbers in _shown(check).items()
    }
    columns = (Column(name, partial(_number, values), right=True) for name, values in of_sets.items())
    table = terminal((Column("", names.__getitem__), *columns), range(len(names)), BOXED)
    return Group(table, *_about_classes(check))


def _number(values: Sequence[float], row: int) -> str:
    return f"{values[row]:,g}" if row else f"{values[row]:,}"


def _classes(check: SiteCheck) -> RenderableType:
    of_classes, own_labels = check.request.task_name == CLASSIFICATION, _own_labels(check)

    def labels(index: int) -> str:
        return ", ".join(label for label in own_labels.get(index, ()) if label != check.request.name(index))

    shown = _shown(check)
    numbers = (
        Column(name, partial(_of_class, counts), right=True, wraps=True, overflow="ellipsis")
        for name, counts in check.request.counts(shown).items()
    )
    # Of findings, a label is a set of them.
    own = [Column("own labels", labels, wraps=True)] if of_classes else []
    table = terminal(
        (Column(_noun(check), check.request.name, wraps=True), *own, *numbers), range(check.request.classes), BOXED
    )
    table.add_section()
    table.add_row("all images", *("" for _ in own), *(f"{len(targets):,}" for targets in shown.values()))
    return Group(table, *_about_classes(check))


def _of_class(counts: Array, index: int) -> str:
    return f"{counts[index]:,}" if counts[index] else "–"


def _repeats_a_split(check: SiteCheck, name: str) -> bool:
    """Whether the daemon uses exactly a split of the source, whose column the table has already."""
    split = {TRAIN: "train", TEST: "test"}.get(name, "")
    if split not in check.stored_targets or len(check.stored_targets[split]) != len(check.used_targets[name]):
        return False
    return bool((check.stored[split] == check.used[name]).all())


def _own_labels(check: SiteCheck) -> dict[int, list[str]]:
    own_labels: dict[int, set[str]] = {}
    for image in check.survey.images:
        for output in image.outputs:
            own_labels.setdefault(output, set()).add(image.label)
    return {index: sorted(labels) for index, labels in own_labels.items()}


def _about_classes(check: SiteCheck) -> Iterable[Text]:
    if check.min_samples is not None and check.min_samples > 1:
        rare = ", ".join(check.rare) or "none"
        limit = f"min_samples_per_class = {check.min_samples}"
        yield Text(f"Below the policy's {limit}, so that they count as absent: {rare}.")
    if {TEST, OWN_TEST} & set(check.used) and DRAWN in check.stored:
        yield Text("What it does not train on is held out by data.seed and data.*_fraction.")
        if _noisy(check):
            yield Text("The run has noise: each image, or patient, is held out by itself, whatever its label.")
        elif check.request.task_name == CLASSIFICATION:
            yield Text(f"A class with fewer than {MIN_SCORED} images is trained on whole and not tested on.")
    for name, classes in check.unscored.items():
        yield Text(f"Not scored, for the {name} has no image of them: {', '.join(classes)}.", style="yellow")


def _labels(check: SiteCheck) -> RenderableType | None:
    lines = []
    for label, count in sorted(check.survey.unmapped.items()):
        near = nearest(label, check.request.class_names)
        hint = f' (nearest: "{near}")' if near else ""
        lines.append(Text(f"- the run cannot use {short(label)!r}, {counted(count, 'image')}{hint}", style="red"))
    if lines:
        lines.append(Text(f"  {advice(check.survey.unmapped)}."))
    lines += [
        Text(f"- ignored: {short(label)!r}, {counted(count, 'image')}")
        for label, count in sorted(check.survey.ignored.items())
    ]
    return Group(*lines) if lines else None


def _files(check: SiteCheck) -> RenderableType:
    images, unreadable = check.survey.images, check.unreadable
    lines = [Text(f"{counted(len(images), 'image')} with a label, {len(unreadable)} of them unreadable")]
    lines += _truncated(unreadable, lambda image: f"- {image.name}: {image.problem}")
    if check.misplaced:
        lines.append(Text(f"{counted(len(check.misplaced), 'file')} in no class's folder (they count as unreadable)"))
        lines += _truncated(check.misplaced, lambda name: f"- {name}")
    if check.ambiguous:
        lines.append(Text("names that several files have (write the path with its folders):", style="red"))
        lines += _truncated(check.ambiguous, lambda name: f"- {name}")
    if check.left_out:
        lines.append(Text(f"left out by its name, as no image or as deleted: {_listed(check.left_out)}"))
    for title, numbers in (("stored as", _formats(check)), ("width x height", _sizes(check))):
        kinds = [f"{name} ({count:,})" for name, count in numbers.most_common(MAX_LISTED)]
        more = [f"and {len(numbers) - MAX_LISTED} others"] if len(numbers) > MAX_LISTED else []
        lines += [Text(f"{title}: {'; '.join([*kinds, *more])}")] if kinds else []
    return Group(*lines)


def _groups(check: SiteCheck) -> RenderableType | None:
    if check.groups is None and not check.ungrouped:
        return None
    whole = "" if check.crossing or check.ungrouped else ", none of them in both train and test"
    lines = [Text(f"{counted(check.groups or 0, 'group')}{whole}")]
    in_both, in_none = "of groups in both train and test", "in no group"
    for names, problem in ((check.crossing, in_both), (check.ungrouped, in_none)):
        if names:
            lines.append(Text(f"{counted(len(names), 'image')} {problem}:", style="red"))
            lines += _truncated(names, lambda name: f"- {name}")
    return Group(*lines)


def _duplicates(check: SiteCheck) -> RenderableType:
    sets, duplicates = check.duplicates.sets, check.duplicates
    images = sum(map(len, sets))
    lines = [
        Text(f"{counted(images, 'image')} in {counted(len(sets), 'set')} are equal in every pixel" if sets else "none")
    ]
    if duplicates.differing:
        text = f"{counted(duplicates.differing, 'set')} of them with several labels, listed first"
        lines.append(Text(text, style="yellow"))
    if duplicates.across:
        lines.append(
            Text(f"{counted(duplicates.across, 'image')} to test on are among those to train on", style="yellow")
        )

    def line(equal: Sequence[SurveyedImage]) -> str:
        return f"- {' = '.join(map(_described, equal[:4]))}{' = …' if equal[4:] else ''}"

    return Group(*lines, *_truncated(sets, line))


def _pixels(check: SiteCheck) -> RenderableType | None:
    if check.moments is None:
        return None
    mean, std = (", ".join(f"{value:.3f}" for value in values) for values in check.moments)
    text = f"mean {mean}; std {std}, by channel, of pixels in 0..1"
    if check.request.recipe is None:
        return Text(text)
    input_ = check.request.input
    mean, std = (", ".join(f"{value:.3f}" for value in values) for values in (input_.mean, input_.std))
    lines = [Text(f"{text} (the recipe: mean {mean}; std {std})")]
    if check.deviations:
        window = "" if input_.window is None else " and that input.window is right"
        hint = f"Far from the recipe's: check that these images are of the kind that the run is about{window}."
        lines += [Text(f"- {line}", style="yellow") for line in check.deviations] + [Text(hint, style="yellow")]
    return Group(*lines)


def _memory(check: SiteCheck) -> Text:
    needed, available = check.memory
    if check.cached is not None:
        return Text(f"the images are decoded on the disk, in {check.cached.path.parent}")
    text = f"the images take {_mb(needed)}" + ("" if available is None else f"; {_mb(available)} are free here")
    return Text(text, style="yellow" if available is not None and needed > available else "")


def _preprocessing(check: SiteCheck) -> RenderableType | None:
    if check.request.recipe is None:
        return None
    digest = check.request.recipe.preprocessing_digest()
    return Group(
        Text(digest),
        Text('Compare it with the other sites\', or pin it: preprocessing_digest = "…" in [data] refuses every other.'),
    )


def _verdict(check: SiteCheck) -> RenderableType:
    if check.refusal is not None:
        return Text(f"The daemon would take no part: {check.refusal}", style="red")
    recipe, concerns = check.request.recipe, check.concerns
    fits = (
        "The images can be read" if recipe is None else f"The daemon would take part in {recipe.name} with these data"
    )
    lines = [Text(f"{fits}, but:" if concerns else f"{fits}.", style="yellow" if concerns else "green")]
    lines += [Text(f"- {concern.text}", style="red" if concern.untrue else "yellow") for concern in concerns]
    if recipe is None:
        lines.append(Text("To compare them with a run, name its recipe: protofed client check RECIPE --settings FILE"))
    if _noisy(check):
        lines.append(
            Text(
                "The run has noise, so images that cannot be used are left out, and the daemon does not refuse the run."
            )
        )
    return Group(*lines)


def _noisy(check: SiteCheck) -> bool:
    return check.request.recipe is not None and check.request.recipe.plan.dp is not None


def _listed(names: Sequence[str]) -> str:
    """The first `MAX_LISTED` of names, each once without its folders: systems leave the same in every folder."""
    known = sorted({name.rpartition("/")[2] for name in names})
    more = f" and {len(known) - MAX_LISTED} more (--json lists all)" if len(known) > MAX_LISTED else ""
    return ", ".join(map(short, known[:MAX_LISTED])) + more


def _truncated(items: Sequence[T], line: Callable[[T], str]) -> list[Text]:
    """The first `MAX_LISTED` items, a line each, as `Text`: in names of files rich would read [x] as a style."""
    more = [Text(f"- and {len(items) - MAX_LISTED} more: --json lists all")] if len(items) > MAX_LISTED else []
    return [Text(line(item)) for item in items[:MAX_LISTED]] + more


def _described(image: SurveyedImage) -> str:
    split = "" if image.split == DRAWN else f", {image.split}"
    return f"{image.name} ({image.label}{split})"


def _formats(check: SiteCheck) -> Counter[str]:
    return Counter(image.format for image in check.survey.images if image.format)


def _sizes(check: SiteCheck) -> Counter[str]:
    return Counter(" x ".join(map(str, image.size)) for image in check.survey.images if image.size)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else "less than 1 MB"
