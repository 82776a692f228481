"""`python -m tests.e2e.engine`: deploy/compose.yaml in a container engine, from building images to taking all down.

Four sites and an evaluator train under `standard`, with secure aggregation; a client is killed and made anew, the
server is restarted, a hospital of its own joins by compose.site.yaml through the published port, and a real Prometheus
answers what dashboards ask. Three replicas of one service train, and `down -v` keeps keys and ledger.
Exit code 0 if all went well. Only the images protofed-server and protofed-client stay.
With --no-build they are taken as they are.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from tests.e2e import engine_checks as checks
from tests.e2e.engine_compose import (
    DEPLOY,
    PROMETHEUS_IMAGE,
    ROOT,
    Compose,
    authorities,
    build_prometheus,
    docker,
    missing,
    often_scraped,
)
from tests.e2e.networks import expect, interrupted, say, spoken_key, wait_for

from protofed.client.secure_aggregation.partners import OFFERED
from protofed.common.version import VERSION

PROJECT, PORT, NORTH = "protofed-e2e", 17443, "north"
REPLICAS = 3
MIN_SITES = ("--set", f"federation.min_sites={REPLICAS}")
KEPT = {"ca", "server-identity", "server-state", "operator-identity", "site-1-identity", "site-1-state"}
SITES = ("site-1", "site-2", "site-3", "site-4")
CLIENTS = (*SITES, "evaluator")
HEALTHY_S, RUN_S = 900.0, 1800.0  # on a machine with other work, too


@dataclass
class Story:
    """What people type, and when it happened."""

    compose: Compose
    north: Compose
    folder: Path
    policy: Path  # of site-1 to site-4 and the evaluator
    trained: float = 0.0  # seconds of the epoch
    is_up: bool = False

    def operator(self, *command: str) -> str:
        return self.compose.run("operator", *command)

    def shown(self, run: str = "wing") -> Any:
        """A run, as the operator sees it."""
        return json.loads(self.operator("runs", "show", run, "--json"))

    def until_round(self, number: int) -> None:
        """Of the run that goes on."""

        def come() -> bool:
            info = self.shown()["info"]
            expect(info["status"] in ("queued", "running"), f"the run goes on: {info['status']} {info['reason']}")
            return bool(info["round"] >= number)

        wait_for(f"round {number}", come, RUN_S)

    def until_healthy(self, compose: Compose, *services: str) -> None:
        """By the health checks of the images."""
        for service in services:
            wait_for(f"{service} to be healthy", lambda s=service: compose.health(s) == "healthy", HEALTHY_S)


def build(story: Story) -> None:
    """Both images as compose builds them, and one of Prometheus."""
    with authorities() as bundle:
        for service in () if "--no-build" in sys.argv else ("server", "site-1"):
            # By its tag: an engine without a registry has a base image of its own.
            own = {"BASE_IMAGE": "python:3.11-slim", "CA_BUNDLE": bundle, "BUILD_NETWORK": "host"}
            settings = {**story.compose.settings, **own}
            Compose(PROJECT, story.folder, story.compose.files, settings)("build", service, patience_s=3600)
            name = f"protofed-{'server' if service == 'server' else 'client'}:{VERSION}"
            size = int(docker("image", "inspect", "--format", "{{.Size}}", name))
            say(f"{name} is built: {size / 1e6:.0f} MB")
    build_prometheus(story.folder)
    say("an image of Debian's Prometheus is built")


def up(story: Story) -> None:
    """Everything starts in its order, and is healthy by its own check."""
    story.compose.make_volumes()
    story.north.make_volumes()
    story.is_up = True
    story.compose("up", "-d", "--no-build", *CLIENTS, "prometheus")
    say("up: certificates were made, the server was ready, the sites were let in")
    story.until_healthy(story.compose, "server", *CLIENTS, "prometheus")
    say("server, evaluator, four sites and Prometheus are healthy")
    story.trained = time.time()


def check_confinement(story: Story) -> None:
    """Rights, ways and ports."""
    containers = story.compose.containers()
    checks.confined(containers, {"server": PORT})
    for service in ("server", *CLIENTS):
        found = checks.inside(containers[service]["Id"])
        capabilities = {int(found[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")}
        expect(capabilities == {0} and found["NoNewPrivs"] == "1" and found["Uid"] == "10001", f"{service}: {found}")
    first = containers["site-1"]["Id"]
    expect(checks.reaches(first, "server", 7443), "site-1 reaches the server")
    for host, port in (("server-metrics", 9464), ("server", 9464), ("site-2", 9464), ("prometheus", 9090)):
        expect(not checks.reaches(first, host, port), f"site-1 does not reach {host}:{port}")
    say("containers: not root, read-only, without capabilities and new privileges; a site reaches gRPC only")


def confirm_partners(story: Story) -> None:
    """All sites by one code; the fifth, which is registered and not started, is left out."""
    story.operator("sites", "exclude", "site-5", "--reason", "not started")
    offering = "consortium", "--offer", "--coordinator", "the engine", "--yes", "--json"
    found: list[str] = []

    def offered() -> bool:
        with suppress(SystemExit):
            found.append(json.loads(story.operator(*offering))["offered"]["code"])
        return bool(found)

    wait_for("the keys of all sites", offered, HEALTHY_S)
    state = "/var/lib/protofed"
    for site in SITES:
        confirming = "protofed", "client", "consortium", "--confirm", found[0], "--state", state, "--yes"
        container = story.compose.containers()[site]["Id"]
        wait_for(f"the list at {site}", lambda: has_list(container), HEALTHY_S)  # noqa: B023
        docker("exec", container, *confirming)
    say("four sites confirmed one code")


def has_list(container: str) -> bool:
    """Whether a site's daemon was offered the list of partners."""
    listed = docker("exec", container, "ls", "/var/lib/protofed", check=False)
    return OFFERED in listed


