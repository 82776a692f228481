"""What a daemon's metrics are, what they count, and what they never tell."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.exposition import generate_latest
from tests.support.pki import Authority
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.agent.agent import Agent
from protofed.client.agent.metrics import (
    COARSE,
    METRICS,
    OTHER_CODE,
    PARTS,
    SECURE_AGGREGATION,
    SUM_CODES,
    WHOLE,
    ClientMetrics,
)
from protofed.client.policy.policy import Policy, PolicyRefusedError, Released
from protofed.client.policy.rules import PolicyRules
from protofed.client.site import DaemonStatus
from protofed.client.training.context import RECENT_STEPS, Throughput
from protofed.common.errors import PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Part, Update
from protofed.common.pki.identity import LiveIdentity, Party
from protofed.common.protocol.messages import Activity, Task, TaskKind, Telemetry
from protofed.common.version import VERSION

TASK = Task(TaskKind.FIT, "run", 1, "n1", None, 0, 60.0)
RELEASED = "protofed_client_bytes_released_total"
REFUSALS = "protofed_client_policy_refusals_total"
GPU_ONLY = {"protofed_client_gpu_memory_bytes"}
TLS_ONLY = {"protofed_client_cert_expiry_timestamp_seconds"}


def value(metrics: ClientMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"site": "ann", **labels})


def by_part(metrics: ClientMetrics, name: str) -> dict[str, float]:
    found = {part: value(metrics, name, part=part) for part in [*PARTS, WHOLE]}
    return {part: count for part, count in found.items() if count}


def exposed(metrics: ClientMetrics) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels by name, of what has a value."""
    return {
        sample.name.removesuffix("_count"): (family.type, tuple(sample.labels))
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.startswith("process_") and not sample.name.endswith("_sum")
    }


def released(payload: dict[Part, Any]) -> Released:
    rules = PolicyRules.model_validate({**RULES, "parts": list(payload)})
    return Policy(rules).release(Update("ann", payload))


def gate_of(metrics: ClientMetrics, harness: AgentHarness) -> Agent:
    site = harness.agent()._site
    return Agent(
        site, harness.link, harness.now, harness.pauses.append, on_refusal=lambda _, why: metrics.count_refusal(why)
    )


def test_what_is_exposed_is_what_is_promised(tmp_path: Path) -> None:
    now = DaemonStatus()
    now.throughput.start()
    now.throughput.step(4)
    now.own_scores, now.privacy = {"loss": 0.5}, (1.5, 8.0)
    promised = {metric.name: (metric.kind, metric.labels) for metric in METRICS}
    assert exposed(ClientMetrics("ann", now, state=tmp_path)) == {
        name: told for name, told in promised.items() if name not in GPU_ONLY | TLS_ONLY
    }
    for metric in METRICS:
        assert metric.name.startswith("protofed_client_")
        assert metric.labels[0] == "site"
        assert set(metric.labels) <= {"site", "phase", "part", "score", "code", "version"}
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_with_a_gpu_and_a_certificate_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {"cuda:1": 7 << 30}[str(device)])
    now = DaemonStatus(own_scores={"loss": 0.5}, privacy=(1.5, 8.0))
    now.throughput.step(1)
    identity = LiveIdentity(Authority.make().issue(tmp_path / "identity", Party.SITE, "ann"), Party.SITE)
    metrics = ClientMetrics("ann", now, state=tmp_path, device=torch.device("cuda:1"), identity=identity)
    assert exposed(metrics).keys() == {metric.name for metric in METRICS}
    assert value(metrics, "protofed_client_gpu_memory_bytes") == 7 << 30
    ends = value(metrics, "protofed_client_cert_expiry_timestamp_seconds")
    assert ends == identity.current().certificate.not_after.timestamp()


def test_the_sites_own_scores_are_for_its_own_prometheus_and_in_no_heartbeat() -> None:
    status = DaemonStatus()
    metrics = ClientMetrics("ann", status)
    assert value(metrics, "protofed_client_score", score="personal.pm_l") is None
    status.own_scores = {"personal.pm_l": 0.25, "loss": 1.5}
    assert value(metrics, "protofed_client_score", score="personal.pm_l") == 0.25
    assert value(metrics, "protofed_client_score", score="loss") == 1.5
    assert not any("score" in name or "loss" in name for name in metrics.telemetry())
    assert not any("score" in str(field) for field in vars(status.progress(0)))


