"""A fit that dies anywhere and goes on elsewhere gives the bytes of one that was never disturbed, in every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import branched
from tests.support.method_facts import METHODS as REGISTERED
from tests.support.method_facts import brief
from tests.support.round_contexts import round_context
from tests.support.scripted_server import RUN, AgentHarness, give_secret, work
from tests.support.training_doubles import Deadly, KilledError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from protofed.client.data.examples import Examples
from protofed.client.data.site_data import SiteData
from protofed.client.method import client_methods
from protofed.client.models.split import SplitModel, dump
from protofed.client.state.disk_store import DiskStore
from protofed.client.training.context import Checkpoints, FitContext, NoCheckpoints, seeded
from protofed.client.training.loop import train
from protofed.client.training.progress import FOLDER, DiskCheckpoints, Optimizer, on_disk
from protofed.common import codec
from protofed.common.config.recipe import Plan
from protofed.common.config.tables import Input
from protofed.common.errors import OutOfSpaceError
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.storage import files
from protofed.server.method import server_methods

METHODS = [*REGISTERED, branched.NAME]
CLASSES = 3
ROUND = 2
TASK = Task(TaskKind.FIT, "run", ROUND, "n1", None, 0, 60.0)
INPUT = Input(shape=(1, 4, 4))
ADAM = {"optimizer": "adam", "lr": 0.01}
PLANS = {
    "momentum": {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 1.0, "augmentation": "crop-flip"},
    "adam": {**ADAM, "weight_decay": 0.1},
    "adamw": {**ADAM, "optimizer": "adamw", "drop_last": True},
    "by-class": {"lr": 0.1, "sampling": "class-balanced", "loss": "balanced-softmax", "augmentation": "crop-flip"},
    "transforms": {
        "lr": 0.1,
        "augmentation": [
            {"transform": "torchvision/RandomHorizontalFlip"},
            {"transform": "monai/RandGaussianNoise", "prob": 0.5},
        ],
    },
}


def model() -> SplitModel:
    """All that could be forgotten: running statistics, and a layer that draws by itself."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))
        return SplitModel(body, nn.Linear(6, CLASSES))


def data() -> SiteData:
    draw = torch.Generator().manual_seed(7)
    train_set = Examples(torch.rand(12, 1, 4, 4, generator=draw), torch.arange(12) % 2)
    return SiteData(train_set, train_set, INPUT, CLASSES)


def local_of(
    plan: dict[str, Any], client_state: Payload, kept: Checkpoints, check: Callable[[], None], round: int = ROUND
) -> FitContext:
    """Fresh objects, as after a restart."""
    made = Plan(**{"epochs": 2, "batch_size": 4, "checkpoint": True, **plan})
    rng = seeded(0, round, "ann", torch.device("cpu"))
    return FitContext(
        "ann", round, 4, model(), data(), CLASSES, made, rng, dict(client_state), check=check, checkpoints=kept
    )


@dataclass
class Case:
    """One method in its second round, with the site's memory of the first one."""

    name: str
    plan: dict[str, Any]

    def __post_init__(self) -> None:
        own = self.name == branched.NAME
        self.method = branched.Branched() if own else client_methods.build(self.name, brief(self.name))
        server = server_methods.build("fedavg" if own else self.name, {})
        state = server.init(whole(model()), round_context(CLASSES))
        local = local_of(self.plan, {}, NoCheckpoints(), lambda: None, round=1)
        update = self.method.fit(local, server.broadcast(state, "ann"))
        self.client_state: Payload = local.client_state
        self.received = server.broadcast(server.aggregate(state, [update], round_context()), "ann")

    def fit(self, kept: Checkpoints, check: Callable[[], None]) -> bytes:
        """All that comes of it: what is sent, said, remembered and predicted with."""
        local = local_of(self.plan, self.client_state, kept, check)
        update = self.method.fit(local, self.received)
        payloads = map(codec.encode, (update.payload, local.client_state, whole(local.model)))
        return b"".join(payloads) + repr(update.metrics).encode()


def whole(made: SplitModel) -> Payload:
    return {Part.BODY: dump(made.body), Part.HEAD: dump(made.head)}


def dies(case: Case, state: Path, at: int) -> bool:
    """A process that ends at that check; whether the fit was so long."""
    check = Deadly(at)
    with suppress(KilledError), on_disk(state, TASK) as kept:
        case.fit(kept, check)
    return check.made == at


