"""Network namespaces: each place has its own addresses and routes; nothing of them is left. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

Process: TypeAlias = subprocess.Popen[bytes]
BEGAN = time.monotonic()
PREFIX = f"protofed-{os.getpid()}"
ETC = Path("/etc/netns")  # what a place sees in place of /etc
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()"


@dataclass
class Networks:
    """Places that were made, and the processes that run in them.

    Attributes:
        logs: folder for a log of each process.
    """

    logs: Path
    places: list[str] = field(default_factory=list)
    running: dict[str, Process] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for place in self.places:
            subprocess.run(["ip", "netns", "del", _full(place)], check=False)
            shutil.rmtree(ETC / _full(place), ignore_errors=True)

    def add(self, place: str, hosts: Mapping[str, str], address: str = "") -> None:
        """Make a place that knows these names and no name server; `address` is its own, whoever it is linked to."""
        self.places.append(place)
        _ip("netns", "add", _full(place))
        etc = ETC / _full(place)
        etc.mkdir(parents=True)
        (etc / "resolv.conf").write_text("", encoding="ascii")
        known = {"localhost": "127.0.0.1", **hosts}
        (etc / "hosts").write_text("".join(f"{ip} {name}\n" for name, ip in known.items()), encoding="ascii")
        self._inside(place, "link", "set", "lo", "up")
        if address:
            self._inside(place, "address", "add", f"{address}/32", "dev", "lo")

    def link(self, near: str, far: str, subnet: str) -> None:
        """A cable; `near` is .1 and `far` is .2 of a subnet such as 10.77.1."""
        _ip("link", "add", far, "netns", _full(near), "type", "veth", "peer", "name", near, "netns", _full(far))
        for place, device, host in ((near, far, 1), (far, near, 2)):
            self._inside(place, "address", "add", f"{subnet}.{host}/30", "dev", device)
            self._inside(place, "link", "set", device, "up")

    def route(self, place: str, address: str, via: str) -> None:
        """The only way from there to an address that is not next to it."""
        self._inside(place, "route", "add", f"{address}/32", "via", via)

    def run(self, place: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command there, to its end."""
        full = ["ip", "netns", "exec", _full(place), *command]
        done = subprocess.run(full, capture_output=True, text=True, check=False, env=_environment(), timeout=900)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def start(self, name: str, place: str, *command: str) -> Process:
        """Start a process there; what it says goes to its log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            full = ["ip", "netns", "exec", _full(place), *command]
            self.running[name] = subprocess.Popen(full, stdout=log, stderr=log, env=_environment())
        return self.running[name]

    def reaches(self, place: str, address: str, port: int) -> bool:
        """Whether a connection can be made from there."""
        return self.run(place, sys.executable, "-c", REACH, address, str(port), check=False).returncode == 0

    def end(self, name: str, patience_s: float) -> int:
        """Exit code of a process that ends by itself; -9 if it has to be killed."""
        try:
            return self.running[name].wait(patience_s)
        except subprocess.TimeoutExpired:
            return -int(signal.SIGKILL)

    def stop(self, name: str) -> int:
        """Ask a process to end; its exit code."""
        self.running[name].terminate()
        return self.end(name, 20)

    def tails(self) -> str:
        """What the processes said last."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.logs.glob("*.log")))

    def _inside(self, place: str, *arguments: str) -> None:
        _ip("-n", _full(place), *arguments)


def say(text: str) -> None:
    """What happened, and when."""
    sys.stdout.write(f"{time.monotonic() - BEGAN:6.1f} s  {text}\n")
    sys.stdout.flush()


def interrupted(_number: int, _frame: object) -> None:
    """Handles a signal as an end that goes otherwise."""
    raise SystemExit("interrupted")


def spoken_key(said: str) -> str:
    """The fingerprint that `certs request` printed, as a party reads it out over the telephone."""
    (key,) = [line.removeprefix("key:").strip() for line in said.splitlines() if line.startswith("key:")]
    return key


def expect(holds: bool, what: str) -> None:
    """End it all, unless it is so."""
    if not holds:
        raise SystemExit(f"not so: {what}")


def wait_for(what: str, condition: Any, patience_s: float = 60.0) -> Any:
    """What `condition` gives, once it gives something."""
    until = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise SystemExit(f"in vain waited {patience_s:.0f} s for: {what}")
        time.sleep(0.2)
    return found


def _full(place: str) -> str:
    return f"{PREFIX}-{place}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _environment() -> dict[str, str]:
    """Nothing of the caller's own way to the internet."""
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return {**own, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
