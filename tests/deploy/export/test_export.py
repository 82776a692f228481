"""An exported model answers exactly as the run's own did, and its folder says where it comes from.

A site's own model is written as it predicts: with its own statistics, where the recipe keeps them local.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tests.support.finished_runs import ROUNDS, FinishedRun, accuracy, finished_run, probabilities
from tests.support.normed_model import NAME, seeded

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import dump
from protofed.client.transport.audit import ClientAudit
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input, NamedOptions
from protofed.common.errors import ConfigError, DataError, ProtofedError, StateError
from protofed.common.payload import Part
from protofed.common.storage.journal import Journal
from protofed.deploy.export import kept_states, model_folder
from protofed.deploy.export.export import ExportRequest, export
from protofed.deploy.export.kept_states import Base, KeptRound
from protofed.deploy.export.models import personal_model
from protofed.deploy.state_folder import open_state
from protofed.server.methods.cwfedavg import CwFedAvgServer
from protofed.server.methods.cwfedavg_private import CwFedAvgPrivateServer
from protofed.server.operator.run_record import run_record
from protofed.testing.small_recipe import small_recipe

Simulated = Callable[[str], FinishedRun]
WITHOUT = ("cwfedavg", "cwfedavg-private", "solo")
SITES = ("site-1", "site-2", "site-3")


@pytest.fixture(scope="session")
def simulated(recipe_of: Callable[..., Recipe]) -> Simulated:
    """By method; no site has all classes."""
    model = {"name": "mlp", "hidden": [16]}
    partition = {"kind": "dirichlet", "sites": 3, "beta": 0.1, "min_examples": 20, "min_classes": 2}
    data = {"source": "digits", "partition": partition}
    return lambda method: finished_run(recipe_of(method, rounds=ROUNDS, model=model, data=data).model_dump_json())


@pytest.fixture(scope="session")
def wanted(simulated: Simulated) -> Callable[..., ExportRequest]:
    """Weights only, of the simulation's folder."""

    def make(method: str, kind: str, out: Path, **changes: object) -> ExportRequest:
        done = simulated(method)
        return replace(ExportRequest(done.run, kind, out, "safetensors", state=done.state), **changes)  # type: ignore[arg-type]

    return make


Wants = Callable[..., ExportRequest]


@pytest.mark.parametrize("method", WITHOUT)
def test_a_personal_model_scores_as_the_site_reported(
    method: str, simulated: Simulated, wanted: Wants, tmp_path: Path
) -> None:
    done = simulated(method)
    for site in SITES:
        out = tmp_path / site
        made = export(wanted(method, "personal", out, site_state=done.site(site), recipe=done.recipe))
        recorded = done.scores[site]["personal.accuracy"]
        assert accuracy(out, done.test) == pytest.approx(recorded, abs=1e-9)
        assert made.facts.scores.values["personal.accuracy"] == recorded


@pytest.mark.parametrize("server", [True, False])
def test_a_site_needs_no_server_for_the_scores_of_its_own_model(
    server: bool, simulated: Simulated, wanted: Wants, tmp_path: Path
) -> None:
    done, site = simulated("solo"), tmp_path / "site"
    state = done.state if server else None
    shutil.copytree(done.site("site-1"), site)
    asked = wanted("solo", "personal", tmp_path / "m", site_state=site, state=state, recipe=done.recipe)
    assert export(asked).facts.scores.values["personal.pm_l"] == done.scores["site-1"]["personal.pm_l"]