def goes_on(case: Case, state: Path, check: Callable[[], None] = lambda: None) -> bytes:
    with on_disk(state, TASK) as kept:
        return case.fit(kept, check)


def undisturbed(case: Case) -> tuple[bytes, int]:
    """What comes of it, and after how many checks."""
    counting = Deadly()
    return case.fit(NoCheckpoints(), counting), counting.made


def left(state: Path) -> list[str]:
    return sorted(path.name for path in (state / FOLDER).glob("*"))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", METHODS)
def test_a_fit_that_dies_anywhere_goes_on_to_the_same_bytes(method: str, plan: str, tmp_path: Path) -> None:
    case = Case(method, PLANS[plan])
    expected, checks = undisturbed(case)
    assert checks >= 4
    for at in range(checks):  # before every batch: the first of an epoch is its boundary
        state = tmp_path / str(at)
        assert dies(case, state, at)
        assert goes_on(case, state) == expected, at
        assert left(state) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_fit_that_dies_again_and_again_comes_to_its_end(method: str, tmp_path: Path) -> None:
    case = Case(method, {**PLANS["momentum"], "epochs": 3})
    deaths = sum(dies(case, tmp_path, 4) for _ in range(3))  # an epoch is three batches: each life does one more
    assert deaths >= 2
    assert goes_on(case, tmp_path) == undisturbed(case)[0]


@pytest.mark.parametrize(("at", "again"), [(0, 6), (2, 6), (3, 3), (5, 3), (6, 0)])
def test_epochs_that_were_done_are_not_done_again(at: int, again: int, tmp_path: Path) -> None:
    case = Case("fedavg", {"epochs": 2})  # of three batches each
    kept, counting = DiskCheckpoints(tmp_path, TASK), Deadly()
    with suppress(KilledError):
        case.fit(kept, Deadly(at))
    case.fit(kept, counting)
    assert counting.made == again


def test_a_call_that_is_done_is_not_repeated_and_nothing_is_kept_without_being_asked(tmp_path: Path) -> None:
    case = Case("fedprp", {"epochs": 2})
    means, batches = 1, 3
    assert dies(case, tmp_path, means + 2 * batches + batches + 1)  # in the body's second epoch
    counting = Deadly()
    goes_on(case, tmp_path, counting)
    assert counting.made == means + batches + means
    case = Case("fedprp", {"checkpoint": False})
    assert dies(case, tmp_path / "1", 8)
    assert not (tmp_path / "1" / FOLDER).exists()


# What is not to be trusted


def flipped(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-1], lambda _: b"", lambda _: b"\x80\x04garbage" * 9])
def test_a_damaged_checkpoint_is_as_good_as_none(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    case = Case("fedavg", {"momentum": 0.9})
    assert dies(case, tmp_path, 4)
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(damage(file.read_bytes()))
    counting = Deadly()
    expected, checks = undisturbed(case)
    assert goes_on(case, tmp_path, counting) == expected
    assert counting.made == checks


@pytest.mark.parametrize("other", [{"run": "b"}, {"round": 3}, {"task_id": "n2"}, {"base_digest": "f" * 64}])
def test_a_checkpoint_counts_for_its_own_task_only(other: dict[str, Any], tmp_path: Path) -> None:
    theirs = DiskCheckpoints(tmp_path, Task(**{**vars(TASK), **other}))
    ours, tensors = DiskCheckpoints(tmp_path, TASK), {"w": torch.ones(3)}
    for kept in (ours, theirs):
        kept.write(1, tensors)
    a, b = sorted(tmp_path.iterdir())
    content = a.read_bytes(), b.read_bytes()
    assert content[0] != content[1]
    assert ours.read(1) is not None
    a.write_bytes(content[1])
    b.write_bytes(content[0])
    assert ours.read(1) is theirs.read(1) is None


def test_a_checkpoint_counts_for_its_own_call_only_and_an_unreadable_one_is_as_good_as_none(tmp_path: Path) -> None:
    kept = DiskCheckpoints(tmp_path, TASK)
    kept.write(1, {"w": torch.ones(3)})
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / first.name.replace("001", "002"))
    assert kept.read(1) is kept.read(2) is None
    first.mkdir()
    assert kept.read(1) is None


