"""A plan says before a run what the run then does."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.method_facts import METHODS, SENDING, SUMMABLE

from protofed.client.method import client_methods
from protofed.client.policy.policy import GateContext, Policy, Released
from protofed.client.policy.rules import Limits, PolicyRules
from protofed.client.policy.run_limits import RunFacts, unchecked
from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.config.tables import Model, NamedOptions
from protofed.common.config.tasks import tasks
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Exchange, Part, TensorSpec, Update
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.secure_aggregation.linear_form import read_form
from protofed.deploy import shipped
from protofed.deploy.cli import main
from protofed.deploy.simulation.simulation import EVALUATOR, simulation
from protofed.deploy.simulation.sites import DirectLink
from protofed.deploy.site import plan_table
from protofed.deploy.site.plan import OWN, SitePlan, plain, site_plan
from protofed.deploy.site.plan_request import asked
from protofed.deploy.site.server_view import NOTHING
from protofed.server.method import server_methods
from protofed.testing.small_recipe import small_recipe

RecipeOf = Callable[..., Recipe]
SECURE = {"min_sites": 3, "secure": True}


def policy(*methods: str, **changes: Any) -> Policy:
    everything = {"parts": set(Part) - NOT_ON_THE_WIRE, "exchange": set(Exchange), "class_distribution_estimate": True}
    rules: dict[str, Any] = {"methods": methods, **everything, **changes}
    return Policy(PolicyRules.model_validate(rules))


def with_options(recipe: Recipe, **options: object) -> Recipe:
    return recipe.model_copy(update={"method": NamedOptions(name=recipe.method.name, **options)})


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Released], list[tuple[TensorSpec, ...]]]:
    """What goes through the gate of simulated sites, and what they fetch, as a run goes on."""
    released: list[Released] = []
    fetched: list[tuple[TensorSpec, ...]] = []
    release, fetch = Policy.release, DirectLink.fetch

    def released_too(policy: Policy, update: Update, context: GateContext | None = None) -> Released:
        passed = release(policy, update, context)
        released.extend([passed] if update.site != EVALUATOR else [])
        return passed

    def fetched_too(link: DirectLink, task: Task) -> bytes:
        data = fetch(link, task)
        fetched.extend([codec.manifest(data)] if task.kind is not TaskKind.REFINE else [])  # an evaluator's
        return data

    monkeypatch.setattr(Policy, "release", released_too)
    monkeypatch.setattr(DirectLink, "fetch", fetched_too)
    return released, fetched


@pytest.mark.parametrize("method", METHODS)
def test_a_run_moves_what_the_plan_says(
    method: str, recipe_of: RecipeOf, passing: tuple[list[Released], list[tuple[TensorSpec, ...]]]
) -> None:
    recipe = recipe_of(
        method,
        rounds=2,
        evaluation={"frequency_groups": True, "probabilities": True},
        data={
            "source": "digits",
            "local_test_fraction": 0.2,
            "partition": {"kind": "dirichlet", "sites": 3, "beta": 0.5},
        },
    )
    plan = site_plan(recipe)
    with simulation(recipe) as running:
        running.go()
        scores = running.ledger.scores(recipe.name)
    (first, same, *updates), fetched = passing
    assert first.manifest == same.manifest
    assert {spec.part for spec in first.manifest.tensors} == {Part.BODY, Part.HEAD}
    assert len(updates) == 3 * 2
    required = {tensor.spec for tensor in plan.outgoing if not tensor.optional}
    for update in updates:
        assert required <= set(update.manifest.tensors) <= {tensor.spec for tensor in plan.outgoing}
    assert {spec for update in updates for spec in update.manifest.tensors} == {t.spec for t in plan.outgoing}
    assert all(set(manifest) <= set(plan.incoming) for manifest in fetched)
    assert set(plan.incoming) == set(fetched[-1])
    assert {name for update in updates for name in update.metrics} == set(plan.scalars["after training"])
    reported = {_family(name) for sites in scores.values() for own in sites.values() for name in own}
    assert reported == {name for names in plan.scalars.values() for name in names} - {"loss"}
    assert ("global.local.accuracy" in reported) is server_methods.get(method).global_model


def _family(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return stem if last.isdigit() else name


@pytest.mark.parametrize("name", ["strict", "standard", "open"])
@pytest.mark.parametrize("method", METHODS)
def test_a_shipped_policy_refuses_exactly_the_methods_that_it_does_not_name(
    method: str, name: str, recipe_of: RecipeOf
) -> None:
    site = Policy.read(shipped.folder("policies") / f"{name}.toml")
    plain_run = site_plan(recipe_of(method), site)
    if method not in site.rules.methods:
        assert plain_run.refusals
        assert {tensor.refused_by for tensor in plain_run.outgoing} <= {"methods"}
        return
    if name == "open" or method not in SENDING:
        assert plain_run.refusals == ()
        assert {tensor.refused_by for tensor in plain_run.outgoing} <= {None}
    else:
        assert "federation.secure = true" in plain_run.refusals[0]
        assert "secure" in {tensor.refused_by for tensor in plain_run.outgoing}
    if method in SUMMABLE:
        aggregated = site_plan(recipe_of(method, federation=SECURE), site)
        assert aggregated.refusals == ()
        assert {tensor.refused_by for tensor in aggregated.outgoing} == {None}


def test_sizes_are_those_of_the_tensors_or_of_the_masked_vector(recipe_of: RecipeOf) -> None:
    plan = site_plan(recipe_of("fednh"))
    body = 4 * (16 * 9 + 16 + 32 * 16 * 9 + 32 + 64 * 128 + 64)
    assert plan.sent_bytes == (body + 4, body + 4 + 10 * 64 * 4)
    assert plan.received_bytes == body + 4 + 10 * 64 * 4
    plan = site_plan(recipe_of("fedavg", federation=SECURE))
    numbers = sum(tensor.spec.nbytes for tensor in plan.outgoing) // 4 + 1  # of float32; and the weight
    assert plan.masked == numbers
    assert plan.sent_bytes == (8 * numbers, 8 * numbers)
    assert plain(plan)["bytes_per_round"]["sent_most"] == 8 * numbers
    shown = " ".join(printed(plan, 100).split())
    assert f"one masked vector of {numbers:,} numbers" in shown
    assert site_plan(recipe_of("fedavg")).masked is None


@pytest.mark.parametrize(
    ("method", "changes", "refused", "said"),
    [
        ("fednh", {"parts": {"body", "head"}}, {"prototypes"}, "method 'fednh' sends 'prototypes', which is not in"),
        ("fednh", {"max_update_mb": 0.05}, {"body", "head", "prototypes"}, "max_update_mb = 0.05"),
        ("fedavg", {"dtypes": {"int64"}}, {"body", "head"}, "dtypes"),
        ("fedavg", {"max_tensor_mb": 0.001}, {"body", "head"}, "max_tensor_mb"),
        ("cwfedavg", {"class_distribution_estimate": False}, {"class-shares"}, "part 'class-shares'"),
    ],
)
def test_what_may_not_leave_is_refused_by_its_rule(
    method: str, changes: dict[str, Any], refused: set[str], said: str, recipe_of: RecipeOf
) -> None:
    plan, (rule,) = site_plan(recipe_of(method), policy(method, **changes)), changes
    found = {tensor.spec.part.value: tensor.refused_by for tensor in plan.outgoing if tensor.refused_by}
    assert found == dict.fromkeys(refused, rule)
    assert said in plan.refusals[0]
    assert rule in plan.refusals[0]
    assert not site_plan(recipe_of("fednh"), policy("fednh", max_update_mb=0.1)).refusals


def test_true_shares_exist_only_in_simulations(recipe_of: RecipeOf) -> None:
    recipe = with_options(recipe_of("cwfedavg"), shares="true")
    for plan in (site_plan(recipe), site_plan(recipe, policy("cwfedavg"))):
        refused = {tensor.spec.part: tensor.refused_by for tensor in plan.outgoing if tensor.refused_by}
        assert refused == {Part.LABEL_DISTRIBUTION: "outside simulations"}
    assert "label-distribution" in plan.refusals[0]


def test_a_count_that_the_run_needs_and_the_policy_keeps_refuses_the_run(recipe_of: RecipeOf) -> None:
    alike = recipe_of("fedavg")
    weighed = with_options(alike, weighting="examples")
    keeps, tells = policy("fedavg"), policy("fedavg", example_count=True)
    plans = [site_plan(recipe, rules) for recipe in (alike, weighed) for rules in (None, keeps, tells)]
    assert [(plan.count_needed, plan.count_leaves, len(plan.refusals)) for plan in plans] == [
        (False, None, 0),
        (False, False, 0),
        (False, True, 0),
        (True, None, 0),
        (True, False, 1),
        (True, True, 0),
    ]


def test_only_scores_that_the_policy_names_leave_and_each_says_what_it_tells(recipe_of: RecipeOf) -> None:
    plan = site_plan(recipe_of("fednh"), policy("fednh", metrics={"personal.recall", "personal.pm_v"}))
    assert {of: names for of, names in plan.released.items() if names} == {OWN: ("personal.pm_v", "personal.recall")}
    assert "personal.recall" in plan.scalars[OWN]
    assert "personal.auroc" not in plan.scalars[OWN]
    plan = site_plan(recipe_of("fednh"), policy("fednh", metrics={"global.accuracy", "personal.pm_l"}))
    shown, sentences = " ".join(printed(plan, 100, policy="mine").split()), plain(plan)["scalars_disclose"]
    assert sentences.keys() == {name for names in plan.scalars.values() for name in names}
    assert f"personal.pm_l: {sentences['personal.pm_l']}" in shown
    assert sentences["personal.pm_v"] not in shown  # it stays
    assert "protofed client runs" in shown
    everything = printed(site_plan(recipe_of("fednh")), 100)
    assert all(sentence in " ".join(everything.split()) for sentence in sentences.values())
    assert "protofed client runs" not in everything


def test_the_first_model_is_judged_apart_and_one_that_is_not_named_never_run(recipe_of: RecipeOf) -> None:
    plan = site_plan(recipe_of("fedprp"), policy("fedprp", parts={"body", "prototypes"}))
    assert not plan.refusals
    assert plan.first_model == "part 'head' is not in this site's policy (parts)"
    assert site_plan(recipe_of("fedprp"), policy("fedprp")).first_model is None
    recipe = recipe_of("fednh", model={"name": "nowhere:made"})
    with pytest.raises(ConfigError, match="Add it to `plugins`"):
        site_plan(recipe)
    with pytest.raises(PolicyViolationError, match="nowhere:made"):
        site_plan(recipe, policy("fednh"))


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("fednh", {"body", "prototypes"}),  # its head is a scalar
        ("fedavg", {"body", "head"}),
        ("cwfedavg-private", {"body", "head", "class-presence"}),
        ("fedper", {"body"}),
    ],
)
def test_a_site_that_hides_its_classes_keeps_what_tells_of_them(
    method: str, kept: set[str], recipe_of: RecipeOf
) -> None:
    plan = site_plan(recipe_of(method), policy(method, hide_class_presence=True))
    refused = {tensor.spec.part.value: tensor.refused_by for tensor in plan.outgoing if tensor.refused_by}
    assert refused == dict.fromkeys(kept, "hide_class_presence")
    assert plan.refusals
    assert all("(hide_class_presence)" in why and "secure aggregation" in why for why in plan.refusals)
    assert "secure aggregation (hide_class_presence)" in " ".join(plan.rules)


def test_what_the_policy_and_heartbeats_say_is_said_in_sentences(recipe_of: RecipeOf) -> None:
    nights = {"days": ["sun", "mon"], "from": "20:00", "until": "06:00"}
    rules = policy("fedprp", min_samples_per_class=7, approval="manual", schedule=[nights])
    plan = site_plan(recipe_of("fedprp"), rules)
    assert not plan.refusals
    for said in (
        "Runs may learn classification (tasks).",
        "No prototype is sent for a class with fewer than 7 examples here (min_samples_per_class).",
        "Which classes the site has is not hidden (hide_class_presence).",
        "Only tensors of float32 and int64 are sent (dtypes).",
        "Step counters among weights are sent as zeros: they would tell the number of examples (example_count).",
        "The site takes part once somebody has run `protofed client approve` for this recipe (approval).",
        "Tasks are taken mon, sun 20:00 to 06:00, UTC (schedule).",
    ):
        assert said in plan.rules
        assert said in " ".join(printed(plan, 100, policy="mine").split())
    assert "Heartbeats say nothing about the site's machine (telemetry)." in plan.rules
    assert plain(plan)["rules"] == plan.rules
    telling = site_plan(recipe_of("fedprp"), policy("fedprp", example_count=True))
    assert not [said for said in telling.rules if "example_count" in said]
    assert site_plan(recipe_of("fedprp")).rules == ()
    assert not [
        said for said in site_plan(recipe_of("fedavg"), rules).rules if "class" in said.replace("classification", "")
    ]
    plan = site_plan(recipe_of("fedavg"), policy("fedavg", telemetry=["step_seconds", "disk_free_bytes"]))
    told = [said for said in plan.rules if "(telemetry)" in said]
    assert [said.partition(" (telemetry). ")[0] for said in told] == [
        "Heartbeats have disk_free_bytes",
        "Heartbeats have step_seconds",
    ]
    assert told[1].endswith("roughly how many examples there are.")
    shown = " ".join(printed(plan, 100, policy="mine").split())
    assert all(said in shown for said in told)


def printed(plan: SitePlan, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width)
    plan_table.show(plan, console, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("method", METHODS)
def test_it_can_be_read_in_a_terminal(method: str, recipe_of: RecipeOf) -> None:
    # FedROD has a loss of its own, which the limits of a policy that says nothing do not allow.
    limits = Limits(losses=Limits().losses | client_methods.build(method, {}).declares.own_losses)
    plan = site_plan(recipe_of(method), policy(method, example_count=True, limits=limits))
    for width in (80, 120):
        by_part, by_tensor = (printed(plan, width, tensors=tensors, policy="mine") for tensors in (False, True))
        for text in (by_part, by_tensor):
            assert max(map(len, text.splitlines())) <= width
            assert "mine lets the site take part" in text
        for tensor in plan.outgoing:
            if width == 120 or len(tensor.spec.path) < 24:  # else it is folded
                assert f" {tensor.spec.path} " in by_tensor
            assert f" {tensor.spec.part} " in by_part
            assert tensor.spec.part.discloses in " ".join(by_part.split())


def test_the_screen_names_its_option_and_takes_no_markup(recipe_of: RecipeOf) -> None:
    plan = site_plan(recipe_of("fedavg"))
    assert ["--tensors" in printed(plan, 100, tensors=tensors) for tensors in (False, True, None)] == [
        True,
        False,
        False,
    ]
    plan = replace(site_plan(recipe_of("fednh"), policy("fednh")), refusals=("remove [data] [/]",), rules=("see [x]",))
    shown = printed(plan, 100, policy="mine")
    assert "remove [data] [/]" in shown
    assert "see [x]" in shown


def test_each_limit_stands_beside_what_the_run_asks_and_the_width_of_its_body(recipe_of: RecipeOf) -> None:
    read = recipe_of("fednh", plan={"lr": 0.7, "batch_size": 32})
    plan = site_plan(read, policy("fednh"), cohort=1, examples=20)
    broken = {check.key for check in plan.limits if not check.holds}
    assert broken == {"lr", "steps", "min_step_sum", "min_cohort"}
    for key in broken:
        assert any(f"(limits.{key})" in reason for reason in plan.refusals)
    text = " ".join(printed(plan, 100, policy="mine").split())
    assert "What the server asks for" in text
    assert {"lr", "min_cohort"} <= {check["key"] for check in plain(plan)["limits"] if not check["holds"]}
    unknown = site_plan(read, policy("fednh"))
    assert not {"steps", "min_step_sum", "min_cohort"} & {check.key for check in unknown.limits}
    read = recipe_of("fednh")
    (check,) = (check for check in site_plan(read, policy("fednh")).limits if check.key == "min_features_per_class")
    assert check.holds
    narrow = read.model_copy(update={"model": Model.model_validate({"name": "digits-cnn", "features": 1})})
    (refusal,) = site_plan(narrow, policy("fednh")).refusals
    assert f"a model of 1 features for {read.classes} classes" in refusal
    assert "limits.min_features_per_class" in refusal


def test_a_limit_by_images_declines_nothing_in_a_secure_run_or_with_noise(recipe_of: RecipeOf) -> None:
    read = recipe_of("fednh", plan={"lr": 0.1, "batch_size": 32}, federation={"secure": True, "min_sites": 3})
    plan = site_plan(read, policy("fednh", limits={"steps": 2}), cohort=3, examples=20)
    assert [check.key for check in plan.limits if not check.holds] == ["steps", "min_step_sum"]
    assert not plan.refusals
    assert "random numbers instead" in plan.withheld[0]
    assert "limits.steps" in plan.withheld[0]
    facts = RunFacts(Digest("b" * 64), frozenset({Part.BODY}), examples=20, cohort=3, features=64)
    assert unchecked(facts, noisy=True) == ()
    assert unchecked(facts) == ("limits.min_contrast",)


def test_what_decides_a_limit_later_is_said_beside_the_verdict(recipe_of: RecipeOf) -> None:
    read = recipe_of("fednh")
    unknown, counted = site_plan(read, policy("fednh")), site_plan(read, policy("fednh"), cohort=3, examples=2000)
    for plan, rules in (
        (unknown, {"limits.min_contrast", "limits.steps", "limits.min_step_sum", "limits.min_cohort"}),
        (counted, {"limits.min_contrast"}),
    ):
        assert not plan.refusals
        assert set(re.findall(r"limits\.\w+", " ".join(plain(plan)["still_open"]))) == rules
        shown = " ".join(printed(plan, 100, policy="mine").split())
        assert "mine lets the site take part, as far as is known here." in shown
        assert all(sentence in shown for sentence in plan.still_open)
    assert site_plan(read).still_open == ()
    assert site_plan(read).limits == ()


@pytest.mark.parametrize(
    ("plan", "about", "said"),
    [
        ({}, "plan", "1 epochs a round in batches of 32"),
        ({"dp": {"noise_multiplier": 1.0, "sampling_rate": 0.1}}, "plan", "10 noisy steps in each training"),
        ({"loss": "logit-adjustment", "tau": 0.5}, "plan", "logits adjusted by 0.5 log of class frequencies"),
        ({"loss": "balanced-softmax"}, "plan", "by the balanced softmax"),
        ({"sampling": "class-balanced"}, "plan", "each class drawn as often"),
        ({"buffers": "local"}, "plan", "with BatchNorm statistics of its own"),
        ({"schedule": "step", "lr_decay": 0.1}, "learning rate", "0.05, times 0.1 after 50%, 75% of the rounds"),
        ({"warmup_rounds": 5}, "learning rate", "0.05, in every round, rising to it over 5 rounds"),
    ],
)
def test_what_a_recipe_asks_of_training_is_said(
    plan: dict[str, Any], about: str, said: str, recipe_of: RecipeOf
) -> None:
    lines = asked(recipe_of("fedavg", plan={"epochs": 1, "batch_size": 32, "lr": 0.05, **plan}))
    assert said in lines[about]
    usual = asked(recipe_of("fedavg", plan={"epochs": 1, "batch_size": 32, "lr": 0.05}))
    assert (lines == usual) == (not plan)


FINDINGS = {"task": {"name": "multi-label", "blank": "zeros"}, "classes": 3, "class_names": ("even", "loop", "large")}
NUMBER = {"task": {"name": "regression", "range": [0, 9]}, "classes": 1, "class_names": ("value",)}


def test_a_task_that_the_policy_does_not_name_is_refused_and_nothing_is_sent(recipe_of: RecipeOf) -> None:
    refused = site_plan(recipe_of("fedavg", **FINDINGS), policy("fedavg", tasks=["classification", "regression"]))
    said = "the task 'multi-label' is not in this site's policy (tasks: classification, regression)"
    assert refused.refusals == (said,)
    assert {tensor.refused_by for tensor in refused.outgoing} == {"tasks"}
    assert refused.requests["task"] == "multi-label (blank = zeros)"
    assert "Runs may learn classification, regression (tasks)." in refused.rules
    assert said in " ".join(printed(refused, 100, policy="mine").split())
    allowed = site_plan(recipe_of("fedavg", **FINDINGS), policy("fedavg", tasks=["multi-label"]))
    assert (allowed.refusals, {tensor.refused_by for tensor in allowed.outgoing}) == ((), {None})
    with pytest.raises(ConfigError, match="method 'fednh' is defined for the task classification"):
        site_plan(recipe_of("fednh", **FINDINGS))


@pytest.mark.parametrize("name", ["strict", "standard", "open"])
def test_shipped_policies_allow_the_shipped_tasks_and_no_other(name: str) -> None:
    assert Policy.read(shipped.folder("policies") / f"{name}.toml").rules.tasks == set(tasks)


@pytest.mark.parametrize(("table", "word"), [(FINDINGS, "findings"), (NUMBER, "numbers")])
def test_what_a_score_tells_is_said_in_the_words_of_its_task(
    table: dict[str, Any], word: str, recipe_of: RecipeOf
) -> None:
    told = plain(site_plan(recipe_of("fedavg", **table)))["scalars_disclose"]
    own = {name: sentence for name, sentence in told.items() if ".local." in name}
    assert own
    assert [name for name, sentence in own.items() if word not in sentence] == []
    assert [name for name, sentence in told.items() if "plug-in" in sentence] == []


def test_it_is_the_same_as_json(recipe_of: RecipeOf) -> None:
    read = json.loads(json.dumps(plain(site_plan(recipe_of("fednh"), policy("fedavg")))))
    assert read["leaves"][0] == {
        "tensor": "conv1.bias",
        "part": "body",
        "shape": [16],
        "dtype": "float32",
        "bytes": 64,
        "optional": False,
        "refused": "methods",
    }
    assert read["discloses"]["prototypes"] == Part.PROTOTYPES.discloses
    assert read["refusals"] == ["method 'fednh' is not in this site's policy (methods: fedavg)"]


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(["client", "preview", *map(str, arguments)])
    return int(ended.value.code or 0), capfd.readouterr().out


def test_the_command_ends_with_77_where_the_policy_refuses(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policies = shipped.folder("policies")
    assert run(capfd, "digits-fednh")[0] == 0
    for name, refused in (
        ("open", set()),
        *((name, {"body", "head", "prototypes"}) for name in ("standard", "strict")),
    ):
        code, out = run(capfd, "digits-fednh", "--policy", policies / f"{name}.toml", "--json")
        assert code == (77 if refused else 0)
        assert {leaf["part"] for leaf in json.loads(out)["leaves"] if leaf["refused"]} == refused
        assert run(capfd, "digits-fednh-secure", "--policy", policies / f"{name}.toml")[0] == 0
    code, out = run(capfd, "digits-fedavg", "--policy", policies / "strict.toml")
    assert code == 77
    assert "refuses this run" in out
    code, out = run(capfd, "digits-fedavg", "--policy", policies / "strict.toml", "--json")
    assert (code, json.loads(out)["method"]) == (77, "fedavg")
    assert run(capfd, "digits-fednh", "--policy", tmp_path / "none.toml")[0] == 77


def test_every_part_says_what_it_discloses() -> None:
    assert all(part.discloses.endswith(".") for part in Part)
    assert len({part.discloses for part in Part}) == len(Part)


def test_a_sum_is_told_by_its_weights_and_sites_and_what_is_sent_back() -> None:
    federation = {"min_sites": 3, "secure": True}
    method = {"name": "cwfedavg", "shares": "true"}
    plan = site_plan(small_recipe("cwfedavg", method=method, federation=federation))
    assert {spec.part for spec in plan.incoming} == {Part.CLASS_MODELS}  # each site mixes them itself
    with pytest.raises(ConfigError, match="norms"):
        site_plan(small_recipe("cwfedavg", federation=federation))
    with pytest.raises(ConfigError, match="solo"):
        site_plan(small_recipe("solo", federation=federation))
    recipe = small_recipe(
        "fedavg", method={"name": "fedavg", "weighting": "examples"}, federation={**SECURE, "quorum": 3}
    )
    plan = site_plan(recipe)
    assert {each.aggregated for each in plan.server_view.parts} == {
        "The mean over the sites of the sum, weighted by their numbers of examples. Of this site alone: nothing, "
        "unless others of its group help."
    }
    assert plan.server_view.whole[0].startswith("A sum is over 3 sites or more.")
    assert "The server sees how many examples all sites of a sum have together." in plan.server_view.whole
    assert (
        "This site is in the same sums as 2 others or more, its group, in all runs (sum_group)."
        in plan.server_view.whole
    )
    alone = site_plan(small_recipe("fedavg", federation={**SECURE, "sum_group": 1}))
    assert (
        "Two sums may differ by one site, and so tell what this site sent (sum_group = 1)." in alone.server_view.whole
    )
    federation = {**SECURE, "min_contributors": 3}
    shares = site_plan(small_recipe("cwfedavg", method={"name": "cwfedavg", "shares": "true"}, federation=federation))
    told = {each.part: each for each in shares.server_view.parts}
    assert "weighted by their shares of the class, of classes with 3 such sites or more" in told[Part.HEAD].aggregated
    assert told[Part.LABEL_DISTRIBUTION].plain == "", "it never leaves without a sum"


@pytest.mark.parametrize("method", SUMMABLE)
def test_what_the_server_sees_of_each_part_is_read_from_the_methods_form(method: str) -> None:
    plain_plan, aggregated = site_plan(small_recipe(method)), site_plan(small_recipe(method, federation=SECURE))
    form = read_form(client_methods.build(method, {}), method)
    rows = {form.rows.part} if form.rows else set()
    in_sums = {*form.means, *rows, *form.mixtures, form.shares}
    for plan in (plain_plan, aggregated):
        assert [each.part for each in plan.server_view.parts] == list(dict.fromkeys(t.spec.part for t in plan.outgoing))
        for each in plan.server_view.parts:
            assert (each.plain, each.aggregated == NOTHING) == (each.part.discloses, each.part not in in_sums)
            assert plan.server_view.seen(each) == (each.aggregated if plan is aggregated else each.plain)
    assert (
        "The server sees how many sites hold each class, not which sites." in aggregated.server_view.whole
    ) is form.by_class


def test_only_a_method_with_a_form_is_told_of_sums_which_true_shares_may_enter() -> None:
    plan = site_plan(small_recipe("cwfedavg"))
    assert "norms" in plan.server_view.why_not
    assert {each.aggregated for each in plan.server_view.parts} == {""}
    recipe = small_recipe("cwfedavg", method={"name": "cwfedavg", "shares": "true"}, federation=SECURE)
    plan = site_plan(recipe, policy("cwfedavg"))
    assert (plan.refusals, {tensor.refused_by for tensor in plan.outgoing}) == ((), {None})


@pytest.mark.parametrize("secure", ["allowed", "required"])
def test_a_policy_that_asks_for_secure_aggregation_lets_a_run_with_them_in_and_no_other(secure: str) -> None:
    site = policy("fednh", secure=secure, hide_class_presence=secure != "allowed")
    aggregated, without = (site_plan(small_recipe("fednh", federation=each), site) for each in (SECURE, {}))
    assert aggregated.refusals == ()
    assert {tensor.refused_by for tensor in aggregated.outgoing} == {None}
    assert aggregated.first_model is None
    assert bool(without.refusals) is (secure != "allowed")
    assert "(secure)" in aggregated.rules[0]
    told = " ".join(without.rules)
    assert ("are sent only in a secure aggregation" in told, "is not hidden" in told) == (
        secure != "allowed",
        secure == "allowed",
    )


def test_the_screen_and_json_say_what_the_server_sees_with_sums_and_without() -> None:
    for federation, heading, other in (
        (SECURE, "What the server sees of these, with secure aggregation", "Without secure aggregation it would see:"),
        (
            {},
            "What the server sees of these, without secure aggregation",
            "With federation.secure = true it would see:",
        ),
    ):
        plan, out = site_plan(small_recipe("fedprp", federation=federation)), io.StringIO()
        plan_table.show(plan, Console(file=out, width=500))
        text = out.getvalue()
        assert text.index(heading) < text.index(other) < text.index("Single numbers beside the tensors")
        seen = plain(plan)["server_sees"]
        assert seen["secure"] is bool(federation)
        assert all(f"- {each['part']}: {each['seen']}" in text for each in seen["parts"])


@pytest.mark.parametrize(("method", "part"), [("scaffold", Part.CONTROL), ("fednova", Part.STEPS)])
def test_what_tells_the_number_of_steps_is_kept_with_the_number_of_examples(method: str, part: Part) -> None:
    for secure in ({}, {"federation": SECURE}):
        keeps, tells = (
            site_plan(small_recipe(method, **secure), policy(method, example_count=n)) for n in (False, True)
        )
        assert {tensor.spec.part for tensor in keeps.outgoing if tensor.refused_by == "example_count"} == {part}
        assert {tensor.refused_by for tensor in tells.outgoing} == {None}
        assert [any(f"Part {part} " in said for said in plan.rules) for plan in (keeps, tells)] == [True, True]


@pytest.mark.parametrize("missing", sorted(Exchange))
def test_what_a_policy_does_not_exchange_is_refused_tensor_by_tensor(missing: Exchange, recipe_of: RecipeOf) -> None:
    recipe = recipe_of("fedamp")
    plan = site_plan(recipe, policy("fedamp", exchange=set(Exchange) - {missing}))
    assert plan.refusals
    assert {tensor.refused_by for tensor in plan.outgoing} == {"exchange"}
    allowed = site_plan(recipe, policy("fedamp"))
    assert allowed.refusals == ()
    assert allowed.exchanges == plan.exchanges == frozenset(Exchange)