def test_what_is_lost_or_not_there_is_absent_and_breaks_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: object) -> int:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(torch.cuda, "memory_reserved", lost)
    metrics = ClientMetrics("ann", state=tmp_path / "gone", device=torch.device("cuda"))
    assert not exposed(metrics).keys() & {"protofed_client_gpu_memory_bytes", "protofed_client_disk_free_bytes"}
    assert metrics.telemetry().keys() == {"policy_refusals", "bytes_released"}
    now = DaemonStatus()
    metrics = ClientMetrics("ann", now, state=tmp_path)
    names = {"protofed_client_privacy_epsilon_spent", "protofed_client_privacy_epsilon_budget"}
    assert not exposed(metrics).keys() & names
    now.privacy = 1.5, None
    assert exposed(metrics).keys() & names == {"protofed_client_privacy_epsilon_spent"}
    assert value(metrics, "protofed_client_privacy_epsilon_spent") == 1.5


def test_what_was_counted_is_telemetry_too_and_of_one_daemon_alone() -> None:
    metrics, other = ClientMetrics("ann"), ClientMetrics("bob")  # in one process
    metrics.count_refusal(PolicyRefusedError("parts", "no", part=Part.HEAD))
    metrics.count_refusal(PolicyRefusedError("max_update_mb", "no"))
    metrics.count_release(TASK, released({Part.BODY: {"w": np.ones(4, np.float32)}}))
    metrics.count_withheld()  # which the server is not told of
    assert metrics.telemetry() == {"policy_refusals": 2.0, "bytes_released": 16.0}
    assert value(metrics, "protofed_client_withheld_updates_total") == 1
    assert other.telemetry() == {"policy_refusals": 0.0, "bytes_released": 0.0}


@pytest.mark.parametrize("activity", Activity)
def test_a_daemon_is_in_one_phase(activity: Activity) -> None:
    now = DaemonStatus(activity=activity)
    now.fit_progress.epoch = 3
    metrics = ClientMetrics("ann", now)
    phases = {phase.value: value(metrics, "protofed_client_phase", phase=phase) for phase in Activity}
    assert phases == {phase.value: float(phase is activity) for phase in Activity}
    assert value(metrics, "protofed_client_epoch") == 3
    assert value(metrics, "protofed_client_build_info", version=VERSION) == 1


def test_a_daemon_is_registered_as_long_as_the_server_answered_lately() -> None:
    at = {"clock": 1000.0, "answer": -math.inf}
    metrics = ClientMetrics("ann", answered_at=lambda: at["answer"], clock=lambda: at["clock"])
    told = []
    for at["answer"], at["clock"] in ((-math.inf, 1000.0), (1000.0, 1000.0), (1000.0, 1179.9), (1000.0, 1180.0)):
        told.append((metrics.answered(), value(metrics, "protofed_client_registered")))
    assert told == [(False, 0.0), (True, 1.0), (True, 1.0), (False, 0.0)]


def test_bytes_are_those_of_the_tensors_by_part() -> None:
    metrics = ClientMetrics("ann")
    assert set(PARTS) == set(Part) - NOT_ON_THE_WIRE
    assert by_part(metrics, RELEASED) == {}
    assert value(metrics, RELEASED, part="body") == 0  # there from the beginning, so that a first one is an increase
    body = {"w": np.ones((2, 3), np.float32), "n": np.array(7, np.int64)}
    update = released({Part.BODY: body, Part.PROTOTYPES: {"0": np.ones(5, np.float32)}})
    metrics.count_release(TASK, update)
    assert by_part(metrics, RELEASED) == {"body": 32.0, "prototypes": 20.0}
    metrics.count_release(TASK, update)  # the same again: its answer was lost
    assert by_part(metrics, RELEASED) == {"body": 32.0, "prototypes": 20.0}
    metrics.count_release(Task(TaskKind.FIT, "run", 2, "n2", None, 0, 60.0), update)
    assert by_part(metrics, RELEASED) == {"body": 64.0, "prototypes": 40.0}


def test_what_the_gate_keeps_is_counted_by_its_part_and_told_by_no_name() -> None:
    metrics = ClientMetrics("ann")
    harness = AgentHarness(rules={**RULES, "max_tensor_mb": 1e-5})
    harness.fit(1, first_model())
    work(gate_of(metrics, harness), 1)
    assert by_part(metrics, REFUSALS) == {"body": 1.0}
    assert b"linear" not in generate_latest(metrics.registry)  # the tensor's name, which the log has
    for why in (
        PolicyRefusedError("parts", "no", part=Part.HEAD),
        PolicyRefusedError("max_update_mb", "no"),
        PolicyViolationError("no"),
    ):
        metrics.count_refusal(why)
    assert by_part(metrics, REFUSALS) == {"body": 1.0, "head": 1.0, WHOLE: 2.0}


@pytest.mark.parametrize(("rules", "part"), [({"parts": ["body"]}, "head"), ({"methods": ["solo"]}, WHOLE)])
def test_a_run_that_the_policy_refuses_is_counted_task_by_task(rules: dict[str, Any], part: str) -> None:
    metrics, harness = ClientMetrics("ann"), AgentHarness(rules={**RULES, **rules})
    daemon = gate_of(metrics, harness)
    for number in range(1, 4):
        harness.fit(number)
    work(daemon, 3)
    assert len(harness.declined()) == 3
    assert by_part(metrics, REFUSALS) == {part: 3.0}


