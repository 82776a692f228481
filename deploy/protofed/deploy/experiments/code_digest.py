"""A digest of the code that computes a job's numbers, so that no score of other code is taken for this one's.

The digest covers what a simulation of the recipe imports from protofed: server, client, common and the simulation. It
also covers the client and server algorithm of the recipe's method, the recipe's task, the packages of its plug-ins, and
the versions of the libraries that compute. Modules are read, not imported, and digested as syntax trees without
docstrings. An edit of a comment, a docstring or the layout changes no digest.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import StrictModel
from protofed.common.config.tasks import tasks
from protofed.common.plugins import PluginKind, find_path

# Of what reads the numbers off a run only itself counts: it imports what shows them, too.
ROOTS = ("protofed.deploy.simulation.simulation", "protofed.deploy.simulation.worker")
LEAVES = ("protofed.deploy.experiments.job",)
METHODS = ("protofed.client.methods", "protofed.server.methods")
LIBRARIES = ("numpy", "torch", "torchvision", "torchmetrics", "scikit-learn", "pillow")
NAMED = 3  # modules in a sentence
_OBJECT = re.compile(r"(\w+(?:\.\w+)*):\w+(?:\.\w+)*")  # package.module:attribute
_DIGITS = 16  # of a module's digest: enough to see that it has changed


class CodeDigest(StrictModel):
    """What computes a job.

    Attributes:
        modules: digests by module.
        libraries: versions by library, Python's with them.
    """

    modules: dict[str, str]
    libraries: dict[str, str]

    @property
    def whole(self) -> Digest:
        """One digest of everything."""
        return digest(json.dumps([self.modules, self.libraries], sort_keys=True).encode())

    def changes(self, other: CodeDigest) -> list[str]:
        """The modules and libraries in which two differ, by name; none: they are equal."""
        pairs = ((self.modules, other.modules), (self.libraries, other.libraries))
        return [name for ours, theirs in pairs for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]


def digest_code(recipe: Recipe) -> CodeDigest:
    """The digest of the code that would compute a job of this recipe now."""
    plugins = _plugins(recipe)
    closure = _Closure({"protofed", *(name.partition(".")[0] for name in plugins)})
    for module in (*ROOTS, *plugins, *_halves(recipe.method.name), *_client_half(recipe.task.name)):
        closure.add(module)
    for module in LEAVES:
        closure.add(module, follow=False)
    versions = {library: version for library in LIBRARIES if (version := _version(library))}
    python = ".".join(map(str, sys.version_info[:2]))  # a newer one writes other trees, too
    return CodeDigest(modules=dict(sorted(closure.digests.items())), libraries={"python": python, **versions})


class InstalledCode:
    """The code as it is now; recipes that are computed by the same share a digest, which is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, ...], CodeDigest] = {}

    def of(self, recipe: Recipe) -> CodeDigest:
        """See `digest_code`."""
        data = (None, None) if recipe.data is None else (recipe.data.source, recipe.data.partition.kind)
        key = (recipe.task.name, recipe.method.name, recipe.model.name, *data, *recipe.transforms)
        if key not in self._known:
            self._known[key] = digest_code(recipe)
        return self._known[key]


def shown(changes: list[str]) -> str:
    """The first of what has changed, as a list in words."""
    more = f" and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
    return f"{', '.join(changes[:NAMED])}{more}"


class _Closure:
    """Modules and all that they import from `packages`, without methods: their algorithms are added by name."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self.digests: dict[str, str] = {}

    def add(self, module: str, *, follow: bool = True) -> None:
        """Take up a module, and what it imports."""
        if module in self.digests or module.partition(".")[0] not in self._packages or (file := _file(module)) is None:
            return
        source = _source(file, module)
        self.digests[module] = source.digest
        if not follow:
            return
        for name in source.imports:
            if _is_method(module) or not _is_method(name):
                self.add(name)
        if not module.startswith("protofed."):  # a plug-in names its halves by their paths, or by methods of ours
            for text in source.texts:
                if path := _OBJECT.fullmatch(text):
                    self.add(path[1])
                for half in _halves(text):
                    self.add(half)


@dataclass(frozen=True)
class _Source:
    """A module's file: its digest, the modules that it may import, its texts, and the names that it registers."""

    digest: str
    imports: frozenset[str]
    texts: frozenset[str]
    registered: frozenset[str]


