"""Nothing that a server says is used before it is checked; what is out of range is declined by a code."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from tests.support.scripted_server import RULES, RUN, AgentHarness, first_model, work

from protofed.client.data.site_data import SiteData
from protofed.client.site import check_model, read_recipe
from protofed.common.config.evaluation import MAX_CLASSES
from protofed.common.config.recipe import MAX_ROUNDS, Recipe
from protofed.common.errors import ConfigError, DataError, FailureReason, ProtocolError
from protofed.common.protocol import wire
from protofed.common.protocol.messages import LONGEST_S, MAX_BYTES, MAX_RECIPE_BYTES, Assignment, TaskKind
from protofed.protos.v1 import federation_pb2 as pb

WIRE = json.loads(Recipe.model_validate(RUN).wire())
LARGE = 10**400


def changed(path: str, value: object) -> str:
    """The recipe with one value changed, as a server could send it."""
    table = json.loads(json.dumps(WIRE))
    *tables, key = path.split(".")
    inner = table
    for name in tables:
        inner = inner[name]
    inner[key] = value
    return json.dumps(table)


def untouched(_: Recipe) -> SiteData:
    raise AssertionError("data are loaded")


HOSTILE_OPTIONS = ({"padding": 10**6}, {"fill": {"a": 1}}, {"path": "/etc/passwd"}, {"padding": [[[[[1]]]]]})
HOSTILE = [
    *[("rounds", value) for value in (0, -1, 1.5, MAX_ROUNDS + 1, LARGE, "many", None, math.nan)],
    *[("classes", value) for value in (1, MAX_CLASSES + 1, 2**63)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, LARGE, 0.5)],
    *[("name", value) for value in ("../../etc", "a b", "", "x" * 65, 7)],
    *[("input.shape", value) for value in ([1, 2], [1, 2, 0], [1, 1 << 13, 1 << 13], [1 << 40, 1, 1], [-1, 2, 2])],
    *[("input.mean", value) for value in ([math.nan], [1e9], [0.5, 0.5])],
    *[("input.std", value) for value in ([0.0], [-1.0], [1e-300], [math.inf])],
    *[("plan.epochs", value) for value in (0, 100_001, 1e9, LARGE)],
    *[("plan.batch_size", value) for value in (0, 1_000_001)],
    *[("plan.lr", value) for value in (0, -0.1, math.nan, math.inf, 1e39)],
    *[("plan.momentum", value) for value in (1.0, -0.5, math.nan)],
    *[("plan.weight_decay", value) for value in (-1, math.inf)],
    *[("plan.max_grad_norm", value) for value in (0, math.nan)],
    *[("plan.lr_decay", value) for value in (0, 1.5)],
    *[("plan.optimizer", value) for value in ("os.system", "SGD", "__import__('os')", ["sgd"])],
    *[("plan.schedule", value) for value in ("never", "cosine; rm -rf /")],
    *[("plan.augmentation", value) for value in ("torch.load", "")],
    *[("plan.augmentation", [{"transform": name}]) for name in ("monai/LoadImage", "os/system")],
    *[("input.prepare", [{"transform": "torchvision/Pad", **options}]) for options in HOSTILE_OPTIONS],
    *[("input.prepare", [{"transform": name}]) for name in ("monai/Lambda", "monai/RandFlip")],
    *[("plan.checkpoint", value) for value in ("/etc/passwd", 7)],
    *[("plan.command", value) for value in ("ls",)],
    *[("federation.heartbeat_s", value) for value in (0, -1, 1e-9, 1e9, math.nan, math.inf)],
    *[("federation.deadline_s", value) for value in (0, 2 * LONGEST_S, math.inf)],
    *[("federation.min_sites", value) for value in (0, 10**9)],
    *[("federation.quorum", value) for value in (0, 2.5, 10**9)],
    *[("federation.required_sites", value) for value in (["../x"], ["a"] * 1001)],
    *[("federation.environment", value) for value in ({"LD_PRELOAD": "x.so"},)],
    *[("evaluation.class_order", value) for value in ([0, 0, 1], [0, 1, 3], [0] * (MAX_CLASSES + 1))],
    *[("method.name", value) for value in ("fedavgg", "os:system", "x" * 201)],
    *[("method.weighting", value) for value in ([0] * 1001, "x" * 201, [[[[[[1]]]]]], math.nan, LARGE)],
    *[("method.unknown", value) for value in (1,)],
    *[("method", value) for value in ({"name": "fednh", "fixed_scale": "perhaps"},)],
    *[("model.name", value) for value in ("mlpp", "x" * 201, "os:system", "protofed.deploy.cli:main", ":", "..:x")],
    *[("model.hidden", value) for value in ([-4], [], [10**12], [10**13], [1.5], [1] * 1001)],
    *[("model.hidden", value) for value in ([60_000, 60_000], [10**9, 10**9], [10**11, 10**11])],
    *[("model", value) for value in ({"name": "conv2cifar"},)],  # too small an image
    *[("model.weights", value) for value in ("/etc/passwd",)],
    *[("data", value) for value in ({"source": "npz", "root": "/etc/passwd"}, {"source": "cifar10", "download": True})],
    *[("path", value) for value in ("/etc",)],
]


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=lambda given: f"{given}"[:40])
def test_a_recipe_that_no_honest_server_sends_is_declined_by_a_code(path: str, value: object) -> None:
    harness = AgentHarness(load_data=untouched)
    harness.link.recipe = changed(path, value)
    tasks = [harness.offer(TaskKind.INITIALISE, 0), harness.fit(1), harness.score(1)]
    work(harness.agent(), 3)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED) for task in tasks]
    assert harness.link.calls == {"enroll": 1, "next_task": 3}


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{", '{"name": "run"}', "\x00", "[" * 100_000, " " * (MAX_RECIPE_BYTES + 1), '{"a":' * 9999],
    ids=lambda text: f"{text[:12]!r} {len(text)}",
)
def test_what_is_no_recipe_is_declined_by_a_code(text: str) -> None:
    harness = AgentHarness(load_data=untouched)
    harness.link.recipe = text
    task = harness.fit(1)
    work(harness.agent(), 1)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED)]


def test_every_value_of_a_recipe_that_is_honest_passes() -> None:
    assert read_recipe(Assignment("run", Recipe.model_validate(RUN).wire())) == Recipe.model_validate(RUN)
    most = {**RUN, "rounds": MAX_ROUNDS, "plan": {"epochs": 100_000, "batch_size": 1_000_000}}
    assert read_recipe(Assignment("run", Recipe.model_validate(most).wire(), MAX_ROUNDS)).rounds == MAX_ROUNDS
    with pytest.raises(ConfigError, match=r"'plan\.warm_up'"):  # a key of a newer server is told as one
        read_recipe(Assignment("run", changed("plan.warm_up", 3)))
    with pytest.raises(ConfigError, match="keep_rounds = 4294967295"):
        read_recipe(Assignment("run", Recipe.model_validate(RUN).wire(), 2**32 - 1))


OWN = Recipe.model_validate(RUN).preprocessing_digest()
OTHER = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("told", "pinned", "why"),
    [
        (OTHER, None, "the server preprocesses images differently from this site's software"),
        (OTHER, OTHER, "Install the same protofed on both"),
        (OWN, OTHER, "differently from what this site's settings pin"),
        ("", "x" * 10_000, "correct data.preprocessing_digest"),
    ],
)
def test_a_run_of_images_prepared_otherwise_is_refused_unread(told: str, pinned: str | None, why: str) -> None:
    harness = AgentHarness(load_data=untouched, pinned=pinned)
    harness.link.preprocessing_digest = told
    task = harness.fit(1)
    with structlog.testing.capture_logs() as logs:
        work(harness.agent(), 1)
    assert harness.declined() == [(task.task_id, FailureReason.REFUSED)]
    said = [str(entry.get("why", "")) for entry in logs]
    assert any(why in text for text in said)
    assert max(map(len, said)) < 400


@pytest.mark.parametrize("pinned", [None, OWN])
@pytest.mark.parametrize("told", ["", OWN])
def test_a_run_of_images_prepared_alike_is_taken(told: str, pinned: str | None) -> None:
    harness = AgentHarness(pinned=pinned)
    harness.link.preprocessing_digest = told
    harness.fit(1)
    work(harness.agent(), 1)
    assert harness.declined() == []
    assert len(harness.link.pushed) == 1


# Code


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "trap_for_servers.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(tmp_path / 'sprung')!r}).touch()\n"
        "def factory(input, classes): raise SystemExit\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "trap_for_servers:factory"


def test_no_module_is_imported_that_the_policy_does_not_name(trap: str, tmp_path: Path) -> None:
    harness = AgentHarness(
        load_data=untouched, rules={**RULES, "plugins": ["trap_for_servers:other", "trap_for_servers"]}
    )
    harness.link.recipe = changed("model.name", trap)
    tasks = [harness.offer(TaskKind.INITIALISE, 0), harness.fit(1)]
    work(harness.agent(), 2)
    assert [task_id for task_id, _ in harness.declined()] == [task.task_id for task in tasks]
    assert "trap_for_servers" not in sys.modules
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("no data at /data"), FailureReason.DATA),
        (MemoryError("no more"), FailureReason.INTERNAL),
        (KeyError("x"), FailureReason.INTERNAL),
    ],
)
def test_whatever_breaks_while_a_run_is_prepared_the_daemon_lives(error: Exception, reason: FailureReason) -> None:
    def broken(_: Recipe) -> SiteData:
        raise error

    harness = AgentHarness(load_data=broken)
    tasks = [harness.fit(1), harness.score(1)]
    work(harness.agent(), 2)
    assert harness.declined() == [(task.task_id, reason) for task in tasks]
    assert harness.link.calls == {"enroll": 1, "next_task": 2}


# Memory


@pytest.mark.parametrize("hidden", [[40_000, 40_000], [10**6, 10**6], [10**12]])
def test_no_memory_is_asked_for_by_a_model_that_is_too_large(hidden: list[int]) -> None:
    recipe = Recipe.model_validate({**RUN, "model": {"name": "mlp", "hidden": hidden}})
    with pytest.raises(ConfigError, match=r"model mlp (takes \d+ bytes: expected at most|cannot be made)"):
        check_model(recipe.model, recipe.input, recipe.classes)


@pytest.mark.parametrize("name", ["mlp", "digits-cnn", "simple-cnn", "resnet18"])
def test_a_model_is_measured_without_a_random_number(name: str) -> None:
    recipe = Recipe.model_validate({**RUN, "input": {"shape": [1, 32, 32]}, "model": {"name": name}})
    before = torch.get_rng_state()
    check_model(recipe.model, recipe.input, recipe.classes)
    assert torch.equal(torch.get_rng_state(), before)


# Tasks


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (TaskKind.INITIALISE, {"round": 1}),
        (TaskKind.FIT, {"round": 0}),
        (TaskKind.FIT, {"round": 4}),
        (TaskKind.FIT, {"round": 2**32 - 1}),
        (TaskKind.FIT, {"base_bytes": MAX_BYTES + 1}),
        (TaskKind.SCORE, {"round": 0}),
        (TaskKind.SCORE, {"round": 4}),
        (TaskKind.SCORE, {"base_bytes": 2**63}),
    ],
)
def test_a_task_that_is_not_of_the_run_is_declined_unfetched(kind: TaskKind, change: dict[str, Any]) -> None:
    harness = AgentHarness()
    harness.offer(kind, 1, first_model())
    task = harness.link.tasks.pop()
    harness.link.tasks.append(replace(task, **change))
    work(harness.agent(), 1)
    assert [failure for _, failure in harness.declined()] == [FailureReason.REFUSED]
    assert harness.link.calls == {"enroll": 1, "next_task": 1}


SECONDS = [math.nan, math.inf, -math.inf, -1.0, 2 * LONGEST_S]


@pytest.mark.parametrize("value", SECONDS)
def test_times_that_cannot_be_are_not_read(value: float) -> None:
    task = pb.Task(kind=pb.TASK_KIND_FIT, run="run", round=1, task_id="n", remaining_s=value)
    for answer in (pb.NextTaskResponse(task=task), pb.NextTaskResponse(wait=pb.Wait(retry_after_s=value))):
        with pytest.raises(ProtocolError, match="seconds: expected 0 to"):
            wire.unpack_next(answer)
