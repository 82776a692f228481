"""Read and write a folder with an exported model: weights in one or two formats, and `model.json`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from protofed.common.codec import digest
from protofed.common.config.evaluation import MAX_CLASSES
from protofed.common.config.recipe import parse_json
from protofed.common.config.tables import Input, NamedOptions, StrictModel
from protofed.common.errors import ConfigError, DataError, short
from protofed.common.storage import files as storage_files

FORMAT: Final = "protofed-model"
VERSION: Final = 2
FACTS, CARD = "model.json", "MODEL_CARD.md"
WEIGHTS: Final = "model.safetensors"
GRAPH: Final = "model.onnx"
File: TypeAlias = Literal["model.safetensors", "model.onnx"]
LARGEST_FACTS = 16 << 20  # bytes
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LONGEST_NAME = 200
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Spec(StrictModel):
    """What is needed to rebuild the model and to use it.

    Attributes:
        architecture: as in a recipe's [model].
        head: how outputs are computed from the body's features: `own`, one of `client.models.split.HEADS`, or the path
            of a method's own head.
        task: as in a recipe's [task].
        predictions: what the model's predictions are, in words.
        input: shape, and the mean and standard deviation with which the model itself normalises pixels of 0..1.
        classes: names of the outputs, by index: of classes or findings, or of a regression's one number.
    """

    architecture: NamedOptions
    head: Annotated[str, Field(pattern=r"^(own|cosine|nearest|[\w.]+:[\w.]+)$", max_length=LONGEST_NAME)]
    task: NamedOptions
    predictions: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    input: Input
    classes: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_CLASSES)]


class Origin(StrictModel):
    """Where the model comes from.

    Attributes:
        kind: global, class:N or personal.
        site: of a personal model; else None.
        round: the round of the published state, or of a personal model's training.
        recipe: fingerprint of the run's recipe.
        state: BLAKE3 of the server's state, or of the model that the site was sent; None if no server's was used.
        weights: BLAKE3 of body and head as protofed encodes a payload.
        at: time of the export, UTC, RFC 3339.
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
    """Scores as recorded in the run; `of` says on what, or why `values` is empty."""

    of: str
    values: dict[str, float] = Field(default_factory=dict)


class ModelFacts(StrictModel):
    """The description of a model, repeated in the metadata of every weight file."""

    format: Literal["protofed-model"] = FORMAT
    format_version: Literal[2] = VERSION
    model: Spec
    origin: Origin
    scores: ModelScores

    def strings(self) -> dict[str, str]:
        """As metadata of safetensors and ONNX files, whose values are strings: JSON, except for plain strings."""
        table = self.model_dump(mode="json")
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in table.items()}


class ModelContents(ModelFacts):
    """`model.json`: the description, and the BLAKE3 of each weight file."""

    files: Annotated[dict[File, Hash], Field(min_length=1)]

    @property
    def facts(self) -> ModelFacts:
        """The description without the files' digests."""
        return ModelFacts(model=self.model, origin=self.origin, scores=self.scores)


def check_vacant(folder: Path, *, force: bool) -> None:
    """Check that an export to the folder would overwrite nothing but an exported model.

    Raises:
        ConfigError: the folder is a file or not empty; with `force`: it holds files with an export's names and others,
            but no `model.json`.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; expected a folder in --out")
    existing = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if existing and not force:
        raise ConfigError(f"{folder} is not empty; take another --out, or --force to replace the model in it")
    own_names = {CARD, WEIGHTS, GRAPH}
    # An export that was killed leaves nothing but files of our names.
    if FACTS not in existing and existing & own_names and existing - own_names:
        raise ConfigError(f"{folder} holds no exported model, but files of yours; take another --out")


def write(folder: Path, facts: ModelFacts, files: Mapping[File, bytes], card: str) -> None:
    """Write a model. `model.json` is removed first and written last: a folder without it is not a model.

    Raises:
        OutOfSpaceError, DiskFailureError: a file cannot be written.
    """
    for name in (FACTS, CARD, WEIGHTS, GRAPH):
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise storage_files.write_error(folder / name, error) from error
    for name, data in files.items():
        storage_files.write(folder / name, data)
    storage_files.write(folder / CARD, card.encode())
    contents = ModelContents(**dict(facts), files={name: digest(data) for name, data in files.items()})
    storage_files.write(folder / FACTS, (contents.model_dump_json(indent=2) + "\n").encode())


def read(folder: Path) -> ModelContents:
    """Read `model.json`.

    Raises:
        DataError: the folder holds no model, or one that is damaged, changed or of another format version.
    """
    path = folder / FACTS
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FACTS)
        table = json.loads(data)
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}"
        raise DataError(f"{reason}; expected a folder that `protofed export` wrote") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON; export the model again") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise DataError(f'{path} is not a protofed model: expected "format": "{FORMAT}"')
    if (version := table.get("format_version")) != VERSION:
        raise DataError(
            f"{path} has format_version {short(repr(version))}; this protofed reads {VERSION}: export the model "
            "again, or take the protofed that exported it"
        )
    try:
        return parse_json(data.decode(), ModelContents, str(path))
    except (ConfigError, UnicodeDecodeError) as error:
        raise DataError(f"{error}; the file was changed: export the model again") from error


def read_file(folder: Path, contents: ModelContents, name: File) -> bytes:
    """Read a weight file and check its digest.

    Raises:
        DataError: the file is missing, or its digest is not that of `model.json`.
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


def check_strings(where: Path, metadata: Mapping[str, str], contents: ModelContents) -> None:
    """Check that a file's own metadata match `model.json`.

    Raises:
        DataError: they differ.
    """
    expected = contents.facts.strings()
    different = sorted(key for key in expected if metadata.get(key) != expected[key])
    if different:
        raise DataError(f"{where} and {FACTS} differ in '{different[0]}'; one of them was changed: export it again")


def read_names(path: Path, classes: int) -> tuple[str, ...]:
    """Read class names from a text file, one per line, in index order.

    Raises:
        ConfigError: the file cannot be read, has another number of names, a name twice, or one that is too long.
    """
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a text file with one class name per line") from error
    if len(names) != classes or len(set(names)) != classes or max(map(len, names)) > LONGEST_NAME:
        raise ConfigError(
            f"{path} has {len(names)} names; expected {classes}, one per line, all different, at most {LONGEST_NAME} "
            "characters long"
        )
    return names
