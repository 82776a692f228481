"""`python -m tests.e2e.tutorials`: follows the tutorials with an installed wheel, outside the repository.

It builds the wheel, installs it into an environment of its own in an empty folder, and types what the pages say, with a
site killed where they say so. It prints how many commands that were, and how long they took; exit code 0: all went well

`--shared-libraries` takes PyTorch and the rest from this Python in place of installing them: minutes less, and no
figures of the installation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("simulate", "findings", "pilot", "bring-your-own")
EXTRAS = "client,report,export,monai"
PATIENCE_S = 600.0
BLOCK = re.compile(r"^```\w*\n# (?P<head>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_TERMINAL, FILE, FIRST = "in a terminal of its own: ", "file ", "first in each terminal"


class WentWrongError(Exception):
    """A command of a page did not do what the page says."""


@dataclass
class Walk:
    """A person with several terminals in one folder.

    Attributes:
        environment: of each terminal.
        daemons: by name, with the command that started each.
        code: of the list of partners, as it was printed.
    """

    folder: Path
    environment: dict[str, str]
    began: float = field(default_factory=time.monotonic)
    commands: int = 0
    code: str = ""
    daemons: dict[str, tuple[str, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self.began:6.1f} s  {text}\n")
        sys.stdout.flush()

    def follow(self, page: str) -> None:
        """Type what a page says, in its order."""
        text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text(encoding="utf-8")
        for head, body in blocks(text):
            if head.startswith(FILE):
                (self.folder / head.removeprefix(FILE)).write_text(body, encoding="utf-8")
            elif head.startswith(FIRST):
                variables = re.findall(r"^export (\w+)=(.*)$", body, re.MULTILINE)
                self.environment |= dict(variables)
            elif head.startswith(OWN_TERMINAL):
                self.start(head.removeprefix(OWN_TERMINAL).removeprefix("the "), body.strip())
            else:
                for line in body.splitlines():
                    self.type(line)

    def start(self, name: str, command: str) -> None:
        """Start a daemon; wait until it says that it works."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.daemons[name] = (command, process)
        self.commands += 1
        self.say(f"$ {command}")
        if name == "server":
            self.wait_for("the server", (self.folder / "server" / "address").exists)
        else:
            self.wait_for(name, lambda: name in {site["site"] for site in self.asked("sites", "list")})

    def type(self, command: str) -> None:
        """One command, as typed; the one that watches a run is left by Ctrl-C, and then a site is killed."""
        command = command.replace("CODE", self.code)
        self.commands += 1
        self.say(f"$ {command}")
        if "--watch" in command:
            self.watch_and_kill(command)
            return
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise WentWrongError(f"$ {command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        self.code = next(iter(re.findall(r"^code +(\S+)$", done.stdout, re.MULTILINE)), self.code)

    def watch_and_kill(self, command: str) -> None:
        """Step 6 of the pilot: leave the view, kill a site in the middle of the run, start it again."""
        view = subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        run = shlex.split(command)[3]
        try:
            self.wait_for(
                "a round", lambda: any(info["run"] == run and info["round"] for info in self.asked("runs", "show"))
            )
        finally:
            view.send_signal(signal.SIGINT)
        shown, _ = view.communicate(timeout=PATIENCE_S)
        if view.returncode != 130 or b"Traceback" in shown:
            raise WentWrongError(f"Ctrl-C in the view ended with {view.returncode}:\n{shown.decode()}")
        again, process = self.daemons["site-1"]
        process.kill()
        process.wait()
        self.say("site-1: kill -9")
        self.start("site-1", again)

    def asked(self, *command: str) -> list[dict[str, object]]:
        """What an operator's command answers as JSON; nothing while there is no answer."""
        done = subprocess.run(
            ["protofed", *command, "--json"], cwd=self.folder, env=self.environment, capture_output=True, check=False
        )
        return list(json.loads(done.stdout)) if done.returncode == 0 else []

    def wait_for(self, what: str, there: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not there():
            for name, (_, process) in self.daemons.items():
                if process.poll() is not None:
                    log = (self.folder / f"{name}.log").read_text(encoding="utf-8")
                    raise WentWrongError(f"{name} ended with {process.returncode}:\n{log}")
            if time.monotonic() > until:
                raise WentWrongError(f"waited {PATIENCE_S:.0f} s for {what}")
            time.sleep(0.2)

    def end(self) -> None:
        """Ctrl-C in each terminal."""
        for _, process in self.daemons.values():
            process.send_signal(signal.SIGINT)
        for name, (_, process) in self.daemons.items():
            if process.wait(PATIENCE_S) not in (0, 130):
                raise WentWrongError(f"{name} ended with {process.returncode}")

    def kill(self) -> None:
        """Leave nothing running."""
        for _, process in self.daemons.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """What a page says to type or to write: where, and the lines."""
    for found in BLOCK.finditer(text):
        yield found["head"], found["body"]


def install(folder: Path, *, shared: bool) -> dict[str, str]:
    """Build the wheel and install it into `folder`/.venv; the environment of a terminal that uses it."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("protofed-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / ".venv")], check=True)
    python, began = folder / ".venv" / "bin" / "python", time.monotonic()
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if shared:
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
        (library,) = (folder / ".venv" / "lib").glob("python*/site-packages")
        others = sorted({path for path in (sysconfig.get_path("purelib"), *sys.path) if "site-packages" in path})
        (library / "shared.pth").write_text("".join(f"{path}\n" for path in others), encoding="utf-8")
    else:
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[{EXTRAS}]"], check=True)
        seconds = time.monotonic() - began
        size = sum(path.stat().st_size for path in (folder / ".venv").rglob("*") if path.is_file())
        packages = len(list((folder / ".venv").glob("lib/python*/site-packages/*.dist-info")))
        sys.stdout.write(f"installed {packages} packages, {size / 1e6:,.0f} MB, in {seconds:.0f} s\n")
    path = f"{folder / '.venv' / 'bin'}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", "LANG": os.environ.get("LANG", "C.UTF-8")}


def main() -> int:
    """Follow the pages; 1 if something went otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared-libraries", action="store_true", help="take other libraries from this Python")
    parser.add_argument("--page", choices=PAGES, help="follow only this one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="protofed-tutorials-") as name:
        environment = install(Path(name), shared=given.shared_libraries)
        for page in [given.page] if given.page else PAGES:
            folder = Path(name) / page
            folder.mkdir()
            walk = Walk(folder, dict(environment))
            try:
                walk.follow(page)
                walk.end()
            except WentWrongError as error:
                sys.stderr.write(f"{page}: {error}\n")
                return 1
            finally:
                walk.kill()
            walk.say(f"{page}: {walk.commands} commands, {(time.monotonic() - walk.began) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
