"""An experiment: recipes times seeds, each a job in its own folder, and what stays when the job is done."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import Field

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, parse, parse_json
from protofed.common.config.tables import StrictModel
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import SiteId
from protofed.common.protocol.scores import Spread
from protofed.common.storage import files
from protofed.deploy.experiments.code_digest import CodeDigest, shown
from protofed.deploy.shipped import leaves

_RECIPE, RESULT = "recipe.json", "result.json"
_CODE, FAILURE, SECONDS = "code.json", "failure.json", "seconds"
LOG = "job.log"


class RoundTraffic(StrictModel):
    """Bytes of one round, of all its sites together: of updates (`up`) and of the models that are trained (`down`)."""

    up: int
    down: int


class Result(StrictModel):
    """A finished run, whole. For simulations of one's own data only: no deployment knows a site's sizes.

    Attributes:
        seconds: wall-clock time of the job, added up over its interruptions.
        state: address of the last published state.
        scores: of every scored round, by site and name; `loss` is a site's training loss in that round.
        sums: of every scored round of a run under secure aggregation, what they say of the sites' own scores, by name.
        cohorts: by round, the sites whose updates were aggregated.
        train_examples, local_test_examples: sizes of each site's own data; sites without a local test have none.
        test_images: size of the test set that all sites share; 0: there is none.
        code: that computed it.
        machine: the kind of machine that computed it.
        traffic: by round from 1. Empty under secure aggregation, whose numbers a simulation does not mask.
        trained: by round and site, examples that the site trained on, repetitions counted.
        held_out: by site of `data.held_out_sites` and name, as of `held_out_scores`.
    """

    recipe: Recipe
    protofed: str
    seconds: float
    state: Digest
    scores: dict[int, dict[SiteId, dict[str, float]]]
    cohorts: dict[int, tuple[SiteId, ...]]
    train_examples: dict[SiteId, int]
    local_test_examples: dict[SiteId, int]
    test_images: int
    code: CodeDigest
    machine: str
    sums: dict[int, dict[str, Spread]] = Field(default_factory=dict)
    traffic: dict[int, RoundTraffic] = Field(default_factory=dict)
    trained: dict[int, dict[SiteId, int]] = Field(default_factory=dict)
    held_out: dict[SiteId, dict[str, float]] = Field(default_factory=dict)


@dataclass(frozen=True)
class ExperimentJob:
    """One recipe with one seed, in `folder`."""

    recipe: Recipe = field(hash=False)
    folder: Path

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.name

    @property
    def state(self) -> Path:
        """Where the simulation survives."""
        return self.folder / "state"

    @property
    def log(self) -> Path:
        """One JSON line an event."""
        return self.folder / LOG

    def result(self) -> Result | None:
        """What it gave, if it is done.

        Raises:
            ConfigError: the file is no result that this version can read.
        """
        path = self.folder / RESULT
        return parse_json(path.read_text(encoding="utf-8"), Result, str(path)) if path.exists() else None

    def write_result(self, result: Result) -> None:
        """The job is done."""
        files.write(self.folder / RESULT, result.model_dump_json().encode())

    def failure(self) -> str | None:
        """Why its run failed, which it would do again; None: it did not."""
        path = self.folder / FAILURE
        return str(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def write_failure(self, why: str) -> None:
        """The run has failed: not the process, which would go on, but what it computes."""
        files.write(self.folder / FAILURE, json.dumps(why).encode())

    def begin(self, code: CodeDigest) -> None:
        """A process begins, or goes on, with the job.

        Raises:
            StateError: what is there was computed by other code.
        """
        if self.state.exists() and (changes := self.changes(code)):
            raise StateError(
                f"{self.folder} was started by other code (changed: {shown(changes)}); the same command begins it again"
            )
        files.write(self.folder / _CODE, code.model_dump_json().encode())

    def changes(self, code: CodeDigest) -> list[str]:
        """What of the code has changed since the job was computed, or started; none: nothing, or it was not started.

        Raises:
            ConfigError: a file is none that this version can read.
        """
        path, result = self.folder / _CODE, self.result()
        if result is not None:
            return code.changes(result.code)
        if not path.exists():
            return []
        return code.changes(parse_json(path.read_text(encoding="utf-8"), CodeDigest, str(path)))

    def begin_again(self) -> None:
        """Set the result and the run aside: they may be days of work, and somebody may want the old code back."""
        result = self.folder / RESULT
        numbered = ({path: _before(path, number) for path in (result, self.state)} for number in count(1))
        aside = next(names for names in numbered if not any(path.exists() for path in names.values()))
        for path, former in aside.items():
            if path.exists():
                os.rename(path, former)
        for name in (_CODE, FAILURE, SECONDS):
            (self.folder / name).unlink(missing_ok=True)

    def check(self) -> None:
        """Another recipe's work is never mixed with this one's, nor thrown away.

        Raises:
            StateError: the folder holds another recipe's run.
            ConfigError: it holds a recipe that this version cannot read.
        """
        path = self.folder / _RECIPE
        recorded = parse_json(path.read_text(encoding="utf-8"), Recipe, str(path)) if path.exists() else self.recipe
        if recorded != self.recipe:
            raise StateError(
                f"{self.folder} holds a run of another recipe ({_difference(recorded, self.recipe)}); "
                "remove it, or take another folder with --out"
            )

    def claim(self) -> None:
        """Make the folder this recipe's."""
        if not (self.folder / _RECIPE).exists():
            files.write(self.folder / _RECIPE, self.recipe.model_dump_json(indent=2).encode())

    @classmethod
    def claimed(cls, folder: Path) -> ExperimentJob:
        """The job of a folder that was claimed before.

        Raises:
            StateError: it never was.
            ConfigError: its recipe cannot be read by this version.
        """
        try:
            text = (folder / _RECIPE).read_text(encoding="utf-8")
        except OSError as error:
            raise StateError(f"{folder} holds no job ({error.strerror}); give the recipes again") from error
        return cls(parse_json(text, Recipe, str(folder / _RECIPE)), folder)


