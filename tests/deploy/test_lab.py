"""The Python face for notebooks."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import structlog

from protofed.common.errors import ConfigError
from protofed.deploy.simulation.simulation import simulation
from protofed.lab import compare, load_recipe, simulate


def test_a_simulation_ends_in_the_same_state_as_the_command_lines() -> None:
    result = simulate("digits-fednh", rounds=2, plan__lr=0.05, quiet=True)
    with simulation(load_recipe("digits-fednh", rounds=2, plan={"lr": 0.05})) as running:
        running.go()
        assert result.digest == running.ledger.rounds(running.recipe.name)[-1].state
    assert result.recipe.plan.lr == 0.05
    assert result.scores.index.names == ["round", "site"]
    assert result.curves().index[-1] == 2
    assert result.figure()._repr_png_().startswith(b"\x89PNG")
    assert "<table" in result._repr_html_()
    with pytest.raises(ConfigError):
        result.figure("no.such.score")
    score = r"\d+\.\d %"
    scores = rf"global accuracy {score}, own models PM\(V\) {score}, PM\(L\) {score}"
    assert re.fullmatch(rf"SimulationResult\(digits-fednh; completed, 2 of 2 rounds, {scores}\)", repr(result))


def test_a_comparison_has_means_and_deviations_and_no_unknown_key() -> None:
    result = compare(["digits-fedavg"], seeds=[0, 1], rounds=1, plan__epochs=1)
    curve = result.curves()["global.accuracy"]
    assert len(repr(result).splitlines()) == 2
    assert "digits-fedavg: 2 runs; completed, 1 of 1 rounds, global accuracy" in repr(result)
    seeds = result.scores["global.accuracy"].groupby("seed").mean()
    assert curve["mean"].tolist() == [pytest.approx(seeds.mean())]
    assert curve["std"].tolist() == [pytest.approx(seeds.std())]
    with pytest.raises(ConfigError):
        load_recipe("digits-fednh", plan__lrr=0.1)


@pytest.mark.parametrize("package", ["pandas", "matplotlib"])
def test_a_missing_package_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("lab", "deploy.experiments.curves", "deploy.plots"):
        monkeypatch.delitem(sys.modules, f"protofed.{module}")
    with pytest.raises(ModuleNotFoundError, match=r"whl\[lab\]") as missing:
        importlib.import_module("protofed.lab")
    assert missing.value.name is not None
    assert missing.value.name.partition(".")[0] == package


def test_quiet_runs_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    configuration = structlog.get_config()
    # Without a long tail: a model that knows one class only would be warned of.
    simulate("digits-fedavg", rounds=1, plan__epochs=1, data__long_tail=1.0, quiet=True)
    compare(["digits-fedavg"], rounds=1, plan__epochs=1, data__long_tail=1.0, quiet=True)
    assert structlog.get_config() == configuration
    assert capfd.readouterr() == ("", "")
