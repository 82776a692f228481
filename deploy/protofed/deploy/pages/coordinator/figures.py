"""Pictures of a run, those of its report: scores over rounds, bytes, prototypes' similarity, with the numbers behind.

They are drawn from the run's record, which a server needs seconds for where a run is long; so they have a page of their
own, are made once for each published round, and are not refreshed by themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.errors import ConfigError, short
from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.guard import SVG_POLICY
from protofed.deploy.pages.shell import shell_of
from protofed.deploy.report import document, models, rounds, scores, summary
from protofed.deploy.report.record import RunRecord

KEPT: Final = 4  # runs whose pictures are kept
SECTIONS: Final = (scores.curves, rounds.transfers, models.prototypes)
Moment = tuple[int, int, str]  # attempts, the newest scored round and the status: what pictures are of


@dataclass(frozen=True)
class Picture:
    """One figure of a report, rendered."""

    title: str
    description: str
    svg: str
    numbers: document.Table | None


@dataclass(frozen=True)
class Pictures:
    """The pictures of a run at one moment.

    Attributes:
        missing: sentences on what is not shown, and how to get it.
        privacy: what its noise is worth, in sentences; none: it has no noise.
    """

    moment: Moment
    pictures: Sequence[Picture]
    missing: Sequence[str]
    privacy: Sequence[str]


@dataclass(frozen=True)
class FigurePages:
    """The pages `/runs/{run}/figures` and their pictures."""

    operator: Operator
    made: OrderedDict[str, Pictures] = field(default_factory=OrderedDict)
    lock: Lock = field(default_factory=Lock)  # one record at a time: a server makes it for seconds

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/runs/{run}/figures", self.show),
            Route("/runs/{run}/figures/{number:int}.svg", self.picture),
        ]

    def show(self, request: Request) -> Response:
        """The newest pictures, with their tables."""
        run: str = request.path_params["run"]
        detail = self.operator.show(run, 1)
        moment = (detail.attempts, detail.scored_round, detail.info.status)
        with self.lock:
            found = self.made.get(run)
            if found is None or found.moment != moment:
                found = drawn(RunRecord(self.operator.run_record(run)), moment)
            self.made[run] = found
            self.made.move_to_end(run)
            while len(self.made) > KEPT:
                self.made.popitem(last=False)
        context = {"info": detail.info, "found": found, "is_cell": lambda cell: isinstance(cell, document.Cell)}
        return shell_of(request).page(request, "figures.html.j2", context)

    def picture(self, request: Request) -> Response:
        """One picture, as the page had it."""
        run, number = request.path_params["run"], request.path_params["number"]
        found = self.made.get(run)
        if found is None or number >= len(found.pictures):
            raise ConfigError(f"run '{short(run)}' has no such picture here; load the page with its pictures again")
        return Response(
            found.pictures[number].svg, media_type="image/svg+xml", headers={"Content-Security-Policy": SVG_POLICY}
        )


def drawn(record: RunRecord, moment: Moment) -> Pictures:
    """The pictures of a run record."""
    sections = [section(record) for section in SECTIONS]
    figures = [figure for section in sections for figure in section.figures]
    pictures = [
        Picture(figure.title, figure.description, document.svg_file(figure), figure.numbers) for figure in figures
    ]
    return Pictures(
        moment, pictures, [line for section in sections for line in section.missing], summary.noise_lines(record)
    )
