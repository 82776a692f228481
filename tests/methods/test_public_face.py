"""What authors of methods, models and datasets get from `protofed`: one module each, frozen here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import protofed.data as data_face
import protofed.models as model_face
import protofed.tasks as task_face
from protofed.client import method as client_face
from protofed.common import plugins
from protofed.common.config.toml_files import parse_toml
from protofed.common.plugins import PluginKind
from protofed.deploy.simulation.simulation import simulation
from protofed.deploy.templates.new import new_package
from protofed.server import method as server_face
from protofed.testing.small_recipe import small_recipe

ROOT = Path(__file__).parents[2]
HALVES = [
    path
    for side in ("client", "server")
    for path in sorted((ROOT / side / "protofed" / side / "methods").glob("*.py"))
    if path.name != "__init__.py"
]

CLIENT = """
Array CalibratedEnsemble ClassRows ClientMethod ComparedBy ComparingMethod ConfigError Cores CosineHead Declaration
Distance DpCost Exchange FailureReason FitContext FitStart LocalLoss Loss MethodHead ONE_CLASS ParameterGroup Part
Payload Personal Plan PrivateMethod PrototypeHead RefiningClientMethod SiteId SplitModel Step SumForm
SummableClientMethod TaskFailedError Tensors Trained Update Weigher Weighting balanced_softmax class_gradients
class_means class_shares
client_methods compute_losses distance distillation distribution_gap dump frequent frozen held inter_class intra_class
label_shares load load_joined mean_discrepancy mixed mixture model_contrast named prototypical_contrast proximal
remembered sgd_length site_models soft_labels stacked supervised towards train train_head weights
"""
SERVER = """
Array ClassRows ClasswiseMethod ConfigError ContributorMeans ExpectedUpdate JoiningMethod Mean Method NOTHING
ONE_CLASS OwnStartMethod Part Payload RefiningServerMethod RoundContext ServerMethod SiteId StateError SumForm
SummableServerMethod Sums TensorSpec Tensors Update Weighting describe distance_norm is_buffer like prototype_rows
server_methods towards unit weigh weighted_mean weights
"""


MODELS = "ConfigError Input SplitModel"
DATA = "Data DataError DataSplit Examples Input read_dataset"
TASKS = """
CONSTANT ClientTask ConfigError DataError LearningTask LeftOut OwnLabel OwnNames Predictions Recipe Target TaskScore
"""
FACES = [(client_face, CLIENT), (server_face, SERVER), (model_face, MODELS), (data_face, DATA), (task_face, TASKS)]


@pytest.mark.parametrize(("face", "names"), FACES, ids=lambda given: getattr(given, "__name__", ""))
def test_the_exported_names_are_a_promise(face: ModuleType, names: str) -> None:
    assert sorted(face.__all__) == sorted(names.split())
    assert all(hasattr(face, name) for name in face.__all__)


def test_the_guides_model_dataset_and_partition_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import nothing of protofed but the two faces."""
    guide = (ROOT / "docs/how-to/plugins.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    assert set(re.findall(r"from (protofed[\w.]*)", code)) == {"protofed.models", "protofed.data"}
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_allowed", set())
    (table,) = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    recipe = small_recipe("fedavg", name="mine", rounds=1, **parse_toml(table, "the guide's recipe"))
    with simulation(recipe) as running:
        running.go()
        assert running.ledger.newest("mine") is not None


def test_the_guides_task_is_the_one_that_is_written(tmp_path: Path) -> None:
    """Each line of its code stands in the package; tests/conformance/test_new_packages.py runs that."""
    files = [path for path in new_package(PluginKind.TASK, "my-grades", tmp_path) if path.suffix in {".py", ".toml"}]
    written = {line for path in files for line in path.read_text(encoding="utf-8").splitlines()}
    guide = (ROOT / "docs/how-to/add-a-task.md").read_text(encoding="utf-8")
    code = re.findall(r"```(?:python|text)\n(.*?)```", guide, re.DOTALL)
    assert len(code) == 5
    assert [line for block in code for line in block.splitlines() if line not in written] == []


@pytest.mark.parametrize("path", HALVES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_half_imports_nothing_else_of_protofed(path: Path) -> None:
    side = path.parts[-3]
    face = {"client": client_face, "server": server_face}[side]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(module.startswith("protofed") for module in modules)
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("protofed"):
            assert node.level == 0
            if side == "server" and module.startswith("protofed.server.methods."):  # one paper's mathematics, shared
                continue
            assert module == f"protofed.{side}.method"
            assert {alias.name for alias in node.names} <= set(face.__all__)
