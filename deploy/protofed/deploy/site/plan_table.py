"""A site's plan as whoever answers for the site's data reads it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from protofed.common.payload import Part, TensorSpec
from protofed.deploy.site.plan import Leaving, SitePlan

MODEL = f"{Part.BODY} and {Part.HEAD}"


def show(plan: SitePlan, console: Console, *, tensors: bool = False, policy: str | None = None) -> None:
    """Print it.

    Args:
        tensors: every tensor by name, rather than a row a part.
        policy: how the policy is called that the plan was made with, if there is one.
    """
    judged, recipe = policy is not None, plan.recipe
    method, model = recipe.method.name, recipe.model.name
    console.print(
        f"[bold]{recipe.name}[/bold]: method {method}, model {model}, {recipe.rounds} rounds", highlight=False
    )
    leaving = _tensors(plan.leaves, judged) if tensors else _parts(plan.leaves, judged)
    for title, *blocks in (
        ("Leaves the site, in every round that it takes part in", leaving, _total(plan)),
        ("What that discloses", _disclosed(plan)),
        ("Single numbers beside the tensors", _numbers(plan, judged), _about_numbers(plan)),
        ("Comes to the site, in every round that it takes part in", _coming(plan), _received(plan)),
        ("Stays on the site", _staying(plan)),
        ("Before round 1", _first_model(plan)),
        ("Policy", *_rules(plan), _verdict(plan, policy)),
    ):
        console.print(f"\n[bold]{title}[/bold]", highlight=False)
        for block in blocks:
            console.print(block, highlight=False)
    if not tensors:
        console.print("\n--tensors lists every tensor by name, shape and dtype.", highlight=False, style="dim")


def _parts(leaves: Sequence[Leaving], judged: bool) -> Table:
    table = _table("part", "tensors", "MB", "sent", "policy")
    for (part, _), group in itertools.groupby(leaves, key=lambda leaving: (leaving.spec.part, leaving.optional)):
        found = list(group)
        specs = [leaving.spec for leaving in found]
        table.add_row(part.value, _kind(specs), _mb(_size(specs)), _sent(found[0]), _judged(found[0], judged))
    return table


def _tensors(leaves: Sequence[Leaving], judged: bool) -> Table:
    table = _table("tensor", "of", "bytes", "sent", "policy")
    for leaving in leaves:
        spec = leaving.spec
        table.add_row(spec.path, _kind([spec]), f"{spec.nbytes:,}", _sent(leaving), _judged(leaving, judged))
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, justify="right" if name in ("MB", "bytes") else "left", overflow="fold")
    return table


def _total(plan: SitePlan) -> str:
    least, most = plan.sent_bytes
    return f"In all {_mb(most)} MB a round" + (f", {_mb(least)} MB of it always." if least != most else ".")


def _disclosed(plan: SitePlan) -> str:
    parts = dict.fromkeys(leaving.spec.part for leaving in plan.leaves)
    return "\n".join(f"- {part}: {part.discloses}" for part in parts) or "Nothing: no tensor leaves."


def _numbers(plan: SitePlan, judged: bool) -> Table:
    table = _table("of", *(("leave", "stay: not in metrics") if judged else ("leave, if a policy names them",)))
    for of, names in plan.scalars.items():
        kept = [name for name in names if name not in plan.released[of]]
        cells = [_names([name for name in names if name not in kept]), _names(kept)]
        table.add_row(of, *cells[: len(table.columns) - 1])
    return table


def _about_numbers(plan: SitePlan) -> str:
    match plan.count_leaves:
        case None:
            count = "leaves only if a policy says so (example_count)"
        case leaves:
            count = f"{'leaves' if leaves else 'stays'}, as the policy says (example_count)"
    needed = " This run needs it, to weigh sites by it." if plan.count_needed else " This run does not need it."
    return (
        f"The number of training examples {count}.{needed} "
        "A recall is one number for each class, a reliability one for each of 15 bins. "
        "Only a site that has a test set of its own scores on one."
    )


def _coming(plan: SitePlan) -> Table:
    table = _table("part", "tensors", "MB")
    for part, group in itertools.groupby(plan.comes, key=lambda spec: spec.part):
        specs = list(group)
        table.add_row(part.value, _kind(specs), _mb(_size(specs)))
    return table


def _received(plan: SitePlan) -> str:
    return f"In all {_mb(plan.received_bytes)} MB a round; in round 1 it can be less."


def _staying(plan: SitePlan) -> str:
    return (
        "- images, labels, and how many there are of each class: no message has a field for them;\n"
        f"- the site's own model ({MODEL}) after each round, and an update until the server has answered;\n"
        "- what the method keeps for itself from round to round. What it does here, in its own words: "
        f"“{plan.remembers}”"
    )


def _first_model(plan: SitePlan) -> str:
    declined = f" This site declines to: {plan.first_model}." if plan.first_model else ""
    return (
        "One participant, an evaluator if there is one, draws the first model from the "
        f"recipe's seed and sends it ({MODEL}); it holds nothing of a site.{declined}"
    )


def _rules(plan: SitePlan) -> list[str]:
    return ["\n".join(f"- {sentence}" for sentence in plan.rules)] if plan.rules else []


def _verdict(plan: SitePlan, policy: str | None) -> str:
    if policy is None:
        return "None was given; --policy FILE says what one makes of this."
    if not plan.refusals:
        return f"[green]{policy} lets the site take part.[/green]"
    return "\n".join([f"[red]{policy} refuses this run:[/red]", *(f"- {why}" for why in plan.refusals)])


def _sent(leaving: Leaving) -> str:
    return "own classes" if leaving.optional else "always"


def _judged(leaving: Leaving, judged: bool) -> str:
    if leaving.refused:
        return f"[red]refused: {leaving.refused}[/red]"
    return "[green]allowed[/green]" if judged else "–"


def _kind(specs: Sequence[TensorSpec]) -> str:
    """`10 × float32 [64]` where all are alike."""
    dtypes, shapes = sorted({spec.dtype for spec in specs}), {spec.shape for spec in specs}
    like = " and ".join(dtypes) + (rf" \{list(min(shapes))}" if len(shapes) == 1 and min(shapes) else "")
    return like if len(specs) == 1 else f"{len(specs)} × {like}"


def _names(names: Iterable[str]) -> str:
    """Without what they are of."""
    return ", ".join(name.rpartition(".")[2] for name in names) or "–"


def _size(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.3f}" if size >= 500 or not size else "< 0.001"