def train(story: Story) -> None:
    """A run that outlives a killed client and a restarted server."""
    story.operator("runs", "start", "/recipes/engine.toml")
    confirm_partners(story)
    story.until_round(2)
    say("round 2 is over; site-2 is killed")
    docker("kill", story.compose.containers()["site-2"]["Id"])
    story.compose("rm", "--force", "site-2")  # its volumes stay, and in them its part of a sum that is open
    story.compose("up", "-d", "--no-build", "site-2")
    story.until_healthy(story.compose, "site-2")
    say("site-2's container is made anew, and healthy")
    story.until_round(story.shown()["info"]["round"] + 2)
    story.compose("restart", "server")
    say(f"the server is restarted in round {story.shown()['info']['round']}")
    join(story)
    wait_for("the run's end", lambda: story.shown()["info"]["ended_at"], RUN_S)
    info = story.shown()["info"]
    expect((info["status"], info["round"]) == ("completed", info["rounds"]), f"all rounds were completed: {info}")
    sys.stdout.write(story.operator("runs", "show", "wing"))
    for row in story.shown()["rounds"]:
        if row["round"] and row["outcome"] in ("published", "degraded"):
            aggregated = {
                one["site"] for one in row["sites"] if one["kind"] == "mask" and one["task_status"] == "reported"
            }
            expect(aggregated == set(SITES), f"round {row['round']} is the sum of the whole group: {aggregated}")
    say(f"the run is completed, each round a sum of all four sites: it waited for site-2, and {NORTH} is in no list")


