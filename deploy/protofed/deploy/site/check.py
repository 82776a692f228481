"""`protofed client check`: examines a site's data as a run would use them. Nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3

from protofed.client.data import image_files
from protofed.client.data.image_files import Scan
from protofed.client.data.labels import LabelMap
from protofed.client.data.site_data import KEPT_BYTES, Examples, SiteData
from protofed.client.data.sources import LABELLED_BY_NAME, infer_class_names, infer_input
from protofed.client.site import check_preprocessing
from protofed.common.config.recipe import Input, Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, DataError, TaskFailedError
from protofed.deploy.console.progress import Bar
from protofed.deploy.daemons import client, client_resources
from protofed.deploy.site.check_result import OWN_TEST, TEST, TRAIN, CheckRequest, Counts, Duplicates, SiteCheck
from protofed.deploy.site.offer import as_offered
from protofed.deploy.site.survey import DRAWN, Survey, SurveyedImage, mean_and_std, survey_arrays, survey_files

_MEMORY = Path("/proc/meminfo")
_EMPTY_SCAN = Scan([], Counter(), Counter(), [], [], [], [], [], LabelMap({}, frozenset(), ()))


def site_check(settings: ClientSettings, recipe: Recipe | None, min_samples: int | None, bar: Bar) -> SiteCheck:
    """Read all images of a site, then load them as the daemon would.

    Args:
        recipe: None: there is no run to compare them with.
        min_samples: the policy's min_samples_per_class; None: no policy was given.

    Raises:
        DataError: without a recipe, if the data cannot be read. With one, the error becomes the check's `refusal`.
    """
    request = _request(settings, recipe)
    scan, survey, refusal = _surveyed(settings, request, bar)
    bar.say("loading them as the daemon does")
    loaded, refusal = _loaded(settings, recipe, refusal, has_policy=min_samples is not None)
    return SiteCheck(
        request=request,
        source=settings.data.source,
        survey=survey,
        stored=_stored(survey, request.classes),
        used=_used(loaded, request.classes),
        unscored=_unscored(settings, loaded, request),
        misplaced=scan.misplaced,
        left_out=scan.left_out,
        ambiguous=[item.name for item in scan.ambiguous],
        groups=len({item.group for item in scan.items} - {None}) or None,
        crossing=[item.name for item in scan.crossing],
        ungrouped=[item.name for item in scan.ungrouped],
        duplicates=_duplicates(survey, loaded),
        # A recipe's mean and std are of training images; a source that has only others is better than none.
        moments=mean_and_std([image for image in survey.images if image.split in ("train", DRAWN)] or survey.images),
        min_samples=min_samples,
        memory=(_needed_bytes(survey, loaded, request.input), _available_bytes()),
        contrast=trained.contrast() if (trained := _sets(loaded).get(TRAIN)) is not None else None,
        refusal=refusal,
    )


def _surveyed(settings: ClientSettings, request: CheckRequest, bar: Bar) -> tuple[Scan, Survey, str | None]:
    """The scan of the files, all images, and the reason if none could be read."""
    data = settings.data
    try:
        client_resources.check_root(settings)
        if data.source not in LABELLED_BY_NAME:
            return _EMPTY_SCAN, survey_arrays(data, request.class_names, bar.advance), None
        scan = image_files.scan(data, request.class_names, request.classes)
        bar.expect(len(scan.items))
        return scan, survey_files(scan, request.input, bar.advance), None
    except DataError as error:
        if request.recipe is None:
            raise
        return _EMPTY_SCAN, Survey([], Counter(), Counter(), lambda _: np.empty(0)), str(error)


def _request(settings: ClientSettings, recipe: Recipe | None) -> CheckRequest:
    if recipe is not None:
        return CheckRequest(recipe.input, recipe.classes, recipe.class_names, recipe)
    client_resources.check_root(settings)
    input_, classes = infer_input(settings.data)
    class_names = infer_class_names(settings.data)
    return CheckRequest(input_, len(class_names) or classes, class_names, None)


def _loaded(
    settings: ClientSettings, recipe: Recipe | None, refusal: str | None, *, has_policy: bool
) -> tuple[SiteData | None, str | None]:
    """The data as the daemon loads them, by its own functions, and the reason why it would take no part, if any."""
    if recipe is None or refusal is not None:
        return None, refusal
    if has_policy:
        try:
            return client.try_run(settings, as_offered(recipe)).data, None
        except TaskFailedError as failure:  # the data may be as they should be: then they are shown all the same
            refusal = str(failure)
    try:
        check_preprocessing(recipe, pinned=settings.data.preprocessing_digest)
        noisy = recipe.plan.dp is not None
        return client.load_data(settings, recipe.input, recipe.classes, recipe.class_names, noisy=noisy), refusal
    except (DataError, ConfigError) as error:
        return None, str(error)


def _stored(survey: Survey, classes: int) -> dict[str, Counts]:
    counts: dict[str, Counts] = {}
    for image in survey.images:
        if image.problem is None and image.index < classes:
            counts.setdefault(image.split, np.zeros(classes, np.int64))[image.index] += 1
    return {split: counts[split] for split in ("train", "val", "test", DRAWN) if split in counts}


def _sets(loaded: SiteData | None) -> dict[str, Examples]:
    """The daemon's sets of examples that are not empty."""
    if loaded is None:
        return {}
    named = {TRAIN: loaded.train, TEST: loaded.test, OWN_TEST: loaded.local_test}
    return {name: examples for name, examples in named.items() if examples is not None and len(examples)}


