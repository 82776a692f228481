"""An audit that begins at the files on disk: a lower bound on the epsilon of one fit, one unit more against none more.

Two folders of images differ by one image, or one patient. The project's own functions prepare the run in each, take the
gradients, clip them, sample and draw the noise. The attacker knows all files and the model, and of the update asks how
far it lies in the direction in which the two worlds differ: the best question to noise on a sum. Of the answers one
half chooses the threshold, the other gives the bound: Clopper and Pearson's at 95 %, as Nasr et al. (S&P 2021) do.

    python -m tests.attacks.split_audit --trials 20000
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import beta
from tests.support.scripted_server import RULES
from torch import Tensor
from torch.nn.functional import cross_entropy

from protofed.client.agent.computation import Computation, fit
from protofed.client.data.site import load_site
from protofed.client.models.catalogue import build, first_model
from protofed.client.models.split import load
from protofed.client.policy.dp_accountant import epsilon, round_events
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import PolicyRules
from protofed.client.site import DaemonStatus, PreparedRun, Site, prepare, train_alone
from protofed.client.state.store import MemoryStore, SiteState
from protofed.client.training.context import NoCheckpoints
from protofed.client.training.noisy_steps import ClippedSum, PerExample
from protofed.common.codec import Digest
from protofed.common.config.data import Data
from protofed.common.config.recipe import DpCost, DpPlan, Recipe
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import Assignment, Role, Task, TaskKind

CLASSES, SIDE = 5, 8
CLIP = 0.1  # below the norm of most gradients: each unit adds all that it may
DELTA, CONFIDENCE = 1e-5, 0.95
PER_PATIENT = 3
PATTERN = "(P[0-9]+)_"
TASK = Task(TaskKind.FIT, "run", 1, "fit", Digest("base"), 0, 60.0)
Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """What is audited."""

    unit: str = "image"  # or patient of `PER_PATIENT` images
    held_out: float = 0.25  # `local_test_fraction`; 0: the files have a folder `test`
    noise: float = 4.2  # of `[plan.dp]`, as the rate
    rate: float = 1.0
    units: int = 300  # that both worlds have
    by_unit: bool = True  # each unit is held out by itself; false: by the rule for runs without noise

    @property
    def name(self) -> str:
        """For the table."""
        where = f"{self.held_out:.0%} held out" if self.held_out else "folder `test`"
        return f"{self.unit}, {where}, q = {self.rate:g}, σ = {self.noise:g}"

    def recipe(self) -> Recipe:
        """A run of one fit; the rate is so small that the model's gradients stay as they are from step to step."""
        dp = {"noise_multiplier": self.noise, "sampling_rate": self.rate, "max_unit_norm": CLIP}
        names = [f"class-{c}" for c in range(CLASSES)]
        table = {"name": "run", "rounds": 1, "classes": CLASSES, "class_names": names, "method": {"name": "fedavg"}}
        table |= {"input": {"shape": [1, SIDE, SIDE]}, "model": {"name": "mlp", "hidden": [8]}}
        return Recipe.model_validate(table | {"plan": {"batch_size": 100, "lr": 1e-3, "dp": dp}})

    def epsilon(self) -> float:
        """What the accountant says of the fit."""
        recipe = self.recipe()
        assert recipe.plan.dp is not None
        return epsilon(round_events(recipe.plan.dp, DpCost((recipe.plan.epochs,))), DELTA)


SETTINGS = (
    *(Setting(unit, held_out) for unit in ("image", "patient") for held_out in (0.25, 0.0)),
    *(Setting(unit, noise=1.0, rate=0.2) for unit in ("image", "patient")),
    Setting(noise=1.0),
)


def write(root: Path, setting: Setting, more: int | None) -> None:
    """The files that all worlds have and, of one with `more`, the unit of this number: random pixels and labels."""
    per = PER_PATIENT if setting.unit == "patient" else 1
    for unit in (*range(setting.units), *(() if more is None else (setting.units + more,))):
        _write_unit(root / ("" if setting.held_out else "train"), unit, per)
    for unit in range(10**6, 10**6 + 10) if not setting.held_out else ():
        _write_unit(root / "test", unit, 1)