def test_examples_and_steps_are_counted_as_they_are_trained_on() -> None:
    harness = AgentHarness()
    metrics = ClientMetrics("ann", harness.now)
    assert value(metrics, "protofed_client_samples_total") == 0
    assert value(metrics, "protofed_client_step_seconds_count") == 0
    daemon, seen = harness.agent(), []
    for number in (1, 2):
        harness.fit(number)
        work(daemon, 1)
        seen.append(value(metrics, "protofed_client_samples_total"))
    assert seen == [24, 48]  # 12 examples, 2 epochs, and on from round to round
    steps, seconds = (value(metrics, f"protofed_client_step_seconds_{kind}") for kind in ("count", "sum"))
    assert steps == harness.now.throughput.steps > 0
    assert seconds == harness.now.throughput.seconds > 0


def test_a_step_is_as_long_as_the_mean_of_the_recent_ones() -> None:
    at, told = [50.0], list[tuple[float | None, int]]()
    throughput = Throughput(lambda: at[0])

    def train(*steps: float) -> None:
        throughput.start()
        for seconds in steps:
            at[0] += seconds
            throughput.step(4)
        told.append((throughput.step_seconds, throughput.examples))
        at[0] += 3600.0  # nobody trains

    train()
    train(0.5, 1.5)
    train(4.0)
    train(*[0.25] * RECENT_STEPS)
    assert told == [(None, 0), (1.0, 8), (2.0, 12), (0.25, 12 + 4 * RECENT_STEPS)]
    # All steps, not only recent ones.
    assert (throughput.steps, throughput.seconds) == (3 + RECENT_STEPS, 6.0 + 0.25 * RECENT_STEPS)


def test_telemetry_has_names_of_the_list_and_never_how_many_examples(tmp_path: Path) -> None:
    harness = AgentHarness(recipe={**RUN})
    metrics = ClientMetrics("ann", harness.now, state=tmp_path)
    harness.fit(1)
    work(harness.agent(), 1)
    told = metrics.telemetry()
    assert told.keys() == {name.value for name in Telemetry} - {"gpu_memory_bytes"}
    assert harness.now.throughput.examples == 24
    assert 24.0 not in told.values()
    assert told["disk_free_bytes"] % COARSE == 0
    exact = value(metrics, "protofed_client_disk_free_bytes")
    assert exact is not None
    assert abs(exact - told["disk_free_bytes"]) < 10 * COARSE  # others write meanwhile
    assert not {name for name in Telemetry if {"sample", "example", "batch", "label"} & set(name.split("_"))}


def masked(task_id: str) -> tuple[Task, Released]:
    task = Task(TaskKind.MASK, "run", 1, task_id, None, 0, 60.0, attempt=1)
    vector = {Part.SECURE_AGGREGATION: {"vector": np.arange(len(task_id), dtype=np.uint64)}}
    return task, Policy(PolicyRules.model_validate(RULES)).release_step(vector)


def test_a_sum_counts_once_when_the_sites_numbers_leave() -> None:
    metrics = ClientMetrics("ann")
    task, vector = masked("n1")
    metrics.count_release(replace(task, kind=TaskKind.SHARE, task_id="n0"), vector)
    assert value(metrics, "protofed_client_sums_total") == 0
    for _ in range(2):  # the second time after a broken connection
        metrics.count_release(task, vector)
    assert value(metrics, "protofed_client_sums_total") == 1
    metrics.count_release(*masked("n22"))
    assert value(metrics, "protofed_client_sums_total") == 2


def test_refusals_of_a_sum_count_by_their_code_and_an_unknown_one_makes_no_new_label() -> None:
    metrics, name = ClientMetrics("ann"), "protofed_client_sum_refusals_total"
    assert {value(metrics, name, code=code) for code in (*SUM_CODES, OTHER_CODE)} == {0.0}
    metrics.count_refusal(PolicyRefusedError(f"{SECURE_AGGREGATION}changed-identity", "north has another identity"))
    metrics.count_refusal(PolicyRefusedError(f"{SECURE_AGGREGATION}of-next-year", "unheard of"))
    metrics.count_refusal(PolicyRefusedError("parts", "no sum"))
    counted = {code: value(metrics, name, code=code) for code in (*SUM_CODES, OTHER_CODE)}
    assert {code: count for code, count in counted.items() if count} == {"changed-identity": 1.0, OTHER_CODE: 1.0}
    assert by_part(metrics, REFUSALS) == {WHOLE: 3.0}