def join(story: Story) -> None:
    """A hospital with compose.site.yaml: asks, is approved, installs, starts; through the port that is published."""
    request = ("request", "--identity", ".", "--site", NORTH, "--out", "site.request")
    key = spoken_key(story.north.run("identity", *request))
    asked = story.north.run("identity", "site.request", entrypoint="cat")
    whom = ("--site", NORTH, "--fingerprint", key)
    sign = ("sign", "/dev/stdin", "--ca", ".", *whom, "--out", "north.bundle", "--server", "server:7443")
    story.compose.run("ca", "certs", *sign, stdin=asked)
    bundle = story.compose.run("ca", "north.bundle", entrypoint="cat")
    story.north.run("identity", "install", "/dev/stdin", "--identity", ".", stdin=bundle)
    story.north("up", "-d", "--no-build", "client")
    story.until_healthy(story.north, "client")
    checks.confined(story.north.containers(), {})
    expect(NORTH in story.operator("sites", "list"), "the operator sees north")
    say("a fifth site joined by compose.site.yaml, through the published port")


def watch(story: Story) -> None:
    """A second run, of which every update is refused; then all that dashboards ask.

    The server sees no update in a sum to refuse it, so the sites let single ones leave for this run.
    """
    story.policy.write_text((DEPLOY / "policies" / "open.toml").read_text("utf-8"), "utf-8")  # in place: it is mounted
    story.operator("sites", "exclude", NORTH)  # its policy is its own, and lets no single update leave
    story.operator("runs", "start", "/recipes/engine-narrow.toml")
    wait_for("the second run's end", lambda: story.shown("narrow")["info"]["ended_at"], RUN_S)
    expect(story.shown("narrow")["info"]["status"] == "failed", "a run that lets in no update fails")
    time.sleep(10)
    say("Prometheus: " + checks.watched(story.compose, story.trained, {"site-5:9464"}))


def load(story: Story) -> None:
    """One service, three replicas: each is a site of its own, and stays it after a restart and in a new container."""
    for site in SITES:
        story.operator("sites", "exclude", site)
    settings = {**story.compose.settings, "COMPOSE_PROFILES": "load", "CLIENTS": str(REPLICAS)}
    scaled = Compose(PROJECT, story.folder, story.compose.files, settings)
    up = ("up", "-d", "--no-build", "--scale", f"client={REPLICAS}", "client")

    def healthy() -> bool:
        found = scaled.replicas().values()
        how = docker("inspect", "--format", "{{.State.Health.Status}}", *found).split() if found else []
        return how == ["healthy"] * REPLICAS

    scaled(*up)
    wait_for("all replicas to be healthy", healthy, HEALTHY_S)
    before = checks.identities(scaled)
    expect(before == {f"client-{number}" for number in range(1, REPLICAS + 1)}, f"each is a site of its own: {before}")
    first, second, *_ = scaled.replicas().values()
    docker("restart", first)
    docker("rm", "--force", second)
    scaled(*up)
    wait_for("all replicas to be healthy again", healthy, HEALTHY_S)
    expect(checks.identities(scaled) == before, "a restarted and a new container are the same sites")
    story.operator("runs", "start", "digits-fednh", "--name", "load", "--set", "rounds=2", *MIN_SITES)
    wait_for("the run's end", lambda: story.shown("load")["info"]["ended_at"], RUN_S)
    rounds = [row for row in story.shown("load")["rounds"] if row["round"]]
    took_part = [{one["site"] for one in row["sites"] if one["kind"] == "fit"} for row in rounds]
    expect(took_part == [before, before], f"all replicas train in each round: {took_part}")
    say(f"{REPLICAS} replicas of one service trained; a new container of one is the same site")


def again(story: Story) -> None:
    """The jobs once more change nothing; no secret is told."""
    before = checks.fingerprints(story.compose)
    said = story.compose.run("certificates", *SITES, "site-5", "evaluator")
    expect(said.count(": kept;") == 8 and said.count("\n") == 8, f"all is kept: {said}")
    story.compose.run("admission")
    expect(checks.fingerprints(story.compose) == before, "certificates and keys are the same files")
    containers = story.compose.containers() | {NORTH: story.north.containers()["client"]}
    checks.secretive(containers, (story.compose.settings["GRAFANA_PASSWORD"],))
    for name in ("server", *CLIENTS):
        log = docker("logs", containers[name]["Id"])
        expect("Traceback" not in log, f"{name} had no internal error")
    say("the certificates' job again: nothing changed; no secret in `docker inspect` and logs")
    story.compose("stop")
    codes = {name: story.compose.containers()[name]["State"]["ExitCode"] for name in ("server", *CLIENTS)}
    expect(not any(codes.values()), f"all ended in order: {codes}")
    say("server and clients end in order when they are told to")


