"""The output of `protofed client preview`: a site's plan in words, for whoever answers for the site's data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from protofed.client.policy.rules import discloses
from protofed.common.payload import Part, TensorSpec
from protofed.deploy.site import privacy
from protofed.deploy.site.plan import OutgoingTensor, SitePlan
from protofed.deploy.site.plan_request import limits_table, lines
from protofed.deploy.tables import BOXED, Column, terminal

R = TypeVar("R")
MODEL = f"{Part.BODY} and {Part.HEAD}"


def show(plan: SitePlan, console: Console, *, tensors: bool | None = None, policy: str | None = None) -> None:
    """Print the plan.

    Args:
        tensors: a row for every tensor; else for every part, None for a command that has no --tensors.
        policy: the name of the policy that the plan was made with; None: without one.
    """
    has_policy, recipe = policy is not None, plan.recipe
    method, model = recipe.method.name, recipe.model.name
    console.print(
        f"[bold]{recipe.name}[/bold]: method {method}, model {model}, {recipe.rounds} rounds", highlight=False
    )
    outgoing = _tensors(plan.outgoing, has_policy) if tensors else _parts(plan.outgoing, has_policy)
    sends = "sends" if plan.masked is None else "masks and sends"
    for title, *blocks in (
        ("What the server asks for", lines(plan.requests), *([limits_table(plan.limits)] if plan.limits else [])),
        *([("What its noise is worth", *_privacy(plan))] if plan.privacy is not None else []),
        (f"What the site {sends}, in every round that it takes part in", outgoing, _total(plan)),
        (
            f"What the server sees of these, {'with' if plan.server_view.secure else 'without'} secure aggregation",
            *_sight(plan),
        ),
        ("What other sites see of these", _others(plan)),
        (
            "Single numbers beside the tensors",
            _numbers(plan, has_policy),
            *_what_numbers_disclose(plan),
            _about_numbers(plan),
        ),
        ("What the site receives, in every round that it takes part in", _incoming(plan), _incoming_total(plan)),
        ("Stays on the site", _kept_on_site(plan)),
        ("Before round 1", _first_model(plan)),
        ("Policy", *_rules(plan), _verdict(plan, policy)),
    ):
        console.print(f"\n[bold]{title}[/bold]", highlight=False)
        for block in blocks:
            console.print(block, highlight=False)
    if tensors is False:
        console.print("\n--tensors lists every tensor by name, shape and dtype.", highlight=False, style="dim")


def _parts(outgoing: Sequence[OutgoingTensor], has_policy: bool) -> Table:
    # The plan's order keeps the tensors of one part together, the required ones before the optional ones.
    groups = itertools.groupby(outgoing, key=lambda tensor: (tensor.spec.part, tensor.optional))
    parts = [list(group) for _, group in groups]
    return terminal(
        (
            _words("part", lambda tensors: tensors[0].spec.part.value),
            _words("tensors", lambda tensors: _kind([tensor.spec for tensor in tensors])),
            _bytes("MB", lambda tensors: _mb(_size(tensor.spec for tensor in tensors))),
            _words("sent", lambda tensors: _sent(tensors[0])),
            _words("policy", lambda tensors: _policy_cell(tensors[0], has_policy)),
        ),
        parts,
        BOXED,
    )


def _tensors(outgoing: Sequence[OutgoingTensor], has_policy: bool) -> Table:
    return terminal(
        (
            _words("tensor", lambda tensor: tensor.spec.path),
            _words("of", lambda tensor: _kind([tensor.spec])),
            _bytes("bytes", lambda tensor: f"{tensor.spec.nbytes:,}"),
            _words("sent", _sent),
            _words("policy", lambda tensor: _policy_cell(tensor, has_policy)),
        ),
        outgoing,
        BOXED,
    )


def _words(head: str, cell: Callable[[R], str | Text]) -> Column[R]:
    return Column(head, cell, wraps=True)


def _bytes(head: str, cell: Callable[[R], str]) -> Column[R]:
    return Column(head, cell, right=True, wraps=True)


def _total(plan: SitePlan) -> str:
    least, most = plan.sent_bytes
    if plan.masked is not None:
        vector = f"one masked vector of {plan.masked:,} numbers, 8 bytes each, {_mb(most)} MB a round"
        return f"They are sent as {vector}, whichever classes the site has."
    return f"In all {_mb(most)} MB a round" + (f", at least {_mb(least)} MB." if least != most else ".")


def _sight(plan: SitePlan) -> Iterator[str]:
    """What the server sees in this run; then what it would see in the same run with, or without, secure aggregation."""
    server_view = plan.server_view
    yield (
        "\n".join(f"- {each.part}: {server_view.seen(each)}" for each in server_view.parts)
        or "Nothing: no tensor is sent."
    )
    if server_view.secure:
        yield "\n".join(f"- {sentence}" for sentence in server_view.whole)
        plain = [f"- {each.part}: {each.plain or 'It would not be sent.'}" for each in server_view.parts]
        yield "\n".join(["Without secure aggregation it would see:", *plain])
    elif server_view.why_not:
        yield f"With secure aggregation there is no such run: {escape(server_view.why_not)}."
    elif server_view.parts:
        aggregated = [f"- {each.part}: {each.aggregated}" for each in server_view.parts]
        whole = [f"- {sentence}" for sentence in server_view.whole]
        yield "\n".join(["With federation.secure = true it would see:", *aggregated, *whole])


def _privacy(plan: SitePlan) -> Iterator[str]:
    if plan.privacy is not None:
        yield "\n".join(f"- {line}" for line in privacy.lines(plan.privacy))


def _others(plan: SitePlan) -> str:
    if not plan.exchanges:
        return "The aggregate, which the server sends to all."
    return "\n".join(f"- {exchange}: {exchange.discloses}" for exchange in sorted(plan.exchanges))


def _numbers(plan: SitePlan, has_policy: bool) -> Table:
    """Rows are what scores are of: the training, the global model, …"""
    alone: Column[str] = _words(
        "sent", lambda of: _names([name for name in plan.scalars[of] if name in plan.released[of]])
    )
    aggregated: Column[str] = _words("sent only in a secure aggregation", lambda of: _names(plan.aggregated[of]))
    secure = plan.recipe.federation.secure
    origin: Column[str] = _words("of", str)
    columns = [origin, alone, *([aggregated] if secure else [])]
    if has_policy:
        columns.append(_words(f"stay: not in {'aggregated_metrics' if secure else 'metrics'}", partial(_staying, plan)))
    elif not secure:
        columns[1] = replace(alone, head="sent, if a policy names them")
    return terminal(columns, plan.scalars, BOXED)


def _staying(plan: SitePlan, of: str) -> str:
    return _names([name for name in plan.scalars[of] if name not in (*plan.released[of], *plan.aggregated[of])])


def _what_numbers_disclose(plan: SitePlan) -> Iterator[str]:
    """What can be computed from the scores that leave, one line a sentence; then where those are that stay."""
    by_sentence: dict[str, list[str]] = {}
    for name in itertools.chain(*plan.released.values()):
        by_sentence.setdefault(discloses(name), []).append(name)
    if by_sentence:
        yield "What a server can compute from the sent numbers and the updates:"
        yield "\n".join(f"- {', '.join(names)}: {sentence}" for sentence, names in by_sentence.items())
    if any(plan.aggregated.values()):
        yield "From a secure aggregation it learns each mean, and how many sites have the score: three or more."
    if any(
        len(plan.released[origin]) + len(plan.aggregated[origin]) < len(names) for origin, names in plan.scalars.items()
    ):
        yield "The others stay on the site, where `protofed client runs` shows them."


def _about_numbers(plan: SitePlan) -> str:
    match plan.count_leaves:
        case None:
            count = "is sent only if a policy says so (example_count)"
        case leaves:
            count = f"{'is sent' if leaves else 'stays'}, as the policy says (example_count)"
    needed = " This run needs it, to weigh sites by it." if plan.count_needed else " This run does not need it."
    return (
        f"The number of training examples {count}.{needed} "
        "A recall is one number for each class, a reliability one for each of 15 bins. "
        "Only a site that has a test set of its own scores on one."
    )


def _incoming(plan: SitePlan) -> Table:
    parts = [list(group) for _, group in itertools.groupby(plan.incoming, key=lambda spec: spec.part)]
    columns: Sequence[Column[list[TensorSpec]]] = (
        _words("part", lambda specs: specs[0].part.value),
        _words("tensors", _kind),
        _bytes("MB", lambda specs: _mb(_size(specs))),
    )
    return terminal(columns, parts, BOXED)


def _incoming_total(plan: SitePlan) -> str:
    return f"In all {_mb(plan.received_bytes)} MB a round; in round 1 it can be less."


def _kept_on_site(plan: SitePlan) -> str:
    return (
        "- images, labels, and how many there are of each class. No message has a field for them. What a server can "
        "compute about them is said above;\n"
        f"- the site's own model ({MODEL}) after each round, and an update until the server has answered;\n"
        "- what the method keeps for itself from round to round. The method's own documentation says about it: "
        f"“{plan.method_summary}”"
    )


def _first_model(plan: SitePlan) -> str:
    declined = f" This site declines to: {plan.first_model}." if plan.first_model else ""
    return (
        "Two sites draw the first model from the recipe's seed and send it "
        f"({MODEL}); in a run of one site this site alone. It has learned nothing from a site's data.{declined}"
    )


def _rules(plan: SitePlan) -> list[str]:
    return ["\n".join(f"- {escape(sentence)}" for sentence in plan.rules)] if plan.rules else []


def _verdict(plan: SitePlan, policy: str | None) -> str:
    if policy is None:
        return (
            "None was given, so nothing was checked. The daemon checks its own policy, and may refuse the run. Give "
            "that policy, as --policy standard or --policy FILE."
        )
    return verdict(plan, policy)


def verdict(plan: SitePlan, policy: str) -> str:
    """What a policy says to the run, as Rich's markup."""
    if plan.withheld and not plan.refusals:
        lines = (f"- {escape(sentence)}" for sentence in plan.withheld)
        return "\n".join([f"[red]Under {policy} the site takes part, and spoils each round:[/red]", *lines])
    if not plan.refusals:
        allowed = f"[green]{policy} lets the site take part[/green]"
        return "\n".join(
            [f"{allowed}, as far as is known here.", *plan.still_open] if plan.still_open else [f"{allowed}."]
        )
    return "\n".join([f"[red]{policy} refuses this run:[/red]", *(f"- {escape(reason)}" for reason in plan.refusals)])


def _sent(tensor: OutgoingTensor) -> str:
    return "own classes" if tensor.optional else "always"


def _policy_cell(tensor: OutgoingTensor, has_policy: bool) -> Text:
    if tensor.refused_by:
        return Text(f"refused: {tensor.refused_by}", "red")
    return Text("allowed", "green") if has_policy else Text("–")


def _kind(specs: Sequence[TensorSpec]) -> str:
    """Number, dtype and shape, as `10 × float32 [64]`; without the shape if they differ."""
    dtypes, shapes = sorted({spec.dtype for spec in specs}), {spec.shape for spec in specs}
    kind = " and ".join(dtypes) + (f" {list(min(shapes))}" if len(shapes) == 1 and min(shapes) else "")
    return kind if len(specs) == 1 else f"{len(specs)} × {kind}"


def _names(names: Iterable[str]) -> str:
    """The names without the prefix that their row has in common."""
    return ", ".join(name.rpartition(".")[2] for name in names) or "–"


def _size(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.3f}" if size >= 500 or not size else "< 0.001"
