"""`protofed` whose server tells, when it ends, how late its event loop ran: of 50 looks a second.

The server's own watchdog looks twice a second, which would miss most of a transfer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

from protofed.deploy.cli.main import main
from protofed.server.rpc import server

LOOK_S = 0.02


class WatchdogWithLags(server.Watchdog):
    """Looks often, and never at a loop that has not answered the look before."""

    def run(self) -> None:
        """Look until the server stops."""
        lags, waiting = list[float](), False

        def arrived(sent_at: float) -> None:
            nonlocal waiting
            lags.append(time.monotonic() - sent_at)
            waiting = False

        while not self._end.wait(LOOK_S):
            if not waiting:
                waiting = True
                self._loop.call_soon_threadsafe(arrived, time.monotonic())
        told = {"most": 1000 * max(lags), "p99": 1000 * sorted(lags)[int(0.99 * len(lags))]}
        Path(os.environ["BENCH_LAG"]).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    with mock.patch.object(server, "Watchdog", WatchdogWithLags):  # in place of a hook that only a measurement needs
        main(sys.argv[1:])
