"""A run: starting it, how it goes, its scores and orders, and the pictures of its report.

The pictures are drawn from the run's record. For a long run the server needs seconds to make it. So the pictures have
their own page, which starts the drawing and follows it. They are drawn once for each published round.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.config.recipe import MAX_ROUNDS, Recipe, parse
from protofed.common.config.toml_files import parse_toml
from protofed.common.errors import ConfigError, short, unknown
from protofed.common.ids import check_id
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.rollback import SITES_GO, STANDARD, plan_rollback
from protofed.deploy.operator.snapshot import ENDED, RunSnapshot
from protofed.deploy.operator.snapshot_builder import ServerReply, WatchHistory, best_snapshot, failures, snapshot
from protofed.deploy.operator.tables import start_notes
from protofed.deploy.pages.pictures import Picture, Pictures
from protofed.deploy.pages.shell import FRAGMENT, Page, find_shell, read_form
from protofed.deploy.report import document, models, rounds, scores, summary
from protofed.deploy.report.rounds import TASK_STATUSES
from protofed.deploy.run_view import (
    NOISE_KEEPS,
    RunView,
    aggregated_sentence,
    best_sentence,
    kept_sentence,
    warning_lines,
)
from protofed.deploy.shipped import read_overrides, with_overrides
from protofed.deploy.site.plan_request import planned_lines
from protofed.deploy.tables import printable
from protofed.protos.v1 import operator_pb2 as pb

ROUNDS_SHOWN: Final = 20
VERIFIED: Final[Mapping[str, str]] = {  # findings that are no faults
    "same": "computed again from its updates, the state is the same",
    "not-kept": "its updates are not kept any more, and so its state cannot be computed again",
}


@dataclass(frozen=True)
class CoordinatorRuns:
    """The pages below `/runs/`."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/runs/{run}", self.show),
            Route("/runs/{run}/rounds", self.rounds),
            Route("/runs/{run}/rounds/{round:int}/{attempt:int}", self.round),
            Route("/runs/{run}/rounds/{round:int}/{attempt:int}/verify", self.verify, methods=["POST"]),
            Route("/runs/{run}/pause", self.pause, methods=["POST"]),
            Route("/runs/{run}/resume", self.resume, methods=["POST"]),
            Route("/runs/{run}/abort", self.ask_abort),
            Route("/runs/{run}/abort", self.abort, methods=["POST"]),
            Route("/runs/{run}/rollback", self.ask_rollback),
            Route("/runs/{run}/rollback", self.rollback, methods=["POST"]),
        ]

    def show(self, request: Request) -> Response:
        """A run, with its newest rounds."""
        run = _name(request)
        detail = self.operator.show(run, ROUNDS_SHOWN)
        page = Page(1, detail.attempts, ROUNDS_SHOWN)
        # One history of this reply alone: how scores changed since the last look is for `runs watch`.
        now, runs = time.time(), self.operator.runs() if detail.info.status == "queued" else []
        view = snapshot(ServerReply(detail, runs=runs), WatchHistory().after(ServerReply(detail)), now)
        context = {
            "run": view,
            "said": _said(view),
            "waits": view.waiting.sentence if view.waiting else "",
            "blocked": view.waiting is not None and view.waiting.blocked,
            "warnings": warning_lines(view.model_warnings, "`protofed report`"),
            "remarks": _remarks(view, detail),
        }
        return find_shell(request).page(request, "run.html.j2", {**context, **self._table(detail, page)})

    def rounds(self, request: Request) -> Response:
        """Older rounds, in one call: a server of a long run works for tenths of a second on each."""
        requested = Page.of(request.query_params.get("page", ""), MAX_ROUNDS, ROUNDS_SHOWN)
        detail = self.operator.show(_name(request), ROUNDS_SHOWN, skip=requested.before)
        page = Page.of(str(requested.number), detail.attempts, ROUNDS_SHOWN)
        return find_shell(request).page(request, "rounds.html.j2", self._table(detail, page))

    def round(self, request: Request) -> Response:
        """Every site's task in one attempt at a round."""
        run = _name(request)
        return find_shell(request).page(request, "round.html.j2", {"run": run, "row": self._attempt(request)})

    def verify(self, request: Request) -> Response:
        """Have the server compute the state of an attempt again, as `protofed runs verify` does for all."""
        shell, run, row = find_shell(request), _name(request), self._attempt(request)
        reply = self.operator.verify(run, row)
        why = reply.reason or f"published {reply.published[:16]}…, came out as {reply.recomputed[:16]}…"
        text = f"round {row.round}: {VERIFIED.get(reply.finding, printable(f'{reply.finding}: {why}'))}"
        shell.access.notify(text, error=reply.finding not in VERIFIED)
        return shell.done(f"/runs/{run}/rounds/{row.round}/{row.attempt}")

    def pause(self, request: Request) -> Response:
        """Order a pause."""
        info = self.operator.pause(_name(request))
        return self._done(request, f"{info.run}: {info.status}, no round opens after round {info.round}")

    def resume(self, request: Request) -> Response:
        """Order that it goes on."""
        info = self.operator.resume(_name(request))
        return self._done(request, f"{info.run}: {info.status}")

    def ask_abort(self, request: Request) -> Response:
        """Ask before the run is ended."""
        return find_shell(request).page(request, "abort.html.j2", {"info": self._info(request)})

    def abort(self, request: Request) -> Response:
        """End the run."""
        info = self.operator.abort(_name(request), read_form(request).get("reason") or "aborted by the operator")
        return self._done(request, f"{info.run}: {info.status} in round {info.round}: {info.reason}")

    def ask_rollback(self, request: Request) -> Response:
        """Ask for the round."""
        detail = self.operator.show(_name(request), 1)
        best = best_snapshot(detail)
        context = {"info": detail.info, "best": "" if best is None else best_sentence(best)}
        context |= {"most": STANDARD, "sites_go": SITES_GO}
        return find_shell(request).page(request, "rollback.html.j2", context)

    def rollback(self, request: Request) -> Response:
        """Continue from an earlier round."""
        form = read_form(request)
        planned = plan_rollback(self.operator, _name(request), form.get("round", ""))
        planned.check(force=form.get("force") == "yes", by="tick the box")
        info = self.operator.roll_back(planned.run, planned.to)
        return self._done(request, f"{info.run}: continues after round {planned.to} ({info.status})")

    def _done(self, request: Request, text: str) -> Response:
        return find_shell(request).done(f"/runs/{_name(request)}", text)

    def _info(self, request: Request) -> pb.RunInfo:
        return self.operator.show(_name(request), 1).info

    def _table(self, detail: pb.RunDetail, page: Page) -> Mapping[str, object]:
        """A page of attempts for a template."""
        last = detail.attempts - page.before
        first = max(0, last - page.rows)
        rounds = list(detail.rounds)[: last - first]  # of the oldest page, a reply has newer ones, too
        if len(rounds) < last - first:  # where there are hundreds of sites, a reply has fewer
            rounds = self.operator.attempts(detail.info.run, first, last - first)
        table = {"rounds": list(reversed(rounds)), "page": page, "calendar": calendar(rounds)}
        return {"info": detail.info, "ended": detail.info.status in ENDED, **table}

    def _attempt(self, request: Request) -> pb.RoundInfo:
        """The attempt at a round that a path names.

        Raises:
            ConfigError: there is none.
        """
        run, number, attempt = _name(request), request.path_params["round"], request.path_params["attempt"]
        at = max(0, number - 1)  # its index is at least that: every round before it had an attempt, but for round 0
        while rows := self.operator.attempts(run, at, ROUNDS_SHOWN):
            for row in rows:
                if (row.round, row.attempt) == (number, attempt):
                    return row
            at += len(rows)
        raise ConfigError(f"run '{short(run)}' has no attempt {attempt} at round {number}")


