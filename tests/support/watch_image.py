"""docs/assets/watch.svg, of a run with some trouble in it: `python -m tests.support.watch_image`, two minutes.

Six sites train the digits in processes of their own. One is stopped in round 3 and so late; another is excluded.
"""

from __future__ import annotations

import io
import re
import signal
import tempfile
import time
from collections.abc import Callable
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"data.partition.sites={len(SITES)}", "plan.epochs=60", *(f"federation.{rule}" for rule in RULES)]
        processes = Processes.of(Path(folder), shipped.recipe("digits-fednh", changes))
        try:
            processes.server()
            processes.site("evaluator", "--role=evaluator")
            for share, name in enumerate(SITES):
                processes.site(name, f"--partition-index={share}")
            with Operator(processes.address, NO_TLS) as operator:
                seen = _disturbed(processes, operator)
        finally:
            processes.end()
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
    console.print(WatchScreen(seen, HEIGHT))
    drawn = console.export_svg(title=f"protofed runs watch {seen.run}")
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), encoding="utf-8")  # from a host


def _disturbed(processes: Processes, operator: Operator) -> Seen:
    """The run in the middle of a round, when some sites have reported and others train."""
    watcher = Watcher(operator, processes.recipe.name)

    def until(reached: Callable[[Seen], bool]) -> Seen:
        while not reached(seen := watcher.snapshot()):
            assert not seen.ended, seen
            time.sleep(0.1)
            watcher.poll()
        return seen

    until(lambda seen: seen.round == 3 and _training(seen) > 2)
    processes.running[LATE].send_signal(signal.SIGSTOP)
    until(lambda seen: seen.round > 3)
    processes.running[LATE].send_signal(signal.SIGCONT)
    until(lambda seen: seen.round == 5)
    operator.exclude(OUT, "labels under review, ticket 4711")
    return until(lambda seen: seen.round > 7 and seen.reported > 0 and _training(seen) > 1)


def _training(seen: Seen) -> int:
    return sum(site.progress not in (None, 0.0, 1.0) for site in seen.sites)


if __name__ == "__main__":
    main()
