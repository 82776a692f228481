"""What `protofed init` and `protofed new` write: a new daemon's settings and folders, the package of a new plug-in.

Settings have a comment for each key. Nothing is overwritten.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Final

from protofed.common.address import host_and_port
from protofed.common.config.data import SOURCES
from protofed.common.config.recipe import MODELS, parse
from protofed.common.config.settings import ClientSettings, ServerSettings
from protofed.common.config.tasks import tasks
from protofed.common.errors import ConfigError, StateError, short, unknown
from protofed.common.plugins import PluginKind, is_plugin

TEMPLATES: Final = Path(__file__).parent / "daemon"
COMMENTS_AT: Final = 36  # column
LIBRARY_SETS: Final = "set"  # the entry of data.toml for all sources without one of their own


@dataclass(frozen=True)
class NewSite:
    """What a site's settings say.

    Attributes:
        root: of the data; empty: the layout's own.
        policy: a file beside the settings, or the name of a policy that comes with protofed.
        label_map: own names of classes -> the run's.
        institution: its name in the list of partners; empty: not said.
    """

    site: str
    server: str
    source: str
    root: str = ""
    policy: str = "policy.toml"
    roles: Sequence[str] = ("trainer",)
    label_map: Mapping[str, str] = field(default_factory=dict)
    institution: str = ""

    def settings(self) -> str:
        """The text of site.toml.

        Raises:
            ConfigError: an answer that no settings file may have, with what was expected.
        """
        layout, host = describe_layout(self.source), host_and_port(self.server)
        example = '# label_map = { "Melanoma" = "mel", "Naevus" = "nv" }'
        pairs = ", ".join(f"{_text(own)} = {_text(of_run)}" for own, of_run in self.label_map.items())
        keys = _filled(
            layout["keys"],
            root=f"root = {_text(self.root or layout['root'])}",
            label_map=f"label_map = {{ {pairs} }}" if pairs else example,
        )
        if "trainer" not in self.roles:  # it has no model of its own
            keys = "\n".join(line for line in keys.splitlines() if not line.startswith("local_test_fraction"))
        text = _filled(
            (TEMPLATES / "site.toml.tmpl").read_text(encoding="utf-8"),
            site=_text(self.site),
            institution=f"institution = {_text(self.institution)}"
            if self.institution
            else '# institution = "Hospital North"',
            server=_text(self.server),
            roles=json.dumps(list(self.roles)),
            policy=_text(self.policy),
            source=_text(self.source),
            layout=layout["layout"],
            data=keys,
        )
        parse(tomllib.loads(text), ClientSettings, f"site {self.site}, server {host[0]}")
        return _aligned(text)


def server_settings(listen: str) -> str:
    """The text of server.toml.

    Raises:
        ConfigError: `listen` is no host:port.
    """
    host_and_port(listen)
    text = _filled((TEMPLATES / "server.toml.tmpl").read_text(encoding="utf-8"), listen=_text(listen))
    parse(tomllib.loads(text), ServerSettings, f"server at {listen}")
    return _aligned(text)


def layouts() -> dict[str, dict[str, str]]:
    """What is said of each layout of a site's data: `layout` in words, `root` as its default, and `keys`."""
    texts: dict[str, dict[str, str]] = tomllib.loads((TEMPLATES / "data.toml").read_text(encoding="utf-8"))
    return texts


def describe_layout(source: str) -> dict[str, str]:
    """What is said of the layout of a source of data: an entry of `layouts`.

    Raises:
        ConfigError: there is no such source.
    """
    if source not in SOURCES:
        raise unknown("data layout", source, SOURCES)
    return layouts().get(source, layouts()[LIBRARY_SETS])


def check_free(into: Path, names: Iterable[str]) -> None:
    """Check that none of the files is there.

    Raises:
        ConfigError: one is; it is named.
    """
    if existing := [name for name in names if os.path.lexists(into / name)]:
        raise ConfigError(f"{into / existing[0]} is there, and nothing is overwritten; give --into another folder")


