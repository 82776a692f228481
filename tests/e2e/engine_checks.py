"""What has to hold of the containers while they run: rights, ways, secrets, and what Prometheus answers."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.e2e.engine_compose import Compose, docker
from tests.e2e.networks import expect, wait_for
from tests.support.dashboards import NAMES, NO_DATA_HERE, queries, rules

RATE_S = 15
# Queries of the sites' own scores, of which `standard` lets some leave within sums.
OWN_SCORES = {
    (name, query.panel, query.ref)
    for name in NAMES
    for query in queries(name)
    if 'scope="personal"' in query.expression
}
# Of single updates, which the server does not see in a sum; it measures the norm of none that it refuses.
NORMS = {("learning", "Norm of updates", ref) for ref in "ABC"}
# Of privacy that is spent: neither run has noise.
NOISE = {
    (name, query.panel, query.ref) for name in NAMES for query in queries(name) if "privacy_epsilon" in query.expression
}
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()"
SECRET = re.compile("PASSWORD|SECRET|TOKEN|PRIVATE", re.IGNORECASE)


def confined(containers: Mapping[str, Any], published: Mapping[str, int]) -> None:
    """No container has more rights than it needs, and nothing is published but this."""
    for name, one in containers.items():
        host, config = one["HostConfig"], one["Config"]
        user = config["User"].split(":")[0]
        expect(user.isdigit() and int(user) > 0, f"{name} is not root: {config['User']!r}")
        expect(host["ReadonlyRootfs"], f"the root of {name} is read-only")
        expect(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{name} has no capabilities")
        expect("no-new-privileges:true" in (host["SecurityOpt"] or []), f"{name} can gain no privileges")
        expect(not host["Privileged"] and host["PidMode"] == "" and host["NetworkMode"] != "host", f"{name} is apart")
        expect(bool(host["Memory"] and host["NanoCpus"] and host["PidsLimit"]), f"{name} has limits")
        expect(host["LogConfig"]["Config"].get("max-size") == "10m", f"the log of {name} has an end")
    found = {name: ports for name, one in containers.items() if (ports := list(_published(one)))}
    expect(found == {name: [port] for name, port in published.items()}, f"published is {found}, expected {published}")


def inside(container: str) -> dict[str, str]:
    """What the kernel says of a container's first process: capabilities, new privileges, user."""
    told = docker("exec", container, "cat", "/proc/1/status")
    fields = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    wanted = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Uid")
    return {name: fields[name].split()[0] for name in wanted}


def secretive(containers: Mapping[str, Any], secrets: tuple[str, ...]) -> None:
    """Neither `docker inspect` nor a log has a secret."""
    for name, one in containers.items():
        told = json.dumps(one) + docker("logs", one["Id"])
        for secret in (*secrets, "PRIVATE KEY"):
            expect(secret not in told, f"{name} tells no secret")
        named = [entry.partition("=")[0] for entry in one["Config"]["Env"] if SECRET.search(entry.partition("=")[0])]
        expect(not named, f"the environment of {name} has no secret: {named}")


def reaches(container: str, host: str, port: int) -> bool:
    """Whether a connection can be made from a container."""
    done = docker("exec", container, "python", "-c", f"{REACH}\nprint('reached')", host, str(port), check=False)
    return "reached" in done


def identities(compose: Compose) -> set[str]:
    """The sites that the replicas of the service `client` are, by the arguments of their daemons."""
    look = "import pathlib; print(*(p.read_bytes().decode(errors='replace').replace(chr(0), ' ') for p in "
    look += "pathlib.Path('/proc').glob('[0-9]*/cmdline')))"
    told = [docker("exec", one, "python", "-c", look) for one in compose.replicas().values()]
    return {found for text in told for found in re.findall(r"--site (client-\d+)", text)}


def fingerprints(compose: Compose) -> str:
    """Digest of every file of the CA and of all identities, and when it was written."""
    look = "find /identities -type f -exec sha256sum {} + -exec stat -c '%n %Y %a %u' {} + | sort"
    return compose.run("certificates", "-c", look, entrypoint="sh")


class Prometheus:
    """The one in the container, asked from this machine: the engine's networks begin here."""

    def __init__(self, compose: Compose) -> None:
        networks = compose.containers()["prometheus"]["NetworkSettings"]["Networks"]
        self._address = networks[f"{compose.project}_monitoring"]["IPAddress"]

    def get(self, path: str, **asked: object) -> Any:
        """The data of an answer."""
        with urlopen(f"http://{self._address}:9090{path}?{urlencode(asked)}", timeout=60) as answer:
            found = json.load(answer)
        expect(found["status"] == "success", f"{path} {asked}: {found}")
        return found["data"]

    def series(self, expression: str, start: float, end: float) -> int:
        """How many lines an expression has, numbers only."""
        found = self.get("/api/v1/query_range", query=expression, start=start, end=end, step=2)["result"]
        return sum(any(math.isfinite(float(value)) for _, value in one["values"]) for one in found)

    def up(self) -> dict[str, str]:
        """Health of each target."""
        found = self.get("/api/v1/targets", state="active")["activeTargets"]
        return {one["labels"]["instance"]: one["health"] for one in found}


def dashboards(prometheus: Prometheus, start: float) -> tuple[int, set[tuple[str, str, str]]]:
    """Asks every query of every dashboard: how many there are, and those without an answer."""
    end, empty, asked = time.time(), set[tuple[str, str, str]](), 0
    for name in NAMES:
        for query in queries(name):
            asked += 1
            if not prometheus.series(query.filled(int(end - start) + 1, RATE_S), start, end):
                empty.add((name, query.panel, query.ref))
    return asked, empty


def watched(compose: Compose, start: float, down: set[str]) -> str:
    """Targets, rules and dashboards are as they should be; in a sentence."""
    prometheus = Prometheus(compose)
    wait_for("targets to be up", lambda: {name for name, how in prometheus.up().items() if how != "up"} == down, 60)
    loaded = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    expect(len(loaded) == len(rules("alerts")) + len(rules("recording")), "all rules are loaded")
    ill = {rule["name"]: rule.get("lastError") for rule in loaded if rule["health"] != "ok"}
    expect(not ill, f"every rule is well: {ill}")
    asked, empty = dashboards(prometheus, start)
    for dashboard, panel, ref in sorted(empty):
        sys.stdout.write(f"          no data: {dashboard}, {panel}, {ref}\n")
    expect(
        empty <= NO_DATA_HERE | OWN_SCORES | NORMS | NOISE,
        f"queries have data but where nothing is here: {sorted(empty)}",
    )
    fired = sorted({one["metric"]["alertname"] for one in prometheus.get("/api/v1/query", query="ALERTS")["result"]})
    told = f"{asked} queries of {len(NAMES)} dashboards, {len(empty)} without data here; {len(loaded)} rules"
    return f"{told}; alerts now: {', '.join(fired) or 'none'}"


def _published(container: Any) -> Iterator[int]:
    for bound in (container["NetworkSettings"]["Ports"] or {}).values():
        yield from sorted({int(one["HostPort"]) for one in bound or ()})
