"""What a run would send, receive and keep at a site: shown by `client preview`, `approve` and `check --preview`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from protofed.common import plugins

if TYPE_CHECKING:
    from protofed.client.policy.approval import Offer
    from protofed.client.policy.policy import Policy
    from protofed.common.config.recipe import Recipe
    from protofed.deploy.site.plan import SitePlan


@dataclass(frozen=True)
class PlanView:
    """A plan, and the policy that it was made under, as a sentence names it."""

    plan: SitePlan
    policy: str | None

    @property
    def refused(self) -> bool:
        """Whether the policy declines the run."""
        return bool(self.plan.refusals)

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
    from protofed.deploy.console.progress import progress

    with progress(f"building {recipe.model.name}", shown=progress_shown):
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