def down(story: Story) -> None:
    """`down -v` keeps keys and ledger; then nothing is left: containers, networks, volumes, Prometheus's image."""
    story.compose.tried("--profile", "tools", "down", "--volumes", "--remove-orphans", "--timeout", "10")
    kept = story.compose.volumes()
    lost = (KEPT - kept) if story.is_up else set()
    say(f"`down -v` kept {len(kept)} volumes; {', '.join(sorted(lost)) or 'none'} of those with keys were removed")
    for compose in (story.north, story.compose):
        left = compose.remove()
        expect(not left, f"nothing is left of {compose.project}: {left}")
    docker("rmi", PROMETHEUS_IMAGE, check=False)
    expect(not lost, f"`down -v` keeps keys and ledger: {lost}")


def stage(folder: Path) -> Story:
    """Settings as people would write them."""
    folder.chmod(0o755)  # containers are not root, and mount what lies here
    subnet = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}").strip()
    gateway = str(next(ip_network(subnet).hosts()))  # this machine, as containers see it
    policy = folder / "policy.toml"
    shutil.copyfile(DEPLOY / "policies" / "standard.toml", policy)
    policy.chmod(0o644)
    settings = {
        "COMPOSE_PROJECT_NAME": PROJECT,
        "COMPOSE_PROFILES": "cpu",
        "SITES_POLICY": str(policy),
        "GRAFANA_PASSWORD": secrets.token_urlsafe(18),
        "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
        "GRPC_ADDRESS": "0.0.0.0",  # noqa: S104  (the hospital comes from another network)
        "GRPC_PORT": str(PORT),
        "SERVER_HOSTS": f"localhost {gateway}",
        "RECIPES": str(ROOT / "tests" / "e2e"),
    }
    own = (DEPLOY / "sites" / "digits.toml").read_text(encoding="utf-8")
    (folder / "north.toml").write_text(f"partition_index = 4\n{own}", encoding="utf-8")
    (folder / "images").mkdir()
    hospital = {
        "COMPOSE_PROJECT_NAME": f"{PROJECT}-{NORTH}",
        "COMPOSE_PROFILES": "cpu",
        "SITE": NORTH,
        "SERVER": f"{gateway}:{PORT}",
        "SITE_SETTINGS": str(folder / "north.toml"),
        "SITE_POLICY": str(DEPLOY / "policies" / "standard.toml"),
        "SITE_DATA": str(folder / "images"),
    }
    compose = Compose(PROJECT, folder, (DEPLOY / "compose.yaml", often_scraped(folder)), settings)
    north = Compose(f"{PROJECT}-{NORTH}", folder, (DEPLOY / "compose.site.yaml",), hospital)
    return Story(compose, north, folder, policy)


def main() -> int:
    """Tell the story; 1 if it went otherwise."""
    signal.signal(signal.SIGTERM, interrupted)
    if why := missing():
        sys.stderr.write(f"{why}\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="protofed-engine-") as name, ExitStack() as held:
        story = stage(Path(name))
        held.callback(down, story)
        try:
            for chapter in (build, up, check_confinement, train, watch, load, again):
                chapter(story)
        except (SystemExit, KeyboardInterrupt) as error:
            sys.stderr.write(f"{error}\n")
            with suppress(SystemExit):
                sys.stderr.write(story.compose.tried("logs", "--no-color", "--tail", "15").stdout[-20000:])
            return 1
    say("done: nothing of it is left but the two images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