def _write_unit(root: Path, unit: int, images: int) -> None:
    draw = np.random.default_rng(unit)
    for number in range(images):
        folder = root / f"class-{draw.integers(CLASSES)}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (SIDE, SIDE), np.uint8)
        Image.fromarray(pixels).save(folder / f"P{unit:07}_{number}.bmp")


def prepared(root: Path, setting: Setting) -> PreparedRun:
    """The run at a site with these files, by the site's own checks."""
    grouped = {"group_pattern": PATTERN} if setting.unit == "patient" else {}
    held_out = {"local_test_fraction": setting.held_out} if setting.held_out else {}
    data = Data.model_validate({"source": "folder", "root": root, **grouped, **held_out})
    recipe = setting.recipe()
    site = Site(
        "north",
        frozenset({Role.TRAINER}),
        Policy(PolicyRules.model_validate(RULES)),
        MemoryStore(),
        lambda run: load_site(data, 0, run.input, run.classes, run.class_names, noisy=setting.by_unit),
        lambda run: build(run.model, run.input, run.classes),
    )
    return prepare(site, Assignment("run", recipe.wire()))


@dataclass(frozen=True, eq=False)
class World:
    """A site with its files."""

    run: PreparedRun
    base: Payload
    clipped: Tensor  # of each unit, [U, P] float64

    @classmethod
    def of(cls, root: Path, setting: Setting) -> World:
        run = prepared(root, setting)
        base = first_model(run.recipe, frozenset())
        load(run.model.body, base[Part.BODY])
        load(run.model.head, base[Part.HEAD])
        return cls(run, base, _clipped(run).double())

    @property
    def plan(self) -> DpPlan:
        assert self.run.recipe.plan.dp is not None
        return self.run.recipe.plan.dp

    def _with(self, secret: int) -> PreparedRun:
        assert self.run.dp is not None
        return replace(self.run, dp=replace(self.run.dp, secret=secret.to_bytes(32, "big")))

    def sums(self, secret: int) -> Tensor:
        """What a fit adds up, with its noise, over all steps: [P], by the noise of this secret."""
        plan, noise = self.plan, self._with(secret).noise("north", TASK, SiteState())
        assert noise is not None
        total, shapes = torch.zeros(self.clipped.shape[1], dtype=torch.float64), _shapes(self.run)
        for step in range(1, plan.steps(1) + 1):
            chosen = noise.chosen(len(self.clipped), plan.sampling_rate, 1, step, "units")
            drawn = [
                noise.normal(shape, 1, step, "noise", index, device=torch.device("cpu")).flatten()
                for index, shape in enumerate(shapes)
            ]
            total += chosen.double() @ self.clipped + plan.noise_multiplier * plan.max_unit_norm * torch.cat(drawn)
        return total

    def mean(self) -> Tensor:
        """What `sums` gives on average, [P]."""
        return self.plan.steps(1) * self.plan.sampling_rate * self.clipped.sum(0)

    def fitted(self, secret: int) -> Tensor:
        """`sums` of the project's own fit from beginning to end, read off its update: [P]."""
        run = self._with(secret)
        work = Computation("north", run, TASK, SiteState())
        update = fit(work, self.base, DaemonStatus(), NoCheckpoints(), train_alone).update.payload
        moved = _flat(update, run) - _flat(self.base, run)
        return moved * (-run.recipe.plan.batch_size / run.recipe.plan.lr)


def _shapes(run: PreparedRun) -> list[torch.Size]:
    return [parameter.shape for parameter in run.model.parameters()]


def _flat(payload: Payload, run: PreparedRun) -> Tensor:
    load(run.model.body, payload[Part.BODY])
    load(run.model.head, payload[Part.HEAD])
    return torch.cat([parameter.detach().flatten().double() for parameter in run.model.parameters()])