def plan_jobs(
    recipes: Sequence[Recipe],
    seeds: Sequence[int] | None,
    rounds: int | None,
    out: Path,
    folders: Mapping[str, str] | None = None,
) -> list[ExperimentJob]:
    """All recipes with the first seed, then with the second, …; a seed deals the data, too.

    Args:
        seeds: in place of the recipes' own.
        rounds: the most that a recipe may have.
        folders: by a recipe's name, what its jobs' folders are called, but for the seed; None: as the recipe.

    Raises:
        ConfigError: two recipes of one name, a seed given twice, or a recipe without [data].
    """
    names = [recipe.name for recipe in recipes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two recipes have the name '{twice.pop()}'; a row of the table needs a name of its own")
    if seeds is not None and len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {', '.join(map(str, seeds))}: expected each once")
    own: list[int | None] = [None]
    variants = (_with_seed(recipe, seed) for seed in seeds or own for recipe in recipes)
    cut = [recipe.model_copy(update={"rounds": min(recipe.rounds, rounds or recipe.rounds)}) for recipe in variants]
    called = folders or {}
    return [ExperimentJob(one, out / f"{called.get(one.name, one.name)}-seed{one.seed}") for one in cut]


def read_values(text: str) -> tuple[str, list[Any]]:
    """A key and its values, as in `method.prototype_momentum=0.1,0.5,0.9`.

    Raises:
        ConfigError: it is no key and values, or a value stands there twice.
    """
    key, equals, values = text.partition("=")
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"] if equals else []
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{text}': {values} are no TOML values ({error}); text needs quotes") from error
    if not parsed:
        raise ConfigError(f"'{text}': expected a key and values, as in method.prototype_momentum=0.1,0.5,0.9")
    if twice := next((value for place, value in enumerate(parsed) if value in parsed[:place]), None):
        raise ConfigError(f"'{text}': expected each value once, and {twice} is there twice")
    return key, parsed


def varied(recipes: Sequence[Recipe], vary: str) -> list[Recipe]:
    """Each recipe once for every value of one key, as of `read_values`; values end names.

    Raises:
        ConfigError: no key and values, a key that cannot be set, or a value that the recipe cannot have.
    """
    key, values = read_values(vary)
    return [with_settings(recipe, {key: value}) for recipe in recipes for value in values]


def with_settings(recipe: Recipe, settings: Mapping[str, Any], *, rename: bool = True) -> Recipe:
    """The recipe with these values of keys, such as `plan.lr`.

    Args:
        rename: its name ends in the values, so that it can stand beside others of the kind.

    Raises:
        ConfigError: a key that cannot be set, or a value that the recipe cannot have.
    """
    table = recipe.model_dump(mode="json")
    for path, value in settings.items():
        *tables, key = path.split(".")
        inner: Any = table
        for name in tables:
            inner = inner.get(name)
            if not isinstance(inner, dict):
                raise ConfigError(f"recipe '{recipe.name}' has no table '{name}' ({path})")
        inner[key] = value
        if rename:
            table["name"] = "-".join([table["name"], key, str(value)]).lower().replace("_", "-").replace(".", "-")
    return parse(table, Recipe, f"recipe '{recipe.name}'")


def _with_seed(recipe: Recipe, seed: int | None) -> Recipe:
    if recipe.data is None:
        raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
    if seed is None:
        return recipe
    return recipe.model_copy(update={"seed": seed, "data": recipe.data.model_copy(update={"seed": seed})})


def _difference(recorded: Recipe, current: Recipe) -> str:
    """The first key in which two recipes differ."""
    theirs, ours = dict(leaves(recorded.model_dump())), dict(leaves(current.model_dump()))
    key = next(key for key in theirs | ours if theirs.get(key) != ours.get(key))
    return f"{key} is {theirs.get(key)} there and {ours.get(key)} here"


def _before(path: Path, number: int) -> Path:
    """The name under which an old result or run is kept: `result-before-1.json`, `state-before-1`."""
    return path.with_name(f"{path.stem}-before-{number}{path.suffix}")


_CONTENTS = "comparison.json"


class Candidate(StrictModel):
    """Settings that were tried for a recipe, and the jobs that tried them.

    Attributes:
        recipe: its name.
        settings: values by key.
        jobs: names of the jobs' folders, one for each seed.
    """

    recipe: str
    settings: dict[str, Any]
    jobs: tuple[str, ...]


class Tuning(StrictModel):
    """The search before a comparison.

    Attributes:
        by: scores that choose, of which a recipe's runs take the first that they have; empty: the first of
            `JUDGED_BY` that all runs have.
        candidates: of all recipes, in the order in which they were asked for.
    """

    by: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...]


