"""Rounds over the network: ours with mTLS and durable commits, the floor of gRPC and mTLS, and the peers, in turns.

Each measurement is a fresh server process and clients that train nothing, on this machine. Peers run where
`make bench-peers` installed them; else their rows say so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tests.bench.report import Row
from tests.bench.server_process import make_identities

PEERS_PYTHON = Path(".venv-peers/bin/python")
PEERS = {"NVFlare 2.9": "nvflare_rounds", "Flower's gRPC server": "flower"}
LIMIT_S = 900.0  # of one measurement
TURNS = int(os.environ.get("BENCH_TURNS", "3"))  # fresh processes of each; fewer for a quick look
Measurement: TypeAlias = dict[str, Any]  # what `echo`, `floor` and the peers print


@dataclass(frozen=True)
class Case:
    """So many sites that send back so large a model.

    Attributes:
        rounds: of each process; the first is not counted.
        faster: the least ratio of a peer's seconds to ours.
    """

    megabytes: int
    sites: int
    rounds: int
    faster: dict[str, float]

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"round, {self.megabytes} MB × {self.sites}"

    @property
    def told(self) -> tuple[str, ...]:
        """As arguments."""
        return f"--megabytes={self.megabytes}", f"--sites={self.sites}", f"--rounds={self.rounds}"


LARGE = Case(45, 8, 5, {"NVFlare 2.9": 4.0, "Flower's gRPC server": 4.0})
SMALL = Case(1, 32, 20, {"NVFlare 2.9": 4.0, "Flower's gRPC server": 1.0})
HUGE = Case(180, 8, 3, {"NVFlare 2.9": 4.0, "Flower's gRPC server": 4.0})


def rows() -> Iterator[Row]:
    """Of 45 MB × 8, 1 MB × 32, 180 MB × 8, and what they cost beside the clock."""
    large = _in_turns(LARGE, {"unsynced": partial(_run, "echo", *LARGE.told, "--without-sync")})
    yield from _large(large)
    yield from _small(_in_turns(SMALL))
    yield from _huge(_in_turns(HUGE), _median(large["ours"], "seconds"))
    yield from _memory()
    yield from _client()


def _large(found: dict[str, list[Measurement]]) -> Iterator[Row]:
    case = LARGE
    ours, floor = found["ours"], found["floor"]
    yield from _beside(case, found, at_most=1.5)
    for key, what in (("server_cpu_s", "server's processor"), ("clients_cpu_s", "clients' processor")):
        yield _row(f"{case.name}: {what}", key, ours, floor)
    most = 150 + 2 * case.megabytes + 32 * case.sites
    yield _row(f"{case.name}: server's peak memory", "peak_mb", ours, floor, unit="MB", ratio=False, at_most=most)
    yield Row(f"{case.name}: syncs", _median(ours, "syncs"), at_most=45, command=_command("echo", *case.told))
    unsynced = found["unsynced"]
    yield _row(f"{case.name}: durability", "seconds", ours, unsynced, beside="an fsync that does nothing")


def _small(found: dict[str, list[Measurement]]) -> Iterator[Row]:
    ours = found["ours"]
    yield from _beside(SMALL, found)
    yield Row(f"{SMALL.name}: on the clock", _median(ours, "seconds"), "s", at_most=0.3)
    yield _row(f"{SMALL.name}: server's processor", "server_cpu_s", ours, found["floor"])


def _huge(found: dict[str, list[Measurement]], large: float) -> Iterator[Row]:
    """Beside `large` seconds of the smaller case."""
    ours = found["ours"]
    yield from _beside(HUGE, found)
    seconds, times = _median(ours, "seconds"), HUGE.megabytes / LARGE.megabytes
    ratio = seconds / times / large
    yield Row(
        f"{HUGE.name}: by its bytes", seconds, "s", times * large, f"{times:.0f} × {LARGE.name}", ratio, at_most=1.1
    )
    most = 150 + 2 * HUGE.megabytes + 32 * HUGE.sites
    yield _row(
        f"{HUGE.name}: server's peak memory", "peak_mb", ours, found["floor"], unit="MB", ratio=False, at_most=most
    )
    lag = statistics.median(one["lag_ms"]["most"] for one in ours)
    p99 = statistics.median(one["lag_ms"]["p99"] for one in ours)
    yield Row(f"{HUGE.name}: event loop late", lag, "ms", p99, "of 100 looks the second latest", at_most=50)


def _memory() -> Iterator[Row]:
    told = "--megabytes=1", "--sites=4", "--rounds=500"
    ours = _run("echo", *told)
    yield Row(
        "500 rounds, 1 MB × 4: growth of the server's memory",
        ours["growth_kb_a_round"],
        "kB a round",
        at_most=5,
        command=_command("echo", *told),
        details=ours,
    )


def _client() -> Iterator[Row]:
    told = "--megabytes=45", "--sites=1", "--rounds=5"
    found = [(_run("echo", *told, "--on-disk"), _run("floor", *told)) for _ in range(TURNS)]
    ours, floor = ([pair[which] for pair in found] for which in (0, 1))
    what = "a site's transfers, 45 MB, its audit log and downloads on disk"
    syncs = f"{_median(ours, 'client_syncs'):.0f} syncs"
    yield _row(f"{what}: its processor", "clients_cpu_s", ours, floor, note=syncs)


def _in_turns(case: Case, further: dict[str, Callable[[], Measurement]] | None = None) -> dict[str, list[Measurement]]:
    """What each measured, by who: ours, the floor, each peer that is installed."""
    runs: dict[str, Callable[[], Measurement]] = {
        "floor": partial(_run, "floor", *case.told),
        "ours": partial(_run, "echo", *case.told),
        **(further or {}),
    }
    if PEERS_PYTHON.exists():
        runs |= {peer: partial(_peer, script, *case.told) for peer, script in PEERS.items()}
    found: dict[str, list[Measurement]] = {who: [] for who in runs}
    for _ in range(TURNS):
        for who, run in runs.items():
            found[who].append(run())
    return found


def _beside(case: Case, found: dict[str, list[Measurement]], at_most: float | None = None) -> Iterator[Row]:
    """Ours beside the floor, then beside each peer."""
    ours = found["ours"]
    yield _row(case.name, "seconds", ours, found["floor"], at_most=at_most, command=_command("echo", *case.told))
    for peer, least in case.faster.items():
        what = f"{case.name}: {peer} beside ours"
        if peer not in found:
            yield Row(what, None, at_least=least, note="not installed: make bench-peers")
        elif problem := next((one["problem"] for one in found[peer] if "problem" in one), ""):
            yield Row(what, None, at_least=least, note=problem)
        else:
            peak = f"server's peak {_median(found[peer], 'peak_mb'):.0f} MB"
            yield _row(what, "seconds", found[peer], ours, beside="ours", at_least=least, note=peak)


def _row(
    what: str,
    key: str,
    ours: Sequence[Measurement],
    other: Sequence[Measurement],
    *,
    beside: str = "floor",
    unit: str = "s",
    ratio: bool = True,
    **told: Any,
) -> Row:
    """Medians of fresh processes; the ratio is the median of those of each turn."""
    turns = [_value(one, key) / _value(two, key) for one, two in zip(ours, other, strict=True)]
    between = statistics.median(turns) if ratio else None
    details = {"measured": list(ours), beside: list(other)}
    return Row(what, _median(ours, key), unit, _median(other, key), beside, between, details=details, **told)


def _median(measured: Sequence[Measurement], key: str) -> float:
    return statistics.median(_value(one, key) for one in measured)


def _value(one: Measurement, key: str) -> float:
    """Of a process; of several rounds, their median."""
    value = one[key]
    return statistics.median(value) if isinstance(value, list) else float(value)


def _run(module: str, *told: str) -> Measurement:
    return _read([sys.executable, "-m", f"tests.bench.{module}", *told])


def _command(module: str, *told: str) -> str:
    return " ".join(["python -m", f"tests.bench.{module}", *told])


def _peer(script: str, *told: str) -> Measurement:
    """What a peer measured, or its problem: one that fails must not end the rest."""
    # Its own commands find Python by the path.
    environment = os.environ | {"PATH": f"{PEERS_PYTHON.parent.absolute()}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="protofed-peer-") as folder:
        identity = make_identities(Path(folder) / "identities", []) / "server"
        command = [str(PEERS_PYTHON), f"tests/bench/peers/{script}.py", *told, f"--identity={identity}"]
        try:
            return _read(command, environment)
        except (subprocess.SubprocessError, ValueError) as error:
            return {"problem": f"failed: {str(error)[-300:]}"}


def _read(command: list[str], environment: Mapping[str, str] | None = None) -> Measurement:
    """What a command prints, as its last line."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    if ended.returncode:
        sys.stderr.write(ended.stderr[-3000:])
        raise subprocess.SubprocessError(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-300:]}")
    return parsed(ended.stdout)


def parsed(output: str) -> Measurement:
    """The last line, which is JSON; libraries may print before it.

    Raises:
        ValueError: it is not.
    """
    measurement: Measurement = json.loads(output.strip().rpartition("\n")[2])
    return measurement
