"""`make e2e`: three hospitals in networks of their own train together, from the first key to the last audit log.

Two hospitals reach the server directly, the third only through its web proxy, and the run waits for it: under the
policy `standard` what tells of a hospital's classes leaves in secure aggregation of three or more.
An evaluator beside the server scores the global model on a test set of its own.
Everything is done by the commands that people type. Exit code 0 if all of it went well; nothing is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.networks import Networks, expect, interrupted, say, spoken_key, wait_for

from protofed.client.secure_aggregation.partners import OFFERED

HERE = Path(__file__).parent
RUN, MASKED = "hospitals", ("mask", "reported")
SERVER, PORT, NAME = "10.77.0.1", 7443, "fl.example.org"
SITES = {"north": "10.77.1.2", "south": "10.77.2.2", "west": "10.77.9.2"}
EVALUATOR = "evaluator"
PROXY, PASSWORD = "10.77.9.1", "west:sesame"
TRIED = (22, 80, 443, PORT)  # ports at which somebody might knock on a hospital's door
CLI = (sys.executable, "-m", "protofed.deploy.cli")


@dataclass
class Story:
    """What people do; each party has folders of its own in `folder`."""

    net: Networks
    folder: Path

    def protofed(self, place: str, *command: str | Path) -> str:
        """What a command prints that somebody types there."""
        return self.net.run(place, *CLI, *map(str, command)).stdout

    def operator(self, *command: str | Path) -> str:
        """A command of the operator, who sits where the server is."""
        return self.protofed("center", *command, "--server", f"{NAME}:{PORT}", "--identity", self.folder / "operator")

    @property
    def ca(self) -> tuple[str | Path, ...]:
        """The CA, as options of the commands that sign."""
        return ("--ca", self.folder / "ca", "--passphrase-file", self.folder / "passphrase")

    def certify(self, site: str, identity: Path) -> Path:
        """Asked for there, signed on the operator's machine, installed there; the bundle that went back."""
        request, bundle = self.folder / f"{site}.request.pem", self.folder / f"{site}.bundle.pem"
        asked: tuple[str | Path, ...] = ("--identity", identity, "--site", site, "--out", request)
        key = spoken_key(self.protofed(site, "certs", "request", *asked))
        self.protofed(
            "center", "certs", "sign", request, *self.ca, "--site", site, "--fingerprint", key, "--out", bundle
        )
        read_out = json.loads(self.protofed("center", "certs", "list", "--ca", self.folder / "ca", "--json"))[0]
        self.protofed(site, "certs", "install", bundle, "--identity", identity, "--ca-code", read_out["key_code"])
        return bundle

    def join(self, site: str, settings: Path = HERE / "hospital.toml") -> None:
        """A new site, from its key to its daemon."""
        identity = self.folder / f"{site}-identity"
        bundle = self.certify(site, identity)
        self.operator("certs", "register", bundle)
        say(f"{site}: key made there, certificate signed, installed and registered")
        self.start_daemon(site, site, identity, settings, f"--partition-index={list(SITES).index(site)}")

    def evaluate(self) -> None:
        """An evaluator on the CA's own machine, from its key to its daemon."""
        identity = self.folder / f"{EVALUATOR}-identity"
        own = ("--site", EVALUATOR, "--identity", identity, "--role", EVALUATOR)
        online = ("--server", f"{NAME}:{PORT}", "--operator-identity", self.folder / "operator")
        self.protofed("center", "certs", "issue", *self.ca, *own, *online)
        self.start_daemon("center", EVALUATOR, identity, HERE / "hospital.toml", f"--role={EVALUATOR}")

    def start_daemon(self, place: str, name: str, identity: Path, settings: Path, option: str) -> None:
        """A daemon that ends with the run."""
        known = (f"--settings={settings}", "--policy=standard", f"--server={NAME}:{PORT}", f"--identity={identity}")
        command = (*known, f"--site={name}", f"--state={self.folder / name}", option, "--until-finished")
        self.net.start(name, place, *CLI, "client", "start", *command)
        say(f"{name}: daemon started")

    def shown(self) -> Any:
        """The run, as the operator sees it."""
        return json.loads(self.operator("runs", "show", RUN, "--json"))


def lay_cables(story: Story) -> None:
    """Nobody forwards for anybody: a hospital reaches the server, or its proxy, and nothing else."""
    net = story.net
    net.add("center", {NAME: SERVER}, SERVER)
    for number, place in enumerate(("north", "south", "proxy"), 1):
        net.add(place, {NAME: SERVER})
        net.link("center", place, f"10.77.{number}")
        net.route(place, SERVER, f"10.77.{number}.1")
    net.add("west", {})  # does not even know the server's address
    net.link("proxy", "west", "10.77.9")


def start_server(story: Story) -> None:
    """A CA, an operator and a server with their certificates; the server."""
    passphrase, identity = story.folder / "passphrase", story.folder / "server-identity"
    passphrase.write_text("correct horse battery staple\n", encoding="ascii")
    passphrase.chmod(0o600)
    server = ("--server-name", "coordinator", "--host", NAME, "--identity", identity)
    operator = ("--operator", "olga", "--operator-identity", story.folder / "operator")
    story.protofed("center", "certs", "init", *story.ca, *server, *operator)
    say("a CA, an operator and a server have their keys and certificates")
    state = story.folder / "server"
    known = (f"--listen={SERVER}:{PORT}", f"--identity={identity}", f"--state={state}")
    story.net.start("server", "center", *CLI, "server", "start", *known)
    wait_for("the server", (state / "address").exists)
    proxy = (sys.executable, "-m", "tests.support.connect_proxy", f"{PROXY}:3128", PASSWORD)
    story.net.start("proxy", "proxy", *proxy)
    wait_for("west's proxy", lambda: story.net.reaches("west", PROXY, 3128))
    story.operator("runs", "start", HERE / "hospitals.toml", "--force")  # before any hospital is registered
    say(f"the server listens on {SERVER}:{PORT}, and a run is queued")


