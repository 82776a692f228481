"""A server that asks one question after the other reads nothing of a site's data off what the site declines.

Under the policy `standard` and secure aggregation. Each question is one to which sites with other data gave other
answers: declined, or not. Now all of them answer alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs
from tests.attacks import share_sets
from tests.attacks.hostile_server import as_payload, honest_model, recipe_like, sites_of
from tests.support.partners import confirm, listed
from tests.support.scripted_server import AgentHarness

from protofed.client.agent import computation
from protofed.client.agent.agent import Agent
from protofed.client.base_checks import judge
from protofed.client.base_checks.statistics import BaseCheck, BaseProblem
from protofed.client.data.site import load_site
from protofed.client.data.site_data import SiteData
from protofed.client.policy.policy import Policy
from protofed.client.secure_aggregation.partners import open_membership
from protofed.client.state.disk_store import DiskStore
from protofed.common import codec
from protofed.common.config.data import Data
from protofed.common.config.recipe import Recipe
from protofed.common.errors import NotEnrolledError
from protofed.common.payload import Part, Payload
from protofed.common.protocol.messages import Activity, PauseReason, SumOf, TaskKind
from protofed.deploy import shipped

RARE = BaseProblem(BaseCheck.RESPONSE, "body/linear", "has units that answer to very few images only")
PLAN = {"lr": 0.1, "epochs": 2, "batch_size": 16, "momentum": 0.0}
SECURE = {"secure": True, "min_sites": 3, "quorum": 1.0}
RULES = Policy.read(shipped.folder("policies") / "standard.toml").rules
NOISY = RULES.model_dump() | {
    "dp": {"epsilon": 1.0, "delta": 1e-5, "unit": "image"},
    "min_images_per_unit": 1,
    "min_samples_per_class": 1,
}


def secure_run(name: str = "digits-fedavg", **plan: Any) -> Recipe:
    return recipe_like(name, plan=PLAN | plan, federation=SECURE)


def always(data: SiteData) -> Callable[[Recipe], SiteData]:
    """A site's data, whatever the recipe."""
    return lambda _: data


class Questioned:
    """The daemon of one site, and a server that notes how it answers."""

    def __init__(
        self, folder: Path, recipe: Recipe, load_data: Callable[[Recipe], SiteData], rules: dict[str, Any] | None = None
    ) -> None:
        store = DiskStore(folder)
        table = json.loads(recipe.wire())
        self.harness = AgentHarness(store, table, rules or RULES.model_dump(), load_data=load_data, name="site-1")
        self.harness.link.run, self.harness.link.min_cohort = recipe.name, 3
        self.agent: Agent = self.harness.agent()
        self.agent._work.sums.membership = open_membership(folder, "site-1", lambda: None)
        partners = {name: folder.parent / f"{folder.name}-{name}" for name in ("site-2", "site-3")}
        confirm(folder, listed({"site-1": folder, **partners}))
        self._asked = 0

    def answer(self, kind: TaskKind, round: int, base: Payload | None = None) -> str:
        """The code by which a task is declined, or `done`."""
        self._asked += 1
        task = self.harness.offer(kind, round, base, f"t{self._asked}")
        if kind is TaskKind.FIT:
            self.harness.link.tasks[-1] = replace(task, attempt=self._asked, sum_of=SumOf.UPDATE)
        before = len(self.harness.link.beats)
        self.agent.step(0.0)
        return self._said(before)

    def _said(self, before: int) -> str:
        failed = [beat.failure for beat in self.harness.link.beats[before:] if beat.activity is Activity.FAILED]
        return "done" if not failed else str(failed[-1])

    def offered(self, recipe: Recipe) -> str:
        """The answer to the first task of another run; where the site takes none, what it tells the server for that."""
        link = self.harness.link
        link.run, link.recipe, link.failing["next_task"] = recipe.name, recipe.wire(), [NotEnrolledError("again")]
        task, before = self.harness.offer(TaskKind.INITIALISE, 0, task_id=recipe.name), len(link.beats)
        for _ in range(4):  # enroll as before, hear of the run, say why no task is taken
            self.agent.step(0.0)
        if task in link.tasks:
            link.tasks.remove(task)
            return str(link.pause_reasons[-1])
        return self._said(before)

    def left(self) -> Payload:
        """What waits to be summed."""
        ((_, update),) = self.agent._site.store.unsettled(self.harness.link.run)
        return update.payload

    def withheld(self) -> bool:
        """Whether random numbers take its place."""
        store = self.agent._site.store
        ((task, _),) = store.unsettled(self.harness.link.run)
        return store.trained_by(task).withheld


