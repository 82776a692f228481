"""gRPC service `Operator`: each call is a line around `OperatorApi`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from protofed.common.protocol.scores import Spread
from protofed.protos.v1 import operator_pb2 as pb
from protofed.protos.v1 import operator_pb2_grpc as rpc
from protofed.server.access.authorization import AccessRules
from protofed.server.operator.downloads import DownloadChunk
from protofed.server.operator.service import OperatorApi, PartnersReport, RoundReport, RunReport, SiteReport
from protofed.server.rounds.machine.waiting import Waiting
from protofed.server.rounds.scores.model_warnings import ModelWarning
from protofed.server.rpc.executors import Executors
from protofed.server.storage.rows import CertificateRow

T = TypeVar("T")
# In one answer, so that it stays below gRPC's message limit; the tasks of at least one round are always sent.
MAX_ROUNDS, MAX_TASKS = 200, 10_000


class OperatorService(rpc.OperatorServicer):
    """Calls of operators; what each does is documented in `operator.proto` and at `OperatorApi`."""

    def __init__(self, operator: OperatorApi, executors: Executors, access: AccessRules) -> None:
        self._operator, self._executors, self._access = operator, executors, access

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operator.start(request.recipe, force=request.force)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[_run(report) for report in await self._control(self._operator.runs)])

    async def ShowRun(self, request: pb.ShowRunRequest, context: Any) -> pb.RunDetail:
        report = await self._control(lambda: self._operator.run(request.run))
        count = min(request.count or MAX_ROUNDS, MAX_ROUNDS)
        rounds = await self._control(lambda: self._operator.rounds(request.run, request.first, count))
        warnings = await self._control(lambda: self._operator.model_warnings(request.run))
        scores = [_score(name, spread) for name, spread in report.overview.scores.items()]
        best = await self._control(lambda: self._operator.best(request.run))
        return pb.RunDetail(
            info=_run(report),
            rounds=[_round(attempt) for attempt in _page(rounds, newest=request.first < 0)],
            scores=scores,
            scored_round=report.overview.scored_round,
            attempts=report.overview.attempts,
            best=None if best is None else _best(best),
            model_warnings=[_warning(warning) for warning in warnings],
        )

    async def PauseRun(self, request: pb.RunName, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operator.pause(request.run, paused=True, by=self._by(context))))

    async def ResumeRun(self, request: pb.RunName, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operator.pause(request.run, paused=False, by=self._by(context))))

    async def AbortRun(self, request: pb.AbortRunRequest, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operator.abort(request.run, request.reason, self._by(context))))

    async def RollBackRun(self, request: pb.RollBackRunRequest, context: Any) -> pb.RunInfo:
        return _run(
            await self._control(lambda: self._operator.roll_back(request.run, request.round, self._by(context)))
        )

    async def VerifyRound(self, request: pb.VerifyRoundRequest, context: Any) -> pb.VerifyRoundResponse:
        verify = self._operator.verify
        verified = await self._read(lambda: verify(request.run, request.round, request.attempt))
        return pb.VerifyRoundResponse(
            finding=verified.finding,
            published=verified.published,
            recomputed=verified.recomputed or "",
            reason=verified.reason,
        )

    async def GetRunRecord(self, request: pb.GetRunRecordRequest, context: Any) -> pb.DownloadChunk:
        downloads = self._operator.downloads
        return _chunk(await self._read(lambda: downloads.run_record(request.run, request.offset, request.digest)))

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.DownloadChunk:
        downloads, number = self._operator.downloads, request.round if request.HasField("round") else None
        return _chunk(await self._read(lambda: downloads.state(request.run, number, request.offset)))

    async def ListSites(self, request: pb.ListSitesRequest, context: Any) -> pb.ListSitesResponse:
        return pb.ListSitesResponse(sites=[_site(report) for report in await self._control(self._operator.sites)])

    async def ExcludeSite(self, request: pb.ExcludeSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(
            await self._control(lambda: self._operator.exclude(request.site, request.reason, self._by(context)))
        )

    async def AdmitSite(self, request: pb.AdmitSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(await self._control(lambda: self._operator.admit(request.site, self._by(context))))

    async def ForgetSite(self, request: pb.ForgetSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(await self._control(lambda: self._operator.forget(request.site, self._by(context))))

    async def RegroupSite(self, request: pb.RegroupSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(await self._control(lambda: self._operator.regroup(request.site, self._by(context))))

    async def ShowConsortium(self, request: pb.ShowConsortiumRequest, context: Any) -> pb.ConsortiumInfo:
        return _partners(await self._control(lambda: self._operator.consortium(request.coordinator)))

    async def OfferConsortium(self, request: pb.OfferConsortiumRequest, context: Any) -> pb.ConsortiumInfo:
        offer, by = self._operator.offer_consortium, self._by(context)
        return _partners(await self._control(lambda: offer(request.consortium, by)))

    async def RegisterCertificate(self, request: pb.RegisterCertificateRequest, context: Any) -> pb.CertificateInfo:
        register = self._operator.register
        row = await self._control(lambda: register(request.pem, request.roles, renewal=request.renewal))
        return self._certificate(row)

    async def RevokeCertificate(
        self, request: pb.RevokeCertificateRequest, context: Any
    ) -> pb.ListCertificatesResponse:
        revoked = await self._control(
            lambda: self._operator.revoke(request.certificate, request.reason, self._by(context))
        )
        return pb.ListCertificatesResponse(certificates=map(self._certificate, revoked))

    async def ListCertificates(self, request: pb.ListCertificatesRequest, context: Any) -> pb.ListCertificatesResponse:
        return pb.ListCertificatesResponse(certificates=map(self._certificate, self._operator.certificates.all()))

    def _by(self, context: Any) -> str:
        """The calling operator's name; empty in plain text."""
        return self._access.peer(context.auth_context()).name

    def _certificate(self, row: CertificateRow) -> pb.CertificateInfo:
        fields = {**asdict(row), "revoked_at": row.revoked_at or 0.0, "reason": row.reason or ""}
        return pb.CertificateInfo(**fields, status=self._operator.certificates.status(row))

    async def _control(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executors.control, function)

    async def _read(self, function: Callable[[], T]) -> T:
        """For slow reads, which neither the coordinator, nor an aggregation, nor a site must wait for."""
        return await asyncio.get_running_loop().run_in_executor(self._executors.operators, function)


