"""/metrics of a real server: the contract to the letter, and the ledger's own numbers."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from prometheus_client import ProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from tests.support.pki import Authority
from tests.support.raw_client import RawClient

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import Monitoring
from protofed.common.monitoring import Monitor
from protofed.common.payload import Part
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import CHUNK_BYTES, Finished, Telemetry, Verdict
from protofed.deploy.simulation.simulation import build_agents
from protofed.protos.v1 import federation_pb2 as pb
from protofed.server.metrics import METRICS, NOTIFICATIONS, OPENED, SUM_SECONDS, SUM_SITES, SUM_STEP
from protofed.server.monitoring.collector import CollectorSources, StateCollector
from protofed.server.storage.reader import LedgerReader

Samples: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]
HARMLESS = re.compile(r"[a-z0-9_.-]{0,64}")  # ids, and words of ours: no path, no sentence, no name


class Metered:
    """A live server and its /metrics."""

    def __init__(self, server: Any) -> None:
        self.server, registry = server, server.context.metrics.registry
        self.records = LedgerReader(str(server.ledger._engine.url))
        certificates, metrics = server.operation.certificates, server.context.metrics
        state = server.audit_file.parent
        seen = CollectorSources(
            server.runs, server.context.presence, self.records, certificates, None, state, lambda: metrics.lag()
        )
        registry.register(StateCollector(seen))
        ProcessCollector(registry=registry)
        self._monitor = Monitor(Monitoring(listen="127.0.0.1:0"), registry, list)
        self.url = f"{self._monitor.start()}/metrics"

    def scrape(self) -> Samples:
        """By name and labels."""
        with urllib.request.urlopen(self.url, timeout=10) as answer:  # noqa: S310  (ours)
            text = answer.read().decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(found) == len(samples), "a series stands twice"
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[f"protofed_{name}", frozenset(labels.items())]

    def total(self, name: str, **labels: str) -> float:
        """Of all series that have these labels, and others."""
        wanted = set(labels.items())
        return sum(
            value for (found, has), value in self.scrape().items() if found == f"protofed_{name}" and wanted <= has
        )

    def wait_for(self, name: str, wanted: float, **labels: str) -> None:
        until = time.monotonic() + 30
        while (found := self.total(name, **labels)) != wanted:
            assert time.monotonic() < until, (name, labels, found)
            time.sleep(0.05)

    def close(self) -> None:
        self._monitor.stop()
        self.records.close()


@pytest.fixture
def metered() -> Iterator[Callable[[Any], Metered]]:
    made: list[Metered] = []

    def make(server: Any) -> Metered:
        made.append(Metered(server))
        return made[-1]

    yield make
    for one in made:
        one.close()


def verdicts(metered: Metered) -> Counter[tuple[str, str]]:
    """As /metrics has them, without those that the ledger does not write down."""
    found: Counter[tuple[str, str]] = Counter()
    for (name, labels), value in metered.scrape().items():
        told = dict(labels)
        if name == "protofed_updates_total" and value and told["verdict"] not in (Verdict.DUPLICATE, "rejected"):
            found[told["verdict"], told["reason"]] = int(value)
    return found


def in_ledger(metered: Metered, run: str) -> Counter[tuple[str, str]]:
    return Counter((row.verdict.value, row.code) for row in metered.records.updates(run))


def take_turns(agents: list[Any]) -> None:
    """Until all know that the run is over."""
    left = list(agents)
    for _ in range(2000):
        left = [agent for agent in left if not isinstance(agent.step(0.02), Finished)]
        if not left:
            return
    raise AssertionError("the run does not end")


def test_what_is_exposed_is_what_is_promised(
    recipe_of: Callable[..., Recipe],
    live_server: Callable[..., Any],
    linked: Callable[[str], Any],
    metered: Callable[[Any], Metered],
    tmp_path: Any,
) -> None:
    partition = {"kind": "dirichlet", "sites": 2, "beta": 0.5}
    federation = {"min_sites": 2, "quorum": 1.0, "heartbeat_s": 0.1}
    recipe = recipe_of("fednh", data={"source": "digits", "partition": partition}, federation=federation)
    server = live_server(recipe)
    seen = metered(server)
    identity = Authority.make().issue(tmp_path / "site-1", Party.SITE, "site-1")
    server.operation.certificates.register((identity / "cert.pem").read_text(encoding="ascii"))
    take_turns(build_agents(recipe, linked(server.address)))
    guest = RawClient(server.address, recipe.name, "guest").enroll()  # no policy: all that can be told is told
    numbers = {name.value: 7.0 for name in Telemetry}
    beat = pb.HeartbeatRequest(caller=guest.caller, run=recipe.name, activity=pb.ACTIVITY_IDLE, telemetry=numbers)
    guest.say("Heartbeat", beat)
    guest.channel.close()

    exposed: dict[str, set[frozenset[str]]] = {}
    for name, labels in seen.scrape():
        if not name.startswith("process_"):
            assert all(HARMLESS.fullmatch(value) for key, value in labels if key != "le"), (name, labels)
            family = name if name.endswith("_total") else re.sub("_(bucket|count|sum)$", "", name)
            exposed.setdefault(family, set()).add(frozenset(key for key, _ in labels) - {"le"})
    # No round is open any more, no run had secure aggregation, and nobody is told of anything.
    absent = (OPENED, SUM_STEP, SUM_SITES, SUM_SECONDS, NOTIFICATIONS)
    promised = {metric.name: {frozenset(metric.labels)} for metric in METRICS if metric not in absent}
    assert exposed == promised

    assert verdicts(seen) == in_ledger(seen, recipe.name)
    rows = seen.records.updates(recipe.name)
    assert seen.total("transfer_bytes_total", direction="in") == pytest.approx(sum(row.bytes for row in rows))
    assert seen.value("update_norm_count") == sum(row.task.round > 0 for row in rows)
    rounds = seen.records.rounds(recipe.name)
    assert seen.value("rounds_total", outcome="committed") == len(rounds) == 4
    assert seen.value("prototype_shift") == rounds[-1].statistics["prototype_shift"] > 0
    assert seen.value("prototype_min_distance") == rounds[-1].statistics["prototype_min_distance"]
    assert seen.value("prototype_classes_covered") == rounds[-1].statistics["classes_covered"]
    scores = seen.records.scores(recipe.name, recipe.rounds)[recipe.rounds]
    assert seen.value("score", scope="global", metric="accuracy", stat="mean") == scores["evaluator"]["global.accuracy"]
    worst = min(scores[site]["personal.accuracy"] for site in ("site-1", "site-2"))
    assert seen.value("score", scope="personal", metric="accuracy", stat="worst") == worst
    for phase in ("collecting", "aggregating", "evaluating"):
        assert seen.value("round_seconds_count", phase=phase) == 4 - (phase == "evaluating")


def test_bytes_that_move_both_ways_and_chunks_that_are_not_sent_again(
    recipe_of: Callable[..., Recipe], live_server: Callable[..., Any], metered: Callable[[Any], Metered]
) -> None:
    server = live_server(recipe_of("fedavg", federation={"min_sites": 1, "quorum": 1}))
    seen, site = metered(server), RawClient(server.address, "small-fedavg").enroll()
    model = {Part.BODY: {"w": np.zeros((1 << 20, 3), np.float32)}, Part.HEAD: {"weight": np.ones((10, 3), np.float32)}}
    task, data = site.task(), codec.encode(model)
    announced = site.announcement(task, data, model)
    upload = site.say("BeginUpload", announced).upload.id
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    for index in (0, 1, 4):
        site.put(upload, index, pieces[index])
    for _ in range(2):  # started again, and once more: the same three chunks
        site.say("BeginUpload", announced)
    assert seen.value("transfer_resumed_chunks_total") == 3
    for index in set(range(len(pieces))) - {0, 1, 4}:
        site.put(upload, index, pieces[index])
    assert site.commit(task, upload).verdict == pb.VERDICT_ACCEPTED
    assert seen.total("transfer_bytes_total", direction="in") == pytest.approx(len(data))
    body = seen.value("transfer_bytes_total", direction="in", part="body")
    assert body / len(data) == pytest.approx((1 << 20) * 3 / ((1 << 20) * 3 + 30))

    fit = site.task()
    assert seen.total("transfer_bytes_total", direction="out") == 0
    for index in range(len(pieces)):
        site.say(
            "GetChunk", pb.GetChunkRequest(caller=site.caller, run="small-fedavg", digest=fit.base_digest, index=index)
        )
    assert seen.total("transfer_bytes_total", direction="out") == pytest.approx(fit.base_bytes)
    site.channel.close()
