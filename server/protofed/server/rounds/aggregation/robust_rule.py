"""A run's robust rule: from a round's updates those that its method aggregates. The method is the same under any rule.

"clip" moves an update back towards what its site was sent. "krum" chooses sites, before anything is aggregated. The
other rules replace each model by the centre of all updates, and a method then takes the mean of these. Rows of classes
are centred on the sphere, except under "clip", which bounds their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import structlog

from protofed.common.config.recipe import Federation, Recipe, Robust
from protofed.common.errors import ConfigError
from protofed.common.payload import NOT_A_MOVE, Array, Part, Payload, SiteId, Tensors, Update, distance_norm
from protofed.common.secure_aggregation.linear_form import SumForm, read_form
from protofed.server import robust
from protofed.server.method import OwnStartMethod, ServerMethod, sent
from protofed.server.rounds.machine.rules import min_cohort

log = structlog.get_logger()
ROWS = frozenset({Part.PROTOTYPES, Part.CLASS_GRADIENTS})  # parts of a tensor a class, named by the class's number
CLIP_FACTOR = 2.0  # times the cohort's median: the largest norm of a move. From 1 honest sites lose rare classes
# Krum compares directions: at their own lengths it would leave out honest sites with more images than others.
COMPARED_FACTOR = 1.0  # times the cohort's median: lengths at which updates are compared
KRUM_MARGIN = 2.0  # times the cohort's median: a Krum score up to which nobody is left out
CENTRES = frozenset({"median", "trimmed", "geometric-median"})
CLIPPED = "updates_clipped"  # statistics of a round: how many; and by class that too few hold, how many do
KEPT_ROW = "kept_row."


@dataclass(frozen=True)
class Made:
    """What the method aggregates, read once, and what the round's record says about it."""

    updates: Iterator[Update]
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RobustRule:
    """One run's rule, over one method.

    Attributes:
        bad: f, the most sites that may send anything; of "krum" and "trimmed".
    """

    name: Robust
    bad: int
    method: ServerMethod

    @classmethod
    def of(cls, recipe: Recipe, method: ServerMethod) -> RobustRule | None:
        """A recipe's rule; None: it has none."""
        rules = recipe.federation
        return None if rules.robust == "none" else cls(rules.robust, rules.max_bad_sites, method)

    @property
    def needed(self) -> int:
        """Updates without which the rule bounds nothing."""
        return needed(self.name, self.bad)

    @property
    def chooses(self) -> bool:
        """Whether it may leave sites out."""
        return self.name == "krum"

    def rejected(self, state: Payload, updates: Sequence[Update]) -> dict[SiteId, str]:
        """By site, why it is not chosen, by a rule that chooses.

        Args:
            updates: of a round, in site order, as views of what is on disk.
        """
        starts = self._starts(state, updates)
        parts = _moving(updates[0].payload)
        products = robust.inner_products([update.payload for update in updates], starts, parts)
        scales = np.array(robust.clip_scales(np.sqrt(products.diagonal()).tolist(), COMPARED_FACTOR))
        products *= np.outer(scales, scales)
        scores = robust.krum_scores(products, self.bad)
        usual = float(np.median(scores))
        outliers = {updates[k].site: scores[k] for k in robust.krum_rejected(scores, self.bad, KRUM_MARGIN)}
        return {
            site: f"krum: the sum of its squared distances to the nearest updates is {score:.6g}, more than "
            f"{KRUM_MARGIN:g} times the cohort's median of {usual:.6g}"
            for site, score in outliers.items()
        }

    def made(self, state: Payload, updates: Sequence[Update], norms: Sequence[float | None]) -> Made:
        """What the method aggregates in place of the updates.

        Args:
            updates: those that count, in site order, as views of what is on disk: memory does not grow with their
                number, but for methods that hold a model of each site anyway.
            norms: of each, as `intake.examined` gave them; None: it is taken here.
        """
        if self.name in CENTRES:
            centre = self._centre(state, updates)
            models: Iterator[Update] = (_with_centre(update, centre) for update in updates)
            statistics: dict[str, float] = {}
        else:
            scales = self._scales(state, updates, norms)
            models = self._clipped(state, updates, scales)
            statistics = {CLIPPED: float(sum(scale < 1 for scale in scales))}
        if self.name == "clip":
            longest = _longest_rows(updates)
            return Made((_with_rows_shortened(update, longest) for update in models), statistics)
        rows, withheld = _centred_rows(updates)
        if withheld:
            log.info("rows of classes kept", classes=sorted(map(int, withheld)), needed=robust.MIN_CONTRIBUTORS)
        statistics |= {f"{KEPT_ROW}{name}": float(contributors) for name, contributors in sorted(withheld.items())}
        return Made((_with_rows(update, rows) for update in models), statistics)

    def _scales(self, state: Payload, updates: Sequence[Update], norms: Sequence[float | None]) -> list[float]:
        """The factor that scales each update's move, [K]."""
        lengths = [self._length(state, update, norm) for update, norm in zip(updates, norms, strict=True)]
        scales = robust.clip_scales(lengths, CLIP_FACTOR)
        for update, norm, scale in zip(updates, lengths, scales, strict=True):
            if scale < 1:
                log.info("update clipped", site=update.site, norm=norm, scale=scale)
        return scales

    def _length(self, state: Payload, update: Update, norm: float | None) -> float:
        """How far the update moves the model; of its norm what rows of classes have no part in."""
        rows = {part: update.payload[part] for part in ROWS & update.payload.keys() - NOT_A_MOVE}
        if norm is None:
            moving = {part: update.payload[part] for part in _moving(update.payload)}
            return distance_norm(moving, self._start(state, update))
        if not rows:
            return norm
        return math.sqrt(max(norm**2 - distance_norm(rows, self._start(state, update)) ** 2, 0.0))

    def _clipped(self, state: Payload, updates: Sequence[Update], scales: Sequence[float]) -> Iterator[Update]:
        """The updates with scaled moves; a number of steps, which multiplies a move, within the same bounds."""
        steps = [float(update.payload[Part.STEPS]["steps"]) for update in updates if Part.STEPS in update.payload]
        most = CLIP_FACTOR * robust.median_length(steps) if steps else 0.0
        for update, scale in zip(updates, scales, strict=True):
            payload = dict(update.payload)
            if scale < 1:
                payload |= robust.moved(payload, self._start(state, update), scale, _moving(payload))
            if Part.STEPS in payload:
                step_count = payload[Part.STEPS]
                payload[Part.STEPS] = {name: np.clip(of, 0, most).astype(of.dtype) for name, of in step_count.items()}
            yield replace(update, payload=payload)

    def _centre(self, state: Payload, updates: Sequence[Update]) -> Payload:
        """Of the parts that the method averages."""
        payloads, parts = [update.payload for update in updates], _form(self.method).means
        match self.name:
            case "median":
                centre: robust.Centre = robust.median
            case "trimmed":
                centre = partial(robust.trimmed, bad=self.bad)
            case _:
                products = robust.inner_products(payloads, self._starts(state, updates), parts)
                centre = partial(robust.weighted, weights=robust.centre_weights(products))
        return robust.centred(payloads, parts, centre)

    def _starts(self, state: Payload, updates: Sequence[Update]) -> list[Payload]:
        return [self._start(state, update) for update in updates]

    def _start(self, state: Payload, update: Update) -> Payload:
        """What the site trained from, as far as the server knows it."""
        if callable(getattr(self.method, "start", None)):
            return cast("OwnStartMethod", self.method).start(state, update.site, update.payload)
        return sent(self.method, state, update.site)


