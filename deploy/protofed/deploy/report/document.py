"""What a report is made of, and how it becomes one HTML file that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import jinja2
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure as Drawing

TEMPLATES = Path(__file__).parent / "templates"
STYLE: Any = {  # of matplotlib
    "svg.fonttype": "none",  # letters stay letters: small, searchable, in the reader's own font
    "svg.hashsalt": "protofed",
    "font.size": 9,
    "axes.edgecolor": "0.4",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


@dataclass(frozen=True)
class Cell:
    """A cell of a table with a look of its own, of the style sheet; what it `says` is shown under a pointer."""

    text: str
    look: str = ""
    says: str = ""


Row: TypeAlias = Sequence[str | Cell]


@dataclass(frozen=True)
class Table:
    """Rows under a header.

    Attributes:
        words: so many first columns are read as words, the others are numbers, which end at the right.
        folded: behind a line that opens it: the numbers behind a figure.
        look: a class of the style sheet.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Row]
    words: int = 1
    folded: bool = False
    look: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing with its name, and in words what can be seen in it."""

    title: str
    says: str
    drawing: Drawing
    numbers: Table | None = None


@dataclass(frozen=True)
class Section:
    """A part of a report; `missing` says what it does not show and how to get that."""

    key: str
    title: str
    lead: Sequence[str] = ()
    points: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """One number that matters, large."""

    label: str
    value: str
    beside: str = ""


@dataclass(frozen=True)
class Document:
    """A report, whole."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    foot: str
    words: Sequence[tuple[str, str]] = ()  # what the words mean


def rendered(document: Document) -> str:
    """The HTML; all that is not ours is escaped."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))  # noqa: S704  (our own file)
    environment.filters["coded"] = coded
    figures = {id(one): svg(one, f"f{n}") for n, one in enumerate(_figures(document), start=1)}
    return environment.get_template("report.html.j2").render(
        document=document, style=style, svg=lambda one: figures[id(one)], is_cell=lambda cell: isinstance(cell, Cell)
    )


def coded(text: str) -> Markup:
    """Text in which what stands between backticks is code."""
    form = ("{}", "<code>{}</code>")
    return Markup("").join(Markup(form[place % 2]).format(part) for place, part in enumerate(text.split("`")))  # noqa: S704


def svg(figure: Figure, prefix: str) -> Markup:
    """A drawing as an element of a page: named, described, as wide as there is room, its ids its own."""
    held = BytesIO()
    with rc_context(STYLE):  # of the writer; what is drawn was drawn in it, too
        figure.drawing.savefig(held, format="svg", dpi=160, metadata={"Date": None})
    root = ElementTree.fromstring(held.getvalue())  # noqa: S314  (just written by ourselves)
    for element in root.iter():
        _at_home(element, prefix)
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    width = f"max-width: {figure.drawing.get_figwidth() * 7:.1f}rem"  # no larger than it was drawn for
    root.attrib |= {"role": "img", "aria-labelledby": f"{prefix}-title {prefix}-desc", "style": width}
    for place, (tag, text) in enumerate((("title", figure.title), ("desc", figure.says))):
        told = ElementTree.Element(tag, {"id": f"{prefix}-{tag}"})
        told.text = text
        root.insert(place, told)
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704  (escaped by the XML writer)


def _at_home(element: ElementTree.Element, prefix: str) -> None:
    """In HTML, elements have no namespace, and all ids of a page are different."""
    element.tag = element.tag.rpartition("}")[2]
    own = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    if "id" in own:
        own["id"] = f"{prefix}-{own['id']}"
    if own.get("href", "").startswith("#"):
        own["href"] = f"#{prefix}-{own['href'][1:]}"
    element.attrib.clear()
    element.attrib |= {name: _REFERENCE.sub(rf"url(#{prefix}-\1)", value) for name, value in own.items()}
    if element.tag == "style" and element.text:
        element.text = ""  # matplotlib's rule for all of the page: joins and caps of lines


def _figures(document: Document) -> list[Figure]:
    return [figure for section in document.sections for figure in section.figures]