def check_ways(story: Story) -> None:
    """What can be reached, and what cannot."""
    reaches = story.net.reaches
    for place in ("north", "south", "proxy"):
        expect(reaches(place, SERVER, PORT), f"{place} reaches the server")
    expect(not reaches("west", SERVER, PORT), "west has no way to the server")
    for place, address in SITES.items():
        for near in ("center", "proxy"):
            expect(not any(reaches(near, address, port) for port in TRIED), f"nothing gets into {place}")
    expect(not reaches("north", SITES["south"], PORT), "no hospital reaches another one")
    say("hospitals reach the server or their proxy, and nobody reaches a hospital")


def train(story: Story) -> None:
    """Two hospitals wait for the third, for a sum of two would be no secret; the run comes to its end."""
    story.evaluate()
    story.join("north")
    story.join("south")
    expect(story.shown()["info"]["round"] == 0, "no round of two hospitals is summed")
    settings = story.folder / "west.toml"
    settings.write_text(f'proxy = "http://{PASSWORD}@{PROXY}:3128"\n' + (HERE / "hospital.toml").read_text(), "utf-8")
    settings.chmod(0o600)
    story.join("west", settings)
    confirm_partners(story)
    for name in (*SITES, EVALUATOR):
        code = story.net.end(name, 180)
        expect(code == 0, f"the daemon of {name} ended with {code}")
    say("the run is over, and all daemons have ended")


def confirm_partners(story: Story) -> None:
    """One code for all three: before that nobody is summed."""

    def known() -> bool:
        return not json.loads(story.operator("consortium", "--json"))["problem"].startswith("no key")

    wait_for("the keys of all three", known)
    told = story.operator("consortium", "--offer", "--coordinator", "Olga's office", "--yes", "--json")
    code = json.loads(told)["offered"]["code"]
    for site in SITES:
        state = story.folder / site
        wait_for(f"the list at {site}", (state / OFFERED).exists)
        story.protofed(site, "client", "consortium", "--confirm", code, "--state", state, "--yes")
    say("the three hospitals confirmed one code")


def check_run(story: Story) -> None:
    """What the operator sees: whole rounds, and all three took part."""
    sys.stdout.write(story.operator("runs", "show", RUN) + story.operator("sites", "list"))
    shown = story.shown()
    info = shown["info"]
    expect((info["status"], info["round"]) == ("completed", info["rounds"]), f"all rounds were completed: {info}")
    fits = [task for one in shown["rounds"] for task in one["sites"] if task["kind"] == "fit"]
    for site in SITES:
        tasks = [task["task_status"] for task in fits if task["site"] == site]
        expect(set(tasks) == {"reported"}, f"{site} reported in all rounds: {tasks}")
        say(f"{site} reported in {len(tasks)} of {info['rounds']} rounds")
    masked = [t["site"] for one in shown["rounds"] for t in one["sites"] if (t["kind"], t["task_status"]) == MASKED]
    expect(
        masked.count("west") == info["rounds"] and len(masked) == len(SITES) * info["rounds"],
        f"each round is a sum of all three: {masked}",
    )
    scores = {one["name"]: one["mean"] for one in shown["scores"]}
    expect(shown["scored_round"] == info["round"], f"the last model has a score, not that of {shown['scored_round']}")
    expect(0 < scores["global.balanced_accuracy"] <= 1, f"the evaluator scored the global model: {scores}")
    say(f"the global model's balanced accuracy: {scores['global.balanced_accuracy']:.3f}")
    known = {one["name"]: one["roles"] for one in json.loads(story.operator("certs", "list", "--json"))}
    expected = {**{site: ["trainer"] for site in SITES}, EVALUATOR: ["evaluator"], "olga": ["operator"]}
    expect(known == expected, f"the server knows its parties: {known}")


def check_logs(story: Story) -> None:
    """Every log is as it was written, and west's connections all went through its proxy."""
    expect(story.net.stop("server") == 0, "the server ended in order")
    states = [story.folder / name for name in ("server", *SITES, EVALUATOR)]
    sys.stdout.write(story.protofed("center", "audit", "verify", *states))
    sys.stdout.write(story.protofed("west", "audit", "show", story.folder / "west"))
    let_through = (story.folder / "proxy.log").read_text(encoding="ascii").splitlines()
    expect(set(let_through) == {f"200 {NAME}:{PORT}"}, f"the proxy let through: {let_through}")
    expect("Traceback" not in story.net.tails(), "nobody had an internal error")
    say("five audit logs verify; west talked through its proxy only")


def main() -> int:
    """Tell the story; 1 if it went otherwise."""
    signal.signal(signal.SIGTERM, interrupted)
    if os.geteuid() != 0:
        sys.stderr.write("network namespaces need root: sudo make e2e\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="protofed-e2e-") as folder, Networks(Path(folder)) as net:
        story = Story(net, Path(folder))
        try:
            lay_cables(story)
            start_server(story)
            check_ways(story)
            train(story)
            check_run(story)
            check_logs(story)
            say("done")
        except (SystemExit, KeyboardInterrupt) as error:
            sys.stderr.write(f"{error}\n{net.tails()}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
