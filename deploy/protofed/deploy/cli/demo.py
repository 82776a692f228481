"""`protofed demo`: what a pilot looks like, on one machine. Server and daemons are processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from protofed.common.config.recipe import Recipe
from protofed.common.errors import ProtofedError, StateError
from protofed.common.pki.identity import CERTIFICATE, Party
from protofed.common.storage.files import Lock, write
from protofed.deploy import shipped
from protofed.deploy.certs import lifecycle
from protofed.deploy.console.processes import end, interruption
from protofed.deploy.console.progress import progress
from protofed.deploy.daemons.metrics_endpoint import METRICS_FILE
from protofed.deploy.daemons.server import read_address
from protofed.server.operator.overview import Overview, overview
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader

RECIPES = ("digits-fednh", "digits-fedavg", "digits-solo")
SITES = tuple(f"site-{share + 1}" for share in range(5))
EVALUATOR, OPERATOR, SERVER = "evaluator", "operator", "server"
PATIENCE_S = 60.0
MARKER = ".protofed-demo"  # only a folder with it is emptied, and only of what is in MADE
PARTICIPANTS = (SERVER, OPERATOR, EVALUATOR, *SITES)
MADE = ("ca", "identities", "scores.json", "report.html", *PARTICIPANTS, *(f"{name}.log" for name in PARTICIPANTS))


class DemoError(ProtofedError):
    """A process of the demo ended before its work did."""


def run_demo(folder: Path, console: Console) -> None:
    """Run the demo's three runs to their end, showing how they get on; nothing is left running.

    Raises:
        DemoError: a process failed; its log is named.
    """
    from protofed.deploy.simulation.run_tables import progress_table, scores_json, scores_table

    recipes = [shipped.recipe(name) for name in RECIPES]
    empty_folder(folder)
    console.print(
        f"One aggregation server, one evaluator and {len(SITES)} sites, seven processes, each with\n"
        "a key and a certificate of its own, talk gRPC over mutual TLS on 127.0.0.1.\n"
        "Handwritten digits, rare classes a tenth as frequent, dealt so that every site\n"
        "sees other classes.\n"
    )
    began, views = time.monotonic(), dict[str, Overview | None]()
    with (
        interruption() as check,
        _processes(folder, check) as processes,
        Live(console=console, refresh_per_second=4) as live,
    ):
        while any(process.poll() is None for process in processes.values()):
            check()
            views = _look(folder, recipes)
            table = progress_table(recipes, views, "protofed demo")
            table.caption = f"{time.monotonic() - began:.0f} s · {_metrics(folder)}Ctrl-C ends all of it"
            live.update(table)
            _watch(processes, folder)
            time.sleep(0.25)
        views = _look(folder, recipes)
        live.update(progress_table(recipes, views, "protofed demo"))
    _watch(processes, folder)
    done = [view for view in views.values() if view is not None]
    (folder / "scores.json").write_text(json.dumps(scores_json(done), indent=2), encoding="utf-8")
    console.print()
    console.print(scores_table(recipes, views, "scores after the last round"))
    console.print(f"\n{_verdict(views)}")
    console.print(
        f"\nIn {folder}:\n"
        f"{_report(folder)}"
        "  scores.json        the scores, with exact numbers\n"
        "  server/            ledger.sqlite, audit.jsonl, the models as blobs\n"
        "  site-*/            what each site kept; audit.jsonl: every message that left it\n"
        "  *.log              one JSON line an event\n"
        "  ca/, identities/   certificates and keys of this demo\n"
        f"`protofed audit show {folder / SITES[0]}` says what left that site.",
        soft_wrap=True,
        highlight=False,
    )


def _metrics(folder: Path) -> str:
    """Where the server tells Prometheus how it gets on, meanwhile."""
    with suppress(FileNotFoundError):
        return f"{(folder / SERVER / METRICS_FILE).read_text(encoding='ascii')}/metrics · "
    return ""


def _report(folder: Path) -> str:
    """The line that says what the report is, or why there is none: the demo has done its work without it."""
    from protofed.deploy.cli.report import run_record_of

    try:
        from protofed.deploy.report.report import write_report

        path = write_report(run_record_of(folder / SERVER, RECIPES[0]), folder / "report.html")
    except (ModuleNotFoundError, ProtofedError) as error:
        return f"  (no report.html: {error})\n"
    return f"  {path.name:<18} {RECIPES[0]} for people who were not there: open it in a browser\n"


def _verdict(views: dict[str, Overview | None]) -> str:
    """The result in words, whatever it is."""
    sentences = (
        ("Global model on the balanced test set, in %", "global.accuracy"),
        ("Own models on the site's own classes, in %", "personal.pm_v"),
        ("Own models on all classes, in %", "personal.balanced_accuracy"),
    )
    names = dict(zip(RECIPES, ("FedNH", "FedAvg", "alone"), strict=True))
    lines = []
    for what, score in sentences:
        scored = {names[run]: view.scores[score].mean for run, view in views.items() if view and score in view.scores}
        lines.append(f"{what}: " + ", ".join(f"{name} {100 * mean:.1f}" for name, mean in scored.items()) + ".")
    return "\n".join(lines)


def _look(folder: Path, recipes: Sequence[Recipe]) -> dict[str, Overview | None]:
    """What the server's ledger says now."""
    if not (folder / "server" / "address").exists():
        return {}
    records = LedgerReader(f"sqlite:///{folder / 'server' / LEDGER_FILE}")
    try:
        return {recipe.name: overview(records, recipe.name) for recipe in recipes}
    except StateError:  # being written for the first time
        return {}
    finally:
        records.close()


