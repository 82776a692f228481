"""`make e2e`, too: docs/how-to/pilot.md, followed word for word on machines of their own.

Every machine is a network namespace with a home folder; of the others' files it sees only what the guide sends by mail.
Exit code 0 if every command ended with 0 and the runs went as the guide says; nothing is left behind.

`--wheel` installs the wheel in place of a clone: PyTorch and the rest come from this Python, the digits from here.
`--rehearsal` ends behind the rehearsal's report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.networks import Networks, expect, interrupted, say, wait_for
from tests.e2e.pilot_guide import COORDINATOR, REHEARSAL, ROOT, Again, Block, Mail, images_commands, of_hospital, read
from tests.e2e.tutorials import install

HUB, NAME = "10.78.0.1", "hub.example"
HOSPITALS = ("north", "south", "west")
JOINS = "east"
EVALUATOR = "evaluator"
READY = {  # how the guide's daemons are asked, by their names there
    "server": "protofed health --state state",
    "daemon": "protofed health --state state",
    EVALUATOR: "protofed health --state evaluator/state",
}
_SIGNING = re.compile(r"protofed certs sign (?P<request>\S+)")
_OFFER, _CONFIRM = "protofed consortium --offer", "protofed client consortium --confirm CODE"
_PRINTED_CODE = re.compile(r"^code +(\S+)$", re.MULTILINE)
_PRINTED_KEY = re.compile(r"^request: (\S+)\nkey: +(.+)$", re.MULTILINE)
# Only its own home is there, at the same place on every machine; $1: the folder of all, $2: the machine.
AT_HOME = """
mount --bind "$1/machines/$2" "$1/home"
mount -t tmpfs none "$1/machines"
export HOME=$1/home
cd
"""


@dataclass
class Pilot:
    """People who do what they read.

    Attributes:
        installed: `~/protofed` of each machine: a clone, or a folder with an installed wheel.
        rehearsal_only: they end behind its report.
        first: what they type in each new terminal.
        daemons: process groups by machine and name, each in a terminal of its own.
        keys: codes that `certs request` and `certs request --renew` printed, by the file of the request.
        code: of the newest list of partners.
    """

    net: Networks
    folder: Path
    parts: Sequence[Block | Mail | Again]
    installed: Path = ROOT
    rehearsal_only: bool = False
    first: str = ""
    daemons: dict[tuple[str, str], int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    code: str = ""

    def home(self, place: str) -> Path:
        return self.folder / "machines" / place

    def set_up(self) -> None:
        """Machines that know the coordinator's name, and have the repository and a way to the coordinator."""
        (self.folder / "home").mkdir()
        self.net.add(COORDINATOR, {NAME: HUB}, HUB)
        for number, place in enumerate((*HOSPITALS, JOINS), 1):
            self.net.add(place, {NAME: HUB})
            self.net.link(COORDINATOR, place, f"10.78.{number}")
            self.net.route(place, HUB, f"10.78.{number}.1")
        for place in (COORDINATOR, *HOSPITALS, JOINS):
            self.home(place).mkdir(parents=True)
            (self.home(place) / "protofed").symlink_to(self.installed)
        # The digits come with a clone: those who have the wheel alone have images of their own.
        evaluators, hospitals = (text.replace("~/protofed", str(ROOT)) for text in images_commands())
        for place in (COORDINATOR, *HOSPITALS, JOINS):
            self.type_(place, evaluators if place == COORDINATOR else hospitals)

    def type_(self, place: str, text: str) -> str:
        """Type something at a machine, in a new terminal; what that prints."""
        text = self._telephoned(text)
        done = self.net.run(place, *self._terminal(place, text), check=False)
        shown = "\n".join(f"          {line}" for line in (done.stdout + done.stderr).splitlines()[-60:])
        say(f"at {place}:\n{text.strip()}\n{shown}")
        expect(done.returncode == 0, f"at {place} this ends with 0, not {done.returncode}: {text}\n{shown}")
        self.keys |= dict(_PRINTED_KEY.findall(done.stdout))
        self.code = next(iter(_PRINTED_CODE.findall(done.stdout)), self.code)
        return done.stdout

    def _telephoned(self, text: str) -> str:
        """`certs sign` asks at a terminal about the key; here the answer is what the party's machine printed.

        So it is with the code of the list of partners, which the coordinator's machine printed.
        """
        text = text.replace(_OFFER, f"{_OFFER} --yes").replace(_CONFIRM, f"{_CONFIRM.replace('CODE', self.code)} --yes")

        def answered(found: re.Match[str]) -> str:
            return f'{found[0]} --fingerprint "{self.keys[found["request"]]}"'

        return _SIGNING.sub(answered, text)

    def follow(self) -> None:
        """Do all of it, in its order."""
        rehearsed = False
        for part in self.parts:
            if part.step >= REHEARSAL.stop and not rehearsed:
                rehearsed = True
                self.check_run("rehearsal", HOSPITALS)
                say("the rehearsal is over, and has its report")
                if self.rehearsal_only:
                    return
            if not isinstance(part, Again):
                self.do(part, HOSPITALS)
            elif part.joining:
                again = [old for old in self._of(part) if isinstance(old, Mail) or "hospital" in old.at or old.first]
                for old in again:
                    self.do(old, (part.joining,))
            else:
                for old in self._of(part):
                    self.do(old, HOSPITALS)
        expect(rehearsed, "the guide goes on behind the rehearsal")

    def _of(self, again: Again) -> Iterator[Block | Mail]:
        return (part for part in self.parts if part.step in again.steps and not isinstance(part, Again))

    def do(self, part: Block | Mail, hospitals: Sequence[str]) -> None:
        """One part, at the machine or machines that it names."""
        if isinstance(part, Block) and (part.install or part.first):
            self.first = part.body if part.first else self.first
            return
        each = "each hospital" in (part.sender + part.to if isinstance(part, Mail) else part.at)
        for hospital in hospitals if each else ("",):
            one = of_hospital(part, hospital) if hospital else part
            if isinstance(one, Mail):
                self._send(one, hospital)
            else:
                self._type(one, hospital if one.at.startswith("each hospital") else COORDINATOR)

    def _send(self, mail: Mail, hospital: str) -> None:
        sender, to = (COORDINATOR if "coordinator" in who else hospital for who in (mail.sender, mail.to))
        for name in mail.files:
            shutil.copy(self.home(sender) / "pilot" / name, self.home(to) / "pilot" / name)
        say(f"by mail from {sender} to {to}: {', '.join(mail.files)}")

    def _type(self, block: Block, place: str) -> None:
        if block.ended is not None:
            self.end(place, block.ended)
        if block.file is not None:
            (self.home(place) / "pilot" / block.file).write_text(block.body, encoding="utf-8")
            say(f"at {place}: wrote {block.file}")
        elif block.daemon is None:
            if _CONFIRM in block.body:  # a daemon without a run hears of the list within seconds
                wait_for(f"the list of partners at {place}", lambda: self._is_offered(place), 60)
            self.type_(place, self.first + block.body)
        else:
            daemon, command = block.daemon, ("setsid", *self._terminal(place, self.first + block.body))
            self.daemons[place, daemon] = self.net.start(f"{place}-{daemon}", place, *command).pid
            say(f"at {place}, in a terminal of its own:\n{block.body.strip()}")
            wait_for(f"the {daemon} at {place}", lambda: self._ready(place, daemon), 600)

    def _is_offered(self, place: str) -> bool:
        shown = self._terminal(place, f"{self.first}protofed client consortium --state state --json")
        asked = self.net.run(place, *shown, check=False)
        return asked.returncode == 0 and json.loads(asked.stdout)["offered"] is not None

    def _ready(self, place: str, daemon: str) -> bool:
        ready = self._terminal(place, self.first + READY[daemon])
        return self.net.run(place, *ready, check=False).returncode == 0

    def end(self, place: str, daemon: str) -> None:
        """Ctrl-C in the terminal of a machine's daemon."""
        os.killpg(self.daemons.pop((place, daemon)), signal.SIGINT)
        code = self.net.end(f"{place}-{daemon}", 120)
        expect(code == 0, f"the {daemon} at {place} ended in order, not with {code}")
        say(f"at {place}: Ctrl-C in the {daemon}'s terminal")

    def check(self) -> None:
        """The runs went as the guide says, and nobody had an internal error."""
        if not self.rehearsal_only:
            self.check_run("lesions", HOSPITALS)
            self.check_sums("lesions")
        expect("Traceback" not in self.net.tails(), "nobody had an internal error")

    def check_run(self, run: str, sites: Sequence[str]) -> None:
        """It was completed, all sites reported, and the evaluator scored the global model of its last round."""
        shown = json.loads(self.type_(COORDINATOR, f"{self.first}protofed runs show {run} --all --json"))
        info, scores = shown["info"], {one["name"] for one in shown["scores"]}
        expect((info["status"], info["round"]) == ("completed", info["rounds"]), f"it was completed: {info}")
        tasks = [(one["site"], one["kind"], one["task_status"]) for row in shown["rounds"] for one in row["sites"]]
        for site in sites:
            expect((site, "fit", "reported") in tasks, f"{site} reported in {run}")
        expect((EVALUATOR, "score", "reported") in tasks, f"the evaluator scored {run}")
        expect(
            shown["scored_round"] == info["round"], f"the last round of {run} has a score, not {shown['scored_round']}"
        )
        expect("global.balanced_accuracy" in scores, f"{run} has the evaluator's scores: {scores}")

    def check_sums(self, run: str) -> None:
        """Each round is one sum of the hospitals that began; the one that joined waits for two more."""
        shown = json.loads(self.type_(COORDINATOR, f"{self.first}protofed runs show {run} --all --json"))
        tasks = [task for row in shown["rounds"] for task in row["sites"]]
        masked = {task["site"] for task in tasks if (task["kind"], task["task_status"]) == ("mask", "reported")}
        expect(masked == set(HOSPITALS), f"the sums are over {HOSPITALS}: {masked}")

    def _terminal(self, place: str, text: str) -> tuple[str, ...]:
        script = f"set -e -o pipefail\n{AT_HOME}\n{text}"
        return ("bash", "-c", script, "bash", str(self.folder), place)


def main() -> int:
    """Follow the guide; 1 if it is not as it says."""
    signal.signal(signal.SIGTERM, interrupted)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="store_true", help="install the wheel in place of a clone")
    parser.add_argument("--rehearsal", action="store_true", help="end behind the rehearsal's report")
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("network namespaces need root: sudo make e2e\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="protofed-pilot-") as folder, Networks(Path(folder)) as net:
        installed = ROOT
        if given.wheel:
            installed = Path(folder) / "installed"
            installed.mkdir()
            install(installed, shared=True)
        pilot = Pilot(net, Path(folder), read(), installed=installed, rehearsal_only=given.rehearsal)
        try:
            pilot.set_up()
            pilot.follow()
            pilot.check()
            say("done")
        except (SystemExit, KeyboardInterrupt) as error:
            sys.stderr.write(f"{error}\n{net.tails()}\n")
            return 1
        finally:
            for group in pilot.daemons.values():  # nothing is left running
                os.killpg(group, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