@pytest.fixture(scope="module")
def sites() -> list[SiteData]:
    return list(sites_of(secure_run()))


def test_class_models_tell_no_share_of_a_class(sites: list[SiteData], tmp_path: Path) -> None:
    """Mixed by its shares they keep the bounds, or not, by the share of one class: so none is mixed to check."""
    recipe = secure_run("digits-cwfedavg-private")
    built = as_payload(honest_model(recipe))

    def models(factor: float) -> Payload:
        factors = np.ones((recipe.classes, 1), np.float32)
        factors[3] += factor
        stacks = {f"{part}.{name}": tensor[None] for part in built for name, tensor in built[part].items()}
        return {Part.CLASS_MODELS: {"factors": factors, **stacks}}

    bound = RULES.limits.max_base_change
    shares = [float(site.label_frequencies()[3]) for site in sites]
    assert len(set(shares)) > 2
    answers = []
    for number, site in enumerate(sites):
        asked = Questioned(tmp_path / str(number), recipe, always(site))
        answers.append([asked.answer(TaskKind.FIT, 2, models(bound / share)) for share in (0.005, 0.1, 0.9, 100.0)])
    assert answers == [answers[0]] * len(sites)


@pytest.mark.parametrize("name", ["digits-solo", "digits-fedavg"])
def test_a_method_that_mixes_no_class_models_takes_none(name: str, sites: list[SiteData], tmp_path: Path) -> None:
    """Else its start would be a mixture by the site's shares, about which what it declines answers."""
    recipe = recipe_like(name, plan=PLAN, **({} if name == "digits-solo" else {"federation": SECURE}))
    built = as_payload(honest_model(recipe))
    stacks = {f"{part}.{tensor}": array[None] for part in built for tensor, array in built[part].items()}
    alike = {Part.CLASS_MODELS: {"factors": np.ones((recipe.classes, 1), np.float32), **stacks}}
    for number, site in enumerate(sites[:2]):
        asked = Questioned(tmp_path / str(number), recipe, always(site))
        assert asked.answer(TaskKind.FIT, 2, alike) == "policy"
        assert asked.answer(TaskKind.FIT, 2, {**built, **alike}) == "policy"


