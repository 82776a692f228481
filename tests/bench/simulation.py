"""Simulated rounds against a plain PyTorch loop that trains, averages and scores the same, side by side.

100 sites of which 10 train in a round, an epoch each. The plain loop is what one would write for one experiment: no
coordinator, no codec, no gate; models as channels_last, because a simulation has them so too; images normalised before.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import structlog
import torch
from tests.bench.report import Row
from tests.bench.server_process import bench_recipe
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.models.catalogue import build
from protofed.common.config.recipe import Recipe
from protofed.common.process import keep_memory
from protofed.deploy.simulation.simulation import simulation
from protofed.deploy.simulation.worker_processes import choose_workers
from protofed.server.rounds.machine.phases import Phase

SITES, COHORT, CLASSES = 100, 10, 10
REPETITIONS = 7
Seconds: TypeAlias = tuple[float, float]  # a round: on the clock, and of the processor, which others cannot disturb
Rounds: TypeAlias = Callable[[int], Seconds]  # does so many rounds


@dataclass(frozen=True)
class Case:
    """One experiment.

    Attributes:
        examples: each site's, to train on.
        own: the models of the sites that trained are scored in each round, too; else only the global one.
        goal: the largest ratio, by the number of processes.
        rounds: of one measurement.
    """

    model: str
    shape: tuple[int, int, int]
    examples: int
    tests: int
    own: bool
    goal: dict[int, float]
    rounds: int

    @property
    def recipe(self) -> Recipe:
        """Without an end: it is measured as it goes."""
        rules = {"min_sites": SITES, "participation": COHORT / SITES, "quorum": 1.0}
        return bench_recipe(
            "bench",
            1_000_000,
            self.model,
            input={"shape": self.shape},
            plan={"epochs": 1, "batch_size": 32, "lr": 0.01, "momentum": 0.9},
            federation={**rules, "score_personal_every": int(self.own)},
        )

    def sites(self) -> list[SiteData]:
        """Random images; all sites share one test set."""
        generator, recipe = torch.Generator().manual_seed(0), self.recipe

        def drawn(count: int) -> Examples:
            images = torch.randint(0, 256, (count, *self.shape), dtype=torch.uint8, generator=generator)
            return Examples(images, torch.randint(0, CLASSES, (count,), generator=generator))

        test = drawn(self.tests)
        return [SiteData(drawn(self.examples), test, recipe.input, CLASSES) for _ in range(SITES)]


DIGITS = Case("digits-cnn", (1, 8, 8), 14, 360, False, {1: 1.3, 2: 1.1}, 10)
CIFAR = Case("conv2cifar", (3, 32, 32), 40, 400, False, {1: 1.05, 2: 1.1}, 1)
OWN = [Case(c.model, c.shape, c.examples, c.tests, True, c.goal, c.rounds) for c in (DIGITS, CIFAR)]
CASES = [DIGITS, CIFAR, *OWN]


def rows() -> Iterator[Row]:
    """Ours beside the plain loop; one run in one process and, of the first cases, on two. Ratios of the clock."""
    for case in CASES:
        for processes in (1,) if case.own else (1, 2):
            ours, plain = measured(case, processes)
            clock, processor = (
                statistics.median(o[of] / p[of] for o, p in zip(ours, plain, strict=True)) for of in (0, 1)
            )
            times = (1000 * statistics.median(wall for wall, _ in found) for found in (ours, plain))
            scored = "and own models " if case.own else ""
            yield Row(
                f"simulation, {case.model}, global {scored}scored, processes: {processes}",
                next(times),
                "ms a round",
                next(times),
                "plain loop",
                clock,
                at_most=case.goal[processes],
                note=f"processor's ratio {processor:.2f}",
                details={"ours": ours, "plain": plain},
            )


def measured(case: Case, processes: int) -> tuple[list[Seconds], list[Seconds]]:
    """The simulation and the plain loop, in turns, each one run on so many processes."""
    with _started(_serve, case, processes) as link:

        def told(which: str) -> Seconds:
            link.send(which)
            answer: Seconds = link.recv()
            return answer

        pairs = [(told("ours"), told("plain")) for _ in range(REPETITIONS + 1)][1:]  # the first warms up
        link.send("")
    return [ours for ours, _ in pairs], [plain for _, plain in pairs]


@contextmanager
def _started(target: Callable[..., None], *given: object) -> Iterator[Connection]:
    """A process of `target(*given, connection)`, which ends by itself."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*given, there))
    process.start()
    there.close()
    yield here
    process.join()


def _serve(case: Case, processes: int, link: Connection) -> None:
    _set_up()
    with simulated(case, processes) as ours, plain_loop(case, processes) as plain:
        known: dict[str, Rounds] = {"ours": ours, "plain": plain}
        while which := link.recv():
            link.send(known[which](case.rounds))


