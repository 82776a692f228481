"""`protofed client check`: a site's data as a run would have them, looked at on the spot. Nothing of it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3

from protofed.client.agent.site import check_preprocessing
from protofed.client.data import image_files
from protofed.client.data.image_files import Scan
from protofed.client.data.labels import LabelMap
from protofed.client.data.site_data import KEPT_BYTES, Examples, SiteData
from protofed.client.data.sources import NAMED, own_class_names, own_input
from protofed.common.config.recipe import Input, Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, DataError
from protofed.deploy.console.progress import Bar
from protofed.deploy.daemons import client, client_resources
from protofed.deploy.site import survey as site_check_survey
from protofed.deploy.site.check_result import OWN_TEST, TEST, TRAIN, Alike, CheckRequest, Counts, SiteCheck
from protofed.deploy.site.survey import DRAWN, Seen, Survey, mean_and_std

_MEMORY = Path("/proc/meminfo")
_NOTHING = Scan([], Counter(), Counter(), [], [], [], LabelMap({}, frozenset(), ()))


def site_check(settings: ClientSettings, recipe: Recipe | None, least: int | None, bar: Bar) -> SiteCheck:
    """Look at all images of a site.

    Args:
        recipe: None: there is no run to compare them with.
        least: the policy's min_samples_per_class; None: no policy is known.

    Raises:
        DataError: without a recipe: there is nothing that could be looked at.
    """
    wanted = _wanted(settings, recipe)
    found, survey, refusal = _surveyed(settings, wanted, bar)
    bar.say("loading them as the daemon does")
    loaded, refusal = _loaded(settings, recipe, refusal)
    return SiteCheck(
        wanted=wanted,
        source=settings.data.source,
        survey=survey,
        stored=_stored(survey, wanted.classes),
        taken=_taken(loaded, wanted.classes),
        astray=found.astray,
        groups=len({item.group for item in found.items} - {None}) or None,
        crossing=[item.name for item in found.crossing],
        ungrouped=[item.name for item in found.ungrouped],
        alike=_alike(survey, loaded),
        moments=mean_and_std([seen for seen in survey.images if seen.split in ("train", DRAWN)] or survey.images),
        least=least,
        memory=(_needed(survey, loaded, wanted.input), _available()),
        refusal=refusal,
    )


def _surveyed(settings: ClientSettings, wanted: CheckRequest, bar: Bar) -> tuple[Scan, Survey, str | None]:
    """All images, or why there are none that could be looked at."""
    data = settings.data
    try:
        client_resources.check_root(settings)
        if data.source not in NAMED:
            return _NOTHING, site_check_survey.of_arrays(data, wanted.class_names, bar.advance), None
        found = image_files.scan(data, wanted.class_names, wanted.classes)
        bar.expect(len(found.items))
        return found, site_check_survey.of_files(found, wanted.input, bar.advance), None
    except DataError as error:
        if wanted.recipe is None:
            raise
        return _NOTHING, Survey([], Counter(), Counter(), lambda _: np.empty(0)), str(error)


def _wanted(settings: ClientSettings, recipe: Recipe | None) -> CheckRequest:
    if recipe is not None:
        return CheckRequest(recipe.input, recipe.classes, recipe.class_names, recipe)
    client_resources.check_root(settings)
    input_, classes = own_input(settings.data)
    own = own_class_names(settings.data)
    return CheckRequest(input_, len(own) or classes, own, None)


def _loaded(settings: ClientSettings, recipe: Recipe | None, refusal: str | None) -> tuple[SiteData | None, str | None]:
    """As the daemon loads them, by its own functions, or why it would not."""
    if recipe is None or refusal is not None:
        return None, refusal
    try:
        check_preprocessing(recipe, pinned=settings.data.preprocessing_digest)
        return client.load_data(settings, recipe.input, recipe.classes, recipe.class_names), None
    except (DataError, ConfigError) as error:
        return None, str(error)


def _stored(survey: Survey, classes: int) -> dict[str, Counts]:
    counts: dict[str, Counts] = {}
    for seen in survey.images:
        if seen.why is None and seen.index < classes:
            counts.setdefault(seen.split, np.zeros(classes, np.int64))[seen.index] += 1
    return {split: counts[split] for split in ("train", "val", "test", DRAWN) if split in counts}


def _sets(loaded: SiteData | None) -> dict[str, Examples]:
    """What the daemon works with, without what is empty."""
    if loaded is None:
        return {}
    named = {TRAIN: loaded.train, TEST: loaded.test, OWN_TEST: loaded.local_test}
    return {name: examples for name, examples in named.items() if examples is not None and len(examples)}


def _taken(loaded: SiteData | None, classes: int) -> dict[str, Counts]:
    return {name: np.bincount(found.labels.numpy(), minlength=classes) for name, found in _sets(loaded).items()}


def _alike(survey: Survey, loaded: SiteData | None) -> Alike:
    by_digest: dict[str, list[Seen]] = {}
    for seen in survey.images:
        if seen.digest is not None:
            by_digest.setdefault(seen.digest, []).append(seen)
    sets = [found for found in by_digest.values() if len(found) > 1]
    differing = [found for found in sets if len({seen.index for seen in found}) > 1]
    same = [found for found in sets if len({seen.index for seen in found}) == 1]
    return Alike([*differing, *same], len(differing), None if loaded is None else _across(_sets(loaded)))


def _across(sets: Mapping[str, Examples]) -> int:
    """Images to test on that are among those to train on."""
    if TRAIN not in sets:
        return 0
    train = set(_digests(sets[TRAIN]))
    return sum(digest in train for name in (TEST, OWN_TEST) if name in sets for digest in _digests(sets[name]))


def _digests(examples: Examples) -> list[bytes]:
    return [blake3(image.tobytes()).digest() for image in examples.images.numpy()]


def _needed(survey: Survey, loaded: SiteData | None, input_: Input) -> int:
    """Bytes for the images, as they are and as they are kept for the model."""
    if sets := _sets(loaded):
        return sum(examples.nbytes for examples in sets.values())
    values = prod(input_.shape) * sum(seen.split != "val" for seen in survey.images)
    return values + (4 * values if 4 * values <= KEPT_BYTES else 0)


def _available() -> int | None:
    """Bytes of main memory that are free or can be freed."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines() if _MEMORY.exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
