"""`protofed client check`: whether a site's data fit a run, before its daemon starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from protofed.common import plugins
from protofed.common.errors import ConfigError, DataError, PolicyViolationError, StateError
from protofed.deploy.cli.options import Set, needs_recipe, print_json

if TYPE_CHECKING:
    from protofed.client.policy.approval import Offer
    from protofed.client.policy.policy import Policy
    from protofed.common.config.recipe import Recipe
    from protofed.common.config.settings import ClientSettings
    from protofed.deploy.progress import Bar
    from protofed.deploy.site.check import SiteCheck
    from protofed.deploy.site.plan import SitePlan

console = Console()
_PLACEHOLDER = "unsaid"  # for settings that a daemon requires and this check does not use


def check(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's file or shipped name; default: only describe the data.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="The daemon's settings file (TOML), with its data table.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The site's policy, by name or file: whether it allows the run, which classes are below its minimum.",
        ),
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="trainer or evaluator. Repeat for both.")] = None,
    partition_index: Annotated[
        int | None, typer.Option(help="This site's index in the partition of the data, from 0.")
    ] = None,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Write a picture with some images of each class, as the model sees them.")
    ] = None,
    preview: Annotated[
        bool,
        typer.Option(
            "--preview", help="Also show what would be sent, as `client preview`, for the examples counted here."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every file by name.")] = False,
    assignments: Set = None,
) -> None:
    """Read the site's data as a run would read them. Sends nothing.

    Exit code 65 if the data do not fit the run, 77 if the policy refuses it or lets no update out, 93 if scores
    would be untrue.

    Example: `protofed client check RECIPE --settings site.toml --preview`
    """
    import structlog

    from protofed.deploy import shipped

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(50)
    )  # the printed result already says what the log would
    if recipe is None:
        needs_recipe(assignments, "a recipe")
        if preview:
            raise ConfigError("--preview shows what a run would send; give the run's recipe")
    run_recipe = None if recipe is None else shipped.recipe(recipe, assignments or ())
    daemon_settings = _settings(settings, {"policy": policy, "roles": role, "partition_index": partition_index})
    with _bar(visible=not as_json) as bar:
        from protofed.deploy.site import check_table  # with PyTorch, which takes seconds

        result = _check_site(daemon_settings, run_recipe, bar)
        if contact_sheet is not None:
            bar.say("drawing the contact sheet")
            _draw(result, contact_sheet)
    judged = preview or (run_recipe is not None and daemon_settings.policy != _PLACEHOLDER)
    view = _preview(result, daemon_settings, as_json=as_json) if judged else None
    if as_json:
        report = check_table.plain(result) | ({"preview": view.plain()} if view else {})
        print_json(report, ascii=False)
    else:
        _show(result, contact_sheet, view, preview=preview)
    if code := _exit_code(result, view):
        raise typer.Exit(code)


def _show(result: SiteCheck, contact_sheet: Path | None, view: PlanView | None, *, preview: bool) -> None:
    from protofed.deploy.site import check_table, plan_table

    check_table.show(result, console)
    if contact_sheet is not None:
        console.print(f"\ncontact sheet: {contact_sheet} (it shows the site's images)", highlight=False)
    if view is not None and preview:
        console.print()
        view.show(console)
    elif view is not None and view.policy is not None and (view.refused or result.refusal is None):
        console.print(plan_table.verdict(view.plan, view.policy), highlight=False)


def _exit_code(result: SiteCheck, view: PlanView | None) -> int:
    """0, or the code of the first reason against the run: the policy, the data, the scores."""
    from protofed.deploy.doctor.checks import diagnosis  # with cryptography

    if view is not None and view.refused:
        return PolicyViolationError.exit_code
    if result.refusal is not None:
        return DataError.exit_code
    return diagnosis("scores-untrue").code if any(concern.untrue for concern in result.concerns) else 0


def _preview(result: SiteCheck, settings: ClientSettings, *, as_json: bool) -> PlanView | None:
    """What would leave under the settings' policy, for the examples that were read."""
    from protofed.deploy.site.check import TRAIN

    if (recipe := result.request.recipe) is None:
        return None
    trained = result.used_targets.get(TRAIN)  # counts of findings do not add up to images
    return plan_view(
        recipe,
        None if settings.policy == _PLACEHOLDER else settings.policy,
        examples=None if trained is None else len(trained),
        contrast=result.contrast,
        progress_shown=not as_json,
    )


