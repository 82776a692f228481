"""What a server asks for in a run, in words and beside what the policy allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from protofed.client.policy.run_limits import BY_IMAGES, LimitCheck
from protofed.common.config.recipe import DpPlan, Plan, Recipe
from protofed.common.errors import count
from protofed.common.payload import Payload
from protofed.deploy.tables import BOXED, Column, terminal


def asked(
    recipe: Recipe, cohort: int | None = None, examples: int | None = None, model: Payload | None = None
) -> dict[str, str]:
    """Everything that a recipe asks of a site, by what it is about.

    Args:
        cohort: sites that a round aggregates at least, as the server announced; None: a file does not say.
        examples: of this site's training set; None: not known.
        model: the run's first model, whose parameters are counted; None: not built.
    """
    plan, images = recipe.plan, recipe.input
    count = "" if model is None else f", {sum(a.size for part in model.values() for a in part.values()):,} numbers"
    started_with = {} if (body := recipe.model.pretrained_body) is None else {"pretrained_body": body}
    return {
        "task": f"{recipe.task.name}{_options(recipe.task.options)}",
        "method": f"{recipe.method.name}{_options(recipe.method.options)}",
        "model": f"{recipe.model.name}{_options(recipe.model.options | started_with)}{count}",
        "input": f"{list(images.shape)} [channels, height, width], mean {list(images.mean)}, std {list(images.std)}",
        "plan": f"{_training(plan, examples)}{_unusual(plan)}",
        "optimizer": f"{plan.optimizer}, momentum {plan.momentum:g}, weight decay {plan.weight_decay:g}, "
        f"largest gradient {'any' if plan.max_grad_norm is None else f'{plan.max_grad_norm:g}'}",
        "learning rate": f"{plan.lr:g}, {_rates(plan)}",
        "rounds": f"{recipe.rounds}",
        "cohort": "not announced yet" if cohort is None else f"{cohort} sites or more in each round's mean",
    }


def lines(about: Mapping[str, str]) -> str:
    """The same as a list."""
    return "\n".join(f"- {name}: {escape(printable(value))}" for name, value in about.items())


def limits_table(checks: Sequence[LimitCheck]) -> Table:
    """What the run asks beside what the policy allows, a row a limit."""
    return terminal(LIMITS, checks, BOXED)


def broken(checks: Sequence[LimitCheck], *, secure: bool) -> Iterator[str]:
    """A sentence for each limit that the run breaks, and is declined for: of a secure run by no limit of the images."""
    yield from (_sentence(check) for check in checks if not check.holds and not (secure and check.rule in BY_IMAGES))


def withheld(checks: Sequence[LimitCheck], *, secure: bool) -> Iterator[str]:
    """A sentence for each limit of the images that a secure run breaks."""
    for check in checks:
        if secure and not check.holds and check.rule in BY_IMAGES:
            noise = (
                "The site sends random numbers instead of what it trains, so the server can decrypt no sum with them"
            )
            yield f"{noise}: {_sentence(check)}."


def _sentence(check: LimitCheck) -> str:
    return f"{printable(check.asked)}: this site's policy allows {check.allowed} ({check.rule})"


def still_open(unchecked: Sequence[str]) -> Iterator[str]:
    """Sentences on rules that a run may break yet, by what decides them."""
    if by_images := [rule for rule in unchecked if rule in BY_IMAGES]:
        yield f"Not known yet, because it depends on the site's images: {', '.join(by_images)}."
    if by_server := [rule for rule in unchecked if rule not in BY_IMAGES]:
        yield f"Not known yet, because the server announces it: {', '.join(by_server)}."


def _unusual(plan: Plan) -> str:
    """How examples are drawn, by what loss and on whose statistics, where it is other than by default."""
    losses = {
        "cross-entropy": "",
        "balanced-softmax": ", by the balanced softmax",
        "logit-adjustment": f", with logits adjusted by {plan.tau:g} log of class frequencies",
    }
    drawn = ", each class drawn as often" if plan.sampling == "class-balanced" else ""
    return f"{drawn}{losses[plan.loss]}{', with BatchNorm statistics of its own' if plan.buffers == 'local' else ''}"


def _rates(plan: Plan) -> str:
    """The learning rates over the rounds."""
    shares = ", ".join(f"{share:.0%}" for share in plan.lr_steps)
    rates = {
        "constant": "in every round",
        "exponential": f"times {plan.lr_decay:g} after each round",
        "step": f"times {plan.lr_decay:g} after {shares} of the rounds",
        "cosine": "falling to nearly 0 in a cosine",
    }
    return rates[plan.schedule] + (f", rising to it over {plan.warmup_rounds} rounds" if plan.warmup_rounds else "")


def _options(options: Mapping[str, object]) -> str:
    pairs = ", ".join(f"{name} = {value}" for name, value in options.items())
    return f" ({pairs})" if pairs else ""


def printable(text: str) -> str:
    """Names and options come from the server: no control characters on the hospital's terminal."""
    return "".join(letter for letter in text if letter.isprintable())


def short_plan(plan: Plan) -> str:
    """`2 epochs of 32, lr 0.1`, or `20 noisy steps, lr 0.3`: local training in a cell."""
    of_round = f"{plan.epochs} epochs of {plan.batch_size}" if plan.dp is None else _noisy_steps(plan, plan.dp)
    return f"{of_round}, lr {plan.lr:g}"


def _training(plan: Plan, examples: int | None) -> str:
    if plan.dp is not None:  # the same at every site, however many examples it has
        return (
            f"{_noisy_steps(plan, plan.dp)} in each training, each on a sample of {plan.dp.sampling_rate:g} of the "
            f"units, divided by {plan.batch_size}"
        )
    here = "" if examples is None else f", {plan.steps_per_epoch(examples)} steps an epoch on {examples} examples here"
    return f"{plan.epochs} epochs a round in batches of {plan.batch_size}{here}"


def _noisy_steps(plan: Plan, dp: DpPlan) -> str:
    return count(dp.steps(plan.epochs), "noisy step")


LIMITS: Sequence[Column[LimitCheck]] = (
    Column("limit", lambda check: check.key, wraps=True),
    Column("this run", lambda check: printable(check.asked), wraps=True),
    Column("the policy allows", lambda check: check.allowed, wraps=True),
    Column("", lambda check: Text("ok", "green") if check.holds else Text("refused", "red"), wraps=True),
)


NOT_HERE = "what its noise is worth is computed where protofed[client] is installed: `protofed client preview`"


def planned_lines(recipe: Recipe) -> list[str]:
    """The privacy that a run costs each site, in sentences, from its recipe alone; none: it has no noise.

    Raises:
        ConfigError: the recipe's method is unknown, or does not work with noise.
    """
    if recipe.plan.dp is None:
        return []
    try:
        from protofed.deploy.site.privacy import lines as privacy_lines
        from protofed.deploy.site.privacy import planned

        plan = planned(recipe)
    except ModuleNotFoundError:  # of the extra `client`
        return [NOT_HERE]
    return [] if plan is None else list(privacy_lines(plan))