def test_a_site_may_predict_with_its_private_head(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    method = {"name": "fedprp", "head_epochs": 1, "prediction": "head"}
    recipe = recipe_of("fedprp", rounds=1, model={"name": "mlp", "hidden": [16]})
    recipe = recipe.model_copy(update={"method": NamedOptions.model_validate(method), "name": "by-head"})
    done = finished_run(recipe.model_dump_json())
    asked = ExportRequest(
        "by-head", "personal", tmp_path / "m", "safetensors", state=done.state, site_state=done.site("site-1")
    )
    assert export(asked).facts.model.head == "own"
    assert accuracy(tmp_path / "m", done.test) == pytest.approx(done.scores["site-1"]["personal.accuracy"], abs=1e-9)


def test_a_private_class_model_is_the_body_with_that_head(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    done = simulated("cwfedavg-private")
    state = kept_states.of_folder(done.state, done.run).state
    found = [export(wanted("cwfedavg-private", f"class:{c}", tmp_path / str(c))).facts.origin for c in range(10)]
    half = CwFedAvgPrivateServer()
    assert [one.weights for one in found] == [codec.digest(codec.encode(half.class_model(state, c))) for c in range(10)]
    assert len({one.weights for one in found}) > 1
    assert "class '3'" in (tmp_path / "3" / model_folder.CARD).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("method", "kind", "phrase"),
    [
        ("cwfedavg", "global", "no global model; take --model class:N"),
        ("cwfedavg-private", "global", "no global model"),
        ("solo", "global", "no global model; take --model personal at a site"),
        ("fednh", "class:1", "no models by class"),
        ("cwfedavg", "class:10", "expected 0 to 9"),
        ("cwfedavg", "class:-1", "expected global, class:N or personal"),
        ("fednh", "local", "expected global, class:N or personal"),
        ("fednh", "personal", "--site-state"),
    ],
)
def test_a_model_that_there_is_not_is_refused(
    method: str, kind: str, phrase: str, wanted: Wants, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=phrase):
        export(wanted(method, kind, tmp_path / "m"))
    assert not (tmp_path / "m").exists()


def test_an_earlier_round_is_exported_and_no_damaged_state(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    made = export(wanted("fedavg", "global", tmp_path / "m", round=1))
    assert made.facts.origin.round == 1
    with pytest.raises(ConfigError, match="round 7"):
        export(wanted("fedavg", "global", tmp_path / "n", round=7))
    done = simulated("fedavg")
    shutil.copytree(done.state, tmp_path / "state")
    address = kept_states.of_folder(done.state, done.run).address
    with (tmp_path / "state" / "blobs" / address).open("ab") as file:
        file.write(b"x")
    with pytest.raises(StateError, match="has changed on disk"):
        export(wanted("fedavg", "global", tmp_path / "damaged", state=tmp_path / "state"))
    assert not (tmp_path / "damaged").exists()


def test_private_mixtures_need_the_sites_own_data(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    done = simulated("cwfedavg-private")
    asked = wanted("cwfedavg-private", "personal", tmp_path / "m", site_state=done.site("site-2"))
    with pytest.raises(ConfigError, match="--settings"):
        export(asked)
    assert done.recipe.data is not None
    export(replace(asked, site_data=(done.recipe.data, 1)))
    assert accuracy(tmp_path / "m", done.test) == pytest.approx(done.scores["site-2"]["personal.accuracy"], abs=1e-9)


def test_a_site_needs_no_server_for_what_it_was_sent(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    """Its own folder has the newest model that it fetched, and its audit log says of which run and round."""
    done = simulated("cwfedavg")
    found = kept_states.of_folder(done.state, done.run)
    data = codec.encode(CwFedAvgServer().broadcast(found.state, "site-2"))
    site = tmp_path / "site"
    shutil.copytree(done.site("site-2"), site)
    asked = wanted("cwfedavg", "personal", tmp_path / "m", site_state=site, state=None, recipe=done.recipe)
    with pytest.raises(ConfigError, match="no longer has the newest model"):
        export(asked)
    (site / ".incoming").mkdir()
    (site / ".incoming" / codec.digest(data)).write_bytes(data)
    audit = ClientAudit(journal := Journal(site / "audit.jsonl"))
    for run, address in ((done.run, codec.digest(data)), ("another", codec.digest(b"its"))):
        audit.sent("server", "plaintext", "GetChunk", {"run": run, "digest": address, "index": 0}, b"")
    audit.sent("server", "plaintext", "ReportScores", {"run": done.run, "round": 2}, b"")
    journal.close()
    made = export(asked)
    assert (made.facts.origin.round, made.facts.origin.state, made.facts.origin.site) == (
        2,
        codec.digest(data),
        "site-2",
    )
    assert accuracy(tmp_path / "m", done.test) == pytest.approx(done.scores["site-2"]["personal.accuracy"], abs=1e-9)
    (site / ".incoming" / codec.digest(data)).write_bytes(data[:-1] + b"x")
    with pytest.raises(StateError, match="damaged"):
        export(replace(asked, force=True))


def test_the_runs_names_and_preparation_go_with_the_model(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    names = tuple(f"digit {c}" for c in range(10))
    crop = {"transform": "torchvision/CenterCrop", "size": 8}
    input_ = {"shape": (1, 8, 8), "fit": "pad", "window": (50, 200), "frames": {"every": 3}, "prepare": [crop]}
    recipe = recipe_of("fedavg", rounds=1, model={"name": "mlp", "hidden": [4]}, class_names=names, input=input_)
    done = finished_run(recipe.model_copy(update={"name": "named"}).model_dump_json())
    export(ExportRequest(done.run, "global", tmp_path / "m", "safetensors", state=done.state))
    made = model_folder.read(tmp_path / "m").facts
    assert (made.model.classes, made.model.input) == (names, Input.model_validate(input_))
    told = (tmp_path / "m" / "MODEL_CARD.md").read_text(encoding="utf-8")
    for words in (
        "the frames 1, 4, 7 and",
        "Values of -50 to 150",
        "torchvision/CenterCrop (size = 8)",
        "black beside",
    ):
        assert words in told


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Of every file: what is in it, and when it was written. SQLite's readers have files of their own beside it."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_looking_leaves_the_folders_as_they_are(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    done = simulated("solo")
    (written := done.state / "blobs" / ".tmp-a-running-server-writes").write_bytes(b"")
    before = contents(done.state)
    export(wanted("solo", "personal", tmp_path / "m", site_state=done.site("site-1"), recipe=done.recipe))
    kept_states.of_folder(done.state, done.run)
    assert contents(done.state) == before
    written.unlink()


def test_nothing_is_replaced_unless_it_is_forced_nor_written_in_a_dry_run(wanted: Wants, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="--force"):
        export(wanted("fedavg", "global", tmp_path))
    export(wanted("fedavg", "global", tmp_path, force=True))
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert model_folder.read(tmp_path).files.keys() == {model_folder.WEIGHTS}
    said = export(wanted("fednh", "global", tmp_path / "m", dry_run=True))
    assert not (tmp_path / "m").exists()
    written = export(wanted("fednh", "global", tmp_path / "m"))
    assert said.files.keys() == written.files.keys()
    assert said.facts.origin.weights == written.facts.origin.weights


def test_classes_have_names(wanted: Wants, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"digit {c}" for c in range(10)), encoding="utf-8")
    assert export(wanted("fedavg", "global", tmp_path / "m", classes=names)).facts.model.classes[3] == "digit 3"
    assert "| 3 | digit 3 |" in (tmp_path / "m" / model_folder.CARD).read_text(encoding="utf-8")
    names.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has 2 names; expected 10"):
        export(wanted("fedavg", "global", tmp_path / "n", classes=names))


def test_every_file_tells_the_same(simulated: Simulated, wanted: Wants, tmp_path: Path) -> None:
    made = export(wanted("fednh", "global", tmp_path / "m"))
    origin, done = made.facts.origin, simulated("fednh")
    with safe_open(tmp_path / "m" / model_folder.WEIGHTS, framework="np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["origin"]) == origin.model_dump(mode="json")
    assert metadata["format_version"] == "2"
    assert (origin.run, origin.round, origin.recipe) == (done.run, ROUNDS, done.recipe.fingerprint())
    card = (tmp_path / "m" / model_folder.CARD).read_text(encoding="utf-8")
    for fact in (origin.state, origin.weights, origin.recipe, origin.at, "not a medical device", "FedNH (Dai et al."):
        assert str(fact) in card


@pytest.mark.parametrize("kind", ["global", "class:1", "personal"])
def test_another_recipe_is_refused(simulated: Simulated, wanted: Wants, tmp_path: Path, kind: str) -> None:
    run = simulated("cwfedavg" if kind.startswith("class") else "fedavg")
    other = run.recipe.model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match="is not that of run"):
        export(wanted(run.recipe.method.name, kind, tmp_path / "m", recipe=other, site_state=run.site("site-1")))


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"site_state": Path("nowhere")}, "no folder nowhere"),
        ({"run": "other-run"}, "no run 'other-run'|keeps no model"),
        ({"round": 9}, "round 9"),
    ],
)
def test_what_a_site_does_not_keep_is_named(
    changes: dict[str, object], phrase: str, simulated: Simulated, wanted: Wants, tmp_path: Path
) -> None:
    done = simulated("fednh")
    asked = wanted("fednh", "personal", tmp_path / "m", **{"site_state": done.site("site-1"), **changes})
    with pytest.raises(ProtofedError, match=phrase):
        export(asked)