class ExperimentContents(StrictModel):
    """What a comparison's folder is about; its presence says that the folder is one.

    Attributes:
        jobs: names of the jobs' folders; none while it is tuned.
        shortened: rounds to which recipes were cut.
        against: the recipe that the others are compared with; None: the first.
        reach: the score that is to be reached, as `global.accuracy=0.8`; None: none.
        tuning: the search before; None: there was none.
        command: what computes the same, without paths; empty while it is tuned.
    """

    jobs: tuple[str, ...] = ()
    shortened: int | None = None
    against: str | None = None
    reach: str | None = None
    tuning: Tuning | None = None
    command: str = ""


def read_contents(out: Path) -> ExperimentContents:
    """What was compared in a folder.

    Raises:
        StateError: nothing was.
    """
    path = out / _CONTENTS
    try:
        return parse_json(path.read_text(encoding="utf-8"), ExperimentContents, str(path))
    except OSError as error:
        raise StateError(f"{out} holds no comparison ({error.strerror}); name recipes to begin one") from error


def write_contents(out: Path, contents: ExperimentContents) -> None:
    """Make a folder a comparison's."""
    files.write(out / _CONTENTS, contents.model_dump_json(indent=2).encode())


def refuse_foreign(out: Path) -> None:
    """A folder with something else in it is left alone.

    Raises:
        StateError: it is neither empty nor a comparison's.
    """
    if out.exists() and not out.is_dir():
        raise StateError(f"{out} is a file; name a folder with --out")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if _CONTENTS not in names and any(name != "lock" and not name.startswith(files.TEMPORARY) for name in names):
        raise StateError(f"{out} holds something else than a comparison; name another folder with --out")
