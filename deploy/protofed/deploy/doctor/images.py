"""What the doctor sees of image files without reading all of them: every label, and a sample of the files."""

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
from protofed.deploy.site.survey import of_files

SAMPLE, NAMED = 32, 3  # files that are read, and files that are named


def look(data: Data, input_: Input, class_names: Sequence[str]) -> str:
    """Of a source `folder` or `manifest`.

    Raises:
        DataError: it cannot be used.
        CheckFailedError: labels without a class, or more unreadable files than `data.max_unreadable_fraction` allows.
    """
    found = image_files.scan(data, class_names, len(class_names))
    try:
        found.labels.check(found.unmapped)
    except DataError as error:
        raise CheckFailedError("labels-unmapped", str(error)) from error
    found.check()
    if not found.items:
        raise DataError(f"{data.root} has no images of the run's classes; expected some")
    _sample(found, data, input_)
    return "its labels are known, and a sample of its files can be read"


def _sample(found: Scan, data: Data, input_: Input) -> None:
    drawn = random.Random(0).sample(list(found.items), min(SAMPLE, len(found.items)))  # noqa: S311  (no secret)
    bad = [(seen.name, seen.why) for seen in of_files(replace(found, items=drawn), input_).images if seen.why]
    astray = [(name, "in no class's folder") for name in found.astray]
    many = len(bad) > ceil(data.max_unreadable_fraction * len(drawn))
    if many or len(astray) > data.max_unreadable_fraction * (len(found.items) + len(astray)):
        told = ", ".join(f"{short(name)}: {why}" for name, why in [*bad, *astray][:NAMED])
        more = "; and others" if len(bad) + len(astray) > NAMED else ""
        raise CheckFailedError("images-unreadable", f"{told}{more} (`protofed client check` lists all)")
