"""Daemons that are killed in a fit, and others that go on: processes forked from this one, which has imported torch.

`python -m tests.support.killed_fits FOLDER` writes FOLDER/outcomes.json: what each second life handed in and kept.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tests.support.scripted_server import RUN, AgentHarness, give_secret

from protofed.client.state.disk_store import DiskStore
from protofed.client.training.progress import FOLDER, on_disk
from protofed.common import codec

PLAN = {**RUN["plan"], "momentum": 0.9, "checkpoint": True}
RECIPE = {**RUN, "method": {"name": "solo"}, "plan": PLAN}  # its update is empty: what counts is its memory
CHECKS = 6  # of one fit: two epochs of three batches


def life(state: Path, batch: int | None) -> Callable[[], None]:
    """A daemon that is killed before this batch of its fit, or does it to the end."""

    def live() -> None:
        harness = AgentHarness(store=DiskStore(state), recipe=RECIPE, checkpoints=partial(on_disk, state))
        before, left = codec.encode(harness.store.last_counted("run", 9).client_state), len(list_of(state))
        trained: list[int | None] = []

        def check() -> None:
            if len(trained) == batch:
                os.kill(os.getpid(), signal.SIGKILL)
            trained.append(batch)

        harness.now.check = check  # type: ignore[method-assign]
        harness.fit(1, task_id="n1")
        harness.agent().step(0.0)
        ((_, released),) = harness.link.pushed
        held = harness.store.last_counted("run", 9)
        assert held.personal is not None
        facts = {
            "before": before.hex(),
            "left": left,
            "trained": len(trained),
            "sent": codec.digest(released.data),
            "loss": released.metrics["loss"],
            "memory": codec.digest(codec.encode(held.client_state)),
            "personal": codec.digest(codec.encode(held.personal)),
            "after": len(list_of(state)),
        }
        (state / "outcome.json").write_text(json.dumps(facts), encoding="utf-8")

    return live


def list_of(state: Path) -> list[Path]:
    """The files that checkpoints are in."""
    return list((state / FOLDER).glob("*"))


def forked(live: Callable[[], None]) -> int:
    """The end of a process that does this: its exit code, or minus the signal that killed it."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        live()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
    os._exit(0)


def main(folder: Path) -> None:
    """One undisturbed fit, and one that is killed before each batch."""
    torch.set_num_threads(1)
    outcomes = {}
    for batch in (None, *range(CHECKS)):
        state = folder / str(batch)
        give_secret(state)  # one for all: what they hand in is compared
        ends = [] if batch is None else [forked(life(state, batch))]
        ends.append(forked(life(state, None)))
        outcomes[str(batch)] = {"ends": ends, **json.loads((state / "outcome.json").read_text(encoding="utf-8"))}
    (folder / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
