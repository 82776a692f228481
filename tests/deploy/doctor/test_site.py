"""What the doctor sees on a site's own machine: folders, disks, device, shared memory, data.

The doctor finds a problem with a site's data exactly where its daemon declines rounds for them, by the same code.
"""

from __future__ import annotations

import re
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import Mount
from tests.support.doctor_rows import findings, rows, skipped
from tests.support.policies import standard_with_plain_updates
from tests.support.scripted_server import ScriptedServer

from protofed.client import device
from protofed.client.agent.agent import Agent
from protofed.client.models.catalogue import first_model
from protofed.client.policy.approval import FOLDER, Approvals
from protofed.client.policy.policy import PolicyFile
from protofed.client.state.owner import claim
from protofed.client.state.store import MemoryStore
from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import FailureReason, ProtofedError
from protofed.common.protocol.messages import Activity, Assignment, Task, TaskKind
from protofed.common.storage.files import Lock
from protofed.deploy import shipped
from protofed.deploy.daemons import client, readyz
from protofed.deploy.doctor import machine
from protofed.deploy.doctor import site as doctor_site
from protofed.deploy.doctor.checks import Check, CheckFailedError, CheckRow, State
from protofed.deploy.doctor.client import ClientDoctor
from protofed.deploy.doctor.site import SiteUnderCheck
from protofed.server.rounds.machine.rules import min_cohort

POLICY = "open"
OWN = ("state folder", "disk", "cache", "metrics", "device", "shared memory", "data")


def look(folder: Path, under_check: SiteUnderCheck | None = None, **changes: Any) -> dict[str, CheckRow]:
    """The checks that need no server."""
    told = {"site": "a", "policy": POLICY, "state": folder / "state", "data": {"source": "digits"}, **changes}
    checks = ClientDoctor(
        lambda: ClientSettings.model_validate(told), under_check or SiteUnderCheck(quick=True)
    ).checks()
    return rows([Check(one.name, one.run, one.otherwise) for one in checks if one.name in OWN])


