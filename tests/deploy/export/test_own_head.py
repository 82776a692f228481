"""A method outside protofed with a head of its own: exported like any other, made again only where it is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, cast

import pytest
import torch
from tests.support.finished_runs import FinishedRun, finished_run, probabilities
from torch import Tensor, nn

from protofed.client.method import Declaration, FitContext, MethodHead, Part, Payload, Update, dump, load
from protofed.client.models.split import blank_head
from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import NamedOptions
from protofed.common.errors import ConfigError
from protofed.common.plugins import MethodPlugin
from protofed.deploy.export import model_folder
from protofed.deploy.export.export import ExportRequest, export
from protofed.deploy.export.formats import ExportError

HERE = "tests.deploy.export.test_own_head"


class SquaredHead(MethodHead):
    """The linear head on squared features."""

    def __init__(self, own: nn.Module, power: float = 2.0) -> None:
        super().__init__()
        self.own, self.power = own, power

    @classmethod
    def blank(cls, own: nn.Module) -> Self:
        return cls(own)

    def forward(self, features: Tensor) -> Tensor:
        return cast("Tensor", self.own(features.pow(self.power)))


class PlainHead(nn.Module):
    """The same; but nothing says how it is made."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, features: Tensor) -> Tensor:
        return cast("Tensor", self.own(features.square()))


@dataclass(frozen=True)
class Client:
    """FedAvg with that head, which is not trained."""

    declares: ClassVar[Declaration] = Declaration(
        personal="trained",
        global_model=True,
        mixes_classes=False,
        exchanges=frozenset(),
        own_losses=frozenset(),
        tasks="any",
    )
    sends: ClassVar[frozenset[Part]] = frozenset({Part.BODY, Part.HEAD})
    head: str = "squared"

    def load_global(self, local: FitContext, received: Payload) -> None:
        own = getattr(local.model.head, "own", local.model.head)
        made = {"squared": SquaredHead(own), "cubed": SquaredHead(own, 3.0), "plain": PlainHead(own)}
        local.model.head = made[self.head]
        load(local.model.body, received[Part.BODY])
        load(own, received[Part.HEAD])

    def fit(self, local: FitContext, received: Payload) -> Update:
        self.load_global(local, received)
        own = local.model.head.get_submodule("own")
        with torch.no_grad():
            own.get_parameter("bias").add_(torch.arange(10) / 100)
        return local.update({Part.BODY: dump(local.model.body), Part.HEAD: dump(own)}, loss=1.0)


METHOD = MethodPlugin(f"{HERE}:Client", "fedavg", client_options=("head",), server_options=("weighting",))
ALLOWED = frozenset({f"{HERE}:METHOD"})
HEAD = f"{HERE}:SquaredHead"


@pytest.fixture
def request_of(recipe_of: Callable[..., Recipe], tmp_path: Path) -> Callable[..., tuple[FinishedRun, ExportRequest]]:
    """The export of a finished run of that method with this head."""
    plugins.allow(ALLOWED)

    def make(head: str, kind: str = "global") -> tuple[FinishedRun, ExportRequest]:
        method = NamedOptions.model_validate({"name": f"{HERE}:METHOD", "head": head})
        recipe = recipe_of("fedavg", rounds=1, model={"name": "mlp", "hidden": [16]}, name=f"head-{head}")
        done = finished_run(recipe.model_copy(update={"method": method}).model_dump_json())
        asked = ExportRequest(done.run, kind, tmp_path / "m", state=done.state, allowed=ALLOWED)
        return done, replace(asked, site_state=done.site("site-1"))

    return make


Requests = Callable[..., tuple[FinishedRun, ExportRequest]]


@pytest.mark.parametrize(
    ("kind", "who", "score"), [("global", "evaluator", "global.accuracy"), ("personal", "site-1", "personal.accuracy")]
)
def test_it_predicts_as_in_the_run(kind: str, who: str, score: str, request_of: Requests, tmp_path: Path) -> None:
    done, asked = request_of("squared", kind)
    assert export(asked).facts.model.head == HEAD
    pixels = done.test.pixels().numpy()
    for runtime, allowed in (("torch", frozenset({HEAD})), ("onnx", frozenset[str]())):
        found = probabilities(tmp_path / "m", pixels, allowed, runtime)  # type: ignore[arg-type]
        assert (found.argmax(1) == done.test.labels.numpy()).mean() == pytest.approx(done.scores[who][score], abs=1e-9)
    assert HEAD in (tmp_path / "m" / model_folder.CARD).read_text(encoding="utf-8")


def test_whoever_did_not_allow_its_code_runs_none_of_it(request_of: Requests, tmp_path: Path) -> None:
    done, asked = request_of("squared")
    export(asked)
    with pytest.raises(ConfigError, match=f"--allow-plugin {HEAD}"):
        probabilities(tmp_path / "m", done.test.pixels()[:2].numpy())


def test_what_its_weights_do_not_say_is_found_before_anything_is_written(request_of: Requests, tmp_path: Path) -> None:
    _, asked = request_of("cubed")
    with pytest.raises(ExportError, match="differ"):
        export(asked)
    assert not (tmp_path / "m").exists()


def test_a_head_that_does_not_say_how_it_is_made_can_be_a_graph(request_of: Requests, tmp_path: Path) -> None:
    done, asked = request_of("plain")
    with pytest.raises(ConfigError, match="MethodHead"):
        export(asked)
    assert not (tmp_path / "m").exists()
    export(replace(asked, format="onnx"))
    found = probabilities(tmp_path / "m", done.test.pixels().numpy(), runtime="onnx").argmax(1)
    recorded = done.scores["evaluator"]["global.accuracy"]
    assert (found == done.test.labels.numpy()).mean() == pytest.approx(recorded, abs=1e-9)


def test_a_head_inside_a_function_is_refused_when_it_is_defined() -> None:
    with pytest.raises(TypeError, match="expected a class of a module"):

        class Lost(SquaredHead):
            pass


@pytest.mark.parametrize("kind", ["os:system", "builtins:int", "os:nothing", "nearer"])
def test_what_is_no_head_is_not_called_even_if_it_is_allowed(kind: str) -> None:
    linear = nn.Linear(4, 3)
    with pytest.raises(ConfigError):
        blank_head(kind, linear, frozenset({kind}))
    with pytest.raises(ConfigError, match="not allowed"):
        blank_head(HEAD, linear, frozenset({"os:system"}))
    assert isinstance(blank_head(HEAD, linear, frozenset({HEAD})), MethodHead)
