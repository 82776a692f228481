"""The runs that the server offered: what each asks and would send, the site's decision, own scores, and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.client.policy.approval import Offer
from protofed.client.state.own_scores import FOLDER, OwnScores
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import ConfigError, PolicyViolationError, ProtofedError
from protofed.deploy.audit.reader import rounds_text
from protofed.deploy.pages.hospital.left import round_lines
from protofed.deploy.pages.hospital.overview import require_examiner, said, started
from protofed.deploy.pages.hospital.site import HospitalSite
from protofed.deploy.pages.pictures import Picture
from protofed.deploy.pages.shell import Page, find_shell, read_form
from protofed.deploy.site import orders
from protofed.deploy.site.offered_runs import all_runs, offered_run, parse_offer
from protofed.deploy.site.own_scores import ScoresView, meaning

SHOWN: Final = 25
SHOWN_SCORES: Final = 50  # rounds, the newest


@dataclass(frozen=True)
class HospitalRuns:
    """The pages below `/runs`."""

    site: HospitalSite

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [
            Route("/runs", self.list),
            Route("/runs/{run}", self.show),
            Route("/runs/{run}/approve", self.ask_approve),
            Route("/runs/{run}/approve", self.approve, methods=["POST"]),
            Route("/runs/{run}/check", self.checked),
            Route("/runs/{run}/check", self.check, methods=["POST"]),
            Route("/runs/{run}/leave", self.ask_leave),
            Route("/runs/{run}/leave", self.leave, methods=["POST"]),
        ]

    def list(self, request: Request) -> Response:
        """All offered runs, the newest first."""
        rows = list(reversed(all_runs(self.site.approvals)))
        page = Page.of(request.query_params.get("page", ""), len(rows), SHOWN)
        return find_shell(request).page(request, "runs.html.j2", {"rows": page.cut(rows), "page": page})

    def show(self, request: Request) -> Response:
        """One run."""
        offer = self._offer(request)
        return find_shell(request).page(
            request,
            "run.html.j2",
            {
                **self._decided(offer),
                **self._preview(offer),
                **self._scores(offer),
                "log": self.site.log.look(),
                "gaps": self.site.log.gaps(),
                "last": round_lines(self.site.log.leavings(offer.run))[:SHOWN],
                "bytes_picture": self._bytes_picture(offer.run),
            },
        )

    def ask_approve(self, request: Request) -> Response:
        """Ask before the run is approved, with what it would send."""
        offer = self._offer(request)
        return find_shell(request).page(request, "approve.html.j2", {**self._decided(offer), **self._preview(offer)})

    def approve(self, request: Request) -> Response:
        """Approve the recipe that the person has seen."""
        offer = self._offer(request)
        if read_form(request).get("recipe") != offer.digest:
            raise ConfigError("the server has changed the recipe since this page was loaded: read it again")
        try:
            self.site.check_allowed(offer)
        except PolicyViolationError as error:
            raise ConfigError(f"this site's policy refuses the run, and nothing was approved: {error}") from error
        noticed = orders.approve(self.site.state, offer)
        return self._done(request, f"approved: run {offer.run}; {orders.noticed_text(noticed)}")

    def ask_leave(self, request: Request) -> Response:
        """Ask before the site denies the run, or leaves it."""
        return find_shell(request).page(request, "leave.html.j2", self._decided(self._offer(request)))

    def leave(self, request: Request) -> Response:
        """Deny the run; or leave it, if the site took part."""
        offer = self._offer(request)
        if orders.is_out(self.site.approvals, offer):
            return self._done(request, f"this site was out of run {offer.run} already")
        word = "left" if self.site.approvals.took_part(offer.run) else "denied"
        noticed = orders.leave(self.site.state, offer)
        text = f"{word}: run {offer.run}; this site sends nothing more for it until it is approved again"
        return self._done(request, f"{text}; {orders.noticed_text(noticed)}")

    def checked(self, request: Request) -> Response:
        """What the newest check of the data for the run has found."""
        offer, examiner = self._offer(request), self.site.examiner
        examination = None if examiner is None else examiner.newest(offer.run)
        context = {
            "offer": offer,
            "has_settings": examiner is not None,
            "found": examination,
            "going": None if examiner is None else examiner.going(),
            "outdated": examination is not None and examination.recipe not in ("", offer.digest),
            "said": said(examination),
        }
        return find_shell(request).page(request, "check.html.j2", context)

    def check(self, request: Request) -> Response:
        """Check the data against the run's recipe, as `protofed client check` does."""
        offer = self._offer(request)
        return started(request, require_examiner(self.site).begin(offer.run), f"/runs/{offer.run}/check")

    def _done(self, request: Request, text: str) -> Response:
        return find_shell(request).done(f"/runs/{request.path_params['run']}", text)

    def _offer(self, request: Request) -> Offer:
        return self.site.approvals.offer(request.path_params["run"])

    def _decided(self, offer: Offer) -> Mapping[str, Any]:
        approvals = self.site.approvals
        row = offered_run(approvals, offer)
        facts = {"out": orders.is_out(approvals, offer), "took_part": approvals.took_part(offer.run)}
        return {"row": row, "offer": offer, "policy": self.site.policy_name, **facts}

    def _preview(self, offer: Offer) -> Mapping[str, Any]:
        """What the run would send, or why that cannot be said."""
        try:
            return {"plan": self.site.preview(offer), "plan_problem": ""}
        except ProtofedError as error:
            return {"plan": None, "plan_problem": str(error)}

    def _scores(self, offer: Offer) -> Mapping[str, Any]:
        run = offer.run
        try:
            stored, sent = OwnScores(self.site.state / FOLDER), self.site.log.handed_in(run)
            view = ScoresView(stored.rounds(run) if run in stored.runs() else [], sent)
        except ProtofedError as error:
            return {
                "scores": None,
                "scores_problem": str(error),
                "handed_in": [],
                "scores_picture": None,
                "has_majority": False,
            }
        from protofed.deploy.pages.hospital import figures  # with matplotlib, which takes a second

        sketch = figures.scores_sketch(view, self._majority(offer))
        # The description has the first and the last value of each line, and what left; between them nothing changes.
        key = None if sketch is None else ("scores", run, len(view.rounds), view.rounds[-1].at, sketch.description)
        picture = None if sketch is None else self.site.pictures.of(key, sketch)
        return {
            "scores": view,
            "about_scores": [(name, meaning(name), _left(name, view)) for name in view.names],
            "newest_scores": list(reversed(view.rounds))[:SHOWN_SCORES],
            "more_scores": max(0, len(view.rounds) - SHOWN_SCORES),
            "scores_problem": "",
            "handed_in": [*sent.lines(), *filter(None, [sent.gap])],
            "scores_picture": picture,
            "has_majority": sketch is not None and "commonest" in sketch.description,
        }

    def _majority(self, offer: Offer) -> Mapping[str, float]:
        """The accuracy of always naming the commonest class, by prefix of scores, as the check of the data counted."""
        examination = None if self.site.examiner is None else self.site.examiner.newest(offer.run)
        if examination is None or examination.data is None or examination.recipe != offer.digest:
            return {}
        if (recipe := parse_offer(offer)).task.name != CLASSIFICATION:
            return {}
        own, shared = (examination.data["taken"].get(name) for name in ("own_test_set", "tests_on"))
        if recipe.evaluation.personal_test_images is not None:
            shared = None  # own models are scored on a sample of it
        sets = {"personal": shared, "personal.local": own, "global.local": own}
        return {prefix: max(counts) / sum(counts) for prefix, counts in sets.items() if counts and sum(counts)}

    def _bytes_picture(self, run: str) -> Picture | None:
        from protofed.deploy.pages.hospital import figures

        parts = self.site.log.by_round(run)
        sketch = figures.by_round_sketch(run, parts)
        return None if sketch is None else self.site.pictures.of(("bytes", run, sketch.description), sketch)


def _left(name: str, view: ScoresView) -> str:
    """In which rounds a score was sent, alone or in a secure aggregation, in words; empty: it stayed."""
    alone, aggregated = view.alone(name), view.aggregated(name)
    words = (
        [f"rounds {rounds_text(alone)}"] if alone else ["more were sent than the log lists"] if view.unlisted else []
    )
    if aggregated:
        words.append(f"in a secure aggregation, as part of a mean over sites: rounds {rounds_text(aggregated)}")
    return "; ".join(words) or ("the log's older files are in an archive" if view.sent.gap else "")
