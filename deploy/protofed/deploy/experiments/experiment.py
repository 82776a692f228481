"""An experiment: recipes times seeds, each a job in a folder of its own, and what is left of it when it is done."""

from __future__ import annotations

import contextlib
import os
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, StrictModel, parse, parse_json
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import SiteId
from protofed.common.statistics import Spread
from protofed.common.storage import files
from protofed.deploy.experiments.code_digest import UNRECORDED, CodeDigest, shown
from protofed.deploy.overrides import leaves

_CONTENTS, _RECIPE, RESULT = "comparison.json", "recipe.json", "result.json"
_CODE, BEFORE, SECONDS = "code.json", "result-before.json", "seconds"
LOG = "job.log"


class RoundTraffic(StrictModel):
    """Bytes of one round, of all its sites together: of updates (`up`) and of the models that are trained (`down`)."""

    up: int
    down: int


class Result(StrictModel):
    """A finished run, whole. For simulations of one's own data only: no deployment knows a site's sizes.

    Attributes:
        seconds: wall-clock time of the job, summed over its interruptions.
        state: address of the last published state.
        scores: of every scored round, by site and name; `loss` is a site's training loss in that round.
        sums: of every scored round of a run under secure sums, what they say of the sites' own scores, by name.
        cohorts: by round, the sites whose updates were aggregated.
        train_examples, local_test_examples: sizes of each site's own data; sites without a local test have none.
        test_images: size of the test set that all sites share; 0: there is none; None: 0.2.0 did not write it.
        code: that computed it; None: it was not recorded yet.
        machine: the kind of machine that computed it; empty: likewise.
        traffic: by round from 1. Empty: likewise, or under secure sums, whose numbers a simulation does not mask.
        trained: by round and site, examples that the site trained on, repetitions counted; empty: not recorded yet.
    """

    recipe: Recipe
    protofed: str
    seconds: float
    state: Digest
    scores: dict[int, dict[SiteId, dict[str, float]]]
    cohorts: dict[int, tuple[SiteId, ...]]
    train_examples: dict[SiteId, int]
    local_test_examples: dict[SiteId, int]
    test_images: int | None = None
    sums: dict[int, dict[str, Spread]] = Field(default_factory=dict)
    code: CodeDigest | None = None
    machine: str = ""
    traffic: dict[int, RoundTraffic] = Field(default_factory=dict)
    trained: dict[int, dict[SiteId, int]] = Field(default_factory=dict)


class ExperimentContents(StrictModel):
    """What a comparison's folder is about; its presence says that the folder is one.

    Attributes:
        jobs: names of the jobs' folders.
        shortened: rounds to which recipes were cut.
    """

    jobs: tuple[str, ...]
    shortened: int | None = None


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

    def begin(self, code: CodeDigest) -> None:
        """A process begins, or goes on, with the job.

        Raises:
            StateError: what is there was computed by other code.
        """
        if self.state.exists() and (changes := self.changes(code)):
            raise StateError(
                f"{self.folder} was begun by other code (changed: {shown(changes)}); the same command begins it again"
            )
        files.write(self.folder / _CODE, code.model_dump_json().encode())

    def changes(self, code: CodeDigest) -> list[str]:
        """What of the code has changed since the job was computed, or begun; none: nothing, or it was not begun.

        Raises:
            ConfigError: a file is none that this version can read.
        """
        path, result = self.folder / _CODE, self.result()
        if result is not None:
            held = result.code
        elif path.exists():
            held = parse_json(path.read_text(encoding="utf-8"), CodeDigest, str(path))
        elif self.state.exists():
            held = None
        else:
            return []
        return [UNRECORDED] if held is None else code.changes(held)

    def begin_again(self) -> None:
        """Set the result aside, and remove the run."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder / RESULT, self.folder / BEFORE)
        for name in (_CODE, SECONDS):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.state, ignore_errors=True)

    def check(self) -> None:
        """Another recipe's work is never mixed with this one's, nor thrown away.

        Raises:
            StateError: the folder holds another recipe's run.
            ConfigError: it holds a recipe that this version cannot read.
        """
        path = self.folder / _RECIPE
        held = parse_json(path.read_text(encoding="utf-8"), Recipe, str(path)) if path.exists() else self.recipe
        if held != self.recipe:
            raise StateError(
                f"{self.folder} holds a run of another recipe ({_difference(held, self.recipe)}); "
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


def jobs_of(
    recipes: Sequence[Recipe], seeds: Sequence[int] | None, rounds: int | None, out: Path
) -> list[ExperimentJob]:
    """All recipes with the first seed, then with the second, …; a seed deals the data, too.

    Args:
        seeds: in place of the recipes' own.
        rounds: the most that a recipe may have.

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
    return [ExperimentJob(recipe, out / f"{recipe.name}-seed{recipe.seed}") for recipe in cut]


def varied(recipes: Sequence[Recipe], vary: str) -> list[Recipe]:
    """Each recipe once for every value of one key, as in `method.prototype_momentum=0.1,0.5,0.9`; values end names.

    Raises:
        ConfigError: no key and values, a key that cannot be set, or a value that the recipe cannot have.
    """
    path, equals, values = vary.partition("=")
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"] if equals else []
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{vary}': {values} are no TOML values ({error}); text needs quotes") from error
    if not parsed:
        raise ConfigError(f"'{vary}': expected a key and values, as in method.prototype_momentum=0.1,0.5,0.9")
    return [_with(recipe, path.split("."), value) for recipe in recipes for value in parsed]


def _with(recipe: Recipe, path: Sequence[str], value: object) -> Recipe:
    table = recipe.model_dump(mode="json")
    *tables, key = path
    inner: Any = table
    for name in tables:
        inner = inner.get(name)
        if not isinstance(inner, dict):
            raise ConfigError(f"recipe '{recipe.name}' has no table '{name}' ({'.'.join(path)})")
    inner[key] = value
    table["name"] = "-".join([recipe.name, key, str(value)]).lower().replace("_", "-").replace(".", "-")
    return parse(table, Recipe, f"recipe '{recipe.name}'")


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


def write_contents(out: Path, jobs: Sequence[ExperimentJob], shortened: int | None) -> None:
    """Make a folder a comparison's."""
    contents = ExperimentContents(jobs=tuple(job.name for job in jobs), shortened=shortened)
    files.write(out / _CONTENTS, contents.model_dump_json(indent=2).encode())


def refuse_foreign(out: Path) -> None:
    """A folder with something else in it is left alone.

    Raises:
        StateError: it is neither empty nor a comparison's.
    """
    if out.exists() and not out.is_dir():
        raise StateError(f"{out} is a file; name a folder with --out")
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    if _CONTENTS not in held and any(name != "lock" and not name.startswith(files.TEMPORARY) for name in held):
        raise StateError(f"{out} holds something else than a comparison; name another folder with --out")


def _with_seed(recipe: Recipe, seed: int | None) -> Recipe:
    if recipe.data is None:
        raise ConfigError(f"recipe '{recipe.name}' has no [data]; a simulation needs to know what its sites hold")
    if seed is None:
        return recipe
    return recipe.model_copy(update={"seed": seed, "data": recipe.data.model_copy(update={"seed": seed})})


def _difference(held: Recipe, wanted: Recipe) -> str:
    """The first key in which two recipes differ."""
    theirs, ours = dict(leaves(held.model_dump())), dict(leaves(wanted.model_dump()))
    key = next(key for key in theirs | ours if theirs.get(key) != ours.get(key))
    return f"{key} is {theirs.get(key)} there and {ours.get(key)} here"
