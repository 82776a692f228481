"""Five runs that go wrong, and what people are told of them: `python -m tests.support.provoked_runs OUT [NAME …]`.

Each is run for real: a server with TLS, three or five sites with certificates, an operator called olga, all in this
process. A folder for each run gets the report (also as a picture, where Chromium is installed), the model card, the
record, and what `runs show` and `runs watch` print: to be read as somebody would who was not there.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from rich.console import Console
from tests.support.pki import Authority

from protofed.client.agent.agent import Agent
from protofed.client.data.site_data import SiteData
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common.config.recipe import Recipe
from protofed.common.payload import SiteId
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Role
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.watch import Watcher
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents, load_data
from protofed.testing.live_server import LiveServer, NoAudit
from protofed.testing.small_recipe import small_recipe

SITES = 5
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COMMON = 0.66  # of the evaluator's images in the run that names one class: a figure that looks good, and is nothing
WIDTH, HEIGHT = 110, 40
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Stage:
    """A run that goes on: what the operator may do to it, and who still works."""

    server: LiveServer
    operator: Operator
    recipe: Recipe
    agents: dict[SiteId, Agent]

    @property
    def round(self) -> int:
        """The newest round that was opened; 0 before the first one."""
        newest = self.server.ledger.newest(self.recipe.name)
        return 0 if newest is None else newest.round

    def play(self, before: Callable[[Stage, SiteId], None]) -> None:
        """Let the sites work in turns until the run has ended; `before` is called before each site's turn."""
        while not self.server.runs.finished:
            for name in list(self.agents):
                before(self, name)
                if name in self.agents and not self.server.runs.finished:
                    self.agents[name].step(0.05)


@dataclass(frozen=True)
class Provoked:
    """A run that goes wrong.

    Attributes:
        tables: of its recipe.
        before: what the operator does, called before each site's turn.
        evaluator: whether the federation has one.
        one_class: most of the evaluator's images are of one class.
    """

    tables: Mapping[str, object]
    before: Callable[[Stage, SiteId], None] = lambda _stage, _site: None
    evaluator: bool = True
    one_class: bool = False


def abort(stage: Stage, site: SiteId) -> None:
    """In the middle of round 4, after some sites have reported."""
    if stage.round == 4 and site == "site-3":
        stage.operator.abort(stage.recipe.name, "labels of two classes were swapped at site-2")


def expel(stage: Stage, site: SiteId) -> None:
    """One site is excluded in round 2, another one's certificate revoked in round 4, both before they trained."""
    if stage.round == 2 and site == "site-4":
        stage.operator.exclude(site, "its ethics vote has expired")
        del stage.agents[SiteId(site)]
    if stage.round == 4 and site == "site-5":
        stage.operator.revoke(site, "a laptop with its key was stolen")
        del stage.agents[SiteId(site)]


def _plan(lr: float) -> dict[str, object]:
    return {"epochs": 1, "batch_size": 32, "lr": lr, "momentum": 0.9}


FEDERATION = {"min_sites": 3, "quorum": 0.5, "heartbeat_s": 0.5, "score_every": 1, "grace": 1.0}
TWICE = {**FEDERATION, "max_attempts": 2}  # the server pauses for 1, 2, 4 and 8 s before the next ones
PARTITION = {"kind": "dirichlet", "sites": SITES, "beta": 0.5}
FEW = {**PARTITION, "sites": 3}
RUNS: dict[str, Provoked] = {
    "one-class": Provoked(
        {"plan": _plan(0.005), "data": {"source": "digits", "partition": FEW, "long_tail": 0.01}}, one_class=True
    ),
    "diverged": Provoked({"plan": _plan(5.0), "federation": TWICE}),
    "aborted": Provoked({"rounds": 12}, abort),
    "no-evaluator": Provoked(
        {"data": {"source": "digits", "partition": PARTITION, "local_test_fraction": 0.25}}, evaluator=False
    ),
    "expelled": Provoked({}, expel),
}


def recipe_of(name: str) -> Recipe:
    """The recipe of one of `RUNS`."""
    table: dict[str, object] = {
        "name": f"digits-{name}",
        "rounds": 6,
        "class_names": NAMES,
        "federation": FEDERATION,
        "data": {"source": "digits", "partition": PARTITION},
    }
    return small_recipe("fedavg", **{**table, **RUNS[name].tables})


