"""The first lines of `runs watch`: where the run is, how far, and how long it has taken and will take."""

from __future__ import annotations

from rich.filesize import decimal
from rich.text import Text

from protofed.deploy.console.tables import count, span, styled
from protofed.deploy.operator.snapshot import RunSnapshot, TimeRemaining

WIDEST_BAR = 40


def header(scene: RunSnapshot, width: int) -> list[Text]:
    """One line each, none longer than the width."""
    lines = [_title(scene), _rounds(scene, width), _phase(scene), _time(scene)]
    if scene.queue:
        lines.append(Text(scene.queue, "yellow"))
    if scene.ended and scene.reason not in ("", scene.status):
        lines.append(Text(scene.reason, "bold red" if scene.status == "failed" else ""))
    if scene.trouble:
        lines.append(Text(silence(scene), "bold red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def bar(share: float, width: int) -> Text:
    """A share as a bar that can be read without colours, too."""
    full = round(max(0.0, min(1.0, share)) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "dim"))


def silence(scene: RunSnapshot) -> str:
    """What is said of a server that does not answer."""
    return f"no answer for {span(scene.silent_s)}, trying again; {scene.trouble}"


def remaining(rest: TimeRemaining) -> str:
    """The rest of a run, with how sure that is."""
    likely, least, most = span(rest.likely), span(rest.least), span(rest.most)
    between = "" if least == most else f"{least} to {most} "
    return f"about {likely} more ({between}by the last {count(rest.by_rounds, 'round')})"


def _title(scene: RunSnapshot) -> Text:
    text = Text.assemble((scene.run, "bold"), f" · {scene.method} · ", styled(scene.status))
    if scene.degraded:
        text.append(f" · {count(scene.degraded, 'round')} degraded", "yellow")
    if scene.abandoned:
        text.append(f" · {count(scene.abandoned, 'attempt')} abandoned", "red")
    if scene.rolled_back:
        text.append(f" · {count(scene.rolled_back, 'attempt')} rolled back", "dim")
    return text


def _rounds(scene: RunSnapshot, width: int) -> Text:
    text = Text(f"round {scene.round} of {scene.rounds} ")
    done = f" {scene.done} done"
    room = min(WIDEST_BAR, width - len(text) - len(done))
    if room >= 5:
        text.append_text(bar(scene.done / max(1, scene.rounds), room))
    return text.append(done)


def _phase(scene: RunSnapshot) -> Text:
    text = Text()
    if not scene.ended:
        text.append(scene.phase)
        text.append("" if scene.phase_s is None else f" for {span(scene.phase_s)}")
        text.append("" if scene.deadline_s is None else f" of at most {span(scene.deadline_s)}")
        text.append(" · ")
    text.append(f"{scene.reported} of {scene.invited} sites reported")
    return text.append(f" · {decimal(scene.received_bytes)} received, {decimal(scene.sent_bytes)} sent")


def _time(scene: RunSnapshot) -> Text:
    if scene.seconds is None:
        return Text("no round was opened yet")
    text = Text(f"{span(scene.seconds)} so far")
    if scene.ended:
        return Text(f"took {span(scene.seconds)}")
    if scene.rest is not None:
        return text.append(f" · {remaining(scene.rest)}")
    return text.append(" · paused" if scene.status == "paused" else " · too early to say how long it will take")
