"""Real processes: `protofed server` and `protofed client` as users start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protofed.common.recipe import Recipe
from protofed.deploy import shipped
from protofed.server.ledger import Ledger

PATIENCE_S = 120.0


@dataclass
class Scene:
    """A folder with a recipe, and the processes that were started in it."""

    folder: Path
    recipe: Recipe
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    address: str = ""

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "protofed.deploy.cli", *arguments, f"--state={self.folder / name}"]
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self.running[name]

    def server(self) -> subprocess.Popen[bytes]:
        recipe = self.folder / "recipe.toml"
        listen = self.address or "127.0.0.1:0"
        (self.folder / "server" / "address").unlink(missing_ok=True)
        process = self.start("server", "server", f"--recipe={recipe}", f"--listen={listen}", "--until-finished")
        self.wait_for(lambda: (self.folder / "server" / "address").exists())
        self.address = (self.folder / "server" / "address").read_text(encoding="utf-8")
        return process

    def site(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        policy = shipped.folder("policies") / "standard.toml"
        settings = f"--settings={self.folder / 'site.toml'}"
        known = (f"--site={name}", f"--server={self.address}", f"--policy={policy}", "--until-finished")
        return self.start(name, "client", settings, *known, *more)

    def sites(self) -> None:
        self.site("evaluator", "--role=evaluator")
        for share in range(3):
            self.site(f"site-{share + 1}", f"--share={share}")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.02)

    def ledger(self) -> Ledger:
        return Ledger(f"sqlite:///{self.folder / 'server' / 'ledger.sqlite'}", read_only=True)

    def wait_until_trains(self, site: str) -> int:
        """The round that the site is in the middle of."""
        found: list[int] = []

        def caught() -> bool:
            ledger = self.ledger()
            try:
                rounds = ledger.rounds(self.recipe.name)
            finally:
                ledger.close()
            assert not rounds or rounds[-1].round < self.recipe.rounds or not rounds[-1].state, (
                "it was never seen to train"
            )
            newest = rounds[-1].round if rounds else 0
            if newest > 0 and self.fates(newest).get(site) == "started":
                found.append(newest)
            return bool(found)

        self.wait_for(caught)
        return found[0]

    def fates(self, number: int) -> dict[str, str]:
        ledger = self.ledger()
        try:
            return {task.site: task.fate for task in ledger.tasks(self.recipe.name, number) if task.kind == "fit"}
        finally:
            ledger.close()

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def finish(self, names: Sequence[str]) -> list[int]:
        return [self.running[name].wait(PATIENCE_S) for name in names]

    def final_digest(self) -> str | None:
        ledger = self.ledger()
        try:
            return [row.state for row in ledger.rounds(self.recipe.name) if row.state][-1]
        finally:
            ledger.close()

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))


@pytest.fixture
def scene(tmp_path: Path, recipe_of: Callable[..., Recipe]) -> Iterator[Callable[..., Scene]]:
    """Makes scenes; nothing of them is left running."""
    made: list[Scene] = []

    def make(recipe: Recipe) -> Scene:
        made.append(Scene(tmp_path, recipe))
        (tmp_path / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        assert recipe.data is not None
        data = recipe.data.model_dump(mode="json", exclude_none=True)
        (tmp_path / "site.toml").write_text(f"[data]\n{_table(data)}", encoding="utf-8")
        return made[-1]

    yield make
    for one in made:
        for process in one.running.values():
            process.kill()
            process.wait()


def to_toml(recipe: Recipe) -> str:
    """A recipe as the TOML that a user would write."""
    table = recipe.model_dump(mode="json", exclude_none=True)
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    return _table(plain) + "".join(f"\n[{key}]\n{_table(value)}" for key, value in tables.items())


def _table(table: dict[str, object]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case dict():
            return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
        case list():
            return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return str(value)
