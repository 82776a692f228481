"""A folder with an exported model: the weights in one or two formats, and what is known of them. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from protofed.common.codec import digest
from protofed.common.config.recipe import MOST_CLASSES, Input, StrictModel, parse_json
from protofed.common.config.table import NamedOptions
from protofed.common.errors import ConfigError, DataError, short
from protofed.common.storage import files as storage_files

FORMAT: Final = "protofed-model"
VERSION: Final = 1
FACTS, CARD = "model.json", "MODEL_CARD.md"
WEIGHTS: Final = "model.safetensors"
GRAPH: Final = "model.onnx"
File: TypeAlias = Literal["model.safetensors", "model.onnx"]
LARGEST_FACTS = 16 << 20  # bytes
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LONGEST_NAME = 200
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Spec(StrictModel):
    """What is needed to make the model again and to use it.

    Attributes:
        architecture: as in a recipe's [model].
        head: what stands behind the body; see `models.deployed`.
        input: shape, and the mean and standard deviation that the model itself takes pixels of 0..1 to.
        classes: their names, by index.
    """

    architecture: NamedOptions
    head: Literal["own", "cosine", "nearest"]
    input: Input
    classes: Annotated[tuple[Name, ...], Field(min_length=2, max_length=MOST_CLASSES)]


class Origin(StrictModel):
    """Where the model comes from.

    Attributes:
        kind: global, class:N or personal; `site` is a personal model's.
        round: whose published state it was made of, or whose training a personal model is the end of.
        recipe: fingerprint of the run's recipe.
        state: BLAKE3 of the server's state, or of what a site was sent; none where a site made it alone.
        weights: BLAKE3 of body and head as protofed encodes a payload.
        at: of the export, UTC, RFC 3339.
    """

    kind: Annotated[str, Field(pattern=r"^(global|personal|class:\d+)$")]
    site: str | None = None
    run: str
    round: int
    method: NamedOptions
    recipe: Hash
    state: Hash | None = None
    weights: Hash
    protofed: str
    at: str


class ModelScores(StrictModel):
    """Scores as they were recorded in the run; `of` says of what, and `values` is empty where none are at hand."""

    of: str
    values: dict[str, float] = Field(default_factory=dict)


class ModelFacts(StrictModel):
    """All that is said of a model, in every file of its folder."""

    format: Literal["protofed-model"] = FORMAT
    format_version: Literal[1] = VERSION
    model: Spec
    origin: Origin
    scores: ModelScores

    def strings(self) -> dict[str, str]:
        """As the metadata of safetensors and ONNX files: JSON, unless it is a text already."""
        table = self.model_dump(mode="json")
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in table.items()}


class ModelContents(ModelFacts):
    """`model.json`: the facts, and the BLAKE3 of each file with weights."""

    files: Annotated[dict[File, Hash], Field(min_length=1)]

    @property
    def facts(self) -> ModelFacts:
        """Without the files."""
        return ModelFacts(model=self.model, origin=self.origin, scores=self.scores)


def check_vacant(folder: Path, *, force: bool) -> None:
    """That nothing in the folder would be lost.

    Raises:
        ConfigError: it holds something, or is a file; with `force`: files of ours by name, but no model.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; expected a folder in --out")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if there and not force:
        raise ConfigError(f"{folder} is not empty; take another --out, or --force to replace the model in it")
    ours = {CARD, WEIGHTS, GRAPH}
    if FACTS not in there and there & ours and there - ours:  # an export that was killed leaves no more than `ours`
        raise ConfigError(f"{folder} holds no exported model, but files of yours; take another --out")


def write(folder: Path, facts: ModelFacts, files: Mapping[File, bytes], card: str) -> None:
    """Write a model. `model.json` comes last: a folder without it is no model yet.

    Raises:
        OutOfSpace, DiskFailure: it cannot be written.
    """
    for old in (FACTS, CARD, WEIGHTS, GRAPH):
        try:
            (folder / old).unlink(missing_ok=True)
        except OSError as error:
            raise storage_files.write_error(folder / old, error) from error
    for name, data in files.items():
        storage_files.write(folder / name, data)
    storage_files.write(folder / CARD, card.encode())
    contents = ModelContents(**dict(facts), files={name: digest(data) for name, data in files.items()})
    storage_files.write(folder / FACTS, (contents.model_dump_json(indent=2) + "\n").encode())


def read(folder: Path) -> ModelContents:
    """What a folder says of its model.

    Raises:
        DataError: it holds no model, or one that was damaged or made by something else.
    """
    path = folder / FACTS
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FACTS)
        table = json.loads(data)
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}"
        raise DataError(f"{why}; expected a folder that `protofed export` wrote") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON; export the model again") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise DataError(f'{path} is not of this software: expected "format": "{FORMAT}"')
    if (version := table.get("format_version")) != VERSION:
        raise DataError(
            f"{path} has format_version {short(repr(version))}; this protofed reads {VERSION}: update it, or export "
            "the model again"
        )
    try:
        return parse_json(data.decode(), ModelContents, str(path))
    except (ConfigError, UnicodeDecodeError) as error:
        raise DataError(f"{error}; the file was changed: export the model again") from error


def read_file(folder: Path, contents: ModelContents, name: File) -> bytes:
    """One of a model's files, checked against its digest.

    Raises:
        DataError: it is not there, or not what was exported.
    """
    if name not in contents.files:
        raise DataError(f"{folder} was exported without {name}; export the model again with --format both")
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {folder / name}: {error.strerror}; export the model again") from error
    if digest(data) != contents.files[name]:
        raise DataError(f"{folder / name} is not what was exported (its digest differs); export the model again")
    return data


def check_strings(where: Path, found: Mapping[str, str], contents: ModelContents) -> None:
    """That a file's own metadata say the same as `model.json`.

    Raises:
        DataError: they do not.
    """
    expected = contents.facts.strings()
    different = sorted(key for key in expected if found.get(key) != expected[key])
    if different:
        raise DataError(f"{where} and {FACTS} differ in '{different[0]}'; one of them was changed: export it again")


def read_names(path: Path, classes: int) -> tuple[str, ...]:
    """Names of classes from a file, one a line, in the order of their numbers.

    Raises:
        ConfigError: it cannot be read, or has another number of names, or one twice.
    """
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a text file with one class name a line") from error
    if len(names) != classes or len(set(names)) != classes or max(map(len, names)) > LONGEST_NAME:
        raise ConfigError(
            f"{path} has {len(names)} names; expected {classes}, one a line, each another, at most {LONGEST_NAME} "
            "characters long"
        )
    return names
