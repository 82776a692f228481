"""Finds the recipes, policies and site settings that come with protofed, and sets keys of a recipe.

Overrides are `plan.lr=0.1` on the command line, `plan__lr=0.1` or a dict in Python. A key that is removed has the value
None, which no TOML has: `plan.dp=` on the command line, `plan__dp=None` in Python.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from protofed.common.config.recipe import Recipe, parse, read_recipe
from protofed.common.config.settings import is_path
from protofed.common.config.toml_files import overlay, read_extended, read_table, toml_problem, without
from protofed.common.errors import ConfigError, StateError, unknown
from protofed.deploy import shipped

_REMOVED = re.compile(r"\s*([\w.-]+)\s*=\s*")


def read_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Assignments in TOML (`plan.lr=0.1`, `name="mine"`) as one nested table; of two that set one key the last counts.

    An assignment of nothing (`plan.dp=`) removes a key.

    Raises:
        ConfigError: an assignment is no TOML.
    """
    table: dict[str, Any] = {}
    for assignment in assignments:
        if removed := _REMOVED.fullmatch(assignment):
            table = overlay(table, from_keywords({removed[1]: None}))
            continue
        try:
            table = overlay(table, tomllib.loads(assignment))
        except tomllib.TOMLDecodeError as error:
            problem = toml_problem(assignment, error)
            expected = f"expected KEY=VALUE in TOML ({problem}); text needs quotes, and KEY= removes the key"
            raise ConfigError(f"--set {assignment}: {expected}") from error
    return table


def from_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as one nested table: `plan__lr` and `plan.lr` are both the key `lr` of the table `plan`."""
    table: dict[str, Any] = {}
    for keyword, value in keywords.items():
        *tables, key = keyword.replace("__", ".").split(".")
        nested: dict[str, Any] = {key: value}
        for name in reversed(tables):
            nested = {name: nested}
        table = overlay(table, nested)
    return table


def with_overrides(recipe: Recipe, table: Mapping[str, Any]) -> Recipe:
    """The recipe with a table over it, merged as `extends` merges; the seed of the data is a key of its own.

    Raises:
        ConfigError: an unknown key, or a value that the recipe cannot have.
    """
    if not table:
        return recipe
    where = f"recipe '{recipe.name}'"
    base, changes = recipe.model_dump(mode="json"), dict(table)
    for path in [path for path, value in leaves(table) if value is None]:
        base, changes = without(base, path, "removed key", where), without(changes, path, "removed key", where)
    return parse(overlay(base, changes), Recipe, where)


def leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested tables with its path, as `plan.lr`, and what it is set to."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


_HERE = Path(__file__).parent
# Beside this file in a wheel; a checkout has them in deploy/.
ROOT: Final = _HERE if (_HERE / "recipes").is_dir() else _HERE.parents[1]
Kind: TypeAlias = Literal["recipe", "policy"]
FOLDERS: Final = {"recipe": "recipes", "policy": "policies"}
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)")


def folder(name: str) -> Path:
    """The folder `recipes`, `policies` or `sites`."""
    return ROOT / name


def files(kind: str) -> dict[str, Path]:
    """The shipped files of a kind, `recipes` or `policies`, by name."""
    return {file.stem: file for file in sorted(folder(kind).glob("*.toml"))}


def recipe(name_or_path: str, assignments: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its path, or by the name of one that comes with protofed.

    Args:
        assignments: of `--set`, such as `plan.lr=0.1`; they replace what the recipe says.

    Raises:
        ConfigError: there is no such recipe, or it cannot be used.
    """
    return with_overrides(read_recipe(recipe_file(name_or_path)), read_overrides(assignments))


def recipe_file(name_or_path: str) -> Path:
    """The file of a recipe, as `recipe` reads it.

    Raises:
        ConfigError: there is no recipe of that name.
    """
    path = Path(name_or_path)
    return path if path.suffix == ".toml" or path.exists() else named("recipe", name_or_path)


def policy(name_or_path: str) -> Path:
    """The file of a policy. A word is the name of a policy that comes with protofed, all else is a path.

    A word that is also a file's name is refused: a site must not get a policy that it did not mean.

    Raises:
        ConfigError: there is no policy of that name; or a file here has the name.
    """
    path = Path(name_or_path)
    if is_path(name_or_path):
        return path
    if path.is_file():
        raise ConfigError(
            f"policy '{name_or_path}' is ambiguous: protofed takes a word for the name of its own policy, and this "
            f"folder has a file of this name. For the file write './{name_or_path}'. For protofed's policy rename the "
            "file"
        )
    return named("policy", name_or_path)


def what(file: Path) -> str:
    """What a shipped file is: the first sentence of its first comment."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: _first_key(lines)]]
    sentence = _SENTENCE.match(text := " ".join(comment))
    return sentence[1] if sentence else text


def named(kind: Kind, name: str) -> Path:
    """The shipped file of a name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in (shipped := files(FOLDERS[kind])):
        raise unknown(kind, name, shipped)
    return shipped[name]


def extends(file: Path) -> str:
    """The file that a recipe extends, as it names it; empty: none."""
    return str(read_table(file).get("extends", ""))