def _settings(file: Path | None, options: dict[str, Any]) -> ClientSettings:
    """The daemon's settings, with placeholders for required ones that are not about data."""
    from protofed.common.config.settings import ClientSettings, read_settings
    from protofed.common.config.toml_files import read_table

    from_file = {} if file is None else read_table(file)
    for name in ("site", "policy", "state"):
        variable = f"PROTOFED_CLIENT_{name.upper()}"
        if options.get(name) is None and name not in from_file and variable not in os.environ:
            options = {**options, name: _PLACEHOLDER}
    return read_settings(ClientSettings, file, options)


def _check_site(settings: ClientSettings, recipe: Recipe | None, bar: Bar) -> SiteCheck:
    from protofed.client.policy.policy import Policy
    from protofed.deploy import shipped
    from protofed.deploy.site.check import site_check

    has_policy = settings.policy != _PLACEHOLDER
    rules = Policy.read(shipped.policy(settings.policy)).rules if has_policy else None
    plugins.allow(rules.plugins if rules else ())
    return site_check(settings, recipe, rules.min_samples_per_class if rules else None, bar)


def _draw(result: SiteCheck, file: Path) -> None:
    """Write the contact sheet, readable by this user only: it shows patients' images.

    Raises:
        StateError: the file cannot be written.
    """
    from protofed.deploy.site.contact_sheet import sheet

    request = result.request
    run = "own labels" if request.recipe is None else f"run {request.recipe.name}"
    shape = " x ".join(map(str, request.input.shape))
    names = [request.name(index) for index in range(request.classes)]
    picture = sheet(result.survey, names, f"{run}: images as the model sees them, {shape}")
    try:
        # O_EXCL after unlink: an existing file would keep its wider permissions, and a link would be followed.
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(picture)
    except OSError as error:
        raise StateError(
            f"cannot write {file}: {error.strerror}; give --contact-sheet a file in an existing folder"
        ) from error


@contextmanager
def _bar(*, visible: bool) -> Iterator[Bar]:
    from protofed.deploy.progress import progress

    with progress("looking at images", unit="images", visible=visible) as bar:
        yield bar


@dataclass(frozen=True)
class PlanView:
    """A plan, and the policy that it was made under, as a sentence names it."""

    plan: SitePlan
    policy: str | None

    @property
    def refused(self) -> bool:
        """Whether the policy declines the run, or sends random numbers instead of what the site trains."""
        return bool(self.plan.refusals or self.plan.withheld)

    def plain(self) -> dict[str, Any]:
        """The plan for JSON."""
        from protofed.deploy.site.plan import plain

        return plain(self.plan)

    def show(self, console: Console, *, tensors: bool | None = None) -> None:
        """Print it as tables; `tensors` as of `plan_table.show`."""
        from protofed.deploy.site import plan_table

        plan_table.show(self.plan, console, tensors=tensors, policy=self.policy)


def plan_view(
    recipe: Recipe,
    name: str | None,
    *,
    examples: int | None,
    contrast: float | None = None,
    offer: Offer | None = None,
    progress_shown: bool = True,
    state: Path | None = None,
) -> PlanView:
    """Build what a recipe asks, beside a policy's limits.

    Args:
        name: the policy, by name or file; None: no policy.
        examples, contrast: of the training examples here, as of `site_plan`; None: unknown.
        state: the site's state folder, which says what privacy is spent and who the partners are; None: unknown.

    Raises:
        ConfigError: the policy cannot be read.
        StateError: the ledger is damaged.
    """
    from protofed.common.codec import Digest
    from protofed.deploy.progress import progress

    with progress(f"building {recipe.model.name}", visible=progress_shown):
        from protofed.client.state.dp_ledger import FILE, read
        from protofed.deploy.site.partners import PartnersView
        from protofed.deploy.site.plan import site_plan  # with PyTorch, which takes seconds

        policy = None if name is None else _policy(name)
        digest, cohort = (None, None) if offer is None else (Digest(offer.digest), offer.min_cohort)
        spent = None if state is None else read(state / FILE)
        partners = None if state is None else PartnersView.of(state)
        known: dict[str, Any] = {"examples": examples, "contrast": contrast, "spent": spent, "partners": partners}
        plan = site_plan(recipe, policy, digest=digest, cohort=cohort, **known)
    return PlanView(plan, None if name is None else _named(name))


def _named(policy: str) -> str:
    """A file by its name, `policy.toml`; one that comes with protofed as `policy standard`."""
    path = Path(policy)
    return path.name if path.suffix or "/" in policy else f"policy {policy}"


def _policy(name: str) -> Policy:
    from protofed.client.policy.policy import Policy
    from protofed.deploy import shipped

    policy = Policy.read(shipped.policy(name))
    plugins.allow(policy.rules.plugins)
    return policy
