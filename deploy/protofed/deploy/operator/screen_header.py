"""The first lines of `runs watch`: the run's status, progress, time taken and time left."""

from __future__ import annotations

import textwrap

from rich.filesize import decimal
from rich.text import Text

from protofed.common.errors import count
from protofed.deploy.console.run_words import NOISE_KEEPS, best_sentence, kept_sentence, summed_sentence, warning_lines
from protofed.deploy.operator.snapshot import RunSnapshot, TimeRemaining
from protofed.deploy.tables import span, styled

WIDEST_BAR = 40  # characters


def header(snapshot: RunSnapshot, width: int) -> list[Text]:
    """The header's lines; rich cuts each at the width."""
    lines = [_title(snapshot), _rounds(snapshot, width), _phase(snapshot), _time(snapshot)]
    lines += [Text(line, "bold yellow") for line in warning_lines(snapshot.model_warnings)]
    if snapshot.queue:
        lines.append(Text(snapshot.queue, "yellow"))
    if snapshot.waiting is not None and snapshot.waiting.blocked:
        lines += _wrapped(snapshot.waiting.sentence, "bold yellow", width)
    elif snapshot.waiting is not None and snapshot.waiting.reason == "sum":  # no column says who is asked for the step
        lines += _wrapped(snapshot.waiting.sentence, "dim", width)
    for warning in snapshot.unmet:
        lines += _wrapped(f"warning: {warning}", "yellow", width)
    if snapshot.ended and snapshot.reason not in ("", snapshot.status):
        lines.append(Text(snapshot.reason, "bold red" if snapshot.status == "failed" else ""))
    if snapshot.best is not None:
        lines += _wrapped(best_sentence(snapshot.best), "dim", width)
    if summed := [score.sites for score in snapshot.scores if score.worst is None]:
        lines.append(Text(summed_sentence(max(summed)), "dim"))
    if snapshot.noisy:
        lines += _wrapped(NOISE_KEEPS, "dim", width)
    elif snapshot.keeping:
        lines.append(Text(kept_sentence(snapshot.keeping), "dim"))
    if snapshot.trouble:
        lines.append(Text(no_answer(snapshot), "bold red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def _wrapped(text: str, style: str, width: int) -> list[Text]:
    """A sentence on as many lines as it needs: its end names the sites."""
    return [Text(line, style) for line in textwrap.wrap(text, max(20, width))]


def bar(share: float, width: int) -> Text:
    """A share (0 to 1) as a bar of `width` characters; two kinds of line keep it readable without colours."""
    full = round(max(0.0, min(1.0, share)) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))


def no_answer(snapshot: RunSnapshot) -> str:
    """The line for a server that does not answer."""
    return f"no answer for {span(snapshot.silent_s)}, trying again; {snapshot.trouble}"


def time_left(estimate: TimeRemaining) -> str:
    """The time that a run has left, with its range and the number of rounds that it is estimated from."""
    likely, least, most = span(estimate.likely), span(estimate.least), span(estimate.most)
    between = "" if least == most else f"{least} to {most} "
    return f"about {likely} more ({between}by the last {count(estimate.by_rounds, 'round')})"


def _title(snapshot: RunSnapshot) -> Text:
    text = Text.assemble((snapshot.run, "bold"), f" · {snapshot.method} · ", styled(snapshot.status))
    if snapshot.degraded:
        text.append(f" · {count(snapshot.degraded, 'round')} degraded", "yellow")
    if snapshot.abandoned:
        text.append(f" · {count(snapshot.abandoned, 'attempt')} abandoned", "red")
    if snapshot.rolled_back:
        text.append(f" · {count(snapshot.rolled_back, 'attempt')} rolled back", "dim")
    return text


def _rounds(snapshot: RunSnapshot, width: int) -> Text:
    text = Text(f"round {snapshot.round} of {snapshot.rounds} ")
    done = f" {snapshot.done} done"
    room = min(WIDEST_BAR, width - len(text) - len(done))
    if room >= 5:
        text.append_text(bar(snapshot.done / max(1, snapshot.rounds), room))
    return text.append(done)


def _phase(snapshot: RunSnapshot) -> Text:
    text = Text()
    if not snapshot.ended:
        text.append(snapshot.phase)
        text.append("" if snapshot.phase_s is None else f" for {span(snapshot.phase_s)}")
        text.append("" if snapshot.deadline_s is None else f" of at most {span(snapshot.deadline_s)}")
        text.append(" · ")
    text.append(f"{snapshot.reported} of {snapshot.invited} sites reported")
    return text.append(f" · {decimal(snapshot.received_bytes)} received, {decimal(snapshot.sent_bytes)} sent")


def _time(snapshot: RunSnapshot) -> Text:
    if snapshot.seconds is None:
        return Text("no round was opened yet")
    text = Text(f"{span(snapshot.seconds)} so far")
    if snapshot.ended:
        return Text(f"took {span(snapshot.seconds)}")
    if snapshot.rest is not None:
        return text.append(f" · {time_left(snapshot.rest)}")
    return text.append(" · paused" if snapshot.status == "paused" else " · too early to say how long it will take")
