"""The contact sheet: a few images of every class as the model sees them, so that wrong labels and colours show."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from protofed.client.data.decoding import in_unit
from protofed.deploy.site.survey import Pixels, Survey, SurveyedImage

THUMB, SMALL_THUMB = 128, 96  # pixels: the size of an image if there are few classes, and if there are many
MANY = 30  # classes from which on images are small
MAX_IMAGES, MIN_IMAGES, IN_ALL = 8, 3, 160  # images of a class, and roughly of a sheet
GAP, BORDER = 10, 24  # pixels
TITLE, CAPTION, HEADING = 15, 10, 20  # font sizes in pixels
WIDE = 1.4  # the sheet's width by its height
INK, PALE, PAPER, LINE = "#1b1f24", "#5c6670", "#ffffff", "#d5dae0"


@dataclass(frozen=True)
class SheetCell:
    """One image on the sheet."""

    picture: Image.Image
    label: str
    file: str


def sheet(survey: Survey, names: Sequence[str], heading: str) -> bytes:
    """The sheet as PNG, with up to `MAX_IMAGES` images of each class; the same images are drawn every time.

    Args:
        names: of the classes, 0..C-1; a class without images is shown, too.
        heading: the title of the sheet.
    """
    thumb = THUMB if len(names) <= MANY else SMALL_THUMB
    each = max(MIN_IMAGES, min(MAX_IMAGES, IN_ALL // max(1, len(names))))
    blocks = [(name, _cells(survey, index, each, thumb)) for index, name in enumerate(names)]
    edge = max([thumb, *(max(cell.picture.size) for _, cells in blocks for cell in cells)])
    width, height = each * (edge + GAP) + GAP, edge + TITLE + 2 * CAPTION + 5 * GAP // 2 + GAP
    columns = min(len(blocks), max(1, round(sqrt(WIDE * len(blocks) * height / width))))
    rows = ceil(len(blocks) / columns)
    page = Image.new("RGB", (2 * BORDER + columns * width, 2 * BORDER + HEADING + 2 * GAP + rows * height), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((BORDER + GAP, BORDER), _fitted(heading, page.width - 2 * BORDER, HEADING), INK, _font(HEADING))
    for place, (name, cells) in enumerate(blocks):
        column, row = divmod(place, rows)  # the classes go down the columns, as a printed list does
        _block(
            page, draw, (BORDER + column * width, BORDER + HEADING + 2 * GAP + row * height), name, cells, edge, each
        )
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _cells(survey: Survey, index: int, each: int, thumb: int) -> list[SheetCell]:
    # Seeded by the class: one more image of another class does not change this one's sample.
    places = [place for place, image in enumerate(survey.images) if index in image.outputs and image.problem is None]
    drawn = sorted(random.Random(index).sample(places, min(each, len(places))))  # noqa: S311  (no secret)
    return [_cell(survey.images[place], survey.pixels(place), thumb) for place in drawn]


def _cell(image: SurveyedImage, pixels: Pixels, thumb: int) -> SheetCell:
    return SheetCell(_enlarged(picture(pixels), thumb), image.label, image.name.rpartition("/")[2])


def picture(pixels: Pixels) -> Image.Image:
    """Pixels [channels, H, W] as RGB: three channels are colours; of any other number only the first is shown, grey."""
    array = pixels if pixels.dtype == np.uint8 else (in_unit(pixels).clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)) if len(array) == 3 else array[0]).convert(
        "RGB"
    )


def _enlarged(image: Image.Image, thumb: int) -> Image.Image:
    """The image times a whole factor, so that each pixel stays visible; reduced only if over twice the thumb's size."""
    longest = max(image.size)
    if longest > 2 * thumb:
        image = image.copy()
        image.thumbnail((2 * thumb, 2 * thumb))
        return image
    return image.resize([side * max(1, thumb // longest) for side in image.size], Image.Resampling.NEAREST)


def _block(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    name: str,
    cells: Sequence[SheetCell],
    edge: int,
    each: int,
) -> None:
    """Draw one class: its name, and below it a row of images, each with its own label and file name."""
    left, top = corner
    width = each * (edge + GAP) - GAP
    draw.line((left + GAP, top, left + GAP + width, top), LINE)
    draw.text((left + GAP, top + GAP // 2), _fitted(name, width, TITLE), INK, _font(TITLE))
    under = top + TITLE + 3 * GAP // 2
    if not cells:
        draw.text((left + GAP, under), "no image", PALE, _font(CAPTION))
    for place, cell in enumerate(cells):
        x = left + GAP + place * (edge + GAP)
        page.paste(cell.picture, (x, under))
        lines = [] if cell.label == name else [cell.label]
        for line, text in enumerate([*lines, cell.file]):
            y = under + edge + 3 + line * (CAPTION + 3)
            draw.text((x, y), _fitted(text, edge, CAPTION), PALE, _font(CAPTION))


def _fitted(text: str, width: int, size: int) -> str:
    """A text shortened to `width` pixels in its middle: names of files often differ only at their ends."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if _font(size).getlength(text) <= width:
        return text
    while text and _font(size).getlength(f"{text[: len(text) // 2]}…{text[-(len(text) // 2) :]}") > width:
        text = text[: len(text) // 2] + text[len(text) // 2 + 1 :]
    return f"{text[: len(text) // 2]}…{text[-(len(text) // 2) :]}"


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # matplotlib brings a font with most alphabets. Pillow's own has few, and fonts of the system differ.
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
