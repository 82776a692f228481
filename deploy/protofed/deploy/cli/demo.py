"""`protofed demo`: a pilot on one machine. The server and every daemon run in separate processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.errors import ProtofedError, StateError
from protofed.common.pki.identity import CERTIFICATE, Party
from protofed.common.protocol.messages import Role
from protofed.common.storage.files import Lock, write
from protofed.deploy import shipped
from protofed.deploy.certs import lifecycle
from protofed.deploy.certs.request import read_request
from protofed.deploy.daemons.metrics_endpoint import METRICS_FILE
from protofed.deploy.daemons.server import read_address
from protofed.deploy.progress import end, interruption, progress, start_module
from protofed.server.operator.run_record import Overview, overview
from protofed.server.storage.database import LEDGER_FILE
from protofed.server.storage.reader import LedgerReader

RECIPES = ("digits-fednh", "digits-fedavg", "digits-solo")
NAMES = dict(zip(RECIPES, ("FedNH", "FedAvg", "alone"), strict=True))
SITES = tuple(f"site-{index + 1}" for index in range(5))
EVALUATOR, OPERATOR, SERVER = "evaluator", "operator", "server"
START_TIMEOUT_S = 60.0
MARKER = ".protofed-demo"  # only a folder with this file is emptied, and only of the names in CREATED
PARTICIPANTS = (SERVER, OPERATOR, EVALUATOR, *SITES)
CREATED = ("ca", "identities", "scores.json", "report.html", *PARTICIPANTS, *(f"{name}.log" for name in PARTICIPANTS))


class DemoError(ProtofedError):
    """A process of the demo failed or did not start."""


def run_demo(folder: Path, console: Console, recipes: Path | None = None) -> None:
    """Run the demo's three runs to their end with live progress; no process survives the call.

    Args:
        recipes: the folder of their recipes; None: the shipped ones.

    Raises:
        DemoError: a process failed; its log is named.
    """
    from protofed.deploy.simulation.run_tables import progress_table, scores_json, scores_table

    files = [(recipes or shipped.folder("recipes")) / f"{name}.toml" for name in RECIPES]
    runs = [read_recipe(file) for file in files]
    empty_folder(folder)
    console.print(
        f"A server, an evaluator and {len(SITES)} sites run as seven processes on this machine.\n"
        "They talk gRPC over mutual TLS, each with its own key and certificate.\n"
        "The sites share 512 handwritten digits: 126 of the most frequent class, 12\n"
        "of the rarest. Each site has few classes. Their policy is open.toml, for\n"
        "public data only: they send their own scores, and a server can compute label\n"
        "counts from these.\n"
    )
    started_at, views = time.monotonic(), dict[str, Overview | None]()
    with (
        interruption() as check,
        _processes(folder, files, check) as processes,
        Live(console=console, refresh_per_second=4) as live,
    ):
        while any(process.poll() is None for process in processes.values()):
            check()
            views = _read_overviews(folder, runs)
            table = progress_table(runs, views, "protofed demo")
            table.caption = f"{time.monotonic() - started_at:.0f} s · {_metrics(folder)}Ctrl-C stops everything"
            live.update(table)
            _check_processes(processes, folder)
            time.sleep(0.25)
        views = _read_overviews(folder, runs)
        live.update(progress_table(runs, views, "protofed demo"))
    _check_processes(processes, folder)
    known_views = [view for view in views.values() if view is not None]
    (folder / "scores.json").write_text(json.dumps(scores_json(known_views), indent=2), encoding="utf-8")
    console.print()
    console.print(scores_table(runs, views, "scores after the last round"))
    console.print(f"\n{_scores_text(views)}")
    protofed = "protofed" if shutil.which("protofed") else sys.argv[0]  # `make demo` sets no PATH
    console.print(
        f"\nIn {folder}:\n"
        f"{_report(folder)}"
        "  scores.json        the scores, with exact numbers\n"
        "  server/            ledger.sqlite, audit.jsonl, the models as blobs\n"
        "  site-*/            what each site kept; audit.jsonl: every message that it sent\n"
        "  *.log              one JSON line per event\n"
        "  ca/, identities/   certificates and keys of this demo\n"
        f"`{protofed} audit show {folder / SITES[0]}` lists what that site sent,\n"
        f"`{protofed} client runs {RECIPES[0]} --state {folder / SITES[0]}` shows its own scores.",
        soft_wrap=True,
        highlight=False,
    )


def _metrics(folder: Path) -> str:
    """The address of the server's metrics, for the caption; empty until the server listens."""
    with suppress(FileNotFoundError):
        return f"{(folder / SERVER / METRICS_FILE).read_text(encoding='ascii')}/metrics · "
    return ""


def _report(folder: Path) -> str:
    """The line about the report, or why there is none: the demo succeeds without it."""
    from protofed.deploy.cli.report import read_run_record

    try:
        from protofed.deploy.report.report import write_report

        path = write_report(read_run_record(folder / SERVER, RECIPES[0]), folder / "report.html")
    except (ModuleNotFoundError, ProtofedError) as error:
        return f"  (no report.html: {error})\n"
    return f"  {path.name:<18} report of {RECIPES[0]}: open it in a browser\n"


