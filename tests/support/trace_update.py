"""What a reader passes: the files and functions of protofed that an update touches, a whole round, and `runs pause`.

Run as `python -m tests.support.trace_update`; `--files` lists them. An update is that of the site which reports last in
a round: from its question for a task to the published state, at the client and at the server, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import structlog
from tests.server.conftest import TRAINERS
from tests.support.operator_lab import operator_lab

from protofed.common.protocol.messages import Task
from protofed.deploy import shipped
from protofed.deploy.simulation.simulation import simulation
from protofed.protos.v1 import operator_pb2 as pb
from protofed.server.access.authorization import AccessRules
from protofed.server.rounds.machine.advance import advance
from protofed.server.rounds.machine.phases import Collecting
from protofed.server.rpc.executors import Executors
from protofed.server.rpc.operator import OperatorService
from protofed.server.storage.ledger import Ledger

RECIPE, ROUND = "digits-fednh", 2
PACKAGE, LEFT_OUT = "/protofed/", ("/protofed/protos/", "/tests/")
FLAG = "paused"


@dataclass
class Trace:
    """The code of protofed that ran.

    Attributes:
        until: the function with whose return the record ends; None: none.
    """

    codes: set[CodeType] = field(default_factory=set)
    until: CodeType | None = None

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)
        elif event == "return" and frame.f_code is self.until:
            sys.setprofile(None)

    @property
    def functions(self) -> list[CodeType]:
        """Those of protofed's own code, without generated code, tests, and what has no name of its own."""
        ours = (code for code in self.codes if PACKAGE in code.co_filename and not code.co_name.startswith("<"))
        return [code for code in ours if not any(part in code.co_filename for part in LEFT_OUT)]

    @property
    def files(self) -> list[str]:
        """Their files, as paths below `protofed`."""
        return sorted({code.co_filename.rpartition(PACKAGE)[2] for code in self.functions})

    def naming(self, word: str) -> Trace:
        """The functions alone that name a thing: as an argument, a variable, an attribute or a keyword."""
        return Trace({code for code in self.functions if word in _names(code)})


def _names(code: CodeType) -> set[str]:
    keywords = (constant for constant in code.co_consts if isinstance(constant, tuple))
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    return names.union(*nested, *({name for name in words if isinstance(name, str)} for words in keywords))


@contextmanager
def traced(into: Trace) -> Iterator[None]:
    """Record what this thread, and those that begin meanwhile, call."""
    threading.setprofile(into)
    sys.setprofile(into)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def update_and_round() -> tuple[Trace, Trace]:
    """What the last update of a round touches, and what all of the round does, its scores too."""
    update, whole = Trace(), Trace()
    with simulation(shipped.recipe(RECIPE, [f"rounds={ROUND + 1}"])) as running:
        while getattr(running.run.phase, "round", ROUND) <= ROUND:
            running.runs.tick()
            for agent in running.agents:
                before, step = running.run.phase, Trace()
                with traced(step):
                    answer = agent.step(0.0)
                if isinstance(answer, Task) and answer.round == ROUND:
                    whole.codes |= step.codes
                    if isinstance(before, Collecting) and not isinstance(running.run.phase, Collecting):
                        update = step
    return update, whole


def pause() -> Trace:
    """The functions that pass the operator's order on: from the call to the ledger, then to the state machine."""
    lab, executors, order = operator_lab(), Executors(), Trace(until=Ledger.pause.__code__)
    lab.enroll(*TRAINERS)
    lab.start("one")
    service = OperatorService(lab.operation, executors, AccessRules(None))
    with traced(order):
        asyncio.run(service.PauseRun(pb.RunName(run="one"), _Plain()))
    executors.close()
    with traced(step := Trace(until=advance.__code__)):
        lab.later(1.0)
    return Trace(order.codes | step.codes).naming(FLAG)


class _Plain:
    """A call without TLS."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files")
    listed = parser.parse_args().files
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    update, whole = update_and_round()
    for name, trace in {"an update": update, "a round": whole, "runs pause": pause()}.items():
        lines = [f"{name}: {len(trace.files)} files, {len(trace.functions)} functions"]
        lines += [f"  {file}" for file in trace.files] if listed else []
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
