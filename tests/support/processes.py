"""Real processes: `protofed server` and `protofed client` as users start them; shared by tests/e2e and tests/faults."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from tests.support.pki import Authority
from tests.support.waiting import wait_for
from tests.support.warm_processes import WarmProcess

from protofed.common import failpoint
from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import Role
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator
from protofed.deploy.simulation.simulation import simulation
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader

PATIENCE_S = 300.0
Process: TypeAlias = subprocess.Popen[bytes] | WarmProcess


@dataclass
class Processes:
    """A folder with a recipe, and the processes that were started in it.

    Attributes:
        address: where the server listens, the same after a restart.
        authority: of the identities with which all talk TLS; None: they talk plain text.
    """

    folder: Path
    recipe: Recipe
    running: dict[str, Process] = field(default_factory=dict)
    address: str = ""
    authority: Authority | None = None

    @classmethod
    def of(cls, folder: Path, recipe: Recipe) -> Self:
        """With the files that the processes read."""
        (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        assert recipe.data is not None
        data = recipe.data.model_dump(mode="json", exclude_none=True)
        (folder / "site.toml").write_text(f"[data]\n{_table(data)}", encoding="utf-8")
        return cls(folder, recipe)

    def start(self, name: str, *arguments: str, party: Party = Party.SITE, fails: str = "") -> Process:
        """Start a process, which reaches this failpoint."""
        connection = "--identity=none" if self.authority is None else f"--identity={self.identity(party, name)}"
        words = [*arguments, connection, f"--state={self.folder / name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", failpoint.VARIABLE: fails}
        file = self.folder / f"{name}.log"
        file.touch()  # a forked daemon opens it later, and tests read it before
        if party is Party.SITE:
            self.running[name] = WarmProcess(words, environment, file)
        else:
            command = [sys.executable, "-m", "protofed.deploy.cli", *words]
            with file.open("ab") as log:
                self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self.running[name]

    def server(self, *more: str, fails: str = "") -> Process:
        recipe = self.folder / "recipe.toml"
        listen = self.address or "127.0.0.1:0"
        (self.folder / "server" / "address").unlink(missing_ok=True)
        known = (f"--recipe={recipe}", f"--listen={listen}", "--until-finished")
        process = self.start("server", "server", "start", *known, *more, party=Party.SERVER, fails=fails)
        self.wait_for(lambda: (self.folder / "server" / "address").exists() or process.poll() is not None)
        if not self.address:
            assert process.poll() is None, self.logs()
            self.address = (self.folder / "server" / "address").read_text(encoding="utf-8")
        return process

    def site(self, name: str, *more: str, via: str = "", fails: str = "", policy: str = "open") -> Process:
        """Start a site's daemon.

        Args:
            via: another address at which it reaches the server.
            policy: a shipped one or a file; open holds back no class, as a simulation does.
        """
        file = shipped.policy(policy)
        settings = f"--settings={self.folder / 'site.toml'}"
        known = (f"--site={name}", f"--server={via or self.address}", f"--policy={file}", "--until-finished")
        return self.start(name, "client", "start", settings, *known, *more, fails=fails)

    def identity(self, party: Party, name: str) -> Path:
        """The party's identity folder, made and known to the server when it is first asked for."""
        folder = self.folder / "identities" / name
        if not folder.exists():
            assert self.authority is not None
            self.authority.issue(folder, party, name)
            if party is Party.SERVER:
                (folder / "operators").mkdir()
                operators = self.identity(Party.OPERATOR, "operator")
                shutil.copy(operators / "cert.pem", folder / "operators" / "operator.pem")
            if party is Party.SITE:
                with Operator(self.address, self.identity(Party.OPERATOR, "operator")) as operator:
                    roles = [Role.EVALUATOR if name == "evaluator" else Role.TRAINER]
                    operator.register((folder / "cert.pem").read_text(encoding="ascii"), roles)
        return folder

    def sites(self, fails: Mapping[str, str] | None = None) -> None:
        """Start the evaluator and three trainers; some, by name, reach a failpoint."""
        self.site("evaluator", "--role=evaluator")
        for share in range(3):
            name = f"site-{share + 1}"
            self.site(name, f"--partition-index={share}", fails=(fails or {}).get(name, ""))

    def wait_for(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        wait_for(condition, patience_s, self.logs)

    @contextmanager
    def ledger(self) -> Iterator[LedgerReader]:
        """The server's ledger, to look at."""
        with closing(LedgerReader(f"sqlite:///{self.folder / 'server' / LEDGER_FILE}")) as records:
            yield records

    def wait_until_trains(self, site: str) -> int:
        """The round that the site is in the middle of."""
        found: list[int] = []

        def caught() -> bool:
            with self.ledger() as ledger:
                rounds = ledger.rounds(self.recipe.name)
            assert not rounds or rounds[-1].round < self.recipe.rounds or not rounds[-1].state, (
                "it was never seen to train"
            )
            newest = rounds[-1].round if rounds else 0
            if newest > 0 and self.task_statuses(newest).get(site) == "started":
                found.append(newest)
            return bool(found)

        self.wait_for(caught)
        return found[0]

    def task_statuses(self, number: int) -> dict[str, str]:
        """By site, of a round's invitations to train."""
        with self.ledger() as ledger:
            return {
                task.site: task.task_status for task in ledger.tasks(self.recipe.name, number) if task.kind == "fit"
            }

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def died(self, name: str, place: str = "its failpoint") -> None:
        """Wait until a process has killed itself there."""
        process = self.running[name]
        self.wait_for(lambda: process.poll() is not None)
        assert process.returncode == -signal.SIGKILL, f"{name} ended before it reached {place}\n{self.logs()}"

    def die_at_each(self, name: str, places: Sequence[str], start: Callable[[str], object]) -> None:
        """A process that was started to die at the first of these places dies there; started again, at the next."""
        for place, after in zip(places, [*places[1:], ""], strict=True):
            self.died(name, place)
            start(f"{after}=kill" if after else "")

    def die_side_by_side(self, places: Mapping[str, Iterator[str]], start: Callable[[str, str], object]) -> list[str]:
        """Start these processes, each to die at its places, one after the other; where they died."""
        armed, deaths = {name: next(own) for name, own in places.items()}, []
        for name, place in armed.items():
            start(name, f"{place}=kill")
        while armed:
            self.wait_for(lambda: any(self.running[name].poll() is not None for name in armed))
            for name in [name for name in armed if self.running[name].poll() is not None]:
                deaths.append(armed.pop(name))
                self.died(name, deaths[-1])
                if following := next(places[name], ""):
                    armed[name] = following
                start(name, f"{following}=kill" if following else "")
        return deaths

    def finish(self, names: Sequence[str]) -> list[int]:
        return [self.running[name].wait(PATIENCE_S) for name in names]

    def until_done(self, starters: Mapping[str, Callable[[], object]], patience_s: float = PATIENCE_S) -> int:
        """Start again what ends with another code than 0, until all have ended with 0; how often that was."""
        left, starts = dict(starters), 0

        def done() -> bool:
            nonlocal starts
            for name in list(left):
                match self.running[name].poll():
                    case 0:
                        del left[name]
                    case int():
                        starts += 1
                        left[name]()
            return not left

        self.wait_for(done, patience_s)
        return starts

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def final_digest(self) -> str | None:
        with self.ledger() as ledger:
            return [row.state for row in ledger.rounds(self.recipe.name) if row.state][-1]

    def attempts(self) -> list[tuple[int, int]]:
        """All rounds that were opened, with their attempts."""
        with self.ledger() as ledger:
            return [(row.round, row.attempt) for row in ledger.rounds(self.recipe.name)]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))


def certified(folder: Path) -> Iterator[Callable[[Recipe], Processes]]:
    """For a fixture: a folder for processes that know each other by certificates; none is left running."""
    made: list[Processes] = []

    def make(recipe: Recipe) -> Processes:
        made.append(Processes.of(folder, recipe))
        made[-1].authority = Authority.make()
        return made[-1]

    yield make
    for one in made:
        one.end()


def undisturbed(recipe: Recipe) -> str:
    """The final state's digest of a simulation, which is that of a run without faults; each recipe is run once."""
    return _undisturbed(recipe.model_dump_json())


@functools.cache
def _undisturbed(recipe: str) -> str:
    with simulation(Recipe.model_validate_json(recipe)) as running:
        running.go()
        assert running.run.published is not None
        return running.run.published.address


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
