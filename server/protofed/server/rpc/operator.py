"""The operator's wire as the server sees it: each call a line around `OperatorApi`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from protofed.protos.v1 import operator_pb2 as pb
from protofed.protos.v1 import operator_pb2_grpc as rpc
from protofed.server.operator.downloads import DownloadChunk
from protofed.server.operator.service import OperatorApi, RoundReport, RunReport, SiteReport
from protofed.server.rpc.executors import Executors
from protofed.server.storage.rows import CertificateRow

T = TypeVar("T")
MOST_ROUNDS, MOST_FATES = 200, 10_000  # in one answer; of tasks, those of one round at least


class OperatorService(rpc.OperatorServicer):
    """Operator calls."""

    def __init__(self, operation: OperatorApi, threads: Executors) -> None:
        self._operation, self._threads = operation, threads

    async def StartRun(self, request: pb.StartRunRequest, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operation.start(request.recipe)))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        return pb.ListRunsResponse(runs=[_run(report) for report in await self._control(self._operation.runs)])

    async def ShowRun(self, request: pb.ShowRunRequest, context: Any) -> pb.RunDetail:
        report = await self._control(lambda: self._operation.run(request.run))
        count = min(request.count or MOST_ROUNDS, MOST_ROUNDS)
        rounds = await self._control(lambda: self._operation.rounds(request.run, request.first, count))
        scores = [
            pb.Score(name=name, mean=spread.mean, std=spread.std, worst=spread.worst, sites=spread.sites)
            for name, spread in report.view.scores.items()
        ]
        shown = [_round(one) for one in _page(rounds, newest=request.first < 0)]
        view = report.view
        counts = {"scored_round": view.scored_round, "attempts": view.attempts}
        return pb.RunDetail(info=_run(report), rounds=shown, scores=scores, **counts)

    async def PauseRun(self, request: pb.RunName, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operation.pause(request.run, paused=True)))

    async def ResumeRun(self, request: pb.RunName, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operation.pause(request.run, paused=False)))

    async def AbortRun(self, request: pb.AbortRunRequest, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operation.abort(request.run, request.reason)))

    async def RollBackRun(self, request: pb.RollBackRunRequest, context: Any) -> pb.RunInfo:
        return _run(await self._control(lambda: self._operation.roll_back(request.run, request.round)))

    async def VerifyRound(self, request: pb.VerifyRoundRequest, context: Any) -> pb.VerifyRoundResponse:
        verify = self._operation.verify
        found = await self._aside(lambda: verify(request.run, request.round, request.attempt))
        return pb.VerifyRoundResponse(
            finding=found.finding, published=found.published, recomputed=found.recomputed or "", reason=found.reason
        )

    async def GetRunRecord(self, request: pb.GetRunRecordRequest, context: Any) -> pb.DownloadChunk:
        documents = self._operation.documents
        return _piece(await self._aside(lambda: documents.run_record(request.run, request.offset, request.digest)))

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.DownloadChunk:
        documents, number = self._operation.documents, request.round if request.HasField("round") else None
        return _piece(await self._aside(lambda: documents.state(request.run, number, request.offset)))

    async def ListSites(self, request: pb.ListSitesRequest, context: Any) -> pb.ListSitesResponse:
        return pb.ListSitesResponse(sites=[_site(report) for report in await self._control(self._operation.sites)])

    async def ExcludeSite(self, request: pb.ExcludeSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(await self._control(lambda: self._operation.exclude(request.site, request.reason)))

    async def AdmitSite(self, request: pb.AdmitSiteRequest, context: Any) -> pb.SiteInfo:
        return _site(await self._control(lambda: self._operation.admit(request.site)))

    async def RegisterCertificate(self, request: pb.RegisterCertificateRequest, context: Any) -> pb.CertificateInfo:
        return self._certificate(await self._control(lambda: self._operation.register(request.pem)))

    async def RevokeCertificate(
        self, request: pb.RevokeCertificateRequest, context: Any
    ) -> pb.ListCertificatesResponse:
        gone = await self._control(lambda: self._operation.revoke(request.certificate, request.reason))
        return pb.ListCertificatesResponse(certificates=map(self._certificate, gone))

    async def ListCertificates(self, request: pb.ListCertificatesRequest, context: Any) -> pb.ListCertificatesResponse:
        return pb.ListCertificatesResponse(certificates=map(self._certificate, self._operation.certificates.all()))

    def _certificate(self, row: CertificateRow) -> pb.CertificateInfo:
        told = {**asdict(row), "revoked_at": row.revoked_at or 0.0, "reason": row.reason or ""}
        return pb.CertificateInfo(**told, status=self._operation.certificates.status(row))

    async def _control(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads.control, function)

    async def _aside(self, function: Callable[[], T]) -> T:
        """What reads only, and takes long: neither the coordinator nor an aggregation waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.transfer, function)


def _page(rounds: list[RoundReport], *, newest: bool) -> list[RoundReport]:
    """As many as one answer has room for, from the first one on, or the newest ones."""
    order, room = rounds[::-1] if newest else rounds, MOST_FATES
    page: list[RoundReport] = []
    for report in order:
        room -= len(report.tasks)
        if page and room < 0:
            break
        page.append(report)
    return page[::-1] if newest else page


def _run(report: RunReport) -> pb.RunInfo:
    view, row = report.view, report.row
    return pb.RunInfo(
        run=row.run,
        method=report.recipe.method.name if report.recipe else "",
        status=report.status,
        phase=view.phase,
        round=view.round,
        rounds=report.recipe.rounds if report.recipe else 0,
        invited=view.invited,
        reported=view.reported,
        degraded=view.degraded,
        abandoned=view.abandoned,
        rolled_back=view.rolled_back,
        began_at=row.began_at,
        ended_at=row.ended_at or 0.0,
        reason=row.reason or "",
        received_bytes=view.received,
        sent_bytes=view.sent,
        deadline_s=report.recipe.federation.deadline_s if report.recipe else 0.0,
    )


def _round(report: RoundReport) -> pb.RoundInfo:
    row = report.row
    tasks = [
        pb.SiteTask(
            site=task.task.site,
            kind=task.task.kind,
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


def _piece(cut: DownloadChunk) -> pb.DownloadChunk:
    return pb.DownloadChunk(data=cut.data, total_bytes=cut.total, digest=cut.digest, round=cut.round)


def _site(report: SiteReport) -> pb.SiteInfo:
    told = report.progress
    share = None if told is None else told.share
    return pb.SiteInfo(
        site=report.site,
        roles=report.roles,
        status=report.status,
        activity_text=report.doing,
        progress_age_s=-1.0 if report.progress_age_s is None else report.progress_age_s,
        excluded=report.excluded,
        certificate_until=report.certificate_until,
        progress=-1.0 if share is None else share,
        bytes_moved=0 if told is None else told.bytes_moved,
        telemetry={} if told is None else told.telemetry,
    )