@contextmanager
def staged(name: str, folder: Path) -> Iterator[Stage]:
    """A server, its operator and the sites of a run, with certificates of a CA of their own."""
    provoked, recipe, authority = RUNS[name], recipe_of(name), Authority.make()
    data = load_data(recipe)
    if provoked.one_class:
        data[EVALUATOR] = _of_one_class(data[EVALUATOR], recipe)
    if not provoked.evaluator:
        del data[EVALUATOR]
    identity = authority.issue(folder / "identities" / "server", Party.SERVER, "server")
    olga = authority.issue(folder / "identities" / "olga", Party.OPERATOR, "olga")
    (identity / "operators").mkdir()
    shutil.copy(olga / "cert.pem", identity / "operators" / "olga.pem")
    with ExitStack() as resources:
        server = LiveServer(recipe, folder / "server", identity=identity)
        resources.callback(server.stop)
        operator = resources.enter_context(Operator(server.address, olga))

        def connect(site: SiteId, roles: frozenset[Role]) -> GrpcLink:
            own = authority.issue(folder / "identities" / site, Party.SITE, site)
            operator.register((own / "cert.pem").read_text(encoding="ascii"), sorted(roles))
            audit, live = ClientAudit(NoAudit()), LiveIdentity(own, Party.SITE)
            link = GrpcLink(server.address, site, site, roles, identity=live, audit=audit, give_up_after_s=30)
            resources.callback(link.close)
            return link

        agents = build_agents(recipe, connect, data=data)
        yield Stage(server, operator, recipe, dict(zip(data, agents, strict=True)))


def _of_one_class(data: SiteData, recipe: Recipe) -> SiteData:
    """An evaluator's data in which `COMMON` of the images are of class 0."""
    zero = (data.test.labels == 0).nonzero().flatten()
    others = (data.test.labels != 0).nonzero().flatten()
    rows = torch.cat([zero, others[:: max(1, round(len(others) * COMMON / (1 - COMMON) / len(zero)))]])
    return SiteData.for_scoring(data.test.take(rows.sort().values), recipe.input, recipe.classes)


def main() -> None:
    """Run them and write what is told of them."""
    out = Path(sys.argv[1])
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(io.StringIO()))
    torch.set_num_threads(1)
    for name in sys.argv[2:] or RUNS:
        folder = out / name
        if folder.exists():
            raise SystemExit(f"{folder} exists; name a folder that does not")
        with staged(name, folder) as stage:
            stage.play(RUNS[name].before)
            write_told(stage, folder)
        sys.stdout.write(f"{folder}\n")


def write_told(stage: Stage, folder: Path) -> None:
    """All that people are told of the run."""
    run, operator = stage.recipe.name, stage.operator
    reached = ("--server", stage.server.address, "--identity", str(folder / "identities" / "olga"))
    record = operator.run_record(run)
    (folder / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    watcher = Watcher(operator, run)
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
    console.print(WatchScreen(watcher.snapshot(), HEIGHT))
    (folder / "watch.txt").write_text(console.export_text(), encoding="utf-8")
    (folder / "runs-show.txt").write_text(_protofed("runs", "show", run, *reached), encoding="utf-8")
    report = folder / "report.html"
    if (said := _protofed("report", run, *reached, "--out", str(report))) and not report.exists():
        raise SystemExit(said)
    model = ("--model", "global", "--format", "safetensors", "--force", "--out", str(folder / "model"))
    (folder / "export.txt").write_text(_protofed("export", run, *reached, *model), encoding="utf-8")
    if browser := next((found for name in BROWSERS if (found := shutil.which(name))), None):
        picture(browser, report, folder / "report.png")


def picture(browser: str, page: Path, target: Path, size: str = "1100,1500") -> None:
    """The top of a page as a browser without a network shows it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
    profile = f"--user-data-dir={target.parent / 'profile'}"
    command = [browser, *options, profile, f"--screenshot={target}", page.absolute().as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    shutil.rmtree(target.parent / "profile", ignore_errors=True)


def _protofed(*arguments: str) -> str:
    """What a command prints, errors included."""
    command = [sys.executable, "-m", "protofed.deploy.cli", *arguments]
    environment = {**os.environ, "COLUMNS": str(WIDTH)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
