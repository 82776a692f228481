"""A few images of every class as the model sees them, on one sheet: wrong labels and colours are seen at a glance."""

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

from protofed.deploy.site.survey import Pixels, Seen, Survey

THUMB, SMALL_THUMB = 128, 96  # pixels, of few and of many classes: smaller images are enlarged by a whole factor
MANY = 30  # classes
MOST, LEAST, IN_ALL = 8, 3, 160  # images a class, and about how many on a sheet
GAP, BORDER = 10, 24
TITLE, CAPTION, HEADING = 15, 10, 20  # sizes of type
WIDE = 1.4  # of the sheet: width by height
INK, PALE, PAPER, LINE = "#1b1f24", "#5c6670", "#ffffff", "#d5dae0"


@dataclass(frozen=True)
class SheetCell:
    """One image on the sheet."""

    picture: Image.Image
    label: str
    file: str


def sheet(survey: Survey, names: Sequence[str], heading: str) -> bytes:
    """A PNG with up to `MOST` images of each class, drawn at random, always the same ones.

    Args:
        names: of the classes, 0..C-1; those without an image are named, too.
        heading: of the sheet.
    """
    thumb = THUMB if len(names) <= MANY else SMALL_THUMB
    each = max(LEAST, min(MOST, IN_ALL // max(1, len(names))))
    blocks = [(name, _cells(survey, index, each, thumb)) for index, name in enumerate(names)]
    edge = max([thumb, *(max(cell.picture.size) for _, cells in blocks for cell in cells)])
    width, height = each * (edge + GAP) + GAP, edge + TITLE + 2 * CAPTION + 5 * GAP // 2 + GAP
    columns = min(len(blocks), max(1, round(sqrt(WIDE * len(blocks) * height / width))))
    rows = ceil(len(blocks) / columns)
    page = Image.new("RGB", (2 * BORDER + columns * width, 2 * BORDER + HEADING + 2 * GAP + rows * height), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((BORDER + GAP, BORDER), _fitted(heading, page.width - 2 * BORDER, HEADING), INK, _font(HEADING))
    for place, (name, cells) in enumerate(blocks):
        column, row = divmod(place, rows)  # down the columns, as a list is read
        _block(
            page, draw, (BORDER + column * width, BORDER + HEADING + 2 * GAP + row * height), name, cells, edge, each
        )
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _cells(survey: Survey, index: int, each: int, thumb: int) -> list[SheetCell]:
    places = [place for place, seen in enumerate(survey.images) if seen.index == index and seen.why is None]
    drawn = sorted(random.Random(index).sample(places, min(each, len(places))))  # noqa: S311  (no secret)
    return [_cell(survey.images[place], survey.pixels(place), thumb) for place in drawn]


def _cell(seen: Seen, pixels: Pixels, thumb: int) -> SheetCell:
    return SheetCell(_enlarged(picture(pixels), thumb), seen.label, seen.name.rpartition("/")[2])


def picture(pixels: Pixels) -> Image.Image:
    """[channels, H, W] as people see it: grey of one channel, colours of three; else the first channel."""
    array = pixels if pixels.dtype == np.uint8 else (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0)) if len(array) == 3 else array[0]).convert(
        "RGB"
    )


def _enlarged(image: Image.Image, thumb: int) -> Image.Image:
    """Pixel by pixel as it is, several times as large; made smaller only where it is more than twice the room."""
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
    """One class: its name over a row of images, each over its own label and file."""
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
        own = [] if cell.label == name else [cell.label]
        for line, text in enumerate([*own, cell.file]):
            y = under + edge + 3 + line * (CAPTION + 3)
            draw.text((x, y), _fitted(text, edge, CAPTION), PALE, _font(CAPTION))


def _fitted(text: str, width: int, size: int) -> str:
    """As much of a text as there is room for: names of files differ at their ends."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if _font(size).getlength(text) <= width:
        return text
    while text and _font(size).getlength(f"{text[: len(text) // 2]}…{text[-(len(text) // 2) :]}") > width:
        text = text[: len(text) // 2] + text[len(text) // 2 + 1 :]
    return f"{text[: len(text) // 2]}…{text[-(len(text) // 2) :]}"


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # comes along, with a typeface of most alphabets

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