def test_a_machine_that_is_well_also_beside_its_daemon(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert findings(found) == []
    assert skipped(found) == {"metrics": "no metrics are asked for"}
    assert "will be made" in found["state folder"].message
    assert not list(tmp_path.iterdir())
    lock = Lock(tmp_path / "state")
    found = look(tmp_path)
    lock.release()
    assert found["state folder"].message.endswith("the daemon is running")
    assert findings(found) == []
    assert "running" not in look(tmp_path)["state folder"].message


def test_a_folder_that_is_read_only(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # a daemon of another test may have set it
    mount(tmp_path / "state", "ro,size=2g")
    found = look(tmp_path)
    assert findings(found)[:1] == [("state folder", "state-not-writable")]
    assert ("cache", "state-not-writable") in findings(found)
    assert "Read-only file system" in found["state folder"].message


def test_a_cache_that_is_read_only(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(tmp_path / "cache", "ro")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert findings(look(tmp_path)) == [("cache", "state-not-writable")]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("", encoding="utf-8")
    assert findings(look(tmp_path))[0] == ("state folder", "state-not-writable")


@pytest.mark.parametrize(("size", "name"), [("64m", "disk-full"), ("2g", "disk-low")])
def test_a_disk_that_is_small(size: str, name: str, tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "state", f"size={size}")
    assert findings(look(tmp_path)) == [("disk", name)]


def test_a_disk_without_room_for_the_probe(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "state", "size=4k")
    (tmp_path / "state" / "all").write_bytes(bytes(4096))
    assert findings(look(tmp_path))[0] == ("state folder", "disk-full")


def test_a_disk_with_space_and_no_inodes(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "state", "size=8g,nr_inodes=200")
    for number in range(150):
        (tmp_path / "state" / f"{number}").touch()
    found = look(tmp_path)
    assert findings(found) == [("disk", "disk-full")]
    assert "left of 200 (`df -i`): the disk has too many files" in found["disk"].message


def test_a_daemon_that_runs_and_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readyz, "WAIT_S", 0.2)
    lock = Lock(tmp_path / "state")
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        (tmp_path / "state" / readyz.ADDRESS_FILE).write_text(url, encoding="utf-8")
        found = look(tmp_path)
    lock.release()
    assert findings(found) == [("state folder", "daemon-silent")]
    assert f"no answer from {url}/readyz: timed out" in found["state folder"].message


def test_a_state_folder_of_another_site(tmp_path: Path) -> None:
    (state := tmp_path / "state").mkdir()
    claim(state, "a")
    assert findings(look(tmp_path)) == []
    found = look(tmp_path, site="b")
    assert findings(found) == [("state folder", "state-of-another")]
    assert "belongs to site 'a', and this is site 'b'" in found["state folder"].message


def test_a_library_that_is_missing_or_old_and_no_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("software", lambda: machine.software("client", ("numpy",)))]
    monkeypatch.setattr(metadata, "requires", lambda _name: ["numpy>=99.1"])
    assert findings(rows(checks)) == [("software", "library-old")]
    monkeypatch.setattr(metadata, "requires", lambda _name: ["nowhere>=1.0; extra == 'client'"])
    assert findings(rows(checks)) == [("software", "library-missing")]
    monkeypatch.setattr(metadata, "requires", lambda _name: ["nowhere>=1.0; extra == 'report'"])
    assert findings(rows(checks)) == []
    with pytest.raises(CheckFailedError, match="nowhere_at_all") as failed:
        machine.import_quietly(("nowhere_at_all",))
    assert failed.value.name == "library-missing"

    def full() -> None:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(CheckFailedError) as found:
        machine.import_quietly(("json",))
    assert found.value.name == "state-not-writable"


@pytest.mark.parametrize(
    ("built", "driver", "gpus", "name", "why"),
    [
        (None, False, 0, "cuda", "built without CUDA"),
        ("13.0", False, 0, "cuda", "no NVIDIA driver is loaded here"),
        ("13.0", True, 0, "cuda:0", r"a driver is loaded, CUDA_VISIBLE_DEVICES is ''"),
        ("13.0", True, 2, "cuda:2", "offers 2 GPUs"),
    ],
)
def test_a_gpu_that_was_asked_for_and_is_not_there(
    built: str | None, driver: bool, gpus: int, name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(doctor_site, "DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = look(tmp_path, device=name)
    assert findings(found) == [("device", "device-absent")]
    assert why in found["device"].message


def test_a_device_that_does_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "pick_device", lambda _name: torch.device("meta"))  # has no numbers
    assert findings(look(tmp_path)) == [("device", "device-unusable")]


def test_shared_memory_that_is_small(tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_site, "SHARED_MEMORY", tmp_path / "none")
    assert findings(look(tmp_path)) == [("shared memory", "shared-memory-small")]
    mount(tmp_path / "shm", "size=16m")
    monkeypatch.setattr(doctor_site, "SHARED_MEMORY", tmp_path / "shm")
    found = look(tmp_path)
    assert findings(found) == [("shared memory", "shared-memory-small")]
    assert "has 16 MiB; data loaders with workers need at least 64" in found["shared memory"].message
    assert found["shared memory"].state is State.WARNING


def images(path: Path, shape: tuple[int, ...] = (90, 12, 12), classes: int = 3) -> dict[str, Any]:
    """Data of a site, whose numbers of examples are 90 and 45."""
    halves = {"train": len(range(shape[0])), "test": shape[0] // 2}
    arrays: dict[str, Any] = {}
    for half, count in halves.items():
        arrays[f"{half}_images"] = np.zeros((count, *shape[1:]), np.uint8)
        arrays[f"{half}_labels"] = np.arange(count) % classes
    np.savez(path, **arrays)
    return {"source": "npz", "root": path}


def test_data_are_loaded_and_not_counted_aloud(tmp_path: Path) -> None:
    found = look(tmp_path, SiteUnderCheck(), data=images(tmp_path / "own.npz"))["data"]
    assert found.message.startswith(
        "npz: images loaded as 1 x 12 x 12 [channels, height, width], with no run to compare"
    )
    assert not {"90", "45", "30", "15", "3"} & set(re.findall(r"\d+", found.message))


def test_data_are_compared_with_a_run_or_with_the_newest_that_was_offered(
    tmp_path: Path, recipe_of: Callable[..., Recipe]
) -> None:
    data, recipe = images(tmp_path / "own.npz"), recipe_of("fednh")  # 1 x 8 x 8
    found = look(tmp_path, SiteUnderCheck(recipe=lambda: recipe), data=data)
    assert findings(found) == [("data", "data-unusable")]
    assert "[1, 12, 12]" in found["data"].message
    assert "[1, 8, 8]" in found["data"].message
    assert "as run small-fednh expects" in look(tmp_path, SiteUnderCheck(recipe=lambda: recipe))["data"].message
    recipe = recipe_of("fedavg")
    Approvals(tmp_path / "state" / FOLDER).record_offer(Assignment(recipe.name, recipe.wire()))
    found = look(tmp_path, SiteUnderCheck(), data=images(tmp_path / "own.npz", classes=12))
    assert findings(found) == [("data", "data-unusable")]
    assert "as run small-fedavg expects" in look(tmp_path, SiteUnderCheck())["data"].message


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    file.write_bytes(b"not an archive")
    data = {"source": "npz", "root": file}
    assert findings(look(tmp_path, SiteUnderCheck(), data=data)) == [("data", "data-unusable")]
    assert look(tmp_path, data=data)["data"].message == f"{file} can be opened; not loaded"
    cut = {"source": "digits", "partition": {"kind": "dirichlet", "sites": 3, "beta": 1.0}}
    found = look(tmp_path, SiteUnderCheck(), partition_index=3, data=cut)
    assert findings(found) == [("data", "data-unusable")]
    assert "partition_index 3 of 3" in found["data"].message


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    """Images of two classes in folders."""
    for number in range(40):
        file = tmp_path / "images" / ("benign", "malignant")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 6 * number, np.uint8)).save(file)
    return {"source": "folder", "root": tmp_path / "images"}


@pytest.fixture
def named(recipe_of: Callable[..., Recipe]) -> SiteUnderCheck:
    """With a run of two classes that have names."""
    recipe = recipe_of("fednh", classes=2, class_names=["benign", "malignant"], data=None)
    return SiteUnderCheck(recipe=lambda: recipe)


def test_image_files_are_loaded_as_the_daemon_loads_them(
    tmp_path: Path, folder: dict[str, Any], named: SiteUnderCheck
) -> None:
    fine = look(tmp_path, named, data=folder)["data"]
    assert (fine.state, "as run small-fednh expects" in fine.message) == (State.FINE, True)
    assert "with no run to compare them with" in look(tmp_path, SiteUnderCheck(), data=folder)["data"].message
    (tmp_path / "images" / "Malignent").mkdir()
    (tmp_path / "images" / "Malignent" / "x.png").write_bytes(b"")
    found = look(tmp_path, named, data=folder)
    assert findings(found) == [("data", "labels-unmapped")]
    assert "'Malignent' (nearest: 'malignant')" in found["data"].message
    assert not {"1", "40", "20"} & set(re.findall(r"\d+", found["data"].message))


def test_image_files_that_cannot_be_read_are_named_up_to_what_is_allowed(
    tmp_path: Path, folder: dict[str, Any], named: SiteUnderCheck
) -> None:
    for file in (tmp_path / "images").glob("*/*.png"):
        file.write_bytes(b"")
    found = look(tmp_path, named, data=folder)
    assert findings(found) == [("data", "images-unreadable")]
    assert found["data"].message.count(": empty") == 3
    assert "; and others (`protofed client check` lists all)" in found["data"].message


def test_images_prepared_otherwise_or_in_no_class_are_named(
    tmp_path: Path, folder: dict[str, Any], named: SiteUnderCheck
) -> None:
    found = look(tmp_path, named, data={**folder, "preprocessing_digest": "0" * 64})
    assert findings(found) == [("data", "preprocessing-differs")]
    (tmp_path / "images" / "notes").write_text("x", encoding="utf-8")
    assert "notes: in no class's folder (" in look(tmp_path, named, data=folder)["data"].message
    assert findings(look(tmp_path, named, data={**folder, "max_unreadable_fraction": 0.1})) == []


def test_where_metrics_would_be_answered_and_a_port_that_is_taken(tmp_path: Path, unused_port: int) -> None:
    listen = f"127.0.0.1:{unused_port}"
    assert look(tmp_path, metrics={"listen": listen})["metrics"].message == f"{listen} is free"
    for bad in ({"listen": "nowhere"}, {"listen": listen, "token": tmp_path / "none"}):
        assert findings(look(tmp_path, metrics=bad)) == [("metrics", "metrics-unusable")]
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = {"listen": f"127.0.0.1:{other.getsockname()[1]}"}
        assert findings(look(tmp_path, metrics=where)) == [("metrics", "metrics-port-taken")]
        lock = Lock(tmp_path / "state")
        assert "as by the daemon that is running" in look(tmp_path, metrics=where)["metrics"].message
        lock.release()


RecipeOf = Callable[..., Recipe]
CLASSES = ("mel", "nv", "bcc")
SKEWED = {"nv": 60, "mel": 12, "bcc": 1}


@dataclass(frozen=True)
class Case:
    """A data set of folders, what the settings and the recipe say beside it, and the doctor's finding; None: none."""

    finding: str | None
    images: Mapping[str, int]  # by folder
    data: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    damage: Callable[[Path], object] = lambda _root: None


def empty_files(root: Path) -> None:
    for file in sorted(root.glob("nv/*.png"))[:4]:
        file.write_bytes(b"")


def one_shade(root: Path) -> None:
    for file in root.glob("*/*.png"):
        Image.fromarray(np.full((8, 8), 90, np.uint8)).save(file)


CASES = {
    "skewed": Case(None, SKEWED),
    "one image in a class": Case(None, {"nv": 40, "mel": 40, "bcc": 1}),
    "one class alone": Case(None, {"nv": 60}),
    "an empty class": Case(None, {**SKEWED, "bcc": 0}),
    "patients": Case(None, SKEWED, {"group_pattern": r"(\d)\.png"}),
    "a test set of its own": Case(None, {"train/nv": 40, "test/nv": 2, "train/mel": 3}),
    "an own test set": Case(None, SKEWED, {"local_test_fraction": 0.2}),
    "an own test set, and the evaluator, too": Case(
        None, SKEWED, {"local_test_fraction": 0.2}, settings={"roles": ["trainer", "evaluator"]}
    ),
    "an own test set that nothing can be spared for": Case(
        None, {"nv": 30}, {"test_fraction": 0.7, "local_test_fraction": 0.2}
    ),
    "an own test set alone that nothing can be spared for": Case(
        "data-unusable", {"nv": 9}, {"local_test_fraction": 0.2}
    ),
    "some unreadable files are allowed": Case(None, SKEWED, {"max_unreadable_fraction": 0.1}, damage=empty_files),
    "an evaluator": Case(None, {"test/nv": 3}, settings={"roles": ["evaluator"]}),
    "no class with enough images for a test set": Case("data-unusable", {"nv": 9, "mel": 9, "bcc": 9}),
    "no images": Case("data-unusable", {"nv": 0}),
    "training images alone missing": Case("data-unusable", {"test/nv": 30}),
    "one patient alone": Case("data-unusable", SKEWED, {"group_pattern": r"(\.png)"}),
    "patients in both train and test": Case(
        "data-unusable", {"train/nv": 20, "test/nv": 20}, {"group_pattern": r"(\d+)\.png"}
    ),
    "no patient in a path": Case("data-unusable", SKEWED, {"group_pattern": "/(P[0-9]+)_"}),
    "a fraction beside a test set": Case("data-unusable", {"train/nv": 40, "test/nv": 9}, {"test_fraction": 0.2}),
    "a partition that is not": Case("data-unusable", SKEWED, {"partition": {"kind": "column"}}),
    "no such folder": Case("data-unusable", SKEWED, {"root": "/nowhere/at/all"}),
    "an unknown label": Case("labels-unmapped", {**SKEWED, "naevus": 30}),
    "a map to an unknown class": Case("labels-unmapped", SKEWED, {"label_map": {"nv": "naevus"}}),
    "empty files": Case("images-unreadable", SKEWED, damage=empty_files),
    "another size": Case("images-unreadable", SKEWED, recipe={"input": {"shape": [1, 12, 12]}}),
    "other colours": Case("images-unreadable", SKEWED, recipe={"input": {"shape": [3, 8, 8]}}),
    "another preprocessing": Case("preprocessing-differs", SKEWED, {"preprocessing_digest": "0" * 64}),
    "too few images for the least movement": Case("run-refused", {"nv": 12}),
    "images all alike": Case("run-refused", SKEWED, damage=one_shade),
    "a batch above the policy's": Case("run-refused", SKEWED, recipe={"plan": {"batch_size": 1024}}),
    "a model that is not": Case("recipe-invalid", SKEWED, recipe={"model": {"name": "digits-cnn", "wide": 3}}),
}


def settings_of(case: Case, folder: Path) -> ClientSettings:
    draw, root = np.random.default_rng(0), folder / "images"
    for name, count in case.images.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(root / name / f"{number:02}.png")
    case.damage(root)
    data = {"source": "folder", "root": root, **case.data}
    policy = standard_with_plain_updates(folder / "policies")
    given = {"site": "a", "policy": policy, "state": folder / "state", "data": data, **case.settings}
    return ClientSettings.model_validate(given)


def recipe_for(case: Case, recipe_of: RecipeOf) -> Recipe:
    plan = {"epochs": 10, "batch_size": 8, "lr": 0.05}
    own = {"classes": 3, "class_names": list(CLASSES), "data": None, "plan": plan, **case.recipe}
    return recipe_of("fedavg", **own)


def declines(settings: ClientSettings, recipe: Recipe) -> FailureReason | None:
    """By which code the daemon declines a round, with everything that it does in one; None: it declines nothing."""
    client.check_root(settings)
    policy, cpu = PolicyFile(shipped.policy(settings.policy)), torch.device("cpu")
    site = client._site(settings, policy, MemoryStore(), cpu, partial(client._load, settings, cpu))
    link = ScriptedServer(recipe.wire(), recipe.name, min_cohort=min_cohort(recipe.federation))
    try:
        base = codec.encode(first_model(recipe, frozenset()))
    except ProtofedError:  # a recipe of no model: the run is declined before any base is fetched
        base = b""
    digest = codec.digest(base)
    link.blobs[str(digest)] = base
    kinds = (TaskKind.FIT, TaskKind.SCORE) if "trainer" in settings.roles else (TaskKind.SCORE,)
    link.tasks = deque(Task(kind, recipe.name, 1, f"n-{kind}", digest, len(base), 60.0) for kind in kinds)
    agent = Agent(site, link, pause=lambda _: None)
    while link.tasks:
        agent.step(0.0)
    return next((beat.failure for beat in link.beats if beat.activity is Activity.FAILED), None)


def doctors_row(settings: ClientSettings, recipe: Recipe) -> CheckRow:
    site = SiteUnderCheck(recipe=lambda: recipe)
    return rows([Check("data", lambda: site.data(settings), "data-unusable")])["data"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_doctor_finds_what_the_daemon_declines_by(case: Case, tmp_path: Path, recipe_of: RecipeOf) -> None:
    settings, recipe = settings_of(case, tmp_path), recipe_for(case, recipe_of)
    row = doctors_row(settings, recipe)
    assert (row.diagnosis and row.diagnosis.name) == case.finding, row.message
    try:
        declined = declines(settings, recipe)
    except ProtofedError:  # it does not even start
        assert case.finding is not None
        return
    assert (declined is None) == (case.finding is None), row.message
    assert declined is None or f"({declined.value})" in row.message


@pytest.mark.parametrize(
    ("name", "said", "never"),
    [
        ("skewed", "not scored", CLASSES),
        ("no patient in a path", "data.group_pattern", "0123456789"),
        ("too few images for the least movement", "limits.", "0123456789"),
    ],
)
def test_neither_classes_nor_numbers_are_told_to_others(
    name: str, said: str, never: Sequence[str], tmp_path: Path, recipe_of: RecipeOf
) -> None:
    message = doctors_row(settings_of(CASES[name], tmp_path), recipe_for(CASES[name], recipe_of)).message
    assert said in message
    assert not [word for word in never if word in (message.partition("declines")[2] or message)]
