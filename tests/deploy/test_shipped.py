"""What comes along fits together."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tests.support.shipped_policies import admitted, filled_in

from protofed.client.method import client_methods
from protofed.client.models.catalogue import build
from protofed.client.policy.policy import Policy, PolicyRefusedError
from protofed.client.policy.update_checks import TELLS_STEPS
from protofed.common.config.data import Data
from protofed.common.config.recipe import read_recipe
from protofed.common.config.settings import ClientSettings, read_settings
from protofed.common.errors import ConfigError
from protofed.common.payload import NOT_ON_THE_WIRE, Part
from protofed.common.protocol.messages import Telemetry
from protofed.deploy import shipped
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


def test_the_rules_below_are_of_many_recipes() -> None:
    assert len(FOLLOW_A_PAPER) > 25
    assert len(WEIGH_BY_EXAMPLES) > 9


@pytest.mark.parametrize("name", FOLLOW_A_PAPER)
def test_a_recipe_of_a_paper_computes_in_float32(name: str) -> None:
    assert not shipped.recipe(name).plan.amp  # bfloat16 cosines times 30 lose 0.1 in the logits


@pytest.mark.parametrize("name", WEIGH_BY_EXAMPLES)
def test_a_recipe_of_a_paper_that_weighs_by_examples_does_so(name: str) -> None:
    method = shipped.recipe(name).method
    if method.name == "cwfedavg-private":  # its server half has no weighting: no count leaves a site
        assert "weighting" not in server_methods.options(method.name)
    else:
        assert method.options["weighting"] == "examples"


@pytest.mark.parametrize("name", [name for name in FOLLOW_A_PAPER if "-dir01-" in name])
def test_no_cap_on_weights_changes_a_paper_whose_sites_differ_much(name: str) -> None:
    assert shipped.recipe(name).federation.max_weight_ratio >= 10  # 3.2 among the partitions of seeds 0 to 7


@pytest.mark.parametrize("name", [name for name in FOLLOW_A_PAPER if re.match("cifar.*-fednh", name)])
def test_a_recipe_of_fednh_says_from_where_it_learns_the_scale(name: str) -> None:
    options = shipped.recipe(name).method.options
    if name.endswith("-release"):
        assert (options["scale"], options["prototype_init"]) == (1.0, "orthogonal")
    else:
        assert (options["scale"], options.get("fixed_scale", False)) in [(20.0, False), (30.0, True)]


def test_each_policy_allows_all_that_a_stricter_one_does() -> None:
    strict, standard = (
        Policy.read(shipped.folder("policies") / f"{name}.toml").rules for name in ("strict", "standard")
    )
    for narrow, wide in ((strict, standard), (standard, OPEN.rules)):
        assert narrow.methods < wide.methods
        assert narrow.parts < wide.parts
        assert narrow.metrics <= wide.metrics
        assert narrow.telemetry < wide.telemetry


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_names_all_methods_that_its_other_rules_admit(name: str) -> None:
    path = shipped.folder("policies") / f"{name}.toml"
    text, methods = path.read_text(encoding="utf-8"), admitted(Policy.read(path))
    assert Policy.read(path).rules.methods == set(methods), "run `make policies`"
    assert filled_in(text, methods) == text
    assert len(methods) > 10


def test_what_a_policy_admits_follows_from_its_rules_alone() -> None:
    rules = OPEN.rules.model_copy(update={"methods": frozenset(), "parts": frozenset({Part.BODY})})
    assert {"solo", "fedper"} <= set(admitted(Policy(rules))) < set(client_methods) - {"fedavg", "fednh"}
    required = rules.model_copy(update={"secure": "required", "parts": frozenset(Part) - NOT_ON_THE_WIRE})
    assert "solo" in admitted(Policy(required))  # sends nothing
    assert "cwfedavg" not in admitted(Policy(required))  # by default not in a sum
    assert "cwfedavg" in admitted(Policy(required.model_copy(update={"secure": "allowed"})))


def test_updates_leave_in_secure_sums_alone_but_under_the_open_policy() -> None:
    asked = {name: Policy.read(shipped.folder("policies") / f"{name}.toml").rules.secure for name in POLICIES}
    assert asked == {"strict": "required", "standard": "required", "open": "allowed"}


def test_only_the_open_policy_lets_numbers_leave_that_hint_at_the_number_of_examples() -> None:
    strict, standard = (
        Policy.read(shipped.folder("policies") / f"{name}.toml").rules for name in ("strict", "standard")
    )
    assert strict.telemetry == frozenset()
    assert standard.telemetry == {Telemetry.DISK_FREE_BYTES}
    assert OPEN.rules.telemetry == frozenset(Telemetry)
    hinting = {name for name in Telemetry if "examples" in name.discloses}
    assert hinting == {Telemetry.GPU_MEMORY_BYTES, Telemetry.STEP_SECONDS}
    assert not hinting & standard.telemetry


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


@pytest.mark.parametrize("name", ["strict", "standard", "open"])
def test_a_policy_is_found_by_its_name(name: str) -> None:
    assert shipped.policy(name) == shipped.folder("policies") / f"{name}.toml"


@pytest.mark.parametrize("text", ["policy.toml", "./standard", "own/standard", "standard.toml", "/srv/standard"])
def test_what_is_written_as_a_path_is_one(text: str) -> None:
    assert shipped.policy(text) == Path(text)


def test_a_file_that_has_the_name_of_a_policy_is_never_mistaken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "standard").write_text("methods = []\n")
    (tmp_path / "ours").write_text("methods = []\n")
    with pytest.raises(ConfigError, match=r"'\./standard'"):
        shipped.policy("standard")
    assert shipped.policy("./standard") == Path("standard")
    with pytest.raises(ConfigError, match=r"'\./ours'"):
        shipped.policy("ours")


def test_a_typo_in_a_policys_name_suggests_it() -> None:
    with pytest.raises(ConfigError, match="did you mean 'standard'"):
        shipped.policy("standrad")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_resolved_recipe_is_the_same_run_in_one_file(path: Path, tmp_path: Path) -> None:
    (alone := tmp_path / path.name).write_text(shipped.resolved(path.stem), encoding="utf-8")
    assert shipped.extends(alone) == ""
    assert read_recipe(alone) == shipped.recipe(path.stem)


def test_every_shipped_file_says_in_a_sentence_of_its_own_what_it_is() -> None:
    for kind in ("recipes", "policies"):
        told = [shipped.what(file) for file in shipped.files(kind).values()]
        assert all(20 < len(text) < 150 for text in told), max(told, key=len)
        assert all(text.endswith(".") for text in told)


@pytest.mark.parametrize("shown", [False, True], ids=["as it stands", "with all that is shown"])
def test_a_hospital_settings_file_can_be_used(shown: bool, tmp_path: Path) -> None:
    text = (shipped.folder("sites") / "hospital-folder.toml").read_text(encoding="utf-8")
    if shown:
        text = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    (tmp_path / "site.toml").write_text(text, encoding="utf-8")
    settings = read_settings(ClientSettings, tmp_path / "site.toml", {})
    assert (settings.proxy is not None, settings.data.group_pattern is not None) == (shown, shown)