def needed(name: Robust, bad: int) -> int:
    """Updates without which a rule bounds nothing; Blanchard et al. need 2 f + 3 for Krum."""
    least = {"krum": 2 * bad + 3, "trimmed": 2 * bad + 1, "median": 3, "geometric-median": 3}
    return least.get(name, 1)


def kept_classes(statistics: Mapping[str, float]) -> list[int]:
    """Of a round's statistics: the classes whose row stayed as it was, because too few sites had one."""
    return sorted(int(name.removeprefix(KEPT_ROW)) for name in statistics if name.startswith(KEPT_ROW))


def check_robust(recipe: Recipe, method: ServerMethod) -> None:
    """Check that a recipe's robust rule has a meaning for its method, and updates enough in every round.

    Raises:
        ConfigError: it has not; the text says what to do.
    """
    rule = recipe.federation.robust
    setting = f"recipe '{recipe.name}': federation.robust = \"{rule}\""
    if rule == "none":
        return
    least = needed(rule, recipe.federation.max_bad_sites)
    if (fewest := min_cohort(recipe.federation)) < least:
        raise ConfigError(
            f"{setting} needs {least} updates in a round{_by(recipe.federation)}, and a round may close with {fewest} "
            "(min_sites, participation, quorum): raise these, or take another rule"
        )
    if rule in CENTRES and (problem := _no_mean(method, recipe.method.name)):
        raise ConfigError(f'{setting}: {problem}; "clip" and "krum" work with every method')
    if rule == "krum" and _sends_no_model(method):
        raise ConfigError(f"{setting} compares models, and {recipe.method.name} sends none: take another rule")