def _name(request: Request) -> str:
    run: str = request.path_params["run"]
    return run


def _said(run: RunSnapshot) -> str:
    """What a screen reader says of a change."""
    return f"{run.run}: {run.status}, round {run.round} of {run.rounds}, {run.done} published"


def _remarks(run: RunSnapshot, detail: pb.RunDetail) -> list[str]:
    """What belongs below the scores."""
    lines = [] if run.best is None else [best_sentence(run.best)]
    if aggregated := [score.sites for score in detail.scores if score.aggregated]:
        lines.append(aggregated_sentence(max(aggregated)))
    if run.noisy:
        lines.append(NOISE_KEEPS)
    elif run.keeping:
        lines.append(kept_sentence(run.keeping))
    return lines


WORDS: Final[Mapping[str, str]] = {
    "reported": "reported",
    "started": "works on it",
    "invited": "invited",
    "rejected": "rejected",
    "failed": "failed",
    "late": "late",
    "not-needed": "not needed",
    "refused": "an update was refused",
}


@dataclass(frozen=True)
class Mark:
    """One site in one attempt; `status` is empty where it was not invited."""

    status: str
    reason: str

    @property
    def sign(self) -> str:
        """One character."""
        return sign(self.status)

    @property
    def word(self) -> str:
        """The status, and why, for who points at it and for screen readers."""
        return WORDS.get(self.status, self.status) + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Trouble:
    """A task that did not count, or an update that was refused."""

    round: int
    attempt: int
    site: str
    kind: str
    status: str
    reason: str