@pytest.mark.parametrize("body", [nn.Linear(16, 5), nn.Sequential(nn.Linear(16, 6)), nn.Linear(16, 6, bias=False)])
def test_a_checkpoint_of_another_model_is_not_used(body: nn.Module, tmp_path: Path) -> None:
    kept = DiskCheckpoints(tmp_path, TASK)
    for layers, expected in ((nn.Linear(16, 6), 6), (body, 6), (body, 0)):
        counting = Deadly()
        local = local_of({}, {}, kept, counting)
        width = next(layers.parameters()).shape[0]
        local.model.body, local.model.head = nn.Sequential(nn.Flatten(), layers), nn.Linear(width, CLASSES)
        train(local, lambda x, y, local=local: cross_entropy(local.model(x), y))  # type: ignore[misc]
        assert counting.made == expected


# What is kept, and for how long


def test_parameters_outside_of_the_model_are_kept(tmp_path: Path) -> None:
    kept = DiskCheckpoints(tmp_path, TASK)
    trained: list[list[float]] = []
    for at in (None, 4, None):
        margins = torch.zeros(2, requires_grad=True)
        local = local_of(ADAM, {}, NoCheckpoints() if not trained else kept, Deadly(at))

        def loss(x: Tensor, y: Tensor, local: FitContext = local, margins: Tensor = margins) -> Tensor:
            return cross_entropy(local.model(x), y) + (margins - x.mean()).square().sum()

        with suppress(KilledError):
            train(local, loss, [*local.model.head.parameters(), margins])
        trained.append(margins.tolist())
    assert trained[0] == trained[2] != trained[1]


def test_the_size_of_micro_batches_is_kept(tmp_path: Path) -> None:
    kept, sizes = DiskCheckpoints(tmp_path, TASK), list[int]()
    for at in (4, None):
        sizes.clear()
        local = local_of({"batch_size": 4}, {}, kept, Deadly(at))

        def loss(x: Tensor, y: Tensor, local: FitContext = local) -> Tensor:
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("simulated")
            return cross_entropy(local.model.head(local.model.body[1](x.flatten(1))), y)  # type: ignore[index]

        with suppress(KilledError):
            train(local, loss)
    assert sizes == [2, 2, 2, 2, 2, 2]  # not one whole batch is tried again


def test_a_disk_that_is_full_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OutOfSpaceError("cannot write: no space left on device")

    case = Case("fedprp", PLANS["adam"])
    monkeypatch.setattr(files, "write", full)
    assert dies(case, tmp_path, 9)
    assert goes_on(case, tmp_path) == undisturbed(case)[0]


@pytest.mark.parametrize("error", [None, ValueError("declined, or called off"), KilledError()])
def test_checkpoints_go_when_the_task_is_over(error: BaseException | None, tmp_path: Path) -> None:
    with suppress(ValueError, KilledError), on_disk(tmp_path, TASK) as kept:
        kept.write(1, {"w": torch.ones(3)})
        kept.write(2, {"w": torch.ones(3)})
        assert len(left(tmp_path)) == 2
        if error is not None:
            raise error
    assert len(left(tmp_path)) == (2 if isinstance(error, KilledError) else 0)


def test_what_another_task_left_goes_when_one_begins(tmp_path: Path) -> None:
    with suppress(KilledError), on_disk(tmp_path, TASK) as kept:
        kept.write(1, {"w": torch.ones(3)})
        raise KilledError
    (tmp_path / FOLDER / f"{files.TEMPORARY}half-0123abcd").write_bytes(b"half")
    mine = left(tmp_path)[-1]
    with suppress(KilledError), on_disk(tmp_path, TASK):
        assert left(tmp_path) == [mine]
        raise KilledError
    with on_disk(tmp_path, Task(**{**vars(TASK), "task_id": "n2"})):
        assert left(tmp_path) == []


# In the daemon

RECIPE = {**RUN, "method": {"name": "solo"}, "plan": {**RUN["plan"], "momentum": 0.9, "checkpoint": True}}


def scene_in(folder: Path) -> AgentHarness:
    """A site with a state folder, whose first round has counted."""
    give_secret(folder)  # one for all sites: what they hand in is compared
    harness = AgentHarness(store=DiskStore(folder), recipe=RECIPE, checkpoints=partial(on_disk, folder))
    harness.fit(1)
    harness.agent().step(0.0)
    return harness


def outcome(folder: Path, harness: AgentHarness) -> tuple[list[bytes], bytes, float]:
    held = harness.store.last_counted("run", 9)
    assert (held.round, left(folder)) == (2, [])
    pushed = [released for _, released in harness.link.pushed]
    return [released.data for released in pushed], codec.encode(held.client_state), pushed[-1].metrics["loss"]