@contextmanager
def _processes(folder: Path, check: Callable[[], None]) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The server, then the daemons; all of them are gone afterwards, whatever happens."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    recipes = shipped.folder("recipes")
    policy = shipped.folder("policies") / "open.toml"  # the digits are public: no class is held back for being rare
    try:
        chosen = [f"--recipe={recipes / name}.toml" for name in RECIPES]
        with progress("starting the server"):
            _make_identities(folder)
            running[SERVER] = _start(
                folder, SERVER, "server", "start", *chosen, "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0"
            )
            address = _address(folder, running[SERVER], check)
            _register(folder, address)
        data = f"--settings={shipped.folder('sites') / 'digits.toml'}"
        common = (data, f"--server={address}", f"--policy={policy}")
        for share, name in enumerate(SITES):
            check()
            running[name] = _start(
                folder, name, "client", "start", *common, f"--site={name}", f"--partition-index={share}"
            )
        evaluator = (f"--site={EVALUATOR}", "--role=evaluator")
        running[EVALUATOR] = _start(folder, EVALUATOR, "client", "start", *common, *evaluator)
        yield running
    finally:
        end(list(running.values()))


def _identity(folder: Path, name: str) -> Path:
    return folder / "identities" / name


def _make_identities(folder: Path) -> None:
    """A CA for this demo alone, and a certificate from it for everybody."""
    authority = lifecycle.make_authority(folder / "ca", "protofed demo")
    parties = {SERVER: Party.SERVER, OPERATOR: Party.OPERATOR} | dict.fromkeys((*SITES, EVALUATOR), Party.SITE)
    for name, party in parties.items():
        hosts = ("127.0.0.1",) if party is Party.SERVER else ()
        asked = lifecycle.read_request(lifecycle.request(_identity(folder, name), party, name, hosts), name)
        lifecycle.install(_identity(folder, name), lifecycle.sign_request(asked, authority))
    operators = _identity(folder, SERVER) / "operators"
    operators.mkdir()
    shutil.copy(_identity(folder, OPERATOR) / CERTIFICATE, operators / f"{OPERATOR}.pem")


def _register(folder: Path, address: str) -> None:
    """The operator lets the sites in, by their certificates."""
    from protofed.deploy.operator.connection import Operator

    with Operator(address, _identity(folder, OPERATOR), plaintext=False) as operator:
        for name in (*SITES, EVALUATOR):
            operator.register((_identity(folder, name) / CERTIFICATE).read_text(encoding="ascii"))


def _start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    kept = (f"--identity={_identity(folder, name)}", f"--state={folder / name}")
    command = [sys.executable, "-m", "protofed.deploy.cli", *arguments, *kept, "--until-finished"]
    with (folder / f"{name}.log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # seven processes share the cores
        # A session of its own: Ctrl-C reaches the demo alone, which then ends all the others in order.
        return subprocess.Popen(  # noqa: S603
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )


def _address(folder: Path, server: subprocess.Popen[bytes], check: Callable[[], None]) -> str:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        check()
        if (address := read_address(folder / "server")) is not None:
            return address
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise DemoError(f"the server did not start; see {folder / 'server.log'}")


def _watch(processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    for name, process in processes.items():
        if process.poll() not in (None, 0):
            raise DemoError(f"{name} ended with exit code {process.returncode}; see {folder / name}.log")


def empty_folder(folder: Path) -> None:
    """A folder for this demo. Of a former demo's, which its marker tells, what the demo made is removed, and no more.

    Raises:
        StateError: it holds something, and no demo ran there; nothing was touched.
    """
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StateError(f"{folder} is not a folder; name a new or an empty one with --keep")
    if marker.is_file() and not marker.is_symlink():
        if (folder / SERVER).is_dir():
            Lock(folder / SERVER).release()  # not while another demo runs
        for name in MADE:
            _remove(folder / name)
    elif folder.exists() and any(folder.iterdir()):
        raise StateError(f"{folder} holds files of yours, not a former demo; name a new or an empty folder with --keep")
    write(marker, b"`protofed demo --keep` made this folder; run again, it removes what it made here.\n")


def _remove(path: Path) -> None:
    """A file, a link (never what it leads to) or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
