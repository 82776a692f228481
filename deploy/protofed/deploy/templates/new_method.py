"""Write the package of a new method: both halves, a recipe, its tests and a pyproject with the entry point."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template

import protofed.server.methods  # noqa: F401  (registers the names that are taken)
from protofed.common.errors import ConfigError, short
from protofed.common.plugins import PluginKind, is_plugin
from protofed.server.method import server_methods

TEMPLATES = Path(__file__).parent / "method"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
LONGEST = 50  # with what stands around it in a recipe's name, which has 64


def new_method(name: str, into: Path) -> list[Path]:
    """Write the package of method `name` as a new folder `into`/`name`.

    Returns:
        The files, in the order in which one reads them.

    Raises:
        ConfigError: the name cannot be that of a method and of a package, or is taken; the folder exists, or cannot be
            written.
    """
    package = check_name(name)
    root, filled = into / name, {"name": name, "package": package, "cls": _class_name(name)}
    files = {
        "README.md": root / "README.md",
        "pyproject.toml": root / "pyproject.toml",
        "init.py": root / package / "__init__.py",
        "client.py": root / package / "client.py",
        "server.py": root / package / "server.py",
        "recipe.toml": root / "recipes" / f"digits-{name}.toml",
        "test.py": root / "tests" / f"test_{package}.py",
    }
    try:
        root.mkdir(parents=True)
        for template, file in files.items():
            file.parent.mkdir(exist_ok=True)
            text = Template((TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")).substitute(filled)
            file.write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{root} exists; choose another name, or another folder by --into") from error
    except OSError as error:
        raise ConfigError(f"cannot write {root}: {error.strerror}") from error
    return list(files.values())


def check_name(name: str) -> str:
    """The Python package of a method of that name.

    Raises:
        ConfigError: as `new_method`.
    """
    package = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(package):
        raise ConfigError(
            f"method name '{short(name)}': expected at most {LONGEST} lower-case letters, digits and single hyphens, "
            "a letter first, and no word of Python's"
        )
    if name in set(server_methods) or is_plugin(PluginKind.METHOD, name):
        raise ConfigError(f"there is a method '{name}' already; choose another name")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"there is a Python package '{package}' already; choose another name")
    return package


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))
