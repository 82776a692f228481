"""A finished simulation, opened again so that it can be drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from protofed.client.data.decoding import in_unit
from protofed.client.data.site import load_sites, load_test
from protofed.client.data.site_data import SiteData
from protofed.client.method import ClientMethod, client_methods
from protofed.client.models.catalogue import device_model
from protofed.client.models.split import SplitModel
from protofed.client.state.disk_store import DiskStore
from protofed.client.training.context import FitContext
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Input
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import ConfigError, StateError
from protofed.common.payload import Array, Part, Payload, SiteId, unit
from protofed.common.protocol.scores import spreads
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.deploy.simulation.simulation import EVALUATOR, simulation, site_names
from protofed.server.method import ServerMethod, sent, server_methods
from protofed.server.rounds.context import build_method
from protofed.server.storage.database import LEDGER_FILE


@dataclass(frozen=True)
class FinishedRun:
    """What a simulation left.

    Attributes:
        label: the job's folder, or else the recipe's name.
        recipe: of the run as recorded, with the settings of its data.
        folder: the simulation's state.
        state: what the server holds at the end.
        scores: of the last scored round, means over sites.
    """

    label: str
    recipe: Recipe
    folder: Path
    state: Payload
    scores: Mapping[str, float]

    @property
    def server_half(self) -> ServerMethod:
        """Of the run's method."""
        return build_method(self.recipe)

    @property
    def title(self) -> str:
        """Of the run's method."""
        return server_methods.about(self.recipe.method.name).title

    @property
    def client_half(self) -> ClientMethod:
        """Of the run's method."""
        return client_methods.build(self.recipe.method.name, self.recipe.method.options)

    def sites(self) -> dict[SiteId, SiteData]:
        """What each site trained on."""
        site_data = load_sites(self._data, *self._loaded_for, noisy=self.recipe.plan.dp is not None)
        return dict(zip(site_names(len(site_data)), site_data, strict=True))

    def test(self) -> SiteData:
        """The test set that all sites share."""
        return load_test(self._data, *self._loaded_for, noisy=self.recipe.plan.dp is not None)

    @property
    def _loaded_for(self) -> tuple[Input, int, tuple[str, ...]]:
        return self.recipe.input, self.recipe.classes, self.recipe.class_names

    def personal(self, site: SiteId) -> Payload | None:
        """What the site's last fit left, BODY and HEAD; None if none of its updates counted."""
        store = DiskStore(self.folder / "sites" / site)
        try:
            return store.last_counted(self.recipe.name, self.recipe.rounds + 1).personal
        finally:
            store.close()

    def global_model(self, data: SiteData) -> SplitModel:
        """The model of all sites, in evaluation mode: what an evaluator scores."""
        recipe = self.recipe
        cpu = torch.device("cpu")
        local = FitContext(
            site=EVALUATOR,
            round=recipe.rounds,
            rounds=recipe.rounds,
            model=device_model(recipe, cpu, recipe.names),
            data=data,
            classes=recipe.classes,
            plan=recipe.plan,
            rng=torch.Generator().manual_seed(recipe.seed),
            client_state={},
        )
        self.client_half.load_global(local, sent(self.server_half, self.state, EVALUATOR))
        return local.model.eval()

    def prototypes(self) -> dict[int, Array]:
        """The global prototypes by class, [D] each; none, if the method has none."""
        tensors = self.state.get(Part.PROTOTYPES, {})
        return dict(enumerate(tensors["mean"])) if "mean" in tensors else {int(name): tensors[name] for name in tensors}

    @property
    def _data(self) -> Data:
        if self.recipe.data is None:
            raise ConfigError(f"recipe '{self.recipe.name}' has no [data]; expected that of a simulation")
        return self.recipe.data


@dataclass(frozen=True, eq=False)
class Embedded:
    """Test examples as the global model sees them.

    Attributes:
        inputs: [N, channels, H, W], pixels in 0..1.
        features: [N, D]; of unit length, as the prototypes, where the method compares by direction.
        labels: [N].
        prototypes: by class, [D] each.
    """

    inputs: Array
    features: Array
    labels: Array
    prototypes: Mapping[int, Array]


def embedded(run: FinishedRun, most: int) -> Embedded:
    """At most so many test examples, drawn with a fixed seed: the same ones for all runs on one test set.

    Raises:
        ConfigError: the run has no test set that its sites share.
    """
    data = run.test()
    if not len(data.test):
        raise ConfigError(f"{run.label} has no shared test set whose features could be drawn")
    drawn = np.random.default_rng(0).permutation(len(data.test))[:most]
    examples = data.test.take(torch.from_numpy(np.sort(drawn)))
    model = run.global_model(data)
    with torch.no_grad():
        features = torch.cat([model.body(images) for images, _ in data.ordered(examples, 512)]).float().numpy()
    prototypes = run.prototypes()
    if any(getattr(compared, "compared_by", None) == "direction" for compared in (run.client_half, model.head)):
        features, prototypes = unit(features), {c: unit(row) for c, row in prototypes.items()}
    return Embedded(in_unit(examples.pixels().numpy()), features, examples.labels.numpy(), prototypes)


def open_run(folder: Path, recipe: Recipe | None = None) -> FinishedRun:
    """A job of `protofed compare`, or a simulation's state with its recipe.

    Raises:
        StateError: neither is there, it is in use, or the run has not ended well.
        ConfigError: a state without its recipe.
    """
    if (folder / "recipe.json").exists():
        recipe, label, state = ExperimentJob.claimed(folder).recipe, folder.name, folder / "state"
    elif recipe is not None:
        label, state = recipe.name, folder
    elif (folder / LEDGER_FILE).exists():
        raise ConfigError(f"{folder} is a simulation's state, which does not hold its data's settings; add --recipe")
    if recipe is None or not (state / LEDGER_FILE).exists():
        raise StateError(f"{folder} holds no simulation; expected a job of `compare`, or the --state of `simulate`")
    if recipe.task.name != CLASSIFICATION:
        raise ConfigError(f"the run in {folder} is of the task '{recipe.task.name}': figures are of classes alone")
    with simulation(recipe, state) as running:
        published = running.run.published
        if not running.runs.finished or running.runs.failed or published is None:
            raise StateError(f"the run in {folder} has not ended well; run the same command again to finish it")
        scored, ledger = running.ledger.scored_round(recipe.name), running.ledger
        single, sums = ledger.scores(recipe.name, scored), ledger.score_sums(recipe.name, scored)
        newest = spreads(single.get(scored, {}), sums.get(scored, {}))
        recorded = running.run.recipe.model_copy(update={"data": recipe.data})
    return FinishedRun(label, recorded, state, published.state, {k: v.mean for k, v in newest.items()})