def write_new(into: Path, files: Mapping[str, str], folders: Sequence[str]) -> list[Path]:
    """Write files that are not there yet (mode 0600), and make folders that only their owner can enter.

    Folders that are there stay as they are. Nothing is written if a file is there.

    Returns:
        What was made, files first.

    Raises:
        ConfigError: one of the files is there.
        StateError: something cannot be written.
    """
    check_free(into, files)
    created = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with os.fdopen(os.open(into / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text.encode())
            created.append(into / name)
        for name in folders:
            if not (folder := into / name).is_dir():
                folder.mkdir(mode=0o700)
                created.append(folder)
    except OSError as error:
        raise StateError(f"cannot write into {into}: {error.strerror}; give --into a folder of yours") from error
    return created


def _filled(text: str, **values: Any) -> str:
    return Template(text).substitute(values)


def _text(value: str) -> str:
    """A basic string of TOML, which is JSON's but for one control character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:  # of a name in another encoding, as ISO-8859-1
        raise ConfigError(f"{short(value)!r}: expected a name in UTF-8, as settings are; rename it") from error
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _aligned(text: str) -> str:
    """Comments after two spaces and a # begin in one column, where the key leaves room."""
    lines = []
    for line in text.splitlines():
        code, mark, comment = line.rpartition("  # ")
        lines.append(f"{code:<{COMMENTS_AT - 1}} # {comment}" if mark else line)
    return "\n".join(lines) + "\n"


PACKAGE_TEMPLATES: Final = Path(__file__).parent
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
LONGEST = 50  # characters; a recipe is named digits-NAME, and a recipe's name has at most 64
# Of each kind, the templates in reading order, with their places in the package.
_PACKAGE = {"README.md": "README.md", "pyproject.toml": "pyproject.toml", "init.py": "$package/__init__.py"}
_TEST = {"test.py": "tests/test_$package.py"}
PACKAGES: Final[Mapping[PluginKind, Mapping[str, str]]] = {
    PluginKind.METHOD: {
        **_PACKAGE,
        "client.py": "$package/client.py",
        "server.py": "$package/server.py",
        "recipe.toml": "recipes/digits-$name.toml",
        **_TEST,
    },
    PluginKind.MODEL: {**_PACKAGE, "recipe.toml": "recipes/digits-$name.toml", **_TEST},
    PluginKind.DATASET: {**_PACKAGE, "recipe.toml": "recipes/$name.toml", **_TEST},
    PluginKind.TASK: {
        **_PACKAGE,
        "client.py": "$package/client.py",
        "recipe.toml": "recipes/digits-$name.toml",
        **_TEST,
    },
}


def new_package(kind: PluginKind, name: str, into: Path) -> list[Path]:
    """Create the package of plug-in `name`, of one of the kinds of `PACKAGES`, in the new folder `into`/`name`.

    Returns:
        The files, in reading order.

    Raises:
        ConfigError: the name is not valid for a plug-in and a package, or is taken; or the folder exists.
        StateError: the folder cannot be written.
    """
    package = check_name(kind, name)
    root, filled = into / name, {"name": name, "package": package, "cls": _class_name(name)}
    files = []
    try:
        root.mkdir(parents=True)
        for template, place in PACKAGES[kind].items():
            file = root / _filled(place, **filled)
            file.parent.mkdir(exist_ok=True)
            text = (PACKAGE_TEMPLATES / kind / f"{template}.tmpl").read_text(encoding="utf-8")
            file.write_text(_filled(text, **filled), encoding="utf-8")
            files.append(file)
    except FileExistsError as error:
        raise ConfigError(f"{root} exists; choose another name, or another folder by --into") from error
    except OSError as error:
        raise StateError(f"cannot write into {root}: {error.strerror}; give --into a folder of yours") from error
    return files


def check_name(kind: PluginKind, name: str) -> str:
    """The name of the Python package for a plug-in.

    Raises:
        ConfigError: as `new_package`.
    """
    package = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(package):
        raise ConfigError(
            f"{kind} name '{short(name)}': expected at most {LONGEST} lower-case letters, digits and single hyphens, "
            "a letter first, and no Python keyword"
        )
    if name in _shipped(kind) or is_plugin(kind, name):
        raise ConfigError(f"there is a {kind} '{name}' already; choose another name")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"there is a Python package '{package}' already; choose another name")
    return package


def _shipped(kind: PluginKind) -> Iterable[str]:
    """The names that come with protofed."""
    if kind is PluginKind.METHOD:
        from protofed.server.method import server_methods

        return set(server_methods)
    if kind is PluginKind.TASK:
        return tasks
    return MODELS if kind is PluginKind.MODEL else SOURCES


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))
