"""The tables that `protofed runs` and `protofed sites` print."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from protofed.common.errors import count, short
from protofed.deploy.console.run_words import (
    NOISE_KEEPS,
    NOT_IN_A_SUM,
    best_sentence,
    kept_sentence,
    summed_sentence,
    warning_lines,
)
from protofed.deploy.console.tables import plain_table, span, styled
from protofed.deploy.operator.snapshot_builder import (
    best_snapshot,
    keeping,
    kept_by_noise,
    model_warnings,
    unmet,
    waiting,
)
from protofed.protos.v1 import operator_pb2 as pb

SHOWN_ROUNDS = 10
CERTIFICATE_SOON_S = 30 * 86_400.0  # a certificate with less time left is shown in red


def runs_table(runs: Sequence[pb.RunInfo]) -> RenderableType:
    """One row for each run; a hint if there are none."""
    if not runs:
        return Text("No runs yet. Start one with: protofed runs start RECIPE")
    table = plain_table("run", "method", "status", "round", "sites", "degraded", "queued", "phase")
    for info in runs:
        what = waiting(info)
        table.add_row(
            info.run,
            info.method,
            styled(info.status),
            f"{info.round}/{info.rounds}",
            f"{info.reported}/{info.invited}",
            str(info.degraded) if info.degraded else "",
            f"{span(time.time() - info.began_at)} ago",
            _ended(info) or (what.cell if what else "") or info.phase,
        )
    return table


def _ended(info: pb.RunInfo) -> str:
    """How a run ended, in so few words that the table keeps its lines; the whole reason is in `runs show`."""
    return short(info.reason.partition(": ")[0], 48)


def run_parts(detail: pb.RunDetail, *, everything: bool) -> list[RenderableType]:
    """The parts of `runs show`: summary, rounds, failed tasks (with `everything` all tasks), scores."""
    rounds = detail.rounds
    parts: list[RenderableType] = [_summary(detail.info)]
    parts += [Text(line, "bold yellow") for line in warning_lines(model_warnings(detail))]
    parts.append(_rounds_table(rounds, ended=bool(detail.info.ended_at)))
    if len(rounds) < detail.attempts:
        parts.append(Text(f"{detail.attempts - len(rounds)} earlier attempts: --all", style="dim"))
    tasks = [(row, task) for row in rounds for task in row.sites if everything or _failed(task)]
    if tasks:
        parts.append(_tasks_table(tasks, "every site's task" if everything else "what failed"))
    if detail.scores:
        parts.append(_scores_table(detail))
    if (best := best_snapshot(detail)) is not None:
        parts.append(Text(best_sentence(best)))
    if summed := [score.sites for score in detail.scores if score.summed]:
        parts.append(Text(summed_sentence(max(summed)), style="dim"))
    if kept_by_noise(detail):
        parts.append(Text(NOISE_KEEPS, style="dim"))
    elif sites := keeping(detail):
        parts.append(Text(kept_sentence(sites), style="dim"))
    return parts


def sites_table(sites: Sequence[pb.SiteInfo]) -> RenderableType:
    """One row for each site; a hint if there are none."""
    if not sites:
        return Text("No site has enrolled yet.")
    secure = any(info.certificate_until for info in sites)  # in plain text nobody has one
    table = plain_table(
        "site", "roles", "status", "task", "progress", *(["certificate until"] if secure else []), "doing"
    )
    for info in sites:
        age = "" if info.progress_age_s < 0 else f"{span(info.progress_age_s)} ago"
        roles, doing = ", ".join(info.roles), info.excluded or info.activity_text
        until = [_until(info.certificate_until)] if secure else []
        share = "" if info.progress < 0 or info.status != "working" else f"{100 * info.progress:.0f} %"
        table.add_row(info.site, roles, styled(info.status), share, age, *until, doing)
    return table


def verification_table(run: str, replies: Iterable[tuple[pb.RoundInfo, pb.VerifyRoundResponse]]) -> RenderableType:
    """One row for each state that the server computed again."""
    table = plain_table("round", "attempt", "state", "finding", "reason", title=f"run {run}: states computed again")
    for row, reply in replies:
        reason = reply.reason or (f"came out as {reply.recomputed[:16]}…" if reply.finding == "different" else "")
        table.add_row(str(row.round), str(row.attempt), f"{reply.published[:16]}…", styled(reply.finding), reason)
    return table


def _until(end: float) -> Text:
    """The day on which a certificate ends, in UTC; empty for 0, a site without a certificate."""
    if not end:
        return Text()
    soon = end - time.time() < CERTIFICATE_SOON_S
    return Text(time.strftime("%Y-%m-%d", time.gmtime(end)), "red" if soon else "")


def _summary(info: pb.RunInfo) -> Text:
    text = Text.assemble((info.run, "bold"), f" · {info.method} · ", styled(info.status))
    text.append(f" · round {info.round} of {info.rounds} · {info.reported} of {info.invited} sites reported")
    if info.degraded:
        text.append(f" · DEGRADED: {count(info.degraded, 'round')} used fewer sites than wanted", "yellow")
    if info.abandoned:
        text.append(f" · {count(info.abandoned, 'attempt')} abandoned", "red")
    if info.rolled_back:
        text.append(f" · {count(info.rolled_back, 'attempt')} rolled back", "dim")
    text.append(f" · {decimal(info.received_bytes + info.sent_bytes)}")
    text.append(f" · {span((info.ended_at or time.time()) - info.began_at)}")
    detail = info.reason or info.phase
    if detail != info.status:
        text.append(f"\n{detail}")
    if (what := waiting(info)) is not None:
        text.append(f"\n{what.sentence}", "bold yellow" if what.blocked else "")
    for warning in unmet(info):
        text.append(f"\nwarning: {warning}", "yellow")
    return text


def _rounds_table(rounds: Iterable[pb.RoundInfo], *, ended: bool) -> Table:
    table = plain_table("round", "attempt", "outcome", "seconds", "tasks", "reason", title="rounds")
    for row in rounds:
        tasks = Counter(task.task_status for task in row.sites if task.kind in ("initialise", "fit"))
        seconds = f"{row.closed_at - row.opened_at:.1f}" if row.closed_at else ""
        counts = ", ".join(f"{number} {task}" for task, number in sorted(tasks.items()))
        outcome = "unfinished" if ended and row.outcome == "open" else row.outcome
        table.add_row(str(row.round), str(row.attempt), styled(outcome), seconds, counts, row.reason)
    return table


def _tasks_table(tasks: Iterable[tuple[pb.RoundInfo, pb.SiteTask]], title: str) -> Table:
    table = plain_table("round", "attempt", "site", "task", "status", "reason", title=title)
    for row, task in tasks:
        # Refusals do not fail a task: the site may send another update.
        reasons = [*([task.reason] if task.reason else []), *(f"refused as {code}" for code in task.refusals)]
        status = styled(task.task_status)
        table.add_row(str(row.round), str(row.attempt), task.site, task.kind, status, "; ".join(reasons))
    return table


def _scores_table(detail: pb.RunDetail) -> Table:
    table = plain_table("score", "mean", "std", "worst", "sites", title=f"scores after round {detail.scored_round}")
    for score in detail.scores:
        if not score.name.rpartition(".")[2].isdigit():  # those of single classes are in --json only
            std, worst = (NOT_IN_A_SUM if score.summed else f"{value:.4f}" for value in (score.std, score.worst))
            table.add_row(score.name, f"{score.mean:.4f}", std, worst, str(score.sites))
    return table


def _failed(task: pb.SiteTask) -> bool:
    return task.task_status in ("failed", "late", "set-aside") or bool(task.refusals)