@dataclass(frozen=True)
class Calendar:
    """Rounds across, sites down.

    Attributes:
        rows: by site, a mark for each of `rounds`.
        legend: (sign, word) of the statuses that occur.
        troubles: newest first.
    """

    rounds: Sequence[pb.RoundInfo]
    rows: Mapping[str, Sequence[Mark]]
    legend: Sequence[tuple[str, str]]
    troubles: Sequence[Trouble]


def calendar(rounds: Sequence[pb.RoundInfo]) -> Calendar:
    """Of the tasks that train; what failed of the others, too, is among the troubles."""
    by_round = [{task.site: mark(task) for task in row.sites if task.kind in ("initialise", "fit")} for row in rounds]
    names = sorted({site for row in by_round for site in row})
    rows = {site: [row.get(site, Mark("", "")) for row in by_round] for site in names}
    statuses = {one.status for marks in rows.values() for one in marks}
    return Calendar(
        rounds, rows, [(sign(status), WORDS[status]) for status in WORDS if status in statuses], troubles(rounds)
    )


def sign(status: str) -> str:
    """The sign of a task's status, as a report has it; none where a site was not invited."""
    return TASK_STATUSES[status][0] if status in TASK_STATUSES else "?" if status else ""


def mark(task: pb.SiteTask) -> Mark:
    """A task's mark. A refused update does not fail its task: the site may send another."""
    reason = printable("; ".join([*([task.reason] if task.reason else []), *task.refusals]))
    refused = bool(task.refusals) and task.task_status in ("invited", "started")
    return Mark("refused" if refused else task.task_status, reason)


def troubles(rounds: Sequence[pb.RoundInfo]) -> list[Trouble]:
    """Tasks that failed, were late or rejected, and refused updates, newest first."""
    return [
        Trouble(row.round, row.attempt, task.site, task.kind, status, reason)
        for row in reversed(rounds)
        for task in row.sites
        for status, reason in failures(task)
    ]


FIELDS = ("recipe", "toml", "name", "changes", "force")


