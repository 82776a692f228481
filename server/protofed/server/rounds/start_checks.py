"""What a recipe asks for and this server cannot give, found before its run is queued."""

from __future__ import annotations

from protofed.common import plugins
from protofed.common.config.models import MODELS
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, nearest
from protofed.common.secure_aggregation.groups import Groups
from protofed.server.rounds import phases
from protofed.server.rounds.grouping import DISSOLVED, Grouping, stuck
from protofed.server.rounds.round_rules import RoundRules
from protofed.server.rounds.sampling import Uniform


def check_model(recipe: Recipe) -> None:
    """Check that sites can know the model: by protofed's own name, as `package.module:factory`, or as a plug-in.

    Raises:
        ConfigError: it is none of them; the text has the nearest name.
    """
    name = recipe.model.name
    if name in MODELS or plugins.is_plugin(plugins.PluginKind.MODEL, name) or plugins.is_allowed(name):
        return
    similar = nearest(name, MODELS)
    hint = f"did you mean '{similar}'?" if similar else f"expected one of: {', '.join(MODELS)}."
    raise ConfigError(
        f"recipe '{recipe.name}': unknown model '{name}': {hint} A model of the sites' own is named as "
        "package.module:factory, or listed under `plugins` in the server's settings"
    )


def unmet(recipe: Recipe, trainers: phases.Sites, groups: Groups = ()) -> list[str]:
    """What rounds of this run need and these sites cannot give, a sentence each.

    Args:
        trainers: all that may take part, whether they are there now or not.
        groups: that sites have since earlier secure sums.
    """
    federation = recipe.federation
    grouping = Grouping.of_run(recipe)
    rules = RoundRules(recipe.rounds, federation, Uniform(recipe.seed), grouping=grouping)
    problems = []
    needed = max(rules.trainers_needed(number, trainers) for number in (0, 1))
    if len(trainers) < needed:
        listed = f": {', '.join(sorted(trainers))}" if trainers else ""
        counts = {"min_sites": federation.min_sites, "quorum": federation.quorum}
        asked = ", ".join(f"{key} = {value}" for key, value in counts.items() if isinstance(value, int))
        problems.append(
            f"{needed} trainers are needed ({asked}), and {len(trainers)} may take part{listed}; "
            "register or start the others, or lower these keys of [federation]"
        )
    elif grouping is not None and len(whole := rules.countable(groups, trainers)) < rules.trainers_needed(1, whole):
        problems += [f"{held.why}: {DISSOLVED.format(held.site)}" for held in stuck(groups, trainers, grouping.fewest)]
    for site in sorted(set(federation.required_sites) - trainers):
        similar = nearest(site, trainers)
        hint = f"did you mean '{similar}'?" if similar else "register it as a trainer, admit it, or leave it out"
        problems.append(f"required_sites names '{site}', which is no site that may train here: {hint}")
    return problems
