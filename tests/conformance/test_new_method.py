"""A method outside the repository: written by `protofed new method`, tested by itself, changed into FedProx, run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.own_packages import write_metadata
from tests.support.processes import Processes
from tests.support.warm_processes import WarmProcess

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, StateError
from protofed.common.plugins import PluginKind
from protofed.deploy import shipped
from protofed.deploy.templates.new import PACKAGES, new_package
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader
from protofed.testing.small_recipe import small_recipe

HERE = Path(__file__).parent
SITES = ("evaluator", "site-1", "site-2", "site-3")
NO_IMPORTS = """
import sys
from protofed.common import plugins
sys.modules.update(dict.fromkeys({absent}, None))
from protofed.{side}.method import {side}_methods
plugins.allow(["ourprox"])
assert {side}_methods.build("ourprox", {{"mu": 0.5, "weighting": "uniform"}})
assert not [name for name in sys.modules if name.startswith("ourprox.") and name != "ourprox.{side}"]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `ourprox` as it is written, on the path of processes, with the metadata that pip would install."""
    files = new_package(PluginKind.METHOD, "ourprox", tmp_path / "own")
    root = files[0].parent
    write_metadata(root)
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return root


@pytest.fixture
def ourprox(package: Path) -> Path:
    """The package after its author's work: another client half, whose new option its `__init__` names."""
    (package / "ourprox" / "client.py").write_text((HERE / "ourprox" / "client.py").read_text(encoding="utf-8"))
    init = package / "ourprox" / "__init__.py"
    text = init.read_text(encoding="utf-8")
    assert "client_options=()," in text
    init.write_text(text.replace("client_options=(),", 'client_options=("mu",),'), encoding="utf-8")
    return package


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Where FedProx is run by real processes."""
    here = Processes.of(tmp_path, recipe_with(mu=0.5))
    yield here
    here.end()


def recipe_with(mu: float) -> Recipe:
    return small_recipe("ourprox", method={"name": "ourprox", "mu": mu})


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def simulated(processes: Processes, recipe: Path, state: Path) -> str:
    """The digest of the last state of `protofed simulate`."""
    log = state.with_suffix(".log")
    words = ["simulate", str(recipe), f"--state={state}"]
    assert WarmProcess(words, os.environ, log).wait() == 0, log.read_text(encoding="utf-8")
    with closing(LedgerReader(f"sqlite:///{state / LEDGER_FILE}")) as ledger:
        return [str(row.state) for row in ledger.rounds(processes.recipe.name) if row.state][-1]


def test_the_package_passes_the_conformance_suite_as_it_is_written(package: Path) -> None:
    files = [path for path in package.rglob("*") if path.is_file() and "dist-info" not in str(path)]
    assert len(files) == len(PACKAGES[PluginKind.METHOD])
    assert not [path for path in files if "$" in path.read_text(encoding="utf-8")], "every template is filled in"
    done = python("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=package)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.timeout(900)  # half a dozen processes that import PyTorch, on a machine with other work
def test_changed_into_ourprox_it_gives_the_same_bytes_by_simulate_and_over_grpc(
    ourprox: Path, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_simulate = simulated(processes, tmp_path / "recipe.toml", tmp_path / "simulated")
    policy = tmp_path / "policy.toml"
    shared = (shipped.folder("policies") / "open.toml").read_text(encoding="utf-8")
    allowing = shared.replace("plugins = []", 'plugins = ["ourprox"]').replace('"fedavg",', '"fedavg", "ourprox",')
    policy.write_text(allowing, encoding="utf-8")
    monkeypatch.setenv("PROTOFED_SERVER_PLUGINS", '["ourprox"]')
    processes.server()
    processes.site("evaluator", "--role=evaluator", f"--policy={policy}")
    for number in range(3):
        processes.site(f"site-{number + 1}", f"--partition-index={number}", f"--policy={policy}")
    assert processes.finish(["server", *SITES]) == [0] * 5, processes.logs()
    assert processes.final_digest() == by_simulate

    text = (tmp_path / "recipe.toml").read_text(encoding="utf-8")
    assert "mu = 0.5" in text
    (tmp_path / "free.toml").write_text(text.replace("mu = 0.5", "mu = 0.0"), encoding="utf-8")
    assert simulated(processes, tmp_path / "free.toml", tmp_path / "free") != by_simulate  # the term has an effect


@pytest.mark.parametrize(("side", "absent"), [("server", ["torch"]), ("client", ["protofed.server", "sqlalchemy"])])
def test_each_half_is_found_without_the_other(ourprox: Path, side: str, absent: list[str]) -> None:
    done = python("-c", NO_IMPORTS.format(side=side, absent=absent))
    assert done.returncode == 0, done.stderr


def test_a_server_that_was_not_told_of_it_refuses_it_and_imports_nothing(ourprox: Path, tmp_path: Path) -> None:
    (ourprox / "ourprox" / "__init__.py").write_text("raise SystemExit('imported')\n")
    Processes.of(tmp_path, recipe_with(mu=0.5))
    done = python(
        *("-m", "protofed.deploy.cli", "server", "start", f"--recipe={tmp_path / 'recipe.toml'}", "--identity=none"),
        *("--listen=127.0.0.1:0", f"--state={tmp_path / 'server'}"),
    )
    assert done.returncode == ConfigError.exit_code
    assert "to `plugins`" in done.stderr


REFUSED = ["", "Fedprox", "1st", "fed_prox", "fed--prox", "-fed", "fed-", "a b", "../fed", "class", "x" * 51, "féd"]
TAKEN = ["fednh", "json", "numpy", "protofed"]


@pytest.mark.parametrize("name", [*REFUSED, *TAKEN])
def test_a_name_that_cannot_be_a_package_or_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        new_package(PluginKind.METHOD, name, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_folder_that_exists_is_left_alone_and_one_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "my-method").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        new_package(PluginKind.METHOD, "my-method", tmp_path)
    assert not os.listdir(tmp_path / "my-method")
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="--into"):
        new_package(PluginKind.METHOD, "my-method", tmp_path / "file")


def test_hyphens_become_what_python_takes(tmp_path: Path) -> None:
    files = new_package(PluginKind.METHOD, "my-method-2", tmp_path)
    assert tmp_path / "my-method-2" / "my_method_2" / "client.py" in files
    assert "class MyMethod2Client" in (tmp_path / "my-method-2" / "my_method_2" / "client.py").read_text()