@dataclass(frozen=True)
class StartPages:
    """The page `/start`: a form, then what it would start, then the order."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [Route("/start", self.ask), Route("/start", self.answer, methods=["POST"])]

    def ask(self, request: Request) -> Response:
        """The empty form; a link may name a recipe."""
        return self._form(request, {"recipe": request.query_params.get("recipe", "")})

    def answer(self, request: Request) -> Response:
        """Check the form, and start the run if it was confirmed; else show what that would do, or what is wrong."""
        form = read_form(request)
        try:
            recipe = read_recipe(form)
            costs, notes = planned_lines(recipe), start_notes(recipe)
            if form.get("do") == "start":
                info = self.operator.start(recipe, force=form.get("force") == "yes")
                unmet = "".join(f"\nwarning: {warning}" for warning in info.unmet)
                return find_shell(request).done(f"/runs/{info.run}", f"{info.run}: {info.status}{unmet}")
        except ConfigError as error:
            return self._form(request, form, problem=str(error))
        if form.get("do") == "change":
            return self._form(request, form)
        context = {
            "recipe": recipe,
            "costs": costs,
            "notes": notes,
            "values": {key: form.get(key, "") for key in FIELDS},
        }
        return find_shell(request).page(request, "start_check.html.j2", context)

    def _form(self, request: Request, form: Mapping[str, str], problem: str = "") -> Response:
        recipes = {name: shipped.what(file) for name, file in shipped.files("recipes").items()}
        values = {key: form.get(key, "") for key in FIELDS}
        status = 400 if problem else 200
        context = {"recipes": recipes, "values": values, "problem": problem}
        return find_shell(request).page(request, "start.html.j2", context, status=status)


def read_recipe(form: Mapping[str, str]) -> Recipe:
    """The recipe that a form names or has, with its changes.

    Raises:
        ConfigError: there is no recipe, there are two, or the recipe cannot be used. The text has the path of the key,
            and what was expected.
    """
    name, text = form.get("recipe", ""), form.get("toml", "")
    if bool(name) == bool(text):
        raise ConfigError("expected a recipe of the list, or a pasted one, and not both")
    if name and name not in shipped.files("recipes"):  # a path must not be read from a form
        raise unknown("recipe", name, shipped.files("recipes"))
    changes = read_overrides([line for line in form.get("changes", "").splitlines() if line.strip()])
    recipe = with_overrides(shipped.recipe(name) if name else pasted(text), changes)
    return recipe.model_copy(update={"name": check_id("run", form["name"])}) if form.get("name") else recipe


def pasted(text: str) -> Recipe:
    """A recipe as TOML text.

    Raises:
        ConfigError: it is no TOML, extends a file, or cannot be used.
    """
    table = parse_toml(text.replace("\r\n", "\n").lstrip("\ufeff"), "the pasted recipe is not TOML")
    if "extends" in table:
        raise ConfigError(
            "the pasted recipe extends another file, which is not here; paste what `protofed recipes FILE` prints"
        )
    return parse(table, Recipe, "the pasted recipe")


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
        figures: by run, the figures that were drawn last at the end.
        drawing: by run, figures in the making.
        turn: one record at a time: a server makes it for seconds.
    """

    operator: Operator
    pictures: Pictures
    figures: OrderedDict[str, RunFigures] = field(default_factory=OrderedDict)
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
            figures = self.figures.get(run)
        context = {"run": run, "found": figures, "drawing": drawing, "with_code": document.with_code}
        return find_shell(request).page(request, "figures.html.j2", context)

    def _begin(self, run: str) -> None:
        """Have the figures of the newest round drawn, unless they are there or in the making."""
        detail = self.operator.show(run, 1)
        moment = (detail.attempts, detail.scored_round, detail.info.status)
        with self.lock:
            known = self.figures.get(run)
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
                figures = drawn(RunView(self.operator.run_record(run)), moment, round, self.pictures)
        except Exception as error:
            future.set_exception(error)
            return
        with self.lock:
            self.figures[run] = figures
            self.figures.move_to_end(run)
            while len(self.figures) > KEPT:
                self.figures.popitem(last=False)
        future.set_result(figures)


def drawn(record: RunView, moment: Moment, round: int, pictures: Pictures) -> RunFigures:
    """The figures of a run record."""
    sections = pictures.of_report(lambda: [section(record) for section in SECTIONS])
    return RunFigures(moment, round, sections, summary.noise_lines(record))
