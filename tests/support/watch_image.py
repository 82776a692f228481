"""docs/assets/watch.svg, a moving picture of a run with trouble: `python -m tests.support.watch_image`, two minutes.

Six sites train the digits in processes of their own. One is stopped in round 3 and so late; another is excluded.
"""

from __future__ import annotations

import io
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from tests.support.processes import Processes

from protofed.common.address import NO_TLS
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.snapshot import RunSnapshot as Seen
from protofed.deploy.operator.watch import Watcher

SITES = [f"site-{number}" for number in range(1, 7)]
LATE, OUT = SITES[1], SITES[4]
WIDTH, HEIGHT = 100, 31
RULES = ("min_sites=5", "quorum=0.5", "deadline_s=60", "grace=0.5", "stall_timeout_s=6", "heartbeat_s=0.2")
PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "watch.svg"
FRAMES, FRAME_S, LAST_S = 12, 0.8, 4.0  # the last one stays longer
# Who asks for less motion, or whose viewer knows no animation, sees the last frame.
STYLE = """<style>
.frame {{ visibility: hidden }} .frame:last-of-type {{ visibility: visible }}
@media (prefers-reduced-motion: no-preference) {{
.frame {{ animation: {whole:.1f}s step-end infinite; visibility: hidden }} {rules}
}}
</style>"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes = [
            f"data.partition.sites={len(SITES)}",
            "plan.epochs=100",
            "plan.batch_size=8",
            *(f"federation.{rule}" for rule in RULES),
        ]
        processes = Processes.of(Path(folder), shipped.recipe("digits-fednh", changes))
        try:
            processes.server()
            processes.site("evaluator", "--role=evaluator")
            for share, name in enumerate(SITES):
                processes.site(name, f"--partition-index={share}")
            with Operator(processes.address, NO_TLS) as operator:
                seen = list(_disturbed(processes, operator))
        finally:
            processes.end()
    step = max(1, (len(seen) - 1) // (FRAMES - 1))
    chosen = [*seen[:-1:step][-(FRAMES - 1) :], seen[-1]]
    PICTURE.write_text(animated([_drawn(one, f"frame{number}") for number, one in enumerate(chosen)]), encoding="utf-8")


def animated(pictures: Sequence[str]) -> str:
    """One SVG that shows these one after the other, without a script."""
    heads = [picture[: picture.index(">") + 1] for picture in pictures]
    head = max(heads, key=lambda one: float(one.split('viewBox="')[1].split('"')[0].split()[3]))  # the tallest's
    whole = FRAME_S * (len(pictures) - 1) + LAST_S
    frames, rules = list[str](), list[str]()
    for number, picture in enumerate(pictures):
        begin, end = (100 * FRAME_S * at / whole for at in (number, number + 1))
        last = number == len(pictures) - 1
        shown = f"0% {{ visibility: hidden }} {begin:.2f}% {{ visibility: visible }}"
        hidden = "" if last else f" {end:.2f}% {{ visibility: hidden }}"
        rules.append(f"@keyframes k{number} {{ {shown}{hidden} }} #f{number} {{ animation-name: k{number} }}")
        inner = picture.removeprefix(heads[number]).strip().removesuffix("</svg>")
        frames.append(f'<g class="frame" id="f{number}">{inner}</g>')
    return "\n".join([head, STYLE.format(whole=whole, rules=" ".join(rules)), *frames, "</svg>\n"])


def _drawn(seen: Seen, name: str) -> str:
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
    console.print(WatchScreen(seen, HEIGHT))
    drawn = console.export_svg(title=f"protofed runs watch {seen.run}", unique_id=name)
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # the font is from a host


def _disturbed(processes: Processes, operator: Operator) -> Iterator[Seen]:
    """A run's changes, to the middle of a round, when some sites have reported and others train."""
    watcher = Watcher(operator, processes.recipe.name)

    def until(reached: Callable[[Seen], bool]) -> Iterator[Seen]:
        before = None
        while not reached(seen := watcher.snapshot()):
            assert not seen.ended, seen
            if (seen.round, seen.reported, seen.done) != before:
                before = seen.round, seen.reported, seen.done
                yield seen
            time.sleep(0.1)
            watcher.poll()
        yield seen

    yield from until(lambda seen: seen.round == 3 and _training(seen) > 2)
    processes.running[LATE].send_signal(signal.SIGSTOP)
    yield from until(lambda seen: seen.round > 3)
    processes.running[LATE].send_signal(signal.SIGCONT)
    yield from until(lambda seen: seen.round == 5)
    operator.exclude(OUT, "labels under review, ticket 4711")
    yield from until(lambda seen: seen.round > 7 and seen.reported > 0 and _training(seen) > 1)


def _training(seen: Seen) -> int:
    return sum(site.progress not in (None, 0.0, 1.0) for site in seen.sites)


if __name__ == "__main__":
    main()
