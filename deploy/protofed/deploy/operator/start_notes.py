"""What an operator should know of a recipe before it is started, on the command line and on the page."""

from __future__ import annotations

from protofed.common.config.recipe import Recipe
from protofed.server.method import server_methods


def start_notes(recipe: Recipe) -> list[str]:
    """Sentences, without a full stop; none: there is nothing to say.

    Raises:
        ConfigError: the recipe's method is unknown.
    """
    notes = []
    if recipe.data is not None:
        notes.append("the recipe's [data] is for `protofed simulate`; each site trains on the data of its own settings")
    if not recipe.federation.secure and not server_methods.about(recipe.method.name).sends_nothing:
        notes.append(
            "without federation.secure = true the server reads each site's updates; "
            "sites under the policies standard and strict decline such a run"
        )
    return notes