def test_how_units_answer_to_images_is_told_to_the_site_and_not_to_the_server(
    sites: list[SiteData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether some image is among the site's would follow: the fit goes on, and nobody can read its sum."""
    recipe, base = secure_run(), as_payload(honest_model(secure_run()))
    honest = Questioned(tmp_path / "honest", recipe, always(sites[0]))
    assert honest.answer(TaskKind.FIT, 1, base) == "done"
    assert not honest.withheld()
    monkeypatch.setattr(judge, "response_problem", lambda *_: RARE)
    trapped = Questioned(tmp_path / "trapped", recipe, always(sites[0]))
    refused, withheld, looked = list[object](), list[object](), list[object]()
    trapped.agent._work.tools.on_refusal = lambda *told: refused.append(told)
    trapped.agent._work.tools.on_withheld = lambda *told: withheld.append(told)

    def noted(payload: Payload, *_: object, **__: object) -> Payload:
        looked.append(payload)
        return payload

    monkeypatch.setattr(computation, "withhold_rare_units", noted)
    with capture_logs() as logs:
        assert trapped.answer(TaskKind.FIT, 1, base) == "done"
    assert trapped.withheld()
    assert (len(refused), len(withheld)) == (0, 1)  # telemetry may send how much was refused
    assert len(looked) == 1  # for as long as every fit
    assert [kind for _, kind in sent(trapped)] == [kind for _, kind in sent(honest)]
    assert any("this update is not sent" in line["event"] and "response" in line["why"] for line in logs)


@pytest.mark.parametrize(
    ("plan", "limits", "kind"),
    [
        ({}, {}, TaskKind.FIT),
        ({}, {"steps": 10**6}, TaskKind.INITIALISE),
        ({"lr": 1e4, "max_grad_norm": None}, {"lr": 1e4}, TaskKind.FIT),
    ],
    ids=["units", "limits", "diverging"],
)
def test_where_nothing_leaves_no_answer_depends_on_the_images(
    plan: Any, limits: Any, kind: TaskKind, sites: list[SiteData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update tells the server more than a site that declines would."""
    monkeypatch.setattr(judge, "response_problem", lambda *_: RARE)
    recipe, rules = recipe_like("digits-solo", plan=PLAN | plan), RULES.model_dump()
    rules["limits"] |= limits
    asked = Questioned(tmp_path, recipe, always(sites[0]), rules)
    assert asked.answer(kind, int(kind is TaskKind.FIT), as_payload(honest_model(recipe))) == "done"
    if plan:
        assert asked.agent._site.store.last_counted(recipe.name, 2).client_state == {}


@pytest.mark.parametrize("name", ["fednh", "fedprp", "fedproc", "fedproto"])
def test_no_recipe_says_from_how_many_images_a_class_counts(name: str, sites: list[SiteData], tmp_path: Path) -> None:
    """Run by run with ever other numbers, how many sites hold a class would be how many images each has."""
    least = RULES.min_samples_per_class

    def run(images: int) -> Recipe:
        method = {"name": name, "min_samples_per_class": images}
        recipe = recipe_like("digits-fednh", plan=PLAN, federation=SECURE, method=method)
        return recipe.model_copy(update={"name": f"at-least-{images}"})

    asked = Questioned(tmp_path, run(least), always(sites[0]))
    assert asked.answer(TaskKind.INITIALISE, 0) == "done"
    answers = [asked.offered(run(images)) for images in (1, least - 1, least + 1, 999)]
    assert answers == ["done", "done", "policy", "policy"]


def sent(asked: Questioned) -> list[tuple[str, TaskKind]]:
    return [(task.task_id, task.kind) for task, _ in asked.harness.link.pushed]


def test_with_noise_images_are_not_asked(
    sites: list[SiteData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replaces an update by exact numbers of the images is no noisy result."""
    monkeypatch.setattr(judge, "response_problem", lambda *_: RARE)
    dp = {"noise_multiplier": 30.0, "sampling_rate": 0.1}
    recipe = recipe_like("digits-fedavg-dp", plan={**PLAN, "dp": dp}, federation=SECURE)
    base = as_payload(honest_model(recipe))
    asked = Questioned(tmp_path / "site", recipe, always(sites[0]), NOISY)
    assert asked.answer(TaskKind.FIT, 1, base) == "done"
    assert not asked.withheld()


@pytest.mark.parametrize("key", ["min_step_sum", "steps", "min_contrast"])
def test_limits_by_images_tell_no_number_of_them(key: str, sites: list[SiteData], tmp_path: Path) -> None:
    """A run that only sites with more images may train, by their policy, is declined by none of them."""
    recipe, base = secure_run(), as_payload(honest_model(secure_run()))
    counts = sorted(len(site.train) for site in sites)
    steps, contrast = math.ceil(counts[2] / 16), sorted(site.train.contrast() for site in sites)[2]
    least = {"min_step_sum": 0.1 * 2 * steps, "steps": steps, "min_contrast": contrast}[key]
    rules = RULES.model_copy(update={"limits": RULES.limits.model_copy(update={key: least})})
    answers, withheld = set(), set()
    for number, site in enumerate(sites):
        asked = Questioned(tmp_path / str(number), recipe, always(site), rules.model_dump())
        answers.add((asked.answer(TaskKind.INITIALISE, 0), asked.answer(TaskKind.FIT, 1, base)))
        withheld.add(asked.withheld())
    assert answers == {("done", "done")}
    assert withheld == {True, False}  # what the site must not tell


@pytest.mark.parametrize("blind", [share_sets.dead, share_sets.faint])
def test_what_the_blind_teach_is_withheld(
    blind: Callable[[Payload], Payload], sites: list[SiteData], tmp_path: Path
) -> None:
    """Eight sums of such fits gave the shares of each of three sites (test_sums.py)."""
    run = share_sets.recipe(federation=SECURE)
    (base,) = share_sets.questions(run, blind(as_payload(honest_model(run))), number=1)
    for number, data in enumerate(sites):
        asked = Questioned(tmp_path / str(number), run, always(data))
        assert asked.answer(TaskKind.FIT, 2, base) == "done"
        assert asked.withheld()


@pytest.mark.parametrize(
    ("width", "scale", "withheld"),
    [(1, None, True), (4, None, True), (64, None, False), (64, 0.75, True), (64, 1.0, True), (64, 2.0, False)],
)
def test_what_a_body_taught_that_is_blind_by_itself_is_withheld(
    width: int, scale: float | None, withheld: bool, sites: list[SiteData], tmp_path: Path
) -> None:
    """At rates of 1 a narrow built body told the shares, and features made to vary and to tell nothing of classes.

    The limit on the number of features is off here; with a scale the last layer is of the second kind (`level`), and of
    2 it told nothing.
    """
    limits = RULES.limits.model_copy(update={"min_features_per_class": 0.0})
    run = share_sets.recipe(1.01, federation=SECURE, model={"name": "digits-cnn", "features": width})
    built = as_payload(honest_model(run))
    body = built if scale is None else share_sets.centred(run, share_sets.level(run, built, scale))
    rules = RULES.model_copy(update={"limits": limits}).model_dump()
    asked = Questioned(tmp_path, run, always(sites[0]), rules)
    assert asked.answer(TaskKind.FIT, 2, body) == "done"
    assert asked.withheld() == withheld


def test_a_fit_that_diverges_is_not_declined(sites: list[SiteData], tmp_path: Path) -> None:
    """From which length of a feature on it does is a threshold on the class counts: 14 declines gave one exactly."""
    run = recipe_like(
        "digits-fedavg",
        plan=PLAN | {"lr": 0.5, "epochs": 8, "max_grad_norm": None},
        federation=SECURE,
        method={"name": "fedprox", "mu": 1000.0},
    )
    first = as_payload(honest_model(run))
    for number, data in enumerate(sites):
        asked = Questioned(tmp_path / str(number), run, always(data))
        assert asked.answer(TaskKind.FIT, 2, first) == "done"
        assert asked.withheld()
        assert codec.first_not_finite(asked.left()) is None
        assert {part: asked.left()[part].keys() for part in first} == {part: first[part].keys() for part in first}


def test_control_variates_tell_no_number_of_steps(sites: list[SiteData], tmp_path: Path) -> None:
    """They lead a fit further with each step: of a method without, they are refused whatever their size."""
    recipe, built = secure_run(), as_payload(honest_model(secure_run()))

    def led(size: float) -> Payload:
        return {**built, Part.CONTROL: {f"body.{name}": -size * tensor for name, tensor in built[Part.BODY].items()}}

    answers = set()
    for number, site in enumerate(sites):
        asked = Questioned(tmp_path / str(number), recipe, always(site))
        answers |= {asked.answer(TaskKind.FIT, 2, led(size)) for size in (1e-4, 0.1, 1.0, 100.0)}
    assert answers == {"policy"}


def test_runs_with_one_class_less_after_the_other_tell_no_class(tmp_path: Path) -> None:
    """A site has no image for a run that lacks its class; so it waits for a person, whether it has the class or not."""
    names = ["akiec", "bcc", "mel", "nv"]
    has = ["bcc", "nv"]
    draw = np.random.default_rng(0)
    for name in has:
        (tmp_path / "images" / name).mkdir(parents=True)
        for image in range(30):
            pixels = draw.integers(0, 255, (16, 16), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{image}.png")
    settings = Data(source="folder", root=str(tmp_path / "images"), test_fraction=0.3, partition={"kind": "whole"})

    def run(name: str, classes: list[str]) -> Recipe:
        changed = {"name": name, "classes": len(classes), "class_names": classes, "input": {"shape": [1, 16, 16]}}
        return Recipe.model_validate(json.loads(secure_run().wire()) | changed)

    def load(recipe: Recipe) -> SiteData:
        return load_site(settings, 0, recipe.input, recipe.classes, class_names=recipe.class_names)

    asked = Questioned(tmp_path / "state", run("all", names), load)
    assert asked.answer(TaskKind.INITIALISE, 0) == "done"
    without = {name: asked.offered(run(f"no-{name}", [n for n in names if n != name])) for name in names}
    assert set(without.values()) == {str(PauseReason.APPROVAL)}
    assert asked.offered(run("again", names)) == "done"  # the first list of classes needs nobody


def test_a_person_who_approves_a_run_accepts_its_classes(sites: list[SiteData], tmp_path: Path) -> None:
    recipe, asked = secure_run(), Questioned(tmp_path, secure_run(), always(sites[0]))
    assert asked.answer(TaskKind.INITIALISE, 0) == "done"
    other = Recipe.model_validate(json.loads(recipe.wire()) | {"name": "other", "classes": recipe.classes + 1})
    assert asked.offered(other) == str(PauseReason.APPROVAL)
    approvals = asked.agent._site.store.approvals
    assert approvals is not None
    approvals.approve(approvals.offer("other"))
    assert asked.offered(other) == "done"
    assert asked.offered(other.model_copy(update={"name": "third"})) == "done"