def resolved(name_or_path: str) -> str:
    """A recipe as TOML with what it extends merged in, so that it needs no other file. Comments are gone.

    Raises:
        ConfigError: as `recipe`.
    """
    table = read_extended(file := recipe_file(name_or_path))
    parse(table, Recipe, str(file))
    base = extends(file)
    lines = [f"# {what(file)}", f"# {file.name}" + (f" with {base}, which it extends, merged in." if base else ".")]
    lines += [_assignment(key, value) for key, value in table.items() if not isinstance(value, dict)]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{name}]", *(_assignment(key, value) for key, value in leaves(inner))]
    return "\n".join(lines) + "\n"


def _assignment(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"  # of strings, numbers, booleans and lists TOML is JSON


def _first_key(lines: Sequence[str]) -> int:
    return next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))


@dataclass(frozen=True)
class FileKind:
    """Files that belong together.

    Attributes:
        what: in a few words.
        paths: files and folders, below `shipped.ROOT` and below the folder that they are written to.
        folders: empty ones that are made beside them.
    """

    what: str
    paths: tuple[str, ...]
    folders: tuple[str, ...] = ()


# All kinds keep their places to one another, so that what one names in another is found below one folder.
KINDS: Final = {
    "dashboards": FileKind("Grafana's dashboards, and the provisioning that finds them", ("grafana",)),
    "prometheus": FileKind(
        "Prometheus: its settings, recording rules and alerts; examples for Alertmanager",
        ("prometheus/prometheus.yml", "prometheus/rules", "prometheus/sites", "prometheus/alertmanager"),
    ),
    "systemd": FileKind(
        "systemd's units for server and sites, examples of settings, how to install them", ("systemd",)
    ),
    "helm": FileKind("a Helm chart for the server and for sites; README.md in it says how", ("helm",)),
    "compose": FileKind(
        "Compose files for the server with sites, Prometheus and Grafana, and for a hospital alone",
        (
            *(
                "compose.yaml",
                "compose.site.yaml",
                ".env.example",
                "grafana",
                "prometheus/rules",
                "prometheus/alertmanager",
            ),
            *(f"docker/compose/{name}" for name in ("admission.py", "certificates.py", "replica.py", "volumes.sh")),
            "docker/compose/prometheus.yml",
            *("docker/compose/data/README.md", "docker/compose/secrets/README.md", "policies", "recipes", "sites"),
        ),
        tuple(f"docker/compose/data/{site}" for site in ("evaluator", *(f"site-{number}" for number in range(1, 6)))),
    ),
    "policies": FileKind("the policies, as `protofed policies` prints them", ("policies",)),
    "recipes": FileKind("the recipes, as `protofed recipes` prints them", ("recipes",)),
    "sites": FileKind("settings of a hospital and of the demonstration's sites", ("sites",)),
}


def write_files(into: Path, kinds: Sequence[str]) -> list[Path]:
    """Write the files of the given kinds (none: all kinds) into a folder; overwrites nothing.

    A file that is there already with the same content stays. If another one is there, nothing is written.

    Returns:
        The files that were written.

    Raises:
        ConfigError: an unknown kind, or a file is there with other content.
        StateError: a file cannot be written.
    """
    for name in kinds:
        if name not in KINDS:
            raise unknown("kind of files", name, KINDS)
    chosen = [KINDS[name] for name in kinds or KINDS]
    texts = {path: _content(path) for kind in chosen for path in _files(kind)}
    try:
        missing = _missing(into, texts)
        for path in missing:
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            with (into / path).open("xb") as file:
                file.write(texts[path])
        for folder in (folder for kind in chosen for folder in kind.folders):
            (into / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot write into {into}: {error.strerror}; name a folder of yours") from error
    return [into / path for path in missing]


def _missing(into: Path, texts: Mapping[str, bytes]) -> list[str]:
    """The paths that are not in the folder yet.

    Raises:
        ConfigError: a file is there with other content.
    """
    existing = {path for path in texts if os.path.lexists(into / path)}
    if other := sorted(path for path in existing if not _is(into / path, texts[path])):
        raise ConfigError(f"{into / other[0]} is there with other content, and nothing is overwritten; move it away")
    return [path for path in texts if path not in existing]


def without_build(text: str) -> str:
    """A Compose file, or its example of settings, without all that builds images: that takes a clone's sources."""
    text = re.sub(r"^x-build-arguments:.*\n(?:  .*\n)+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^( +)build:\n(?:\1 +.*\n)+", "", text, flags=re.MULTILINE)
    return re.sub(r"^# Base image of the build(?s:.*)\Z", "", text, flags=re.MULTILINE)


def _files(kind: FileKind) -> Iterator[str]:
    for name in kind.paths:
        if not (source := shipped.ROOT / name).is_dir():
            yield name
        for folder, _, files in os.walk(source, followlinks=True):  # a link of the checkout: the chart's rules
            relative = Path(folder).relative_to(shipped.ROOT)
            yield from (str(relative / file) for file in sorted(files))


def _content(path: str) -> bytes:
    content = (shipped.ROOT / path).read_bytes()
    if path in ("compose.yaml", "compose.site.yaml", ".env.example"):
        return without_build(content.decode()).encode()
    return content


def _is(file: Path, content: bytes) -> bool:
    return file.is_file() and file.read_bytes() == content