@pytest.fixture
def scenes(tmp_path: Path) -> tuple[AgentHarness, AgentHarness]:
    """Two sites that differ in nothing; the first one has trained in round 2."""
    calm, stormy = scene_in(tmp_path / "calm"), scene_in(tmp_path / "stormy")
    calm.fit(2)
    work(calm.agent(), 1)
    return calm, stormy


@pytest.mark.parametrize("at", range(6))
def test_a_daemon_that_dies_in_a_fit_goes_on(
    at: int, scenes: tuple[AgentHarness, AgentHarness], tmp_path: Path
) -> None:
    calm, stormy = scenes
    before, stormy.now.check = stormy.store.last_counted("run", 9), Deadly(at)  # type: ignore[method-assign]
    task = stormy.fit(2)
    with pytest.raises(KilledError):
        stormy.agent().step(0.0)
    assert len(left(tmp_path / "stormy")) == (at >= 3)
    stormy.restart(tmp_path / "stormy")
    after, counting = stormy.store.last_counted("run", 9), Deadly()
    assert codec.encode(before.client_state) == codec.encode(after.client_state)  # an unfinished fit changes no memory
    stormy.now.check = counting  # type: ignore[method-assign]
    stormy.link.tasks.append(task)
    work(stormy.agent(), 1)
    assert counting.made == 6 - at // 3 * 3
    assert outcome(tmp_path / "stormy", stormy) == outcome(tmp_path / "calm", calm)


def test_another_nonce_begins_anew(scenes: tuple[AgentHarness, AgentHarness], tmp_path: Path) -> None:
    calm, stormy = scenes
    stormy.now.check = Deadly(5)  # type: ignore[method-assign]
    stormy.fit(2, task_id="first")
    with pytest.raises(KilledError):
        stormy.agent().step(0.0)
    stormy.now.check = counting = Deadly()  # type: ignore[method-assign]
    stormy.fit(2, task_id="second")
    work(stormy.agent(), 1)
    assert counting.made == 6
    assert outcome(tmp_path / "stormy", stormy) == outcome(tmp_path / "calm", calm)


# The optimizers give the bytes of `torch.optim`'s classes, which they do without


STEPS = 5
SHAPES = [(8, 3, 3, 3), (8,), (), (10, 33)]
OPTIMIZERS: list[tuple[str, float, float]] = [  # optimizer, momentum, weight decay
    *(("sgd", momentum, decay) for momentum in (0.0, 0.9) for decay in (0.0, 1e-4)),
    *((optimizer, 0.0, decay) for optimizer in ("adam", "adamw") for decay in (0.0, 1e-2)),
]
Make = Callable[[Iterable[Tensor], Plan], torch.optim.Optimizer]
THEIRS: dict[str, Make] = {
    "sgd": lambda trained, plan: torch.optim.SGD(
        trained, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
    ),
    "adam": lambda trained, plan: torch.optim.Adam(trained, lr=plan.lr, weight_decay=plan.weight_decay),
    "adamw": lambda trained, plan: torch.optim.AdamW(trained, lr=plan.lr, weight_decay=plan.weight_decay),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def trained_on(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in SHAPES]


def steps(trained: list[Tensor], optimizer: Optimizer | torch.optim.Optimizer) -> None:
    """Random gradients; the first parameter has its first one in the second step, and the last none in the third."""
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        for tensor in trained:
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        if step in (0, 2):
            trained[0 if step == 0 else -1].grad = None
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("optimizer", "momentum", "decay"), OPTIMIZERS)
def test_parameters_and_moments_are_those_of_pytorchs(
    optimizer: str, momentum: float, decay: float, device: str
) -> None:
    plan = Plan.model_validate({"lr": 0.1, "optimizer": optimizer, "momentum": momentum, "weight_decay": decay})
    ours, theirs = trained_on(device), trained_on(device)
    made, expected = Optimizer(plan, ours, plan.lr), THEIRS[optimizer](theirs, plan)
    steps(ours, made)
    steps(theirs, expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    # A checkpoint holds the moments under these very numbers and names.
    state = expected.state_dict()["state"]
    assert made.moments.keys() == state.keys()
    for number, moments in made.moments.items():
        assert moments.keys() == state[number].keys()
        for name, moment in moments.items():
            assert torch.equal(moment, state[number][name])
            assert moment.device == state[number][name].device
