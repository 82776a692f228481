"""A run: how it goes, what became of every site's task, its scores, and the orders that it takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.config.recipe import MOST_ROUNDS
from protofed.common.errors import ConfigError, short
from protofed.deploy.console.run_words import NOISE_KEEPS, best_sentence, kept_sentence, summed_sentence, warning_lines
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.rollback import SITES_GO, STANDARD, rollback_of
from protofed.deploy.operator.snapshot import ENDED, FAILED, RunSnapshot
from protofed.deploy.operator.snapshot_builder import ServerReply, WatchHistory, best_snapshot, snapshot
from protofed.deploy.pages.formats import Page
from protofed.deploy.pages.shell import form_of, shell_of
from protofed.deploy.report.rounds import TASK_STATUSES
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
        shown = snapshot(ServerReply(detail, runs=runs), WatchHistory().after(ServerReply(detail)), now)
        context = {
            "run": shown,
            "said": _said(shown),
            "waits": shown.waiting.sentence if shown.waiting else "",
            "blocked": shown.waiting is not None and shown.waiting.blocked,
            "warnings": warning_lines(shown.model_warnings, "`protofed report`"),
            "remarks": _remarks(shown, detail),
        }
        return shell_of(request).page(request, "run.html.j2", {**context, **self._table(detail, page)})

    def rounds(self, request: Request) -> Response:
        """Older rounds, in one call: a server of a long run works for tenths of a second on each."""
        asked = Page.of(request.query_params.get("page", ""), MOST_ROUNDS, ROUNDS_SHOWN)
        detail = self.operator.show(_name(request), ROUNDS_SHOWN, skip=asked.before)
        page = Page.of(str(asked.number), detail.attempts, ROUNDS_SHOWN)
        return shell_of(request).page(request, "rounds.html.j2", self._table(detail, page))

    def round(self, request: Request) -> Response:
        """Every site's task in one attempt at a round."""
        run = _name(request)
        return shell_of(request).page(request, "round.html.j2", {"run": run, "row": self._attempt(request)})

    def verify(self, request: Request) -> Response:
        """Have the server compute the state of an attempt again, as `protofed runs verify` does for all."""
        shell, run, row = shell_of(request), _name(request), self._attempt(request)
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
        return shell_of(request).page(request, "abort.html.j2", {"info": self._info(request)})

    def abort(self, request: Request) -> Response:
        """End the run."""
        info = self.operator.abort(_name(request), form_of(request).get("reason") or "aborted by the operator")
        return self._done(request, f"{info.run}: {info.status} in round {info.round}: {info.reason}")

    def ask_rollback(self, request: Request) -> Response:
        """Ask for the round."""
        detail = self.operator.show(_name(request), 1)
        best = best_snapshot(detail)
        context = {"info": detail.info, "best": "" if best is None else best_sentence(best)}
        context |= {"most": STANDARD, "sites_go": SITES_GO}
        return shell_of(request).page(request, "rollback.html.j2", context)

    def rollback(self, request: Request) -> Response:
        """Continue from an earlier round."""
        form = form_of(request)
        planned = rollback_of(self.operator, _name(request), form.get("round", ""))
        planned.check(force=form.get("force") == "yes", by="tick the box")
        info = self.operator.roll_back(planned.run, planned.to)
        return self._done(request, f"{info.run}: continues after round {planned.to} ({info.status})")

    def _done(self, request: Request, text: str) -> Response:
        return shell_of(request).done(f"/runs/{_name(request)}", text)

    def _info(self, request: Request) -> pb.RunInfo:
        return self.operator.show(_name(request), 1).info

    def _table(self, detail: pb.RunDetail, page: Page) -> Mapping[str, object]:
        """A page of attempts for a template."""
        last = detail.attempts - page.before
        first = max(0, last - page.rows)
        rounds = list(detail.rounds)[: last - first]  # of the oldest page, a reply has newer ones, too
        if len(rounds) < last - first:  # where there are hundreds of sites, a reply has fewer
            rounds = self.operator.attempts(detail.info.run, first, last - first)
        shown = {"rounds": list(reversed(rounds)), "page": page, "calendar": calendar(rounds)}
        return {"info": detail.info, "ended": detail.info.status in ENDED, **shown}

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
    if summed := [score.sites for score in detail.scores if score.summed]:
        lines.append(summed_sentence(max(summed)))
    if run.noisy:
        lines.append(NOISE_KEEPS)
    elif run.keeping:
        lines.append(kept_sentence(run.keeping))
    return lines


WORDS: Final[Mapping[str, str]] = {
    "reported": "reported",
    "started": "works on it",
    "invited": "invited",
    "set-aside": "set aside",
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
    found = {one.status for marks in rows.values() for one in marks}
    return Calendar(
        rounds, rows, [(sign(status), WORDS[status]) for status in WORDS if status in found], troubles(rounds)
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
    """Tasks that failed, were late or set aside, and refused updates, newest first."""
    found = []
    for row in reversed(rounds):
        for task in row.sites:
            if task.task_status in FAILED:
                found.append(_trouble(row, task, task.task_status, task.reason))
            found += [_trouble(row, task, "refused", refusal) for refusal in task.refusals]
    return found


def _trouble(row: pb.RoundInfo, task: pb.SiteTask, status: str, reason: str) -> Trouble:
    return Trouble(row.round, row.attempt, task.site, task.kind, status, printable(reason))
