"""What comes along fits together.

`--set` and `--dry-run`.

`protofed files`: each kind is whole, finds its parts where it was written, and takes nobody's file away.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.shipped_policies import admitted, filled_in
from typer.testing import CliRunner, Result

from protofed.client.method import client_methods
from protofed.client.models.catalogue import build
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.client.policy.update_checks import TELLS_STEPS
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe, read_recipe
from protofed.common.config.settings import ClientSettings, ServerSettings, read_settings
from protofed.common.errors import ConfigError, ProtofedError
from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.common.protocol.messages import Telemetry
from protofed.deploy import shipped
from protofed.deploy.cli.main import app
from protofed.deploy.daemons.server import read_recipes
from protofed.deploy.shipped import KINDS, from_keywords, write_files
from protofed.deploy.site.plan import site_plan
from protofed.server.method import server_methods

RECIPES = sorted(shipped.folder("recipes").glob("*.toml"))
POLICIES = ("strict", "standard", "open")
OPEN = Policy.read(shipped.folder("policies") / "open.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_used(path: Path) -> None:
    recipe = shipped.recipe(path.stem)
    assert recipe.name == path.stem
    assert server_methods.build(recipe.method.name, recipe.method.options)
    half = client_methods.build(recipe.method.name, recipe.method.options)
    build(recipe.model, recipe.input, recipe.classes)
    if half.sends & NOT_ON_THE_WIRE:
        return  # those are for simulations only
    site = OPEN
    if half.sends & TELLS_STEPS:  # then it names the method, and lets out about how many examples there are
        site = _naming(recipe.method.name)
        with pytest.raises(PolicyRefusedError) as refused:
            site.admit(recipe.method.name, half.sends, exchanges=half.declares.exchanges)
        assert refused.value.rule == "example_count"
        site = _naming(recipe.method.name, example_count=True)
    site.admit(recipe.method.name, half.sends, exchanges=half.declares.exchanges)


def _naming(method: str, **rules: bool) -> Policy:
    """The open policy with this method, too, and these rules."""
    return Policy(OPEN.rules.model_copy(update={"methods": OPEN.rules.methods | {method}, **rules}))


FOLLOW_A_PAPER = [path.stem for path in RECIPES if re.match("cifar|mnist|spiral", path.stem)]
WEIGH_BY_EXAMPLES = [name for name in FOLLOW_A_PAPER if "-dir01-" in name or "-dir05-" in name]


def test_recipes_that_follow_a_paper_do_so() -> None:
    assert len(FOLLOW_A_PAPER) > 25
    assert len(WEIGH_BY_EXAMPLES) > 9
    for name in FOLLOW_A_PAPER:
        recipe = shipped.recipe(name)
        options = recipe.method.options
        assert not recipe.plan.amp, name  # bfloat16 cosines times 30 lose 0.1 in the logits
        if "-dir01-" in name:  # sites differ much, by 3.2 among the partitions of seeds 0 to 7: no cap changes that
            assert recipe.federation.max_weight_ratio >= 10, name
        if name in WEIGH_BY_EXAMPLES and recipe.method.name == "cwfedavg-private":  # no count leaves a site
            assert "weighting" not in server_methods.options(recipe.method.name)
        elif name in WEIGH_BY_EXAMPLES:
            assert options["weighting"] == "examples", name
        if re.match("cifar.*-fednh.*-release$", name):  # from where it learns the scale
            assert (options["scale"], options["prototype_init"]) == (1.0, "orthogonal"), name
        elif re.match("cifar.*-fednh", name):
            assert (options["scale"], options.get("fixed_scale", False)) in [(20.0, False), (30.0, True)], name


def test_each_policy_allows_all_that_a_stricter_one_does_and_only_the_open_one_tells_of_examples() -> None:
    strict, standard = (
        Policy.read(shipped.folder("policies") / f"{name}.toml").rules for name in ("strict", "standard")
    )
    for narrow, wide in ((strict, standard), (standard, OPEN.rules)):
        assert narrow.methods <= wide.methods
        assert narrow.parts <= wide.parts
        assert narrow.metrics <= wide.metrics
        assert narrow.telemetry < wide.telemetry
    assert strict.telemetry == frozenset()
    assert standard.telemetry == {Telemetry.DISK_FREE_BYTES}
    assert OPEN.rules.telemetry == frozenset(Telemetry)
    hinting = {name for name in Telemetry if "examples" in name.discloses.lower()}
    assert hinting == {Telemetry.GPU_MEMORY_BYTES, Telemetry.STEP_SECONDS}
    assert not hinting & standard.telemetry
    asked = {name: Policy.read(shipped.folder("policies") / f"{name}.toml").rules.secure for name in POLICIES}
    assert asked == {"strict": "required", "standard": "required", "open": "allowed"}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_names_all_methods_that_its_other_rules_admit(name: str) -> None:
    path = shipped.folder("policies") / f"{name}.toml"
    text, methods = path.read_text(encoding="utf-8"), admitted(Policy.read(path))
    assert Policy.read(path).rules.methods == set(methods), "run `make policies`"
    assert filled_in(text, methods) == text
    assert len(methods) > 10


def test_every_file_says_what_it_is_and_a_policy_admits_by_its_rules_alone() -> None:
    rules = OPEN.rules.model_copy(update={"methods": frozenset(), "parts": frozenset({Part.BODY})})
    assert {"solo", "fedper"} <= set(admitted(Policy(rules))) < set(client_methods) - {"fedavg", "fednh"}
    required = rules.model_copy(update={"secure": "required", "parts": frozenset(Part) - NOT_ON_THE_WIRE})
    assert "solo" in admitted(Policy(required))  # sends nothing
    assert "cwfedavg" not in admitted(Policy(required))  # by default not in a sum
    assert "cwfedavg" in admitted(Policy(required.model_copy(update={"secure": "allowed"})))
    for kind in ("recipes", "policies"):
        told = [shipped.what(file) for file in shipped.files(kind).values()]
        assert all(20 < len(text) < 150 for text in told), max(told, key=len)
        assert all(text.endswith(".") for text in told)


@pytest.mark.parametrize(("site", "trio"), [("digits", False), ("digits-trio", True)])
def test_a_demonstration_site_holds_what_the_recipes_simulate(site: str, trio: bool) -> None:
    settings = tomllib.loads((shipped.folder("sites") / f"{site}.toml").read_text(encoding="utf-8"))
    data = Data.model_validate(settings["data"])
    # With [plan.dp] there is no long tail: of two images of a class noise leaves nothing.
    digits = [r for path in RECIPES if path.stem.startswith("digits-") and not (r := shipped.recipe(path.stem)).plan.dp]
    same = [recipe.data for recipe in digits if (recipe.name == "digits-trio") == trio]
    assert same
    # Auxiliary images are an evaluator's setting: a recipe that needs them takes them from these sites' images.
    assert all(d is not None and d.model_copy(update={"auxiliary_per_class": None}) == data for d in same)


def test_a_policy_is_found_by_its_name_and_a_file_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in POLICIES:
        assert shipped.policy(name) == shipped.folder("policies") / f"{name}.toml"
    for text in ("policy.toml", "./standard", "own/standard", "/srv/standard"):
        assert shipped.policy(text) == Path(text)
    with pytest.raises(ConfigError, match="did you mean 'standard'"):
        shipped.policy("standrad")
    monkeypatch.chdir(tmp_path)
    for name in ("standard", "ours"):
        (tmp_path / name).write_text("methods = []\n")
        with pytest.raises(ConfigError, match=rf"'\./{name}'"):
            shipped.policy(name)
    assert shipped.policy("./standard") == Path("standard")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_is_the_same_run_in_one_file(path: Path, tmp_path: Path) -> None:
    (alone := tmp_path / path.name).write_text(shipped.resolved(path.stem), encoding="utf-8")
    assert shipped.extends(alone) == ""
    assert read_recipe(alone) == shipped.recipe(path.stem)


@pytest.mark.parametrize("shown", [False, True], ids=["as it stands", "with all that is shown"])
def test_a_hospital_settings_file_can_be_used(shown: bool, tmp_path: Path) -> None:
    text = (shipped.folder("sites") / "hospital-folder.toml").read_text(encoding="utf-8")
    if shown:
        text = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    (tmp_path / "site.toml").write_text(text, encoding="utf-8")
    settings = read_settings(ClientSettings, tmp_path / "site.toml", {})
    assert (settings.proxy is not None, settings.data.group_pattern is not None) == (shown, shown)


def test_assignments_and_keywords_go_over_the_recipe_with_their_types() -> None:
    changed = shipped.recipe("digits-fednh", ["plan.lr=0.125", "rounds=2", "rounds=3", 'name="mine"'])
    assert (changed.plan.lr, changed.rounds, changed.name) == (0.125, 3, "mine")
    plain = shipped.recipe("digits-fednh")
    assert changed.method == plain.method
    assert changed.plan.epochs == plain.plan.epochs
    assert shipped.recipe("digits-fednh", ['method.name="fedavg"']).method.options == {}
    assert shipped.recipe("digits-fednh-dp").plan.dp is not None
    assert shipped.recipe("digits-fednh-dp", ["plan.dp="]).plan.dp is None
    default = type(shipped.recipe("digits-fednh").plan).model_fields["lr"].default
    assert shipped.recipe("digits-fednh", ["plan.lr=0.5", "plan.lr ="]).plan.lr == default
    assert shipped.recipe("digits-fednh", ["plan.lr=", "plan.lr=0.5"]).plan.lr == 0.5
    given = {"plan__lr": 0.1, "plan.epochs": 2, "evaluation": {"every": 3}, "rounds": 4}
    assert from_keywords(given) == {"plan": {"lr": 0.1, "epochs": 2}, "evaluation": {"every": 3}, "rounds": 4}


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("plan.lrr=0.1", "did you mean 'lr'"),
        ("plan.lr=fast", "plan"),
        ("rounds=0", "rounds"),
        ("plan.dpp=", "did you mean 'plan.dp'"),
        ("rounds=", "'rounds' is missing"),
        ("plan.lr", "KEY= removes the key"),
    ],
)
def test_what_a_recipe_cannot_have_or_lack_is_refused(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shipped.recipe("digits-fednh", [assignment])


RECIPE = shipped.folder("recipes") / "digits-fednh.toml"


def dry(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in (*words, "--dry-run")])


def folder_of(words: tuple[object, ...], tmp_path: Path) -> list[object]:
    """The words with `STATE` in the folder of the test."""
    return [tmp_path / "state" if word == "STATE" else word for word in words]


READERS: dict[str, tuple[object, ...]] = {
    "simulate": ("simulate", RECIPE, "--state", "STATE"),
    "server": ("server", "start", "--recipe", RECIPE, "--identity=none", "--state", "STATE"),
    "runs": ("runs", "start", RECIPE, "--identity=none", "--server", "127.0.0.1:9"),
}


@pytest.mark.parametrize("words", READERS.values(), ids=READERS)
def test_a_dry_run_prints_the_recipe_and_what_leaves_or_refuses_and_makes_nothing(
    words: tuple[object, ...], tmp_path: Path
) -> None:
    found = dry(*folder_of(words, tmp_path), "--set", "plan.lr=0.125")
    assert found.exit_code == 0
    assert Recipe.model_validate(tomllib.loads(found.stdout)) == shipped.recipe("digits-fednh", ["plan.lr=0.125"])
    (sent,) = [line for line in found.stdout.splitlines() if line.startswith("# a site sends each round: ")]
    plan = site_plan(shipped.recipe("digits-fednh"))
    assert {part.strip() for part in sent.split(": ")[1].split(";")[0].split(",")} == {
        tensor.spec.part.value for tensor in plan.outgoing
    }
    assert list(tmp_path.iterdir()) == []
    found = dry(*folder_of(words, tmp_path), "--set", "method.momentun=0.5")
    assert isinstance(found.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []
    sets = ("--set", 'method.name="solo"', "--set", 'federation.robust="median"')
    found = dry(*folder_of(words, tmp_path), *sets)
    assert isinstance(found.exception, ConfigError)
    assert "does not take a mean" in str(found.exception)
    assert found.stdout == ""


def test_a_dry_run_says_what_leaves_in_a_secure_aggregation_and_works_without_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = shipped.recipe("digits-fednh-secure")
    lines = dry("simulate", "digits-fednh-secure").stdout.splitlines()
    plan = site_plan(recipe)
    assert any(line.endswith(f"as one masked vector, {plan.sent_bytes[1]:,} bytes") for line in lines)
    own = [line for line in lines if ": personal." in line or line.endswith(": loss")]
    assert len(own) > 1
    assert all(line.startswith("# a site sends only in a secure aggregation, ") for line in own)
    monkeypatch.setitem(sys.modules, "protofed.deploy.site.plan", None)
    found = dry("runs", "start", RECIPE, "--identity=none")
    assert Recipe.model_validate(tomllib.loads(found.stdout)) == shipped.recipe("digits-fednh")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "federation.min_sites=50"), "50 trainers are needed"),
        (("--set", "data.partition.min_examples=9999"), "examples"),
        (("--policy", "standard"), "no site takes part"),
        (("--device", "cuda:99"), "cuda"),
    ],
)
def test_a_dry_run_of_a_simulation_looks_at_sites_data_policy_and_device(words: tuple[str, ...], said: str) -> None:
    found = dry("simulate", RECIPE, *words)
    assert isinstance(found.exception, ProtofedError)
    assert said in str(found.exception)


def test_a_dry_run_of_a_server_needs_its_identity_and_of_a_simulation_data(tmp_path: Path) -> None:
    found = dry("server", "start", "--recipe", RECIPE, "--identity", tmp_path / "none")
    assert isinstance(found.exception, ConfigError)
    assert str(tmp_path / "none") in str(found.exception)
    text = RECIPE.read_text(encoding="utf-8").partition("[data]")[0]
    (tmp_path / "no-data.toml").write_text(text, encoding="utf-8")
    assert isinstance(dry("simulate", tmp_path / "no-data.toml").exception, ConfigError)
    assert dry("runs", "start", tmp_path / "no-data.toml", "--identity=none").exit_code == 0


NO_RECIPE: dict[str, tuple[str, ...]] = {
    "server": ("server", "start", "--identity=none", "--state", "STATE"),
    "figures": ("figures", "STATE"),
    "export": ("export", "run", "--model", "global", "--out", "STATE"),
    "check": ("client", "check"),
}


@pytest.mark.parametrize("words", NO_RECIPE.values(), ids=NO_RECIPE)
def test_set_without_a_recipe_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    called = [str(word) for word in folder_of(words, tmp_path)]
    found = CliRunner().invoke(app, [*called, "--set", "rounds=2"])
    assert isinstance(found.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


def test_a_server_its_doctor_and_a_comparison_read_recipes_with_overrides(tmp_path: Path) -> None:
    settings = read_settings(ServerSettings, None, {"recipes": [RECIPE], "identity": "none", "state": tmp_path})
    (read,) = read_recipes(settings, ["rounds=2"])
    assert read == shipped.recipe("digits-fednh", ["rounds=2"])
    words = ["server", "doctor", "--recipe", str(RECIPE), "--identity=none", "--state", str(tmp_path), "--json"]
    checks = json.loads(CliRunner().invoke(app, [*words, "--set", "method.momentun=0.5"]).stdout)
    assert "momentun" in json.dumps(checks)
    called = ["compare", "digits-fednh", "digits-fedavg", "--dry-run", "--seeds", "0,1", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, called)
    assert found.exit_code == 0
    assert found.stdout.count("\nrounds = ") == 4
    assert not (tmp_path / "out").exists()


ROOT = Path(__file__).parents[2]
COMPOSE = ("compose.yaml", "compose.site.yaml")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_written_as_it_is_in_the_repository_and_is_in_the_wheel(kind: str, tmp_path: Path) -> None:
    written = [path.relative_to(tmp_path) for path in write_files(tmp_path, [kind])]
    assert written
    changed = [path for path in written if (tmp_path / path).read_bytes() != (ROOT / "deploy" / path).read_bytes()]
    assert changed == ([Path(name) for name in (*COMPOSE, ".env.example")] if kind == "compose" else [])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in KINDS[kind].paths:
        above = {str(Path("deploy") / folder) for folder in (Path(path), *Path(path).parents)} & set(included)
        assert above, path
        assert all(included[name] == f"protofed/{name}" for name in above)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_builds_nothing_and_is_otherwise_the_same(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, ["compose"])
    ours, theirs = loaded(ROOT / "deploy" / name), loaded(tmp_path / name)
    for service in ours["services"].values():
        service.pop("build", None)
    assert theirs["services"] == ours["services"]
    assert {key: theirs[key] for key in ("networks", "volumes")} == {key: ours[key] for key in ("networks", "volumes")}
    assert not re.search(r"build:|BUILD_NETWORK|INDEX_URL|\.\./", (tmp_path / name).read_text(encoding="utf-8"))


def test_what_compose_mounts_is_there(tmp_path: Path) -> None:
    write_files(tmp_path, ["compose"])
    for name in COMPOSE:
        text = (tmp_path / name).read_text(encoding="utf-8")
        mounted = {path.rstrip("/") for path in re.findall(r"(?:- |:-)\"?(\./[\w./-]+)", text)}
        assert {path for path in mounted if not (tmp_path / path).exists()} == set()
    used = set(re.findall(r"\$\{(\w+)", "".join((tmp_path / name).read_text(encoding="utf-8") for name in COMPOSE)))
    said = set(re.findall(r"^(?:# )?(\w+)=", (tmp_path / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert said - used <= {"COMPOSE_PROJECT_NAME", "COMPOSE_PROFILES"}, "settings that nothing reads"
    for site in ("evaluator", "site-1", "site-5"):
        assert (tmp_path / "docker/compose/data" / site).is_dir()


def said_above(line: str) -> bool:
    """The head of alerts.yml says where the files of its `runbook_url` are."""
    return line.strip().startswith("runbook_url: docs/")


def test_no_file_names_a_place_that_only_a_clone_has(tmp_path: Path) -> None:
    """But where it says so: `deploy/…` and `docs/…` are of the repository."""
    for path in write_files(tmp_path, ()):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert (
                not re.search(r"\.\./|(?<!/)\bdocs/|\bdeploy/", line)
                or "clone" in line
                or "repository" in line
                or said_above(line)
            ), line


@pytest.mark.parametrize("kind", [None, "compose"])
def test_a_file_with_other_content_is_not_overwritten(kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/digits.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"digits\.toml"):
        write_files(tmp_path, [kind] if kind else [])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "sites/digits.toml"]
    assert (tmp_path / "sites/digits.toml").read_text() == "mine"


def test_kinds_that_share_files_come_one_after_the_other_and_rules_as_files(tmp_path: Path) -> None:
    assert write_files(tmp_path, ["dashboards"])
    assert tmp_path / "grafana/dashboards/rounds.json" not in write_files(tmp_path, ["compose"])
    assert write_files(tmp_path, ["compose", "dashboards"]) == []
    write_files(tmp_path, ["helm"])
    rules = tmp_path / "helm/protofed/rules"
    assert not rules.is_symlink()
    assert sorted(path.name for path in rules.iterdir()) == ["alerts.yml", "recording.yml"]


def test_the_command_lists_writes_and_suggests(tmp_path: Path) -> None:
    run = CliRunner()
    assert [row["kind"] for row in json.loads(run.invoke(app, ["files", "--list", "--json"]).output)] == list(KINDS)
    told = run.invoke(app, ["files", str(tmp_path), "policies", "--json"])
    assert sorted(json.loads(told.output)) == sorted(
        str(tmp_path / f"policies/{name}.toml") for name in shipped.files("policies")
    )
    assert "did you mean 'dashboards'?" in str(run.invoke(app, ["files", str(tmp_path), "dashbords"]).exception)
    assert isinstance(run.invoke(app, ["files"]).exception, ConfigError)
