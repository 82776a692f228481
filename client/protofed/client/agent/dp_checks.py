"""What a run with `[plan.dp]` is checked for before anything is trained: a guarantee with a hole is refused by name."""

from __future__ import annotations

from protofed.client.data.site_data import SiteData
from protofed.client.method import ClientMethod, dp_cost_of
from protofed.client.models.split import SplitModel
from protofed.client.privacy.rules import PolicyRules
from protofed.client.privacy.update_checks import ROWS, PolicyRefusedError
from protofed.client.training.noisy_steps import check_model
from protofed.common.config.recipe import Recipe
from protofed.common.dp import DpCost
from protofed.common.payload import Part

_COUNTED = ROWS | {Part.CLASS_PRESENCE, Part.LABEL_DISTRIBUTION}  # parts that rule `min_samples_per_class` looks at


def check_dp(
    recipe: Recipe, method: ClientMethod, model: SplitModel, data: SiteData, rules: PolicyRules
) -> DpCost | None:
    """What a round of the run costs at this site; None: the recipe has no `[plan.dp]`.

    Args:
        model: on the site's device.
        data: an evaluator's has nothing to protect, and the policy's rules on counts do not matter there.

    Raises:
        ConfigError: the method or the model cannot be trained so.
        PolicyRefusedError: a rule of the site decides by exact counts of its images.
    """
    plan = recipe.plan.dp
    if plan is None:
        return None
    cost = dp_cost_of(method, recipe.method.name, recipe.plan)
    check_model(model, recipe.input, data.device)
    if not data.scores_only:
        check_rules(method, rules)
    return cost


def check_rules(method: ClientMethod, rules: PolicyRules) -> None:
    """Check that no rule of a site decides by exact counts of its images what leaves, or PolicyRefusedError."""
    counted = (
        ("min_images_per_unit", rules.min_images_per_unit, Part.BODY in method.sends),
        ("min_samples_per_class", rules.min_samples_per_class, bool(method.sends & _COUNTED)),
    )
    for rule, fewest, applies in counted:
        if applies and fewest > 1:
            text = (
                f"{rule} = {fewest} decides by exact counts of this site's images what leaves, and the run has "
                f"[plan.dp], whose noise hides single patients: set {rule} = 1 in a policy with dp"
            )
            raise PolicyRefusedError(rule, text)