def _page(rounds: list[RoundReport], *, newest: bool) -> list[RoundReport]:
    """The first attempts (or the newest) whose tasks fit into one answer, in their order; at least one."""
    order, tasks_left = rounds[::-1] if newest else rounds, MAX_TASKS
    page: list[RoundReport] = []
    for report in order:
        tasks_left -= len(report.tasks)
        if page and tasks_left < 0:
            break
        page.append(report)
    return page[::-1] if newest else page


def _score(name: str, spread: Spread) -> pb.Score:
    aggregated = spread.worst is None
    std, worst = (math.nan if value is None else value for value in (spread.std, spread.worst))  # 0 would be a value
    return pb.Score(name=name, mean=spread.mean, std=std, worst=worst, sites=spread.sites, aggregated=aggregated)


def _run(report: RunReport) -> pb.RunInfo:
    overview, row = report.overview, report.row
    return pb.RunInfo(
        run=row.run,
        method=report.recipe.method.name if report.recipe else "",
        status=report.status,
        phase=overview.phase,
        round=overview.round,
        rounds=report.recipe.rounds if report.recipe else 0,
        invited=overview.invited,
        reported=overview.reported,
        degraded=overview.degraded,
        abandoned=overview.abandoned,
        rolled_back=overview.rolled_back,
        began_at=row.began_at,
        ended_at=row.ended_at or 0.0,
        reason=row.reason or "",
        received_bytes=overview.received,
        sent_bytes=overview.sent,
        deadline_s=report.recipe.federation.deadline_s if report.recipe else 0.0,
        waiting=None if report.waiting is None else _waiting(report.waiting),
        unmet=report.unmet,
        noisy=report.recipe is not None and report.recipe.plan.dp is not None,
    )


def _waiting(waiting: Waiting) -> pb.Waiting:
    fields = {**asdict(waiting), "missing": [pb.MissingSite(**asdict(site)) for site in waiting.missing]}
    for name in ("requested", "reported", "step", "group", "newcomers", "regroup", "why"):  # in the text
        del fields[name]
    return pb.Waiting(**fields, text=waiting.text)


def _best(best: Mapping[str, Any]) -> pb.BestRound:
    kept_round = -1 if best["kept"] is None else best["kept"]
    return pb.BestRound(round=best["round"], score=best["score"], value=best["value"], kept=kept_round)


def _warning(warning: ModelWarning) -> pb.ModelWarning:
    return pb.ModelWarning(code=warning.code.value, round=warning.round, site=warning.site or "", text=warning.text)


def _round(report: RoundReport) -> pb.RoundInfo:
    row = report.row
    tasks = [
        pb.SiteTask(
            site=task.task.site,
            kind=task.task.label,
            task_status=task.task.task_status,
            reason=task.task.reason,
            refusals=[f"{update.code or update.verdict}: {update.reason}" for update in task.refusals],
        )
        for task in report.tasks
    ]
    return pb.RoundInfo(
        round=row.round,
        attempt=row.attempt,
        outcome=report.outcome,
        reason=row.abandoned or "",
        opened_at=row.opened_at,
        closed_at=row.closed_at or 0.0,
        state=row.state or "",
        sites=tasks,
    )


def _chunk(chunk: DownloadChunk) -> pb.DownloadChunk:
    return pb.DownloadChunk(data=chunk.data, total_bytes=chunk.total, digest=chunk.digest, round=chunk.round)


def _partners(report: PartnersReport) -> pb.ConsortiumInfo:
    return pb.ConsortiumInfo(
        offered="" if report.offered is None else report.offered.document,
        proposed="" if report.proposed is None else report.proposed.document,
        problem=report.problem,
        confirmed=report.confirmed,
        waiting=report.waiting,
    )


def _site(report: SiteReport) -> pb.SiteInfo:
    progress = report.progress
    share = None if progress is None else progress.share
    return pb.SiteInfo(
        site=report.site,
        roles=report.roles,
        status=report.status,
        activity_text=report.activity_text,
        progress_age_s=-1.0 if report.progress_age_s is None else report.progress_age_s,
        excluded=report.excluded,
        certificate_until=report.certificate_until,
        progress=-1.0 if share is None else share,
        bytes_moved=0 if progress is None else progress.bytes_moved,
        telemetry={} if progress is None else progress.telemetry,
        group=report.group,
    )
