"""Create the package of a new method: both halves, a recipe, tests and a pyproject with the entry point."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from string import Template

from protofed.common.errors import ConfigError, StateError, short
from protofed.common.plugins import PluginKind, is_plugin
from protofed.server.method import server_methods

TEMPLATES = Path(__file__).parent / "method"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
LONGEST = 50  # characters; the recipe is named digits-NAME, and a recipe's name has at most 64


def new_method(name: str, into: Path) -> list[Path]:
    """Create the package of method `name` in the new folder `into`/`name`.

    Returns:
        The files, in reading order.

    Raises:
        ConfigError: the name is not valid for a method and a package, or is taken; or the folder exists.
        StateError: the folder cannot be written.
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
        raise StateError(f"cannot write into {root}: {error.strerror}; give --into a folder of yours") from error
    return list(files.values())


def check_name(name: str) -> str:
    """The name of the Python package for a method.

    Raises:
        ConfigError: as `new_method`.
    """
    package = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > LONGEST or keyword.iskeyword(package):
        raise ConfigError(
            f"method name '{short(name)}': expected at most {LONGEST} lower-case letters, digits and single hyphens, "
            "a letter first, and no Python keyword"
        )
    if name in set(server_methods) or is_plugin(PluginKind.METHOD, name):
        raise ConfigError(f"there is a method '{name}' already; choose another name")
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise ConfigError(f"there is a Python package '{package}' already; choose another name")
    return package


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))
