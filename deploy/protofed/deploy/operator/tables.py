"""The tables that `protofed runs` and `protofed sites` print."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.filesize import decimal
from rich.text import Text

from protofed.common.config.recipe import Recipe
from protofed.common.errors import count, short
from protofed.common.protocol.messages import score_family
from protofed.deploy.operator.snapshot_builder import (
    best_snapshot,
    keeping,
    kept_by_noise,
    model_warnings,
    unmet,
    waiting,
)
from protofed.deploy.run_view import (
    NOISE_KEEPS,
    NOT_IN_A_SUM,
    aggregated_sentence,
    best_sentence,
    kept_sentence,
    score_text,
    warning_lines,
)
from protofed.deploy.tables import STATUS, Column, span, styled, terminal
from protofed.protos.v1 import operator_pb2 as pb
from protofed.server.method import server_methods

SHOWN_ROUNDS = 10
CERTIFICATE_SOON_S = 30 * 86_400.0  # a certificate with less time left is shown in red


def runs_table(runs: Sequence[pb.RunInfo]) -> RenderableType:
    """One row for each run; a hint if there are none."""
    return terminal(RUNS, runs, STATUS) if runs else Text("No runs yet. Start one with: protofed runs start RECIPE")


def _doing(info: pb.RunInfo) -> str:
    what = waiting(info)
    return _ended(info) or (what.cell if what else "") or info.phase


def _ended(info: pb.RunInfo) -> str:
    """How a run ended, in so few words that the table keeps its lines; the whole reason is in `runs show`."""
    return short(info.reason.partition(": ")[0], 48)


def run_parts(detail: pb.RunDetail, *, everything: bool) -> list[RenderableType]:
    """The parts of `runs show`: summary, rounds, failed tasks (with `everything` all tasks), scores."""
    rounds = detail.rounds
    parts: list[RenderableType] = [_summary(detail.info)]
    parts += [Text(line, "bold yellow") for line in warning_lines(model_warnings(detail))]
    parts.append(terminal(ENDED_ROUNDS if detail.info.ended_at else ROUNDS, rounds, STATUS, "\nrounds"))
    if len(rounds) < detail.attempts:
        parts.append(Text(f"{detail.attempts - len(rounds)} earlier attempts: --all", style="dim"))
    tasks = [(row, task) for row in rounds for task in row.sites if everything or _failed(task)]
    if tasks:
        parts.append(terminal(TASKS, tasks, STATUS, "\nevery site's task" if everything else "\nwhat failed"))
    if detail.scores:
        scores = [score for score in detail.scores if score_family(score.name) == score.name]  # others: --json
        parts.append(terminal(SCORES, scores, STATUS, f"\nscores after round {detail.scored_round}"))
    return [*parts, *_about_scores(detail)]


def _about_scores(detail: pb.RunDetail) -> list[RenderableType]:
    """The best round, which scores are from a secure aggregation, and which ones sites do not send."""
    parts: list[RenderableType] = []
    if (best := best_snapshot(detail)) is not None:
        parts.append(Text(best_sentence(best)))
    if aggregated := [score.sites for score in detail.scores if score.aggregated]:
        parts.append(Text(aggregated_sentence(max(aggregated)), style="dim"))
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
    return terminal([column for column in SITES if secure or column.head != "certificate until"], sites, STATUS)


def verification_table(run: str, replies: Iterable[tuple[pb.RoundInfo, pb.VerifyRoundResponse]]) -> RenderableType:
    """One row for each state that the server computed again."""
    return terminal(VERIFIED, replies, STATUS, f"\nrun {run}: states computed again")


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


def _counts(row: pb.RoundInfo) -> str:
    tasks = Counter(task.task_status for task in row.sites if task.kind in ("initialise", "fit"))
    return ", ".join(f"{number} {task}" for task, number in sorted(tasks.items()))


def _reasons(task: pb.SiteTask) -> str:
    """Refusals do not fail a task: the site may send another update."""
    return "; ".join([*([task.reason] if task.reason else []), *(f"refused as {code}" for code in task.refusals)])


def _number(score: pb.Score, value: float) -> str:
    return NOT_IN_A_SUM if score.aggregated else score_text(value)


def _came_out(reply: pb.VerifyRoundResponse) -> str:
    return f"came out as {reply.recomputed[:16]}…" if reply.finding == "different" else ""


def _failed(task: pb.SiteTask) -> bool:
    return task.task_status in ("failed", "late", "rejected") or bool(task.refusals)


RUNS: Sequence[Column[pb.RunInfo]] = (
    Column("run", lambda info: info.run, wraps=True),
    Column("method", lambda info: info.method),
    Column("status", lambda info: styled(info.status)),
    Column("round", lambda info: f"{info.round}/{info.rounds}"),
    Column("sites", lambda info: f"{info.reported}/{info.invited}"),
    Column("degraded", lambda info: str(info.degraded) if info.degraded else ""),
    Column("queued", lambda info: f"{span(time.time() - info.began_at)} ago"),
    Column("phase", _doing, wraps=True),
)
SITES: Sequence[Column[pb.SiteInfo]] = (
    Column("site", lambda info: info.site, wraps=True),
    Column("roles", lambda info: ", ".join(info.roles)),
    Column("status", lambda info: styled(info.status)),
    Column(
        "task", lambda info: "" if info.progress < 0 or info.status != "working" else f"{100 * info.progress:.0f} %"
    ),
    Column("progress", lambda info: "" if info.progress_age_s < 0 else f"{span(info.progress_age_s)} ago"),
    Column("certificate until", lambda info: _until(info.certificate_until)),
    Column("doing", lambda info: info.excluded or info.activity_text, wraps=True),
)
VERIFIED: Sequence[Column[tuple[pb.RoundInfo, pb.VerifyRoundResponse]]] = (
    Column("round", lambda one: str(one[0].round)),
    Column("attempt", lambda one: str(one[0].attempt)),
    Column("state", lambda one: f"{one[1].published[:16]}…"),
    Column("finding", lambda one: styled(one[1].finding)),
    Column("reason", lambda one: one[1].reason or _came_out(one[1]), wraps=True),
)
ROUNDS: Sequence[Column[pb.RoundInfo]] = (
    Column("round", lambda row: str(row.round)),
    Column("attempt", lambda row: str(row.attempt)),
    Column("outcome", lambda row: styled(row.outcome)),
    Column("seconds", lambda row: f"{row.closed_at - row.opened_at:.1f}" if row.closed_at else ""),
    Column("tasks", _counts, wraps=True),
    Column("reason", lambda row: row.reason, wraps=True),
)
_UNFINISHED = Column[pb.RoundInfo](
    "outcome", lambda row: styled("unfinished" if row.outcome == "open" else row.outcome)
)
ENDED_ROUNDS = tuple(_UNFINISHED if column.head == "outcome" else column for column in ROUNDS)
TASKS: Sequence[Column[tuple[pb.RoundInfo, pb.SiteTask]]] = (
    Column("round", lambda one: str(one[0].round)),
    Column("attempt", lambda one: str(one[0].attempt)),
    Column("site", lambda one: one[1].site, wraps=True),
    Column("task", lambda one: one[1].kind),
    Column("status", lambda one: styled(one[1].task_status)),
    Column("reason", lambda one: _reasons(one[1]), wraps=True),
)
SCORES: Sequence[Column[pb.Score]] = (
    Column("score", lambda score: score.name),
    Column("mean", lambda score: score_text(score.mean)),
    Column("std", lambda score: _number(score, score.std)),
    Column("worst", lambda score: _number(score, score.worst)),
    Column("sites", lambda score: str(score.sites)),
)


def start_notes(recipe: Recipe) -> list[str]:
    """Sentences, without a full stop; none: there is nothing to say.

    Raises:
        ConfigError: the recipe's method is unknown.
    """
    notes = []
    if recipe.data is not None:
        notes.append("the recipe's [data] is for `protofed simulate`; each site trains on the data of its own settings")
    if not recipe.federation.secure and not server_methods.about(recipe.method.name).sends_nothing:
        notes.append(
            "without federation.secure = true the server reads each site's updates; "
            "sites under the policies standard and strict decline such a run"
        )
    return notes
