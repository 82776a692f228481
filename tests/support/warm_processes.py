"""Site daemons without PyTorch's import: forked from one process that has imported it, a second of processor each.

What is forked runs `python -m protofed.deploy.cli` from its first line, with its own environment, working folder and
log. gRPC is imported after the fork, as it must be. Servers, which have no PyTorch, are started as users do, and so are
the daemons of tests/deploy and of the demo. What is forked shares one hash seed: only these others show whether results
depend on the order of a set.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

PRELOADED = (
    *("torch", "sklearn.datasets"),
    *("protofed.deploy.cli.main", "protofed.deploy.daemons.client", "protofed.client.agent.agent"),
    *("protofed.client.data.site", "protofed.client.models.catalogue", "protofed.client.training.evaluation"),
)


class WarmProcess:
    """A forked `protofed`, with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        os.umask(umask := os.umask(0o077))
        own = (list(arguments), dict(environment), os.getcwd(), umask, str(log))
        self._process = context.Process(target=_run, args=own, daemon=True)
        with _without_main():
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide what this process runs: what is forked would import it, and with it gRPC, as of `python -m tests.bench…`."""
    main = sys.modules["__main__"]
    hidden = {name: value for name in ("__spec__", "__file__") if (value := getattr(main, name, None)) is not None}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


def _run(arguments: list[str], environment: dict[str, str], folder: str, umask: int, log: str) -> None:
    assert "grpc" not in sys.modules, "gRPC does not work in a fork of a process that has imported it"
    assert sys.modules.keys() >= {*PRELOADED}, "the process that is forked passes over what it cannot import"
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))  # as PyTorch would have read it at its import
    sys.path[:0] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.chdir(folder)
    os.umask(umask)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.argv = ["protofed", *arguments]
    runpy.run_module("protofed.deploy.cli", run_name="__main__", alter_sys=True)
