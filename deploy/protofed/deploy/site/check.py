"""`protofed client check`: examines a site's data as a run would use them. Nothing is sent."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protofed.client.data import image_files
from protofed.client.data.examples import KEPT_BYTES, Examples, total_bytes
from protofed.client.data.image_cache import CachedImages, ImageCache
from protofed.client.data.image_files import Scan
from protofed.client.data.labels import LabelMap, as_targets
from protofed.client.data.reading import Reading, image_cache_for
from protofed.client.data.site_data import SiteData
from protofed.client.data.sources import LABELLED_BY_NAME, infer_class_names, infer_input
from protofed.client.site import check_preprocessing
from protofed.client.task import ClientTask, Target, build_client_task
from protofed.client.tasks.classification import CLASSES
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.config.tables import Input
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import ConfigError, DataError, TaskFailedError
from protofed.common.protocol.messages import Assignment
from protofed.deploy.daemons import client
from protofed.deploy.progress import Bar
from protofed.deploy.site.survey import DRAWN, Survey, SurveyedImage, mean_and_std, survey_arrays, survey_files
from protofed.server.rounds.machine.rules import min_cohort

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
        stored_targets=_stored_targets(survey, request),
        used_targets={name: examples.labels for name, examples in _sets(loaded).items()},
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
        cached=next((examples.source for examples in _sets(loaded).values() if examples.source is not None), None),
        contrast=trained.contrast() if (trained := _sets(loaded).get(TRAIN)) is not None else None,
        refusal=refusal,
    )


def _surveyed(settings: ClientSettings, request: CheckRequest, bar: Bar) -> tuple[Scan, Survey, str | None]:
    """The scan of the files, all images, and the reason if none could be read."""
    data = settings.data
    try:
        client.check_root(settings)
        if data.source not in LABELLED_BY_NAME:
            return _EMPTY_SCAN, _survey_arrays(settings, request, bar), None
        scan = image_files.scan(data, request.class_names, request.classes, request.input.frames, request.task)
        bar.expect(len(scan.items))
        return scan, survey_files(scan, request.input, bar.advance, _cache(settings, request, scan, bar)), None
    except DataError as error:
        if request.recipe is None:
            raise
        return _EMPTY_SCAN, Survey([], Counter(), Counter(), lambda _: np.empty(0)), str(error)


def _cache(settings: ClientSettings, request: CheckRequest, scan: Scan, bar: Bar) -> ImageCache | None:
    """The daemon's cache, if it would use it for this run: then each image is decoded once for both."""
    if request.recipe is None:
        return None
    pictures = [image_files.as_picture(item) for item in scan.items]
    return image_cache_for(pictures, request.input, _reading(settings, bar))


def _survey_arrays(settings: ClientSettings, request: CheckRequest, bar: Bar) -> Survey:
    noisy = request.recipe is not None and request.recipe.plan.dp is not None
    reading = _reading(settings, bar)
    of_run = request.input, request.class_names, request.classes, request.task
    return survey_arrays(settings.data, *of_run, reading, bar.advance, noisy=noisy)


def _reading(settings: ClientSettings, bar: Bar) -> Reading:
    return client.reading(settings, lambda done, _: bar.to(done, "decoding them onto the disk"))


def _request(settings: ClientSettings, recipe: Recipe | None) -> CheckRequest:
    if recipe is not None:
        return CheckRequest(recipe.input, recipe.classes, recipe.class_names, recipe)
    client.check_root(settings)
    input_, classes = infer_input(settings.data, client.reading(settings))
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
        return client.load_run(settings, recipe), refusal
    except (DataError, ConfigError) as error:
        return None, str(error)


def _stored_targets(survey: Survey, request: CheckRequest) -> dict[str, Tensor]:
    by_split: dict[str, list[Target]] = {}
    for image in survey.images:
        if image.problem is None:
            by_split.setdefault(image.split, []).append(image.target)
    valid: dict[str, Tensor] = {}
    for split in ("train", "val", "test", DRAWN):
        if split in by_split:
            targets = as_targets(np.array(by_split[split]))
            if len(usable := targets[request.task.valid(targets, request.classes)]):
                valid[split] = usable
    return valid


