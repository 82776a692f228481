"""Measurements: `make bench`. Ratios of one run, medians over repetitions that take turns; machines are noisy."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tests.bench import class_models, echo, simulation
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from protofed.client.data.site_data import Examples, SiteData
from protofed.client.models.catalogue import build
from protofed.client.training.context import FitContext
from protofed.client.training.loop import train
from protofed.common.config.recipe import Input, NamedOptions, Plan

REPETITIONS = 9
PLAN = Plan(epochs=1, lr=0.01, momentum=0.9, weight_decay=1e-5, max_grad_norm=10.0)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title=f"medians of {REPETITIONS}, one thread, torch {torch.__version__}", title_justify="left")
    for name in ("what", "measured", "beside", "ratio", "goal"):
        table.add_column(name)
    for model, shape, batch, count in (("digits-cnn", (1, 8, 8), 32, 3200), ("conv2cifar", (3, 32, 32), 64, 1280)):
        ours, bare = loops(model, shape, batch, count)
        ratio = statistics.median(b / o for o, b in zip(ours, bare, strict=True))
        speeds = [f"{count / statistics.median(times):,.0f} images/s" for times in (ours, bare)]
        table.add_row(
            f"SGD loop, {model}, batch {batch}", speeds[0], f"bare PyTorch {speeds[1]}", f"{ratio:.3f}", "≥ 0.97"
        )
    start = statistics.median(seconds(server_start) for _ in range(5))
    python = statistics.median(seconds(python_start) for _ in range(5))
    for row in (*class_models.rows(), *simulation.rows(), *echo.rows()):
        table.add_row(*row)
    table.add_row("server start to first answer", f"{start:.2f} s", f"bare Python {python:.2f} s", "", "< 2 s")
    Console(width=140).print(table)


def loops(name: str, shape: tuple[int, int, int], batch: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of an epoch: our loop's and the bare one's, in turns, on the same model and data."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    input_ = Input(shape=shape)
    model = build(NamedOptions(name=name), input_, 10)
    data = SiteData(Examples(images, labels), Examples(images[:10], labels[:10]), input_, 10)
    plan = PLAN.model_copy(update={"batch_size": batch})
    local = FitContext("bench", 1, 1, model, data, 10, plan, generator, {})
    ready = data.train.normalised(input_)

    def ours() -> None:
        train(local, lambda x, y: cross_entropy(model(x), y))

    def bare() -> None:
        optimizer = torch.optim.SGD(model.parameters(), PLAN.lr, PLAN.momentum, weight_decay=PLAN.weight_decay)
        model.train()
        order = torch.randperm(count, generator=generator)
        for start in range(0, count, batch):
            rows = order[start : start + batch]
            optimizer.zero_grad(set_to_none=True)
            loss = cross_entropy(model(ready[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

    ours()
    bare()
    pairs = [(seconds(ours), seconds(bare)) for _ in range(REPETITIONS)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def server_start() -> None:
    """A server process until it answers a health check; without torch in it."""
    script = (
        "import sys, threading, grpc, tempfile, pathlib\n"
        "from protofed.deploy.cli.main import main\n"
        "from protofed.deploy import shipped\n"
        "from protofed.deploy.daemons import server as server_process\n"
        "from grpc_health.v1 import health_pb2, health_pb2_grpc\n"
        "import os, signal\n"
        "def check(address):\n"
        "    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))\n"
        "    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1\n"
        "    assert 'torch' not in sys.modules\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "serve = server_process.serve\n"
        "def watched(*a, started, **k):\n"
        "    return serve(*a, started=lambda x: threading.Thread(target=check, args=(x,)).start(), **k)\n"
        "server_process.serve = watched\n"
        "recipe = shipped.folder('recipes') / 'digits-fednh.toml'\n"
        "told = [f'--recipe={recipe}', '--listen=127.0.0.1:0', '--plaintext', f'--state={tempfile.mkdtemp()}']\n"
        "main(['server', 'start', *told])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr


def python_start() -> None:
    """An interpreter that does nothing."""
    subprocess.run([sys.executable, "-c", ""], check=True)


if __name__ == "__main__":
    main()