def _set_up() -> None:
    torch.set_num_threads(1)
    keep_memory()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))


@contextmanager
def simulated(case: Case, processes: int = 1) -> Iterator[Rounds]:
    """A simulation that goes on by some rounds at a call."""
    with simulation(case.recipe, sites=case.sites(), pool=choose_workers(processes)) as running:

        def now() -> int:
            phase: Phase = running.run.phase
            return getattr(phase, "round", 0)

        def go(rounds: int) -> Seconds:
            first = now()
            return timed(lambda: running.go(until=lambda: now() >= first + rounds), lambda: now() - first)

        go(2)
        yield go


class Loop:
    """FedAvg as one would write it for one experiment."""

    def __init__(self, case: Case) -> None:
        self.case, self.recipe, sites = case, case.recipe, case.sites()
        self.generator = torch.Generator().manual_seed(0)
        self.model = build(self.recipe.model, self.recipe.input, CLASSES)
        self.model.to(memory_format=torch.channels_last)
        self.train = [(site.train.normalised(self.recipe.input), site.train.labels) for site in sites]
        self.test = sites[0].test.normalised(self.recipe.input), sites[0].test.labels

    def trained(self, sites: list[int], state: dict[str, Tensor], total: dict[str, Tensor]) -> None:
        """Train from this state on each of these sites, and add what comes out to the total."""
        for number in sites:
            self.model.load_state_dict(state)
            _epoch(self.model, self.recipe, self.train[number], self.generator)
            for name, value in self.model.state_dict().items():
                total[name] += value
            if self.case.own:
                _score(self.model, *self.test)

    def cohort(self) -> list[int]:
        """The sites of a round."""
        return torch.randperm(SITES, generator=self.generator)[:COHORT].tolist()

    def averaged(self, totals: list[dict[str, Tensor]]) -> None:
        """Take up the mean, and score it."""
        self.model.load_state_dict({name: sum(total[name] for total in totals) / COHORT for name in totals[0]})
        _score(self.model, *self.test)


@contextmanager
def plain_loop(case: Case, processes: int = 1) -> Iterator[Rounds]:
    """The loop of one run; with more processes, each trains its share of a round's sites in memory that all share."""
    loop = Loop(case)
    states, totals = ([_zeros(loop.model) for _ in range(processes)] for _ in range(2))
    with ExitStack() as running:
        links = [
            running.enter_context(_started(_help, case, state, total))
            for state, total in zip(states[1:], totals[1:], strict=True)
        ]

        def one() -> None:
            now, cohort = loop.model.state_dict(), loop.cohort()
            for state, total in zip(states, totals, strict=True):
                for name, value in now.items():
                    state[name].copy_(value)
                    total[name].zero_()
            for number, link in enumerate(links, 1):
                link.send(cohort[number::processes])
            loop.trained(cohort[::processes], states[0], totals[0])
            for link in links:
                link.recv()
            loop.averaged(totals)

        def go(rounds: int) -> None:
            for _ in range(rounds):
                one()

        yield lambda rounds: timed(lambda: go(rounds), lambda: rounds)
        for link in links:
            link.send([])


def _help(case: Case, state: dict[str, Tensor], total: dict[str, Tensor], link: Connection) -> None:
    _set_up()
    loop = Loop(case)
    while sites := link.recv():
        loop.trained(sites, state, total)
        link.send(True)


def _zeros(model: nn.Module) -> dict[str, Tensor]:
    """Of the shapes of a model, in memory that other processes can share."""
    return {
        name: torch.zeros_like(value).share_memory_()  # type: ignore[no-untyped-call]
        for name, value in model.state_dict().items()
    }


def timed(work: Callable[[], object], rounds: Callable[[], int]) -> Seconds:
    """Of a round; how many there were is asked afterwards."""
    clock, processor = time.perf_counter(), _processor()
    work()
    return (time.perf_counter() - clock) / rounds(), (_processor() - processor) / rounds()


def _processor() -> float:
    """Seconds of the processor, of this process and those that it began."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return time.process_time() + sum(_ran(Path(f"/proc/{child}/task")) for child in children)


def _ran(tasks: Path) -> float:
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks.iterdir()) / 1e9


def _epoch(model: nn.Module, recipe: Recipe, train: tuple[Tensor, Tensor], generator: torch.Generator) -> None:
    images, labels = train
    optimizer = torch.optim.SGD(model.parameters(), recipe.plan.lr, recipe.plan.momentum)
    model.train()
    order = torch.randperm(len(labels), generator=generator)
    for batch in torch.split(order, recipe.plan.batch_size):
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _score(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Accuracy, and each class's recall [C]."""
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(some).argmax(1) for some in torch.split(images, 512)])
    right = labels[answers == labels].bincount(minlength=CLASSES)
    return float(right.sum() / len(labels)), right / labels.bincount(minlength=CLASSES)