def _sets(loaded: SiteData | None) -> dict[str, Examples]:
    """The daemon's sets of examples that are not empty."""
    if loaded is None:
        return {}
    sets = {TRAIN: loaded.train, TEST: loaded.test, OWN_TEST: loaded.local_test}
    return {name: examples for name, examples in sets.items() if examples is not None and len(examples)}


def _unscored(settings: ClientSettings, loaded: SiteData | None, request: CheckRequest) -> dict[str, list[str]]:
    by_set = {} if loaded is None else client.unscored(settings, loaded)
    return {name: [request.name(index) for index in classes] for name, classes in by_set.items()}


def _duplicates(survey: Survey, loaded: SiteData | None) -> Duplicates:
    by_digest: dict[str, list[SurveyedImage]] = {}
    for image in survey.images:
        if image.digest is not None:
            by_digest.setdefault(image.digest, []).append(image)
    sets = [images for images in by_digest.values() if len(images) > 1]
    differing = [images for images in sets if len({image.target for image in images}) > 1]
    same = [images for images in sets if len({image.target for image in images}) == 1]
    # Counted on what the daemon loaded: with a drawn split, only then is it known which image is in which set.
    across = None if loaded is None else _tested_and_trained_on(_sets(loaded))
    return Duplicates([*differing, *same], len(differing), across)


def _tested_and_trained_on(sets: Mapping[str, Examples]) -> int:
    """The number of test images that are equal to a training image."""
    if TRAIN not in sets:
        return 0
    train = set(sets[TRAIN].digests())
    return sum(digest in train for name in (TEST, OWN_TEST) if name in sets for digest in sets[name].digests())


def _needed_bytes(survey: Survey, loaded: SiteData | None, input_: Input) -> int:
    """Bytes for the images and their normalised copy; an estimate if the daemon could not load them."""
    if sets := _sets(loaded):
        return total_bytes(examples for examples in sets.values() if examples.source is None)
    values = prod(input_.shape) * sum(image.split != "val" for image in survey.images)
    return values + (4 * values if 4 * values <= KEPT_BYTES else 0)  # as `Examples.nbytes`: uint8, and float32 if small