def _used(loaded: SiteData | None, classes: int) -> dict[str, Counts]:
    return {name: np.bincount(examples.labels.numpy(), minlength=classes) for name, examples in _sets(loaded).items()}


def _unscored(settings: ClientSettings, loaded: SiteData | None, request: CheckRequest) -> dict[str, list[str]]:
    by_set = {} if loaded is None else client.unscored(settings, loaded)
    return {name: [request.name(index) for index in classes] for name, classes in by_set.items()}


def _duplicates(survey: Survey, loaded: SiteData | None) -> Duplicates:
    by_digest: dict[str, list[SurveyedImage]] = {}
    for image in survey.images:
        if image.digest is not None:
            by_digest.setdefault(image.digest, []).append(image)
    sets = [images for images in by_digest.values() if len(images) > 1]
    differing = [images for images in sets if len({image.index for image in images}) > 1]
    same = [images for images in sets if len({image.index for image in images}) == 1]
    # Counted on what the daemon loaded: with a drawn split, only then is it known which image is in which set.
    across = None if loaded is None else _tested_and_trained_on(_sets(loaded))
    return Duplicates([*differing, *same], len(differing), across)


def _tested_and_trained_on(sets: Mapping[str, Examples]) -> int:
    """The number of test images that are equal to a training image."""
    if TRAIN not in sets:
        return 0
    train = set(_digests(sets[TRAIN]))
    return sum(digest in train for name in (TEST, OWN_TEST) if name in sets for digest in _digests(sets[name]))


def _digests(examples: Examples) -> list[bytes]:
    """Of `examples.images`, [N, channels, H, W]."""
    return [blake3(image.tobytes()).digest() for image in examples.images.numpy()]


def _needed_bytes(survey: Survey, loaded: SiteData | None, input_: Input) -> int:
    """Bytes for the images and their normalised copy; an estimate if the daemon could not load them."""
    if sets := _sets(loaded):
        return sum(examples.nbytes for examples in sets.values())
    values = prod(input_.shape) * sum(image.split != "val" for image in survey.images)
    return values + (4 * values if 4 * values <= KEPT_BYTES else 0)  # as `Examples.nbytes`: uint8, and float32 if small


def _available_bytes() -> int | None:
    """Bytes of main memory that are free or can be freed; None where /proc/meminfo does not say."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines() if _MEMORY.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
