"""A real Prometheus with the configuration and rules that come along, on ports of its own."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode, urlsplit

import yaml
from tests.support.dashboards import PROMETHEUS

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Series:
    """One line of an answer; values that are no numbers (0/0) are left out."""

    labels: dict[str, str]
    points: list[tuple[float, float]]  # seconds of the epoch, value


class Prometheus:
    """The process, as a context.

    Args:
        server: host:port of the server's /metrics.
        sites: likewise of each site's daemon, which may come later with `scrape`.
        port: a free one.
    """

    def __init__(self, folder: Path, server: str, sites: Mapping[str, str], port: int) -> None:
        self._folder, self._port = folder, port
        (folder / "sites").mkdir(parents=True)
        self._configure(server)
        self.scrape(sites)

    def _configure(self, server: str) -> None:
        """As deploy/prometheus/prometheus.yml, but scraped every second, and with these targets."""
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yml")]
        own, clients = config["scrape_configs"]
        own["static_configs"] = [{"targets": [server]}]
        clients["file_sd_configs"] = [{"files": [str(self._folder / "sites" / "*.yml")], "refresh_interval": "1s"}]
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def scrape(self, sites: Mapping[str, str]) -> None:
        """Look at these daemons from now on."""
        targets = [{"targets": [address], "labels": {"site": site}} for site, address in sites.items()]
        (self._folder / "sites" / "all.yml").write_text(yaml.safe_dump(targets), encoding="utf-8")

    def __enter__(self) -> Self:
        command = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE_S
        while not self._ready():
            said = (self._folder / "prometheus.log").read_text("utf-8")
            assert self._process.poll() is None, said
            assert time.monotonic() < until, said
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        """What an expression gave over a time, in seconds of the epoch."""
        asked = {"query": expression, "start": start, "end": end, "step": step}
        found = self._get("/api/v1/query_range", asked)["result"]
        return [Series(one["metric"], _numbers(one["values"])) for one in found]

    def now(self, expression: str, at: float | None = None) -> list[Series]:
        """What it gives at a time, or now."""
        found = self._get("/api/v1/query", {"query": expression} | ({} if at is None else {"time": at}))
        if found["resultType"] == "scalar":
            return [Series({}, _numbers([found["result"]]))]
        return [Series(one["metric"], _numbers([one["value"]])) for one in found["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health and the alerts that are there now."""
        return [rule for group in self._get("/api/v1/rules", {})["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, and how that goes."""
        active: list[dict[str, Any]] = self._get("/api/v1/targets", {})["activeTargets"]
        return active

    def _get(self, path: str, asked: Mapping[str, object]) -> dict[str, Any]:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            body, method = (urlencode(asked), "POST") if asked else (None, "GET")
            connection.request(method, path, body, headers if asked else {})
            answer = json.loads(connection.getresponse().read())
        assert answer["status"] == "success", f"{asked}: {answer}"
        data: dict[str, Any] = answer["data"]
        return data

    def _ready(self) -> bool:
        try:
            with closing(HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
                connection.request("GET", "/-/ready")
                return connection.getresponse().status == 200
        except OSError:
            return False


def target(url: str) -> str:
    """host:port of a URL."""
    return urlsplit(url).netloc


def _numbers(values: list[list[Any]]) -> list[tuple[float, float]]:
    points = [(float(at), float(value)) for at, value in values]
    return [(at, value) for at, value in points if math.isfinite(value)]
