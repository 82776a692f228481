"""The doctor's quick check of image files: all labels, and a sample of the files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from protofed.client.data import image_files
from protofed.client.data.image_files import Scan
from protofed.common.config.recipe import Data, Input
from protofed.common.errors import DataError, short
from protofed.deploy.doctor.checks import CheckFailedError
from protofed.deploy.site.survey import survey_files

SAMPLE, NAMED = 32, 3  # files that are read, and unreadable ones that the message names


def check_images(data: Data, input_: Input, class_names: Sequence[str]) -> str:
    """Check a source `folder` or `manifest`.

    Raises:
        DataError: the source cannot be used.
        CheckFailedError: labels without a class, or more unreadable files than `data.max_unreadable_fraction` allows.
    """
    scan = image_files.scan(data, class_names, len(class_names))
    try:
        scan.labels.check(scan.unmapped)
    except DataError as error:
        raise CheckFailedError("labels-unmapped", str(error)) from error
    scan.check()
    if not scan.items:
        raise DataError(f"{data.root} has no images of the run's classes; expected some")
    _sample(scan, data, input_)
    return "its labels are known, and a sample of its files can be read"


def _sample(scan: Scan, data: Data, input_: Input) -> None:
    # A fixed seed: the same files every time, so that a repaired file shows the next time.
    drawn = random.Random(0).sample(list(scan.items), min(SAMPLE, len(scan.items)))  # noqa: S311  (no secret)
    sample = survey_files(replace(scan, items=drawn), input_)
    unreadable = [(image.name, image.problem) for image in sample.images if image.problem]
    astray = [(name, "in no class's folder") for name in scan.misplaced]
    # `ceil`: one unreadable file in a small sample is allowed whenever the fraction is not 0.
    many = len(unreadable) > ceil(data.max_unreadable_fraction * len(drawn))
    if many or len(astray) > data.max_unreadable_fraction * (len(scan.items) + len(astray)):
        listed = ", ".join(f"{short(name)}: {why}" for name, why in [*unreadable, *astray][:NAMED])
        more = "; and others" if len(unreadable) + len(astray) > NAMED else ""
        raise CheckFailedError("images-unreadable", f"{listed}{more} (`protofed client check` lists all)")
