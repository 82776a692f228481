"""What a comparison's folder holds: its jobs, and how they are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protofed.common.config.recipe import parse_json
from protofed.common.config.tables import StrictModel
from protofed.common.errors import StateError
from protofed.common.storage import files

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
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    if _CONTENTS not in held and any(name != "lock" and not name.startswith(files.TEMPORARY) for name in held):
        raise StateError(f"{out} holds something else than a comparison; name another folder with --out")