def _source(file: Path, module: str) -> _Source:
    return _read(file.read_bytes(), module if file.name == "__init__.py" else module.rpartition(".")[0])


@cache
def _read(source: bytes, package: str) -> _Source:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imports = frozenset(name for node in nodes for name in _imports(node, package))
    texts = frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    registered = frozenset(name for node in nodes for name in _strip(node))
    return _Source(digest(ast.dump(tree).encode())[:_DIGITS], imports, texts, registered)


def _imports(node: ast.AST, package: str) -> Iterable[str]:
    """What a statement may import, also within a function: of `from a import b` a, and a.b, which may be a module."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if not isinstance(node, ast.ImportFrom):
        return ()
    steps = package.split(".")
    above = steps[: len(steps) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{name.name}" for name in node.names)]


def _strip(node: ast.AST) -> Iterator[str]:
    """Take its docstring out, and the decorators that register a class; the names that those register it by.

    A half that serves several methods is registered by each of their names: one more changes no number of the others.
    """
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    if ast.get_docstring(node, clean=False) is not None:
        del node.body[0]
    if isinstance(node, ast.ClassDef):
        calls = [call for call in node.decorator_list if isinstance(call, ast.Call) and _registers(call)]
        node.decorator_list = [call for call in node.decorator_list if call not in calls]
        for call in calls:
            yield from _names(call)


def _names(registration: ast.Call) -> Iterator[str]:
    """The names that a decorator registers a class by."""
    yield from (keyword.arg for keyword in registration.keywords if keyword.arg)
    for argument in registration.args:  # a name, or a server half's `Method("fedprox", …)`
        name = argument.args[0] if isinstance(argument, ast.Call) and argument.args else argument
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


def _registers(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "register"


def _halves(method: str) -> list[str]:
    """The modules of protofed that register a method of this name."""
    modules = []
    for package in METHODS:
        for name in sorted({path.stem for folder in _folders(package) for path in folder.glob("*.py")}):
            module = f"{package}.{name}"
            if (file := _file(module)) and method in _source(file, module).registered:
                modules.append(module)
    return modules


def _client_half(task: str) -> list[str]:
    """The module of the PyTorch half of a task of protofed; of a plug-in the closure finds it by its path."""
    return [tasks.get(task).client.partition(":")[0]] if task in set(tasks) else []


def _is_method(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in METHODS)


def _plugins(recipe: Recipe) -> list[str]:
    """The modules that hold the recipe's plug-ins."""
    named = [(PluginKind.TASK, recipe.task.name), (PluginKind.METHOD, recipe.method.name)]
    named.append((PluginKind.MODEL, recipe.model.name))
    named += [(PluginKind.TRANSFORM, name) for name in recipe.transforms]
    if recipe.data is not None:
        named += [(PluginKind.DATASET, recipe.data.source), (PluginKind.PARTITION, recipe.data.partition.kind)]
    paths = (find_path(kind, name) for kind, name in named)
    return [path.partition(":")[0] for path in paths if path is not None]


@cache
def _file(module: str) -> Path | None:
    """The file of a module, which is not imported; None: it is none that is written in Python."""
    *parents, name = module.split(".")
    for folder in _folders(".".join(parents)) if parents else _places(module):
        path = folder / name if parents else folder
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    spec = None if parents else find_spec(module)
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    return origin if origin is not None and origin.suffix == ".py" and origin.is_file() else None


@cache
def _folders(package: str) -> list[Path]:
    """The folders of a package: all that have its name, as `import` looks for it in a namespace such as `protofed`."""
    above, _, name = package.rpartition(".")
    if not above:
        return _places(package)
    return [place for folder in _folders(above) if (place := folder / name).is_dir()]


@cache
def _places(top: str) -> list[Path]:
    spec = find_spec(top)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