def _available_bytes() -> int | None:
    """Bytes of main memory that are free or can be freed; None where /proc/meminfo does not say."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines() if _MEMORY.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


TRAIN, TEST, OWN_TEST = "trains on", "tests on", "own test set"
SETS = {TEST: "test set", OWN_TEST: "own test set"}
FAR = 1.0  # a channel's mean may differ from the recipe's by this many of the recipe's stds without a warning
WIDE = 3.0  # and its std may be this many times larger or smaller
Counts: TypeAlias = NDArray[np.int64]  # [C]


@dataclass(frozen=True, eq=False)
class CheckRequest:
    """The input and classes that the data are checked for: a recipe's or, without one, the data's own.

    Attributes:
        input: what images are converted to.
        classes: their number, C.
        class_names: C names, or none if the run's classes have numbers only.
        recipe: None: there is no run to compare the data with.
    """

    input: Input
    classes: int
    class_names: tuple[str, ...]
    recipe: Recipe | None

    @cached_property
    def task(self) -> ClientTask:
        """What the labels are targets of: the recipe's task, or classes."""
        return CLASSES if self.recipe is None else build_client_task(self.recipe.task)

    @property
    def task_name(self) -> str:
        """The recipe's task; without a recipe, labels are taken for classes."""
        return CLASSIFICATION if self.recipe is None else self.recipe.task.name

    def counts(self, targets: Mapping[str, Tensor]) -> dict[str, Counts]:
        """Images of each class or finding in each set of targets, [C] each."""
        return {name: self.task.counts(of_set, self.classes).numpy() for name, of_set in targets.items()}

    def name(self, index: int) -> str:
        """The name of output `index`, 0..C-1."""
        return self.class_names[index] if self.class_names else f"{index}"


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Images that are equal in every pixel that the model sees.

    Attributes:
        sets: of equal images, two or more each; sets with several labels come first.
        differing: number of sets with several labels.
        across: number of images in the daemon's test sets that it also trains on; None: the data were not loaded.
    """

    sets: Sequence[Sequence[SurveyedImage]]
    differing: int
    across: int | None


@dataclass(frozen=True)
class Concern:
    """Something that does not keep the daemon from taking part, and that the site's people should know before it does.

    Attributes:
        untrue: with it the scores of these data say something else than how good the model is.
    """

    text: str
    untrue: bool


@dataclass(frozen=True, eq=False)
class SiteCheck:
    """What data a site has, and whether its daemon would take part in a run with them.

    Attributes:
        source: `data.source` of the settings.
        stored_targets: targets of the readable images, [N, ...] each, by the source's own split (or DRAWN).
        used_targets: targets of the examples that the daemon uses, by TRAIN, TEST and OWN_TEST; empty if it refuses.
        unscored: names of the classes that a test set has no image of, by the set's name; complete sets are left out.
        misplaced: files in no class's folder, by name below the root.
        left_out: files and folders that their name tells to be no images, or deleted ones.
        ambiguous: names in a manifest that several files have.
        groups: number of groups (of patients, say); None: the data have none.
        crossing: images whose group is in both train and test.
        ungrouped: images that have no group although others have.
        moments: means and stds by channel, [channels] each, of pixels in 0..1; None: there is no readable image.
        min_samples: examples below which the policy makes a class absent; None: no policy was given.
        memory: bytes that the images need, and bytes that are available (None: unknown).
        cached: the images that are mapped from the disk; None: all are in memory.
        contrast: of the images that the daemon trains on, as `Examples.contrast`; None: it trains on none.
        refusal: the reason why the daemon would not take part; None: it would.
    """

    request: CheckRequest
    source: str
    survey: Survey
    stored_targets: Mapping[str, Tensor]
    used_targets: Mapping[str, Tensor]
    unscored: Mapping[str, Sequence[str]]
    misplaced: Sequence[str]
    left_out: Sequence[str]
    ambiguous: Sequence[str]
    groups: int | None
    crossing: Sequence[str]
    ungrouped: Sequence[str]
    duplicates: Duplicates
    moments: tuple[list[float], list[float]] | None
    min_samples: int | None
    memory: tuple[int, int | None]
    cached: CachedImages | None
    contrast: float | None
    refusal: str | None

    @cached_property
    def stored(self) -> Mapping[str, Counts]:
        """Readable images of each class or finding, [C], by the source's own split (or DRAWN)."""
        return self.request.counts(self.stored_targets)

    @cached_property
    def used(self) -> Mapping[str, Counts]:
        """Examples of each class or finding that the daemon works with, [C], by TRAIN, TEST and OWN_TEST."""
        return self.request.counts(self.used_targets)

    @property
    def unreadable(self) -> list[SurveyedImage]:
        """Files that the run cannot use as an image."""
        return [image for image in self.survey.images if image.problem is not None]

    @property
    def training(self) -> Counts:
        """Training examples by class, [C]: the daemon's or, if it refuses, all that are not held out by the source."""
        if TRAIN in self.used:
            return self.used[TRAIN]
        none = np.zeros(self.request.classes, np.int64)
        return self.stored.get("train", none) + self.stored.get(DRAWN, none)

    @property
    def rare(self) -> list[str]:
        """Names of classes that have examples, but fewer than the policy requires."""
        below = (self.training > 0) & (self.training < (self.min_samples or 0))
        return [self.request.name(int(index)) for index in np.flatnonzero(below)]

    @property
    def concerns(self) -> list[Concern]:
        """What the verdict names beside that the daemon would take part."""
        return [
            *self._about_files(),
            *self._about_duplicates(),
            *(self._about_single_classes() if self.request.task_name == CLASSIFICATION else self._about_equal()),
            *self._about_depths(),
        ]

    def _about_files(self) -> Iterator[Concern]:
        if count := len(self.unreadable) + len(self.misplaced):
            without_run = "a run refuses the site if data.max_unreadable_fraction allows fewer"
            then = without_run if self.request.recipe is None else "they are left out"
            yield Concern(f"images that cannot be used: {count:,}; {then}", untrue=False)

    def _about_duplicates(self) -> Iterator[Concern]:
        if across := self.duplicates.across:
            text = f"test images that are also trained on: {across:,}; with them scores are too good"
            yield Concern(f"{text}: remove them on one side", untrue=True)
        if differing := self.duplicates.differing:
            text = f"images that occur under several labels: {differing:,}; no model can be right on all of them"
            yield Concern(f"{text}: correct the labels", untrue=True)

    def _about_single_classes(self) -> Iterator[Concern]:
        trained, *more = np.flatnonzero(self.training)[:2].tolist() or [None]
        if trained is not None and not more:
            yield Concern(f"all images to train on are of one class, {self.request.name(trained)}", untrue=False)
        for name in (TEST, OWN_TEST):
            tested = np.flatnonzero(self.used.get(name, ()))
            if len(tested) == 1:
                only = self.request.name(int(tested[0]))
                yield Concern(
                    f"the {SETS[name]} has one class alone, {only}: any model that names it is right", untrue=True
                )

    def _about_equal(self) -> Iterator[Concern]:
        for name, targets in self.used_targets.items():
            if (targets == targets[0]).all():
                scored = name in SETS
                where = f"of the {SETS[name]}" if scored else "to train on"
                yield Concern(f"all images {where} have the same label", untrue=scored)

    def _about_depths(self) -> Iterator[Concern]:
        formats = [image.format for image in self.survey.images if image.problem is None]
        bits = [int(match[1]) for stored in formats if (match := re.search(r"([0-9]+) bits?$", stored))]
        depths = Counter(max(8, depth) for depth in bits)  # 1 bit is read as 8
        if len(depths) > 1:
            listed = ", ".join(f"{count:,} with {depth} bits" for depth, count in sorted(depths.items()))
            text = f"the images have several bit depths ({listed}): compare their brightness by --contact-sheet"
            yield Concern(text, untrue=False)

    @property
    def deviations(self) -> list[str]:
        """A sentence for each channel far from the mean and std that the recipe sets: most likely other images."""
        input_ = self.request.input
        sets_none = (input_.mean, input_.std) == (Input.model_fields["mean"].default, Input.model_fields["std"].default)
        if self.moments is None or self.request.recipe is None or sets_none:
            return []
        shape, lines = (len(self.moments[0]),), []
        # A recipe may give one number for all channels.
        expected = [np.broadcast_to(values, shape) for values in (input_.mean, input_.std)]
        for channel, (mean, std, to_mean, to_std) in enumerate(zip(*self.moments, *expected, strict=True)):
            if abs(mean - to_mean) > FAR * to_std or not 1 / WIDE < std / to_std < WIDE:
                lines.append(
                    f"channel {channel}: mean {mean:.3f}, std {std:.3f}; the recipe has {to_mean:.3f}, {to_std:.3f}"
                )
        return lines


def nearest(label: str, names: Sequence[str]) -> str | None:
    """The class name that is most similar to a label; None: none is similar."""
    folded = {name.casefold(): name for name in names}
    matches = difflib.get_close_matches(label.casefold(), folded, n=1, cutoff=0.5)
    return folded[matches[0]] if matches else None


def as_offered(recipe: Recipe) -> Assignment:
    """What a site would be given at its enrolling."""
    return Assignment(recipe.name, recipe.wire(), min_cohort=min_cohort(recipe.federation))
