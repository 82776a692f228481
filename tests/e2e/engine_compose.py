"""deploy/compose.yaml in an engine, as a project of its own of which nothing is left; needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CA_COPY = DEPLOY / "docker" / "ca.pem"  # within the context of the build
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
PROMETHEUS_IMAGE = "protofed-e2e-prometheus"
PROMETHEUS_DOCKERFILE = """
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus wget \\
 && install --directory --owner=65534 --group=65534 /prometheus
ENTRYPOINT ["prometheus"]
"""
SCRAPED_EVERY = "2s"


@dataclass(frozen=True)
class Compose:
    """One project; every command is one that people type.

    Attributes:
        folder: for its settings.
        files: compose files.
        settings: as in .env.
    """

    project: str
    folder: Path
    files: tuple[Path, ...]
    settings: Mapping[str, str]

    def __call__(self, *command: str, stdin: str | None = None, patience_s: float = 600) -> str:
        """What `docker-compose COMMAND` prints; the end of it all, if it fails."""
        done = self.tried(*command, stdin=stdin, patience_s=patience_s)
        if done.returncode:
            raise SystemExit(f"compose {' '.join(command)}\nended with {done.returncode}:\n{_end(done)}")
        return done.stdout

    def tried(
        self, *command: str, stdin: str | None = None, patience_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """The same, whatever comes of it."""
        env_file = self.folder / f"{self.project}.env"
        env_file.write_text("".join(f"{key}={value}\n" for key, value in self.settings.items()), encoding="utf-8")
        files = [part for path in self.files for part in ("--file", str(path))]
        full = [*_tool(), "--project-name", self.project, "--env-file", str(env_file), *files, *command]
        environment = {key: value for key, value in os.environ.items() if key not in self.settings}
        return subprocess.run(
            full,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "NO_COLOR": "1", "COLUMNS": "140"},
            timeout=patience_s,
        )

    def run(self, service: str, *command: str, stdin: str | None = None, entrypoint: str = "") -> str:
        """A command in a new container of a service."""
        entry = ("--entrypoint", entrypoint) if entrypoint else ()
        return self("run", "--rm", "-T", *entry, service, *command, stdin=stdin)

    def containers(self) -> dict[str, Any]:
        """All that the engine knows of the project's containers, by their services."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.project}").split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def make_volumes(self) -> None:
        """As people do once, before the first `up`."""
        script = ["sh", str(DEPLOY / "docker" / "compose" / "volumes.sh"), self.files[0].name]
        named = {**os.environ, "COMPOSE_PROJECT_NAME": self.project}
        subprocess.run(script, check=True, cwd=DEPLOY, env=named, timeout=120)

    def volumes(self) -> set[str]:
        """Those of this project that are there, without its name."""
        names = docker("volume", "ls", "--quiet", "--filter", f"name=^{self.project}_").split()
        return {name.removeprefix(f"{self.project}_") for name in names}

    def replicas(self) -> dict[str, str]:
        """Ids of the containers of the service `client`, by their names."""
        label = f"label=com.docker.compose.project={self.project}"
        asked = ("ps", "--filter", label, "--filter", "label=com.docker.compose.service=client")
        lines = docker(*asked, "--format", "{{.Names}} {{.ID}}").splitlines()
        return dict(line.split() for line in lines)

    def health(self, service: str) -> str:
        """healthy, unhealthy, starting; or nothing, if there is no such container."""
        found = self.containers().get(service)
        return str(found["State"].get("Health", {}).get("Status", "")) if found else ""

    def remove(self) -> str:
        """Take all of it down, then the volumes that `down -v` keeps; ids of what is left, if anything is."""
        self.tried("--profile", "tools", "down", "--volumes", "--remove-orphans", "--timeout", "10")
        if kept := sorted(self.volumes()):
            docker("volume", "rm", *(f"{self.project}_{name}" for name in kept))
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return "".join(docker(*kind, "--quiet", "--filter", label) for kind in kinds)


def docker(*command: str, check: bool = True) -> str:
    """What `docker COMMAND` prints."""
    done = subprocess.run(["docker", *command], capture_output=True, text=True, check=False, timeout=900)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(command)[:200]}\nended with {done.returncode}:\n{_end(done)}")
    return done.stdout + done.stderr if command[0] == "logs" else done.stdout


def missing() -> str:
    """Why no engine can be used here; or nothing."""
    if os.geteuid() != 0:
        return "the containers' story needs root"
    found = shutil.which("docker")
    if found is None or subprocess.run([found, "info"], capture_output=True, check=False).returncode:
        return "the containers' story needs a Docker engine that runs"
    return "" if _tool() else "the containers' story needs docker compose, or docker-compose 1.29"


@contextmanager
def authorities() -> Iterator[str]:
    """This machine's own CAs as a file in the context of a build, for as long as it lasts; empty, if it has none."""
    source = next((os.environ[name] for name in CA_VARIABLES if os.environ.get(name)), "")
    if not source or CA_COPY.exists():
        yield str(CA_COPY.relative_to(ROOT)) if CA_COPY.exists() else ""
        return
    shutil.copy(source, CA_COPY)
    try:
        yield str(CA_COPY.relative_to(ROOT))
    finally:
        CA_COPY.unlink()


def build_prometheus(folder: Path) -> None:
    """An image of Debian's Prometheus, where none can be fetched."""
    (folder / "prometheus").mkdir()
    (folder / "prometheus" / "Dockerfile").write_text(PROMETHEUS_DOCKERFILE, encoding="ascii")
    docker("build", "--quiet", "--network", "host", "--tag", PROMETHEUS_IMAGE, str(folder / "prometheus"))


def often_scraped(folder: Path) -> Path:
    """A compose file that lets Prometheus ask more often: what is shown after hours is there after minutes."""
    config = yaml.safe_load((DEPLOY / "docker" / "compose" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": SCRAPED_EVERY, "evaluation_interval": SCRAPED_EVERY}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "prometheus.yml").chmod(0o644)
    mounted = f"{folder / 'prometheus.yml'}:/etc/prometheus/prometheus.yml:ro"
    (folder / "often.yaml").write_text(yaml.safe_dump({"services": {"prometheus": {"volumes": [mounted]}}}), "utf-8")
    return folder / "often.yaml"


def _tool() -> list[str]:
    """Compose 2 as a plugin, or 1.29."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return [] if plugin.returncode else ["docker", "compose"]


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
