"""The runs that a server offered to a site, with what the site has decided on each: for the screen and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protofed.client.policy.approval import Approval, Approvals, ApprovalStatus, Offer
from protofed.client.site import read_recipe
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, short
from protofed.common.protocol.messages import Assignment
from protofed.deploy.site.plan_request import asked, printable, short_plan

_INDENT = "  "


def parse_offer(offer: Offer) -> Recipe:
    """The recipe of an offer, checked.

    Raises:
        ConfigError: it cannot be used.
    """
    return read_recipe(Assignment(offer.run, offer.recipe))


def offered_run(approvals: Approvals, offer: Offer) -> dict[str, Any]:
    """A run as plain data: what it asks, and the site's decision with who took it and when.

    `approval` is a value of `ApprovalStatus`, or `cannot be used: …` of a recipe that no site of this version can use.
    """
    status, record = approvals.decision(offer)
    row: dict[str, Any] = {"run": offer.run, "offered": offer.at, "recipe": offer.digest, "cohort": offer.min_cohort}
    row |= {"approval": status.value, **_decided(status, record), "first_task": approvals.first_task_at(offer.run)}
    try:
        recipe = parse_offer(offer)
    except ConfigError as error:
        unusable = f"cannot be used: {short(printable(str(error)), 300)}"
        return {**row, "method": "", "model": "", "plan": "", "rounds": 0, "approval": unusable}
    chosen = {"method": printable(recipe.method.name), "model": printable(recipe.model.name)}
    about = {name: printable(text) for name, text in asked(recipe, offer.min_cohort).items()}
    return {**row, **chosen, "plan": short_plan(recipe.plan), "rounds": recipe.rounds, "asked": about}


def _decided(status: ApprovalStatus, record: Approval | None) -> dict[str, Any]:
    """Who decided (`policy`, `person`, or nobody yet), when, and the policy or the user name."""
    if record is None or status is ApprovalStatus.WAITING:
        return {"decided_by": None, "decided_at": "", "who": "", "policy": "", "policy_digest": ""}
    by = "policy" if status is ApprovalStatus.BY_POLICY else "person"
    policy = {"policy": printable(record.policy), "policy_digest": record.policy_digest}
    return {"decided_by": by, "decided_at": record.at, "who": printable(record.by), **policy}


def run_lines(row: Mapping[str, Any], width: int) -> Iterator[str]:
    """A run in a few lines of at most `width` characters, unless a word is longer: no date is ever cut."""
    yield str(row["run"])
    for text in (_decision_text(row), _plan_text(row)):
        yield from textwrap.wrap(
            text,
            max(width, 30),
            initial_indent=_INDENT,
            subsequent_indent=2 * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _decision_text(row: Mapping[str, Any]) -> str:
    by = f" by {row['who']}" if row["who"] else ""
    since = f", first task {row['first_task']}" if row["first_task"] else ", no task yet"
    at = row["decided_at"]
    match row["approval"]:
        case ApprovalStatus.BY_POLICY:
            digest = f" (digest {row['policy_digest'][:16]}…)" if row["policy_digest"] else ""
            return f"approved by policy {row['policy']}{digest}, automatically, {at}{since}"
        case ApprovalStatus.APPROVED:
            return f"approved by a person{by}, {at}{since}"
        case ApprovalStatus.DENIED | ApprovalStatus.WITHDRAWN as status:
            return f"{status}{by}, {at}: this site sends nothing for it; `protofed client approve` takes this back"
        case ApprovalStatus.CHANGED:
            return f"awaiting approval: it has changed since it was approved{by}, {at}"
        case ApprovalStatus.WAITING:
            return f"awaiting approval: protofed client approve {row['run']}"
        case unusable:
            return str(unusable)


def _plan_text(row: Mapping[str, Any]) -> str:
    if not row["rounds"]:
        return f"offered {row['offered']}"
    sites = "1 site or more" if row["cohort"] == 1 else f"{row['cohort']} sites or more"
    asks = f"{row['method']}, {row['model']}, {row['rounds']} rounds of {row['plan']}; {sites} in each round's mean"
    return f"{asks}; offered {row['offered']}"


def all_runs(approvals: Approvals) -> Sequence[dict[str, Any]]:
    """Every offered run, the newest last."""
    return [offered_run(approvals, offer) for offer in approvals.offers()]
