"""What `protofed client check` finds out about a site's images; numbers of examples among it, so it stays there."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.common.config.recipe import Input, Recipe
from protofed.deploy.site.survey import DRAWN, Seen, Survey

TRAIN, TEST, OWN_TEST = "trains on", "tests on", "own test set"
FAR = 1.0  # of the recipe's std: how far a mean may be off before a word is said about it
WIDE = 3.0  # likewise, how many times a std may be larger or smaller
Counts: TypeAlias = NDArray[np.int64]  # [C]


@dataclass(frozen=True, eq=False)
class CheckRequest:
    """What images are brought to, and the classes: a recipe's or, without one, the data's own.

    Attributes:
        class_names: the classes by name; empty of a run that has numbers only.
        recipe: None: what there is, and nothing to compare it with.
    """

    input: Input
    classes: int
    class_names: tuple[str, ...]
    recipe: Recipe | None

    def name(self, index: int) -> str:
        """Of a class."""
        return self.class_names[index] if self.class_names else f"{index}"


@dataclass(frozen=True, eq=False)
class Alike:
    """Images that the model cannot tell apart: equal in every pixel that it sees.

    Attributes:
        sets: names of images that are alike, by split; those of one label come after those of several.
        differing: how many of the sets hold more than one label.
        across: images of the daemon's test sets that it trains on, too; None: the data were not loaded.
    """

    sets: Sequence[Sequence[Seen]]
    differing: int
    across: int | None


@dataclass(frozen=True, eq=False)
class SiteCheck:
    """What a site has, and whether its daemon would take part with it.

    Attributes:
        stored: images by the source's own split (or DRAWN), [C] each; unreadable ones are not counted.
        taken: what the daemon makes of them, [C] each, by TRAIN, TEST and OWN_TEST; empty where it refuses.
        astray: files in no class's folder.
        groups: how many; None: there are none.
        crossing, ungrouped: images whose group is in train and test, or that have none.
        moments: means and stds by channel, of pixels in 0..1; None: of no image.
        least: examples below which the policy makes a class absent.
        memory: bytes that the images need, and that are there; None: nobody can say.
        refusal: why the daemon would take no part; None: it would.
    """

    wanted: CheckRequest
    source: str
    survey: Survey
    stored: Mapping[str, Counts]
    taken: Mapping[str, Counts]
    astray: Sequence[str]
    groups: int | None
    crossing: Sequence[str]
    ungrouped: Sequence[str]
    alike: Alike
    moments: tuple[list[float], list[float]] | None
    least: int | None
    memory: tuple[int, int | None]
    refusal: str | None

    @property
    def unreadable(self) -> list[Seen]:
        """Files that are no image that the run can use."""
        return [seen for seen in self.survey.images if seen.why is not None]

    @property
    def training(self) -> Counts:
        """Examples to train on, [C]: as the daemon has them or, where it refuses, all that may be."""
        if TRAIN in self.taken:
            return self.taken[TRAIN]
        none = np.zeros(self.wanted.classes, np.int64)
        return self.stored.get("train", none) + self.stored.get(DRAWN, none)

    @property
    def rare(self) -> list[str]:
        """Classes that the policy makes absent, though there are some examples."""
        some = (self.training > 0) & (self.training < (self.least or 0))
        return [self.wanted.name(int(index)) for index in np.flatnonzero(some)]

    @property
    def off(self) -> list[str]:
        """Channels whose pixels are far from what the recipe expects, in words."""
        if self.moments is None or self.wanted.recipe is None:
            return []
        shape, told = (len(self.moments[0]),), []
        wanted = [np.broadcast_to(values, shape) for values in (self.wanted.input.mean, self.wanted.input.std)]
        for channel, (mean, std, at, by) in enumerate(zip(*self.moments, *wanted, strict=True)):
            if abs(mean - at) > FAR * by or not 1 / WIDE < std / by < WIDE:
                told.append(f"channel {channel}: mean {mean:.3f}, std {std:.3f}; the recipe has {at:.3f}, {by:.3f}")
        return told


def nearest(label: str, names: Sequence[str]) -> str | None:
    """The class whose name is most like a label."""
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(label.casefold(), folded, n=1, cutoff=0.5)
    return folded[near[0]] if near else None
