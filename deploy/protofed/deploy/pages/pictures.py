"""Pictures on pages, in the style of reports: SVG in an <img>, wide and for phones, with the numbers behind each.

An <img> runs no script of an SVG file and takes none of its styles; `SVG_POLICY` says it once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Final

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError
from protofed.deploy.pages.guard import SVG_POLICY

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from protofed.deploy.report.document import Figure, Section
    from protofed.deploy.tables import Table

WIDE, NARROW = 8.6, 3.9  # inches; a phone shows the latter at about its own size, so that its words can be read
KEPT: Final = 32  # pictures
NAME: Final = 32  # characters of a digest


@dataclass(frozen=True)
class Sketch:
    """What a picture shows.

    Attributes:
        description: for those who cannot see it.
        draw: draws it so many inches wide.
    """

    title: str
    description: str
    draw: Callable[[float], Drawing]
    numbers: Table | None = None


@dataclass(frozen=True)
class Drawn:
    """One SVG file. Its name comes from its content, so that a page shows the same picture by the same address.

    Attributes:
        width, height: in pixels, as drawn: a browser keeps room for it.
    """

    name: str
    svg: str
    width: int
    height: int


@dataclass(frozen=True)
class Picture:
    """A sketch, drawn, or a figure of a report, which has no narrow form."""

    title: str
    description: str
    wide: Drawn
    narrow: Drawn | None
    numbers: Table | None

    @property
    def files(self) -> list[Drawn]:
        """Its files."""
        return [self.wide] if self.narrow is None else [self.wide, self.narrow]


@dataclass
class Pictures:
    """The newest pictures of one program. Threads share it."""

    _pictures: OrderedDict[Hashable, Picture] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)  # matplotlib's settings belong to the process

    def routes(self) -> list[BaseRoute]:
        """Where the pictures are."""
        return [Route("/pictures/{name}.svg", self.answer)]

    def of(self, key: Hashable, sketch: Sketch) -> Picture:
        """The picture of a key; drawn if it was not, or was forgotten.

        Args:
            key: all that the picture shows: of another content it is another.
        """
        with self._lock:
            return self._keep(key, self._pictures.get(key) or _drawn(sketch))

    def of_report(self, sections: Callable[[], Sequence[Section]]) -> list[tuple[Section, list[Picture]]]:
        """Sections of a report, each with its figures as pictures.

        Args:
            sections: makes them; called in the style of reports.
        """
        from matplotlib import rc_context

        from protofed.deploy.plots import STYLE

        with self._lock, rc_context(STYLE):
            pages = [(section, [_rendered(figure) for figure in section.figures]) for section in sections()]
            for _, pictures in pages:
                for picture in pictures:
                    self._keep(picture.wide.name, picture)
        return pages

    def answer(self, request: Request) -> Response:
        """One SVG file, as a page had it."""
        name = request.path_params["name"]
        with self._lock:
            files = [one for picture in self._pictures.values() for one in picture.files]
        file = next((one for one in files if one.name == name), None)
        if file is None:
            raise ConfigError("there is no such picture any more; load its page again")
        return Response(file.svg, media_type="image/svg+xml", headers={"Content-Security-Policy": SVG_POLICY})

    def _keep(self, key: Hashable, picture: Picture) -> Picture:
        self._pictures[key] = picture
        self._pictures.move_to_end(key)
        while len(self._pictures) > KEPT:
            self._pictures.popitem(last=False)
        return picture


def _drawn(sketch: Sketch) -> Picture:
    from matplotlib import rc_context  # takes a second

    from protofed.deploy.plots import STYLE
    from protofed.deploy.report.document import Figure

    def at(width: float) -> Drawn:
        with rc_context(STYLE):
            return _file(Figure(sketch.title, sketch.description, sketch.draw(width)))

    return Picture(sketch.title, sketch.description, at(WIDE), at(NARROW), sketch.numbers)


def _rendered(figure: Figure) -> Picture:
    return Picture(figure.title, figure.description, _file(figure), None, figure.numbers)


def _file(figure: Figure) -> Drawn:
    from protofed.deploy.report.document import svg_file

    svg = svg_file(figure)
    width, height = (round(96 * inches) for inches in figure.drawing.get_size_inches())
    return Drawn(blake3(svg.encode()).hexdigest()[:NAME], svg, width, height)