def _scores_text(views: Mapping[str, Overview | None]) -> str:
    """The final scores, one sentence per kind of model, and what they show."""
    means = {
        NAMES[run]: {name: spread.mean for name, spread in view.scores.items()} for run, view in views.items() if view
    }
    rows = {
        "Global model on all ten classes, in %": {run: of.get("global.accuracy") for run, of in means.items()},
        "Sites' own models on their own classes": {run: of.get("personal.pm_v") for run, of in means.items()},
        "Sites' own models on all ten classes": {
            run: of.get("personal.balanced_accuracy") for run, of in means.items()
        },
    }
    shown = {label: {run: value for run, value in row.items() if value is not None} for label, row in rows.items()}
    lines = [
        f"{label}: " + ", ".join(f"{run} {100 * value:.1f}" for run, value in row.items()) + "."
        for label, row in shown.items()
        if row
    ]
    own = shown["Sites' own models on all ten classes"]
    return "\n".join([*lines, *([_story(own)] if len(own) == len(RECIPES) else [])])


def _story(own: Mapping[str, float]) -> str:
    """What the own models' accuracy on all classes shows, and how sure that is (docs/reference/results.md)."""
    fednh, fedavg, alone = (own[name] for name in NAMES.values())
    here = "Here, as" if fednh > fedavg > alone else "Not here, but"
    return (
        f"{here} in each of five seeds, sites that train together know classes\n"
        "that they hardly have, and with FedNH more than with FedAvg."
    )


def _read_overviews(folder: Path, recipes: Sequence[Recipe]) -> dict[str, Overview | None]:
    """Each run's current state from the server's ledger; empty before the server has started."""
    if not (folder / "server" / "address").exists():
        return {}
    records = LedgerReader(f"sqlite:///{folder / 'server' / LEDGER_FILE}")
    try:
        return {recipe.name: overview(records, recipe.name) for recipe in recipes}
    except StateError:  # the server is still creating the ledger
        return {}
    finally:
        records.close()


@contextmanager
def _processes(
    folder: Path, recipes: Sequence[Path], check: Callable[[], None]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the server, then the daemons; end all of them on exit, also after an error."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    policy = shipped.folder("policies") / "open.toml"  # the digits are public: no class and no score is withheld
    try:
        chosen = [f"--recipe={recipe}" for recipe in recipes]
        with progress("starting the server"):
            _make_identities(folder)
            running[SERVER] = _start(
                folder, SERVER, "server", "start", *chosen, "--listen=127.0.0.1:0", "--metrics=127.0.0.1:0"
            )
            address = _address(folder, running[SERVER], check)
            _register(folder, address)
        data = f"--settings={shipped.folder('sites') / 'digits.toml'}"
        common = (data, f"--server={address}", f"--policy={policy}")
        for index, name in enumerate(SITES):
            check()
            running[name] = _start(
                folder, name, "client", "start", *common, f"--site={name}", f"--partition-index={index}"
            )
        evaluator = (f"--site={EVALUATOR}", "--role=evaluator")
        running[EVALUATOR] = _start(folder, EVALUATOR, "client", "start", *common, *evaluator)
        yield running
    finally:
        end(list(running.values()))


def _identity(folder: Path, name: str) -> Path:
    return folder / "identities" / name


def _make_identities(folder: Path) -> None:
    """Create a CA for this demo and a certificate from it for every participant."""
    authority = lifecycle.make_authority(folder / "ca", "protofed demo")
    parties = {SERVER: Party.SERVER, OPERATOR: Party.OPERATOR} | dict.fromkeys((*SITES, EVALUATOR), Party.SITE)
    for name, party in parties.items():
        hosts = ("127.0.0.1",) if party is Party.SERVER else ()
        request = read_request(lifecycle.request(_identity(folder, name), party, name, hosts), name)
        lifecycle.install(_identity(folder, name), lifecycle.sign_request(request, authority))
    operators = _identity(folder, SERVER) / "operators"
    operators.mkdir()
    shutil.copy(_identity(folder, OPERATOR) / CERTIFICATE, operators / f"{OPERATOR}.pem")


def _register(folder: Path, address: str) -> None:
    """Register the sites' certificates at the server, as its operator."""
    from protofed.deploy.operator.connection import Operator

    with Operator(address, _identity(folder, OPERATOR)) as operator:
        for name in (*SITES, EVALUATOR):
            roles = [Role.EVALUATOR if name == EVALUATOR else Role.TRAINER]
            operator.register((_identity(folder, name) / CERTIFICATE).read_text(encoding="ascii"), roles)


def _start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    paths = (f"--identity={_identity(folder, name)}", f"--state={folder / name}")
    command = ("protofed.deploy.cli", *arguments, *paths, "--until-finished")
    with (folder / f"{name}.log").open("wb") as log:
        return start_module(*command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _address(folder: Path, server: subprocess.Popen[bytes], check: Callable[[], None]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        check()
        if (address := read_address(folder / "server")) is not None:
            return address
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise DemoError(f"the server did not start; see {folder / 'server.log'}")


def _check_processes(processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    for name, process in processes.items():
        if process.poll() not in (None, 0):
            raise DemoError(f"{name} ended with exit code {process.returncode}; see {folder / name}.log")


def empty_folder(folder: Path) -> None:
    """Prepare the folder: from an earlier demo's folder, which has the marker, remove only what the demo created.

    Raises:
        StateError: the folder is not empty and has no marker, or another demo runs in it; nothing was removed.
    """
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StateError(f"{folder} is not a folder; name a new or an empty one with --keep")
    if marker.is_file() and not marker.is_symlink():
        if (folder / SERVER).is_dir():
            Lock(folder / SERVER).release()  # raises while another demo's server holds it
        for name in CREATED:
            _remove(folder / name)
    elif folder.exists() and any(folder.iterdir()):
        raise StateError(f"{folder} holds other files, not an earlier demo; name a new or an empty folder with --keep")
    write(marker, b"`protofed demo --keep` made this folder; the next run removes what it made here.\n")


def _remove(path: Path) -> None:
    """Remove a file, a link (never its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