def test_the_same_pixels_are_answered_the_same_in_any_batch(
    simulated: Simulated, wanted: Wants, tmp_path: Path
) -> None:
    export(wanted("fedprp", "global", tmp_path / "m"))
    pixels = simulated("fedprp").test.pixels()[:5].numpy()
    one_by_one = np.concatenate([probabilities(tmp_path / "m", pixels[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(one_by_one, probabilities(tmp_path / "m", pixels), atol=1e-6)


class Served:
    """Answers as a server's operator service does, from a state folder."""

    def __init__(self, folder: Path, damage: bytes = b"") -> None:
        self._folder, self._damage = folder, damage

    def state(self, run: str, round: int | None) -> tuple[int, bytes]:
        found = kept_states.of_folder(self._folder, run, round)
        return found.round, codec.encode(found.state) + self._damage

    def run_record(self, run: str) -> Any:
        with open_state(self._folder) as opened:
            return json.loads(json.dumps(run_record(opened.ledger, opened.blobs, run)))


def test_a_servers_state_is_the_same_model_checked_against_its_ledger(
    simulated: Simulated, wanted: Wants, tmp_path: Path
) -> None:
    done = simulated("fednh")
    by_folder = export(wanted("fednh", "global", tmp_path / "one")).facts
    by_server = export(wanted("fednh", "global", tmp_path / "two", state=None, operator=Served(done.state))).facts
    assert by_server.origin.weights == by_folder.origin.weights
    assert by_server.origin.state == by_folder.origin.state
    assert by_server.scores.values["global.accuracy"] == by_folder.scores.values["global.accuracy"]
    served = Served(simulated("fednh").state, damage=b"x")
    with pytest.raises(DataError, match="the ledger says"):
        export(wanted("fednh", "global", tmp_path / "m", state=None, operator=served))


def no_data() -> SiteData:
    raise AssertionError("FedPer needs none to predict")


def test_an_exported_model_has_the_sites_own_statistics() -> None:
    own = {"buffers.body.2.running_mean": np.full(16, 7.0, np.float32)}
    for buffers, expected in (("local", 7.0), ("averaged", 0.0)):
        recipe = small_recipe("fedper", model={"name": NAME}, plan={"buffers": buffers})
        first = seeded(recipe.input, recipe.classes)
        model = {Part.BODY: dump(first.body), Part.HEAD: dump(first.head)}
        digest = Digest("a" * 64)
        kept = KeptRound("ann", 1, digest, {Part.HEAD: model[Part.HEAD], Part.PRIVATE: own}, model)
        built = personal_model(recipe, kept, partial(Base, digest, 1, model), no_data, frozenset({NAME}))
        assert (built.model.weights()[Part.BODY]["2.running_mean"] == expected).all()
