"""Pictures of a run, those of its report: scores, rounds and sites over time, bytes, prototypes' similarity.

They are drawn from the run's record, which a server needs seconds for where a run is long. So they have a page of their
own, which starts the drawing and follows it, and are drawn once for each published round: not again by themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.pictures import Picture, Pictures
from protofed.deploy.pages.shell import FRAGMENT, shell_of
from protofed.deploy.report import document, models, rounds, scores, summary
from protofed.deploy.run_view import RunView

KEPT: Final = 4  # runs whose figures are kept
PATIENCE_S: Final = 0.4  # that a page waits for its figures before it says that they are being drawn
SECTIONS: Final = (scores.curves, rounds.participation, rounds.transfers, models.prototypes)
Moment = tuple[int, int, str]  # attempts, the newest scored round and the status: what figures are of


@dataclass(frozen=True)
class RunFigures:
    """The figures of a run at one moment, section by section.

    Attributes:
        round: the newest round then.
        privacy: what its noise is worth, in sentences; none: it has no noise.
    """

    moment: Moment
    round: int
    sections: Sequence[tuple[document.Section, Sequence[Picture]]]
    privacy: Sequence[str]


@dataclass(frozen=True)
class FigurePages:
    """The pages `/runs/{run}/figures`. Threads share it.

    Attributes:
        made: by run, the figures that were drawn last at the end.
        drawing: by run, figures in the making.
        turn: one record at a time: a server makes it for seconds.
    """

    operator: Operator
    pictures: Pictures
    made: OrderedDict[str, RunFigures] = field(default_factory=OrderedDict)
    drawing: dict[str, Future[RunFigures]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)  # of both
    turn: Lock = field(default_factory=Lock)

    def routes(self) -> Sequence[BaseRoute]:
        """Its route; the pictures have their own."""
        return [Route("/runs/{run}/figures", self.show)]

    def show(self, request: Request) -> Response:
        """The newest figures, with their tables; the last ones while newer ones are drawn.

        A page that refreshes itself (a fragment) asks the server for nothing: it waits for what is being drawn.
        """
        run: str = request.path_params["run"]
        if FRAGMENT not in request.query_params:
            self._begin(run)
        drawing = self._in_the_making(run)
        with self.lock:
            found = self.made.get(run)
        context = {"run": run, "found": found, "drawing": drawing, "with_code": document.with_code}
        return shell_of(request).page(request, "figures.html.j2", context)

    def _begin(self, run: str) -> None:
        """Have the figures of the newest round drawn, unless they are there or in the making."""
        detail = self.operator.show(run, 1)
        moment = (detail.attempts, detail.scored_round, detail.info.status)
        with self.lock:
            known = self.made.get(run)
            if run in self.drawing or (known is not None and known.moment == moment):
                return
            future = self.drawing[run] = Future()
        # A daemon thread: Ctrl-C does not wait for a server that makes a long record.
        Thread(target=self._draw, args=(run, moment, detail.info.round, future), name="figures", daemon=True).start()

    def _in_the_making(self, run: str) -> bool:
        """Whether figures of a run are still in the making, after some patience; raises what they failed of, once."""
        with self.lock:
            future = self.drawing.get(run)
        if future is None:
            return False
        try:
            future.result(PATIENCE_S)
        except NotDone:
            return True
        finally:
            with self.lock:
                if future.done() and self.drawing.get(run) is future:
                    del self.drawing[run]
        return False

    def _draw(self, run: str, moment: Moment, round: int, future: Future[RunFigures]) -> None:
        try:
            with self.turn:
                found = drawn(RunView(self.operator.run_record(run)), moment, round, self.pictures)
        except Exception as error:
            future.set_exception(error)
            return
        with self.lock:
            self.made[run] = found
            self.made.move_to_end(run)
            while len(self.made) > KEPT:
                self.made.popitem(last=False)
        future.set_result(found)


def drawn(record: RunView, moment: Moment, round: int, pictures: Pictures) -> RunFigures:
    """The figures of a run record."""
    sections = pictures.of_report(lambda: [section(record) for section in SECTIONS])
    return RunFigures(moment, round, sections, summary.noise_lines(record))
