"""What a run costs, round by round: bytes between server and sites, and local epochs that were really trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from protofed.common.errors import ConfigError
from protofed.common.protocol.scores import lower_is_better
from protofed.deploy.experiments.experiment import Result


@dataclass(frozen=True)
class Cost:
    """Of all rounds up to one.

    Attributes:
        bytes: of updates, and of the models that sites were asked to train, all sites together; None: not known.
        epochs: passes of a site over its own training examples, of a round's sites in the mean; None: not known.
            Whatever a method trains is counted: heads, second models, fine-tuning.
    """

    bytes: int | None
    epochs: float | None


@dataclass(frozen=True)
class Target:
    """A score that is to be reached, `global.accuracy=0.8`."""

    score: str
    value: float

    @classmethod
    def read(cls, text: str) -> Target:
        """As the command line has it.

        Raises:
            ConfigError: it is no score and number.
        """
        score, _, value = text.partition("=")
        if not re.fullmatch(r"\d*\.?\d+", value):
            raise ConfigError(f"--reach {text}: expected a score and a value, such as global.accuracy=0.8")
        return cls(score, float(value))

    def reached(self, means: Mapping[int, float]) -> int | None:
        """The first round whose mean is as good; None: none is."""
        lower = lower_is_better(self.score)
        good = (n for n in sorted(means) if (means[n] <= self.value if lower else means[n] >= self.value))
        return next(good, None)

    @property
    def shown(self) -> str:
        """The value, shares in percent."""
        return f"{self.value:g}" if self.score.endswith("loss") else f"{100 * self.value:g} %"


def costs(result: Result) -> dict[int, Cost]:
    """The cost of a run up to each of its rounds; empty: it was not recorded."""
    numbers = sorted(result.trained)
    held = result.train_examples
    by_round = (
        fmean(examples / held[site] for site, examples in result.trained[number].items() if held.get(site))
        for number in numbers
    )
    epochs = dict(zip(numbers, accumulate(by_round), strict=True))
    moved = accumulate(of.up + of.down for _, of in sorted(result.traffic.items()))
    totals = dict(zip(sorted(result.traffic), moved, strict=True))
    return {number: Cost(totals.get(number), epochs.get(number)) for number in sorted({*epochs, *totals})}