def _by(federation: Federation) -> str:
    return f" with max_bad_sites = {federation.max_bad_sites}" if federation.robust in ("krum", "trimmed") else ""


def _no_mean(method: ServerMethod, name: str) -> str:
    """Why a method's next state is not made of one mean of the sites' models; empty: it is."""
    try:
        form = read_form(method, name)
    except ConfigError:
        return f"{name} with these options does not take a mean of the sites' updates, which a centre could replace"
    return f"{name} makes a model for each class from the updates, and not one mean" if form.mixtures else ""


def _sends_no_model(method: ServerMethod) -> bool:
    try:
        return not read_form(method, "").means
    except ConfigError:
        return False


def _form(method: ServerMethod) -> SumForm:
    return read_form(method, "")


def _moving(payload: Payload) -> list[Part]:
    """The parts that are a model, or move as one does; rows of classes are bounded by themselves."""
    return [part for part in sorted(payload) if part not in NOT_A_MOVE and part not in ROWS]


def _by_class(updates: Sequence[Update]) -> dict[tuple[Part, str], list[Array]]:
    by_class: dict[tuple[Part, str], list[Array]] = {}
    for update in updates:
        for part in sorted(ROWS & update.payload.keys()):
            for name, row in update.payload[part].items():
                by_class.setdefault((part, name), []).append(row)
    return by_class


def _centred_rows(updates: Sequence[Update]) -> tuple[dict[Part, Tensors], dict[str, int]]:
    """The centre of each class's rows; and of the classes that have none, how many sites hold them."""
    rows: dict[Part, dict[str, Array]] = {}
    withheld: dict[str, int] = {}
    for (part, name), of_class in _by_class(updates).items():
        if centre := robust.robust_rows({name: of_class}):
            rows.setdefault(part, {}).update(centre)
        else:
            withheld[name] = len(of_class)
    return dict(rows), withheld


def _with_centre(update: Update, centre: Payload) -> Update:
    replaced = {part: {**update.payload[part], **tensors} for part, tensors in centre.items()}
    return replace(update, payload={**update.payload, **replaced})


def _with_rows(update: Update, rows: Mapping[Part, Tensors]) -> Update:
    """The update with the centre of each class's rows, and without its rows of classes that have none."""
    replaced = {
        part: {name: rows[part][name] for name in update.payload[part] if name in rows.get(part, {})}
        for part in ROWS & update.payload.keys()
    }
    return replace(update, payload={**update.payload, **replaced}) if replaced else update


def _with_rows_shortened(update: Update, longest: Mapping[tuple[Part, str], float]) -> Update:
    shortened = {
        part: {name: _shortened(row, longest[part, name]) for name, row in update.payload[part].items()}
        for part in ROWS & update.payload.keys()
    }
    return replace(update, payload={**update.payload, **shortened}) if shortened else update


def _longest_rows(updates: Sequence[Update]) -> dict[tuple[Part, str], float]:
    """By class, how long a row may be."""
    return {
        of: CLIP_FACTOR * robust.median_length([_length(row) for row in rows])
        for of, rows in _by_class(updates).items()
    }


def _shortened(row: Array, most: float) -> Array:
    length = _length(row)
    return (row * (most / length)).astype(row.dtype) if 0 < most < length else row


def _length(row: Array) -> float:
    return distance_norm({Part.PROTOTYPES: {"row": row}}, {})
