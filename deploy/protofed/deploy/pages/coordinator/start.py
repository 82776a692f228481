"""Start a run: a recipe that comes with protofed or a pasted one, checked and shown with its cost first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from protofed.common.config.recipe import Recipe, parse
from protofed.common.config.toml_files import parse_toml
from protofed.common.errors import ConfigError, unknown
from protofed.common.forms import check_id
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.tables import start_notes
from protofed.deploy.overrides import read_overrides, with_overrides
from protofed.deploy.pages.shell import form_of, shell_of
from protofed.deploy.site.recipe_privacy import planned_lines

FIELDS = ("recipe", "toml", "name", "changes", "force")


@dataclass(frozen=True)
class StartPages:
    """The page `/start`: a form, then what it would start, then the order."""

    operator: Operator

    def routes(self) -> Sequence[BaseRoute]:
        """Their routes."""
        return [Route("/start", self.ask), Route("/start", self.answer, methods=["POST"])]

    def ask(self, request: Request) -> Response:
        """The empty form; a link may name a recipe."""
        return self._form(request, {"recipe": request.query_params.get("recipe", "")})

    def answer(self, request: Request) -> Response:
        """Check the form, and start the run if it was confirmed; else show what that would do, or what is wrong."""
        form = form_of(request)
        try:
            recipe = recipe_of(form)
            costs, notes = planned_lines(recipe), start_notes(recipe)
            if form.get("do") == "start":
                info = self.operator.start(recipe, force=form.get("force") == "yes")
                unmet = "".join(f"\nwarning: {warning}" for warning in info.unmet)
                return shell_of(request).done(f"/runs/{info.run}", f"{info.run}: {info.status}{unmet}")
        except ConfigError as error:
            return self._form(request, form, problem=str(error))
        if form.get("do") == "change":
            return self._form(request, form)
        context = {
            "recipe": recipe,
            "costs": costs,
            "notes": notes,
            "values": {key: form.get(key, "") for key in FIELDS},
        }
        return shell_of(request).page(request, "start_check.html.j2", context)

    def _form(self, request: Request, form: Mapping[str, str], problem: str = "") -> Response:
        recipes = {name: shipped.what(file) for name, file in shipped.files("recipes").items()}
        values = {key: form.get(key, "") for key in FIELDS}
        status = 400 if problem else 200
        context = {"recipes": recipes, "values": values, "problem": problem}
        return shell_of(request).page(request, "start.html.j2", context, status=status)


def recipe_of(form: Mapping[str, str]) -> Recipe:
    """The recipe that a form names or has, with its changes.

    Raises:
        ConfigError: there is none or there are two, or it cannot be used; the text has the path of the key and what was
            expected.
    """
    name, text = form.get("recipe", ""), form.get("toml", "")
    if bool(name) == bool(text):
        raise ConfigError("expected a recipe of the list, or a pasted one, and not both")
    if name and name not in shipped.files("recipes"):  # a path must not be read from a form
        raise unknown("recipe", name, shipped.files("recipes"))
    changes = read_overrides([line for line in form.get("changes", "").splitlines() if line.strip()])
    recipe = with_overrides(shipped.recipe(name) if name else pasted(text), changes)
    return recipe.model_copy(update={"name": check_id("run", form["name"])}) if form.get("name") else recipe


def pasted(text: str) -> Recipe:
    """A recipe as TOML text.

    Raises:
        ConfigError: it is no TOML, extends a file, or cannot be used.
    """
    table = parse_toml(text.replace("\r\n", "\n").lstrip("\ufeff"), "the pasted recipe is not TOML")
    if "extends" in table:
        raise ConfigError(
            "the pasted recipe extends another file, which is not here; paste what `protofed recipes show FILE` prints"
        )
    return parse(table, Recipe, "the pasted recipe")
