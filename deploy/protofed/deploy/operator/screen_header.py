"""The first lines of `runs watch`: where the run is, how far, and how long it has taken and will take."""

from __future__ import annotations

from rich.filesize import decimal
from rich.text import Text

from protofed.deploy.console.tables import count, span, styled
from protofed.deploy.operator.snapshot import RunSnapshot, TimeRemaining

WIDEST_BAR = 40


def header(snapshot: RunSnapshot, width: int) -> list[Text]:
    """One line each, none longer than the width."""
    lines = [_title(snapshot), _rounds(snapshot, width), _phase(snapshot), _time(snapshot)]
    if snapshot.queue:
        lines.append(Text(snapshot.queue, "yellow"))
    if snapshot.ended and snapshot.reason not in ("", snapshot.status):
        lines.append(Text(snapshot.reason, "bold red" if snapshot.status == "failed" else ""))
    if snapshot.trouble:
        lines.append(Text(silence(snapshot), "bold red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def bar(share: float, width: int) -> Text:
    """A share as a bar that can be read without colours, too."""
    full = round(max(0.0, min(1.0, share)) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))


def silence(snapshot: RunSnapshot) -> str:
    """What is said of a server that does not answer."""
    return f"no answer for {span(snapshot.silent_s)}, trying again; {snapshot.trouble}"


def remaining(rest: TimeRemaining) -> str:
    """The rest of a run, with how sure that is."""
    likely, least, most = span(rest.likely), span(rest.least), span(rest.most)
    between = "" if least == most else f"{least} to {most} "
    return f"about {likely} more ({between}by the last {count(rest.by_rounds, 'round')})"


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
        return text.append(f" · {remaining(snapshot.rest)}")
    return text.append(" · paused" if snapshot.status == "paused" else " · too early to say how long it will take")
