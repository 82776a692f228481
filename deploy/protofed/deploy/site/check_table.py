"""What `protofed client check` found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from protofed.common.errors import short
from protofed.deploy.site.check_result import OWN_TEST, TEST, TRAIN, SiteCheck, nearest
from protofed.deploy.site.survey import DRAWN, Seen

MOST = 12  # lines of one list; --json has all
_SPLITS = {"train": "train", "val": "val (left alone)", "test": "test", DRAWN: "images"}


def show(found: SiteCheck, console: Console) -> None:
    """Print it."""
    console.print(_heading(found), highlight=False)
    survey = found.survey
    about = (
        ("Classes", _classes),
        ("Own labels", _labels),
        ("Files", _files),
        ("Groups", _groups),
        ("Duplicates", _alike),
        ("Pixels", _pixels),
        ("Memory", _memory),
    )
    looked_at = survey.images or survey.unmapped or survey.ignored or found.astray
    for title, told in (*(about if looked_at else ()), ("Preparation", _preprocessing), ("Verdict", _verdict)):
        if (block := told(found)) is not None:
            console.print(f"\n[bold]{title}[/bold]", highlight=False)
            console.print(block, highlight=False)


def plain(found: SiteCheck) -> dict[str, Any]:
    """All of it, as JSON takes it. It has counts: it is not for others."""
    wanted, names = found.wanted, [found.wanted.name(c) for c in range(found.wanted.classes)]
    return {
        "recipe": None if wanted.recipe is None else wanted.recipe.name,
        "source": found.source,
        "refusal": found.refusal,
        "classes": names,
        "stored": {("all" if split == DRAWN else split): counts.tolist() for split, counts in found.stored.items()},
        "taken": {name.replace(" ", "_"): counts.tolist() for name, counts in found.taken.items()},
        "below_min_samples_per_class": found.rare,
        "unmapped": {
            label: {"images": count, "nearest": nearest(label, wanted.class_names)}
            for label, count in sorted(found.survey.unmapped.items())
        },
        "ignored": dict(sorted(found.survey.ignored.items())),
        "unreadable": [{"file": seen.name, "why": seen.why} for seen in found.unreadable],
        "astray": list(found.astray),
        "formats": dict(_formats(found).most_common()),
        "sizes": dict(_sizes(found).most_common()),
        "groups": found.groups,
        "crossing": list(found.crossing),
        "ungrouped": list(found.ungrouped),
        "alike": [[_where(seen) for seen in alike] for alike in found.alike.sets],
        "alike_with_several_labels": found.alike.differing,
        "test_images_trained_on": found.alike.across,
        "mean": None if found.moments is None else found.moments[0],
        "std": None if found.moments is None else found.moments[1],
        "far_from_the_recipe": found.off,
        "memory_bytes": {"needed": found.memory[0], "available": found.memory[1]},
        "preprocessing_digest": None if wanted.recipe is None else wanted.recipe.preprocessing_digest(),
    }


def _heading(found: SiteCheck) -> Text:
    recipe, shape = found.wanted.recipe, " x ".join(map(str, found.wanted.input.shape))
    of = "no run to compare with" if recipe is None else f"run {recipe.name}"
    return Text.assemble(
        (f"source {found.source}, {of}", "bold"),
        f": {found.wanted.classes} classes, images of {shape} [channels, height, width]\n",
        ("Stays on this machine: it has numbers of examples, which no message to the server has.", "dim"),
    )


def _classes(found: SiteCheck) -> RenderableType:
    taken = {name: counts for name, counts in found.taken.items() if not _said_already(found, name)}
    table = Table()
    table.add_column("class", overflow="fold")
    table.add_column("own labels", overflow="fold")
    for name in (*map(_SPLITS.__getitem__, found.stored), *taken):
        table.add_column(name, justify="right")
    own = _own(found)
    for index in range(found.wanted.classes):
        numbers = [int(counts[index]) for counts in (*found.stored.values(), *taken.values())]
        name = found.wanted.name(index)
        labels = ", ".join(label for label in own.get(index, ()) if label != name)
        table.add_row(Text(name), Text(labels), *(f"{number:,}" if number else "–" for number in numbers))
    sums = [int(counts.sum()) for counts in (*found.stored.values(), *taken.values())]
    table.add_section()
    table.add_row("all", "", *(f"{number:,}" for number in sums))
    return Group(table, *_about_classes(found))


def _said_already(found: SiteCheck, name: str) -> bool:
    """Of what the daemon makes of the images: whether that is a split of their own."""
    split = {TRAIN: "train", TEST: "test"}.get(name, "")
    return split in found.stored and found.stored[split].tolist() == found.taken[name].tolist()


def _own(found: SiteCheck) -> dict[int, list[str]]:
    own: dict[int, set[str]] = {}
    for seen in found.survey.images:
        own.setdefault(seen.index, set()).add(seen.label)
    return {index: sorted(labels) for index, labels in own.items()}


def _about_classes(found: SiteCheck) -> Iterable[Text]:
    if found.least is not None and found.least > 1:
        rare = ", ".join(found.rare) or "none"
        yield Text(f"Below the policy's min_samples_per_class = {found.least}, so that they count as absent: {rare}.")
    if (left := {TEST, OWN_TEST} & set(found.taken)) and DRAWN in found.stored:
        yield Text(f"What it {' and its '.join(sorted(left, reverse=True))} is held out by data.seed and data.*_share.")


def _labels(found: SiteCheck) -> RenderableType | None:
    lines = []
    for label, count in sorted(found.survey.unmapped.items()):
        near = nearest(label, found.wanted.class_names)
        hint = f' (nearest: "{near}")' if near else ""
        lines.append(Text(f"- no class of the run: {short(label)!r}, {_images(count)}{hint}", style="red"))
    if lines:
        lines.append(
            Text('  Say in data.label_map what each is ("own" = "the run\'s"), or name it in data.ignore_labels.')
        )
    lines += [
        Text(f"- ignored: {short(label)!r}, {_images(count)}") for label, count in sorted(found.survey.ignored.items())
    ]
    return Group(*lines) if lines else None


def _files(found: SiteCheck) -> RenderableType:
    seen, bad = len(found.survey.images), found.unreadable
    what = "image" if found.survey.images and found.survey.images[0].format.startswith("array") else "file"
    lines = [Text(f"{_count(seen, what)} with a class, {len(bad)} of them unreadable")]
    lines += _listed(bad, lambda one: f"- {one.name}: {one.why}")
    if found.astray:
        lines.append(Text(f"{_count(len(found.astray), 'file')} in no class's folder (they count as unreadable)"))
        lines += _listed(found.astray, lambda name: f"- {name}")
    for title, counted in (("stored as", _formats(found)), ("width x height", _sizes(found))):
        kinds = [f"{name} ({count:,})" for name, count in counted.most_common(MOST)]
        more = [f"and {len(counted) - MOST} others"] if len(counted) > MOST else []
        lines += [Text(f"{title}: {'; '.join([*kinds, *more])}")] if kinds else []
    return Group(*lines)


def _groups(found: SiteCheck) -> RenderableType | None:
    if found.groups is None and not found.ungrouped:
        return None
    whole = "" if found.crossing or found.ungrouped else ", none of them in both train and test"
    lines = [Text(f"{_count(found.groups or 0, 'group')}{whole}")]
    for names, what in ((found.crossing, "are of groups in both train and test"), (found.ungrouped, "are in no group")):
        if names:
            lines.append(Text(f"{_images(len(names))} {what}:", style="red"))
            lines += _listed(names, lambda name: f"- {name}")
    return Group(*lines)


def _alike(found: SiteCheck) -> RenderableType:
    sets, alike = found.alike.sets, found.alike
    images = sum(map(len, sets))
    lines = [Text(f"{_images(images)} in {_count(len(sets), 'set')} are equal in every pixel" if sets else "none")]
    if alike.differing:
        text = f"{_count(alike.differing, 'set')} of them with several labels, listed first"
        lines.append(Text(text, style="yellow"))
    if alike.across:
        lines.append(Text(f"{_images(alike.across)} to test on are among those to train on", style="yellow"))
    return Group(*lines, *_listed(sets, lambda one: f"- {' = '.join(map(_where, one[:4]))}{' = …' if one[4:] else ''}"))


def _pixels(found: SiteCheck) -> RenderableType | None:
    if found.moments is None:
        return None
    mean, std = (", ".join(f"{value:.3f}" for value in values) for values in found.moments)
    said = f"mean {mean}; std {std}, by channel, of pixels in 0..1"
    if found.wanted.recipe is None:
        return Text(said)
    at, by = (", ".join(f"{v:.3f}" for v in values) for values in (found.wanted.input.mean, found.wanted.input.std))
    lines = [Text(f"{said} (the recipe: mean {at}; std {by})")]
    if found.off:
        hint = "Far from the recipe's: are these images of the kind that the run is about, and input.window right?"
        lines += [Text(f"- {line}", style="yellow") for line in found.off] + [Text(hint, style="yellow")]
    return Group(*lines)


def _memory(found: SiteCheck) -> Text:
    needed, there = found.memory
    said = f"the images take {_mb(needed)}" + ("" if there is None else f"; {_mb(there)} are free here")
    return Text(said, style="yellow" if there is not None and needed > there else "")


def _preprocessing(found: SiteCheck) -> RenderableType | None:
    if found.wanted.recipe is None:
        return None
    digest = found.wanted.recipe.preprocessing_digest()
    return Group(
        Text(digest),
        Text('Compare it with the other sites\', or pin it: preprocessing_digest = "…" in [data] refuses every other.'),
    )


def _verdict(found: SiteCheck) -> Text:
    if found.refusal is not None:
        return Text(f"The daemon would take no part: {found.refusal}", style="red")
    if found.wanted.recipe is None:
        return Text("A recipe says which classes and images a run wants: protofed client check RECIPE --settings FILE")
    return Text(f"The daemon would take part in {found.wanted.recipe.name} with these data.", style="green")


def _listed(things: Sequence[Any], told: Any) -> list[Text]:
    more = [Text(f"- and {len(things) - MOST} more: --json lists all")] if len(things) > MOST else []
    return [Text(told(one)) for one in things[:MOST]] + more


def _where(seen: Seen) -> str:
    return f"{seen.name} ({seen.label})" if seen.split in (DRAWN,) else f"{seen.name} ({seen.label}, {seen.split})"


def _formats(found: SiteCheck) -> Counter[str]:
    return Counter(seen.format for seen in found.survey.images if seen.format)


def _sizes(found: SiteCheck) -> Counter[str]:
    return Counter(" x ".join(map(str, seen.size)) for seen in found.survey.images if seen.size)


def _images(count: int) -> str:
    return _count(count, "image")


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else "less than 1 MB"
