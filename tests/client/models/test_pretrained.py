"""A run that begins with a pre-trained body: what is read, what is refused, and who has to have the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from protofed.client.models.catalogue import first_model
from protofed.client.policy.policy import Policy
from protofed.client.policy.rules import Limits
from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.errors import ConfigError
from protofed.common.payload import Part, Tensors, same_tensors
from protofed.deploy.simulation.simulation import build_agents, everything, simulation
from protofed.testing.live_server import LiveServer, links

RecipeOf = Callable[..., Recipe]
Kept = Callable[..., Digest]
MODEL = {"name": "mlp", "hidden": [12]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That `PROTOFED_DATA` names."""
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def kept(folder: Path) -> Kept:
    """Writes a file of weights under its digest."""

    def keep(data: bytes) -> Digest:
        (folder / f"{digest(data)}.safetensors").write_bytes(data)
        return digest(data)

    return keep


@pytest.fixture
def recipe(recipe_of: RecipeOf) -> Callable[..., Recipe]:
    def make(body: str | None = None, method: str = "fedprp", **changes: Any) -> Recipe:
        model = MODEL if body is None else {**MODEL, "pretrained_body": body}
        return recipe_of(method, model=model, **{"rounds": 1, **changes})

    return make


Make = Callable[..., Recipe]


def exported(body: Tensors, **head: Any) -> bytes:
    """As the `model.safetensors` of an export."""
    return save({f"body.{name}": array for name, array in body.items()} | {f"head.{n}": t for n, t in head.items()})


def another_body(recipe: Recipe) -> Tensors:
    return {name: 1.25 * array for name, array in first_model(recipe, frozenset())[Part.BODY].items()}


def test_the_first_model_has_the_files_body_and_a_recipe_names_its_digest(recipe: Make, kept: Kept) -> None:
    drawn, body = first_model(recipe(), frozenset()), another_body(recipe())
    made = first_model(recipe(kept(exported(body, weight=np.ones((10, 12))))), frozenset())
    assert same_tensors({Part.BODY: made[Part.BODY]}, {Part.BODY: body})
    assert same_tensors({Part.HEAD: made[Part.HEAD]}, {Part.HEAD: drawn[Part.HEAD]})  # the private heads' beginning
    for name in ("../" + "0" * 61, "0" * 63, "A" * 64):
        with pytest.raises(ValueError, match="pretrained_body"):
            recipe(name)
    sent = parse_json(recipe("0" * 64).wire(), Recipe, "the recipe")
    assert sent.model.pretrained_body == "0" * 64
    assert sent.model.options == {"hidden": [12]}
    assert sent.fingerprint() != recipe().fingerprint()


def test_a_simulation_and_a_server_begin_with_it(recipe: Make, kept: Kept, tmp_path: Path) -> None:
    body = another_body(recipe())
    started = recipe(kept(exported(body)))
    with simulation(started) as running:
        running.go(until=lambda: running.run.published is not None)
        assert running.run.published is not None
        first = running.run.published
        assert same_tensors({Part.BODY: first.state[Part.BODY]}, {Part.BODY: body})
        running.go()
        last = running.run.published.address
    assert last != first.address
    server = LiveServer(started, tmp_path / "server")
    try:
        with links(server.address) as connect:
            rules = everything(started).rules.model_copy(update={"limits": Limits()})
            agents = build_agents(started, connect, policy=Policy(rules))
            while not server.runs.finished:
                for agent in agents:
                    agent.step(0.0)
        published = server.runs.of(started.name).published
        assert published is not None
        assert published.address == last  # sites have checked the first model against their own files
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04\x95 " + bytes(7) + b"}\x94\x8c\rbody.0.weight\x94as.", "is no safetensors file"),
        (b"", "is no safetensors file"),
        (exported({"0.weight": np.zeros((12, 64), np.float32)}), "does not fit the recipe's model: the model and what"),
        (save({"0.weight": np.zeros((12, 64), np.float32)}), "does not fit the recipe's model"),  # no tensor `body.…`
    ],
    ids=["Python objects", "empty", "other names", "no prefix"],
)
def test_a_file_of_something_else_is_refused(data: bytes, said: str, recipe: Make, kept: Kept) -> None:
    with pytest.raises(ConfigError, match=said):
        first_model(recipe(kept(data)), frozenset())


def test_shapes_and_values_that_do_not_fit_and_another_file_of_that_name_are_refused(
    recipe: Make, kept: Kept, folder: Path
) -> None:
    body = another_body(recipe())
    name = next(iter(body))
    with pytest.raises(ConfigError, match="the model expects"):
        first_model(recipe(kept(exported({**body, name: np.zeros((1, 1), np.float32)}))), frozenset())
    with pytest.raises(ConfigError, match=f"body/{name} has values that are not finite"):
        first_model(recipe(kept(exported({**body, name: body[name] * np.nan}))), frozenset())
    wanted = kept(exported(another_body(recipe())))
    (folder / f"{wanted}.safetensors").write_bytes(exported(first_model(recipe(), frozenset())[Part.BODY]))
    with pytest.raises(ConfigError, match="expected the digest in the file's name"):
        first_model(recipe(wanted), frozenset())


def test_a_site_without_the_file_is_told_what_to_do(recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started = recipe("0" * 64)
    with pytest.raises(ConfigError, match="Put the run's pre-trained body there"), simulation(started):
        pass
    monkeypatch.delenv("PROTOFED_DATA")
    with pytest.raises(ConfigError, match="set PROTOFED_DATA to the folder that has it"), simulation(started):
        pass