def _clipped(run: PreparedRun) -> Tensor:
    """The clipped gradient of each unit, [U, P]."""
    trained = list(run.model.parameters())
    by_image = PerExample(run.model, trained, lambda x, y: cross_entropy(run.model(x), y))
    gradients, _ = by_image(run.data.train.normalised(run.recipe.input), run.data.train.labels)
    units = run.data.train.units
    numbers = torch.arange(len(run.data.train)) if units is None else units
    rows = []
    for unit in range(int(numbers.max()) + 1):
        own = numbers == unit
        clipped = ClippedSum(trained, CLIP)
        clipped.add([gradient[own] for gradient in gradients], None if units is None else numbers[own], ends=True)
        rows.append(torch.cat([total.flatten() for total in clipped.total]))
    return torch.stack(rows)


@dataclass(frozen=True)
class Found:
    """What an audit found."""

    moved: float  # how far one unit more moves the sum of a step without noise, in C; noise bounds 1
    bound: float  # the lower bound on epsilon
    epsilon: float  # the accountant's


def audit(setting: Setting, trials: int, root: Path) -> Found:
    """Audit a setting by so many fits in each of the two worlds."""
    write(root / "without", setting, None)
    without = World.of(root / "without", setting)
    with_one = next(_with_one(setting, root, without))
    towards = with_one.mean() - without.mean()
    towards = towards / towards.norm()
    answers = [
        np.array([float(world.sums(number) @ towards) for number in range(first, first + trials)])
        for first, world in ((0, without), (trials, with_one))
    ]
    moved = float((with_one.clipped.sum(0) - without.clipped.sum(0)).norm()) / CLIP
    return Found(moved, lower_bound(*answers), setting.epsilon())


def _with_one(setting: Setting, root: Path, without: World) -> Iterator[World]:
    """Worlds with one unit more that is trained on: of one that is held out nothing is learnt."""
    for more in range(100):
        write(root / f"with-{more}", setting, more)
        world = World.of(root / f"with-{more}", setting)
        if len(world.clipped) > len(without.clipped):
            yield world


def lower_bound(without: Values, with_one: Values) -> float:
    """The lower bound at `CONFIDENCE`; 0: nothing was found.

    Of both each second answer chooses the threshold, and on which side of it is guessed; the others count.
    """
    guesses = [(t, above) for t in _thresholds(without, with_one) for above in (False, True)]
    threshold, above = max(guesses, key=lambda guess: _bound(without[::2], with_one[::2], *guess))
    return max(0.0, _bound(without[1::2], with_one[1::2], threshold, above))


def _thresholds(without: Values, with_one: Values) -> Sequence[float]:
    seen = np.concatenate((without[::2], with_one[::2]))
    return [float(t) for t in np.quantile(seen, np.linspace(0, 1, 400))]


def _bound(without: Values, with_one: Values, threshold: float, above: bool) -> float:
    """Of an event that is likelier in one of the worlds: log of (its least chance there - delta) / its most here."""
    here, there = (
        (without > threshold, with_one > threshold) if above else (with_one <= threshold, without <= threshold)
    )
    likely, rare = _least(int(there.sum()), len(there)), _most(int(here.sum()), len(here))
    return math.log((likely - DELTA) / rare) if likely > DELTA else -math.inf


def _most(count: int, of: int) -> float:
    """Clopper and Pearson's upper end; half of what may be wrong, as the bound needs two of them."""
    return 1.0 if count == of else float(beta.ppf(1 - (1 - CONFIDENCE) / 2, count + 1, of - count))


def _least(count: int, of: int) -> float:
    return 0.0 if not count else float(beta.ppf((1 - CONFIDENCE) / 2, count, of - count + 1))


@click.command(help=__doc__)
@click.option("--trials", default=20000, help="fits in each world")
def main(trials: int) -> None:
    """Print the table of the document."""
    click.echo("| setting | accountant's ε | a unit moves the sum by | bound | old split: the sum | lower bound |")
    click.echo("|---|---|---|---|---|---|")
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            now, old = audit(setting, trials, Path(folder) / "now"), "– | –"
            if setting.held_out:
                other = audit(replace(setting, by_unit=False), trials, Path(folder) / "other")
                old = f"{other.moved:.2f} C | {other.bound:.2f}"
        click.echo(f"| {setting.name} | {now.epsilon:.2f} | {now.moved:.2f} C | {now.bound:.2f} | {old} |")


if __name__ == "__main__":
    main()
