"""Every sentence of a report is bound to the record: change a field, and what is told changes.

A row has the changes of the record, what must then be in the report's words, and what must not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.run_records import BEGAN_AT, ROUND_S, SITES, attempt, intervention, run_record, task, warning

from protofed.deploy.report.document import Document
from protofed.deploy.report.report import document

FITS = [task(name) for name in SITES]
WENT_WELL = "Nothing went wrong"
PLANNED = "2 of 2 planned rounds are finished"


def words(part: Any) -> Iterator[str]:
    """All texts of a document, in its order."""
    if isinstance(part, str):
        yield part
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from words(getattr(part, field.name))
    elif isinstance(part, list | tuple):
        for one in part:
            yield from words(one)


def told(changes: dict[str, Any]) -> str:
    """What a report says of the changed record, but for the glossary."""
    return "\n".join(words(dataclasses.replace(document(run_record(changes)), glossary=())))


def aggregated(number: int, *dropped: str, **fields: Any) -> dict[str, Any]:
    """An attempt at a round under secure aggregation in which these sites did not send their masked numbers."""
    masks = [
        task(name, "mask", loss=None, **({"task_status": "late", "received": 0} if name in dropped else {}))
        for name in SITES
    ]
    masks += [task(name, "agree", loss=None, received=0) for name in SITES if name not in dropped]
    keys = [task(name, loss=None, received=1_000) for name in SITES]
    return attempt(number, tasks=[*keys, *(task(name, "share", received=1_000) for name in SITES), *masks], **fields)


def fits(number: int = 2, outcome: str = "published", **statuses: dict[str, Any]) -> dict[str, Any]:
    """An attempt at a round whose sites' fits have these fields."""
    tasks = [task(name, **statuses.get(name, {})) for name in SITES]
    reason = "1 update at the deadline, quorum 2" if outcome == "abandoned" else ""
    state = "" if outcome in ("abandoned", "open") else f"{number:064d}"
    return attempt(number, outcome=outcome, tasks=tasks, state=state, reason=reason)


LATE = {"task_status": "late", "received": 0, "loss": None}
OUT = {**LATE, "task_status": "failed", "reason": "excluded: no vote", "cause": "excluded"}
REFUSAL = {"verdict": "refused", "code": "norm", "reason": "too far away", "bytes": 2_000_000, "digest": "0" * 64}
ABORTED = {"run.status": "aborted", "run.reason": "the wrong labels", "recipe.rounds": 150}
NO_CLASSES: dict[str, Any] = {f"classes.{which}": {"round": None, "sites": {}} for which in ("newest", "best")}
NOT_SCORED: dict[str, Any] = {"scores": [], **NO_CLASSES}
OWN_ONLY = {"scores.0.sites": {"ann": {"global.local.balanced_accuracy": 0.5, "personal.local.accuracy": 0.25}}}
TWO = {"global.balanced_accuracy": 0.5, "global.accuracy": 0.25}

ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "as it is": ({}, [PLANNED, WENT_WELL, "The run was completed on"], ["abort", "exclu", "revok"]),
    # Secure aggregation
    "without sums": (
        {},
        ["the server saw the update of each site."],
        ["the sum over"],
    ),
    "aggregated": (
        {
            "recipe.federation": {"secure": True},
            "rounds": [attempt(0), aggregated(1), aggregated(2)],
            "groups": [["ann", "bob", "cyd"], ["dan", "eve"]],
            "partners": {"coordinator": "the hub", "number": 2, "institutions": {"ann": "The Hub", "bob": "bob"}},
        },
        [
            "in each of 2 rounds the server saw the sum over 3 sites, and no single",
            "Aggregated together: The Hub (ann), bob, cyd. The server can read a site's own update only together with "
            "all others of the site's group.",
            "The offered list of partners is number 2; the hub runs the server, and is a partner, too (ann).",
            "The server accepted 6 masked updates (6.00 MB)",
            WENT_WELL,
        ],
        ["saw the update of each site", "dropped out"],
    ),
    "one large group": (
        {
            "recipe.federation": {"secure": True},
            "rounds": [attempt(0), aggregated(1), aggregated(2)],
            "groups": [["ann", "bob", "cyd", *(f"more-{number}" for number in range(4))]],
        },
        ["only together with 5 or more others of the site's group."],
        ["all others"],
    ),
    "scores summed, too": (
        {
            "recipe.federation": {"secure": True},
            "rounds": [attempt(0), aggregated(1), aggregated(2)],
            "rounds.2.tasks.0": task("ann", "mask", loss=None, sum_of="scores"),
        },
        ["the server saw the sum over 3 sites", "The server accepted 6 masked updates (6.00 MB)"],
        ["4 sites,"],
    ),
    "one round summed": (
        {
            "recipe.federation": {"secure": True},
            "rounds": [attempt(0), aggregated(1)],
            "groups": [["ann", "bob", "cyd"]],
        },
        [
            "in round 1 the server saw the sum over 3 sites",
            "No list of partners was offered: whoever signs certificates could have invented sites.",
        ],
        ["of each of"],
    ),
    "summed in groups of any size": (
        {"recipe.federation": {"secure": True, "sum_group": 1}, "rounds": [attempt(0), aggregated(1), aggregated(2)]},
        ["the server saw the sum over 3 sites", "Sites were in no groups: two sums may differ by one site"],
        ["of the site's group"],
    ),
    "one dropped out of a sum": (
        {
            "recipe.federation": {"secure": True},
            "rounds": [attempt(0), aggregated(1), aggregated(2, "bob", outcome="degraded")],
        },
        [
            "in each of 2 rounds the server saw the sum over 2 to 3 sites, the fewest in round 2, and no single",
            "Sites that dropped out of a secure aggregation: bob (1 time).",
            "it had trained, and dropped out of the secure aggregation",
            "The server accepted 5 masked updates",
        ],
        [WENT_WELL],
    ),
    "never in a sum": (
        {"recipe.federation": {"secure": True}, "rounds": [attempt(0), aggregated(1, "bob"), aggregated(2, "bob")]},
        ["2 of 3 invited sites took part: ann and cyd.", "No update of bob was ever used."],
        [],
    ),
    "summed in a simulation": (
        {"recipe.federation": {"secure": True}},
        ["All sites were in one process."],
        ["the server saw the sum", "saw the update of each"],
    ),
    "to be summed": (
        {"recipe.federation": {"secure": True}, "rounds": [attempt(0)], **NOT_SCORED},
        ["The recipe asks for secure aggregation, and no round with one is finished."],
        ["with secure aggregation"],
    ),
    # Rounds: planned, done, and how the run ended
    "fewer rounds": ({"recipe.rounds": 150}, ["2 of 150 planned rounds", "\n2 of 150\n"], [PLANNED, "as planned"]),
    "no round": (
        {"rounds": [attempt(0)], **NOT_SCORED},
        ["was to be trained by FedAvg: none of the 2 planned rounds", "No site was asked to train"],
        ["was trained by", WENT_WELL, "invited sites took part"],
    ),
    "no model": ({"rounds": [], **NOT_SCORED, "prototypes.round": None}, ["no model was made yet"], ["kept any more"]),
    "aborted": (
        {**ABORTED, "interventions": [intervention("aborted", reason="the wrong labels")]},
        ["The run was aborted by operator 'olga' on", "2 of 150 planned rounds: the wrong labels.", "aborted"],
        [WENT_WELL, "completed", "in the middle of"],
    ),
    "aborted in a round": (
        {**ABORTED, "rounds": [attempt(0), attempt(1), fits(outcome="open", bob=LATE | {"cause": "run-ended"})]},
        ["in the middle of round 2", "1 of 150", "and the round did not count", "the run ended before the round"],
        [WENT_WELL, "operator '", "had not reported when", "every update that arrived was used"],
    ),
    "failed": ({"run.status": "failed", "run.reason": "the disk"}, ["The run failed on", ": the disk."], [WENT_WELL]),
    "going on": (
        {"run.status": "going on", "run.ended_at": None, "recipe.rounds": 3, "rounds.2": fits(outcome="open")},
        ["The run is going on: 1 of 3 planned rounds are finished, and round 2 is open", "wrong so far", "not ended"],
        ["completed", "did not count"],
    ),
    "paused": ({"run.status": "paused", "run.ended_at": None}, ["The run is paused"], ["going on", "completed"]),
    # Who took part
    "a site never": (
        {"rounds.1": fits(1, "degraded", bob=LATE), "rounds.2": fits(2, "degraded", bob=LATE)},
        [
            "2 of 3 invited sites took part: ann and cyd.",
            "No update of bob was ever used.",
            "Sites that had not reported when the round closed: bob (2 times).",
            "2 rounds went on with fewer updates than wanted: 1 and 2.",
            "2 with fewer updates than wanted",
        ],
        [WENT_WELL, "each with every update"],
    ),
    "a site that reported in vain": (
        {"rounds.1": fits(1, "rolled-back"), "rounds.2": fits(2, "abandoned")},
        ["none of the 2 planned", "no update of any was used", "its update came, and the round did not count"],
        ["invited sites took part", WENT_WELL, "every update that arrived was used"],
    ),
    "more than needed": (
        {"rounds.2": fits(cyd=LATE | {"task_status": "not-needed"})},
        [WENT_WELL, "every update that a round needed came"],
        ["the update of every invited site"],
    ),
    "failed fits": (
        {"rounds.2": fits(2, "degraded", cyd=LATE | {"task_status": "failed", "reason": "numeric"})},
        ["could not train or send an update: cyd (1 time: numeric)", "it reported that it could not train"],
        [WENT_WELL, "excluded"],
    ),
    "a site that left": (
        {"rounds.2": fits(2, "degraded", cyd=OUT | {"reason": "withdrawn", "cause": "withdrawn"})},
        ["cyd left the run, by its own decision, in round 2.", "the site left the run, or denied it"],
        [WENT_WELL, "cyd was excluded", "could not train or send"],
    ),
    "a site whose privacy budget ended": (
        {"rounds.2": fits(2, "degraded", cyd=OUT | {"reason": "privacy budget spent", "cause": "budget"})},
        [
            "cyd's privacy budget allowed no further round from round 2 on.",
            "its privacy budget allowed no further round",
        ],
        [WENT_WELL, "cyd was excluded", "could not train or send"],
    ),
    "a refused update": (
        {"rounds.2": fits(bob={"refused": [REFUSAL]})},
        ["1 update (2.00 MB) was not accepted", "too far away"],
        [WENT_WELL, "None: every update"],
    ),
    "rejected": (
        {"rounds.2": fits(2, "degraded", bob={"task_status": "rejected", "reason": "too large"})},
        ["sent updates that were rejected: bob (1 time)", "too large"],
        [WENT_WELL],
    ),
    "no first model": (
        {"rounds.0.tasks.0.task_status": "failed"},
        ["could not make the first model: ann (1 time)"],
        [WENT_WELL],
    ),
    "no scores from the evaluator": (
        {"rounds.2.tasks.6.task_status": "late"},
        ["did not answer a request for scores: eva (1 time)"],
        [WENT_WELL],
    ),
    "repeated": (
        {"rounds": [attempt(0), fits(1, "abandoned"), attempt(1, attempt=2), attempt(2)]},
        ["1 attempt at a round had to be abandoned, the last one in round 1: 1 update at the deadline"],
        [WENT_WELL, "no round was repeated"],
    ),
    # What operators did
    "excluded": (
        {
            "interventions": [intervention("excluded", site="cyd", reason="no vote")],
            "rounds.2": fits(2, "degraded", cyd=OUT),
            "sites.cyd.excluded": "no vote",
            "sites.cyd.excluded_at": BEGAN_AT + 2.1 * ROUND_S,
        },
        ["cyd was excluded by operator 'olga' on 2027-01-15 08:02:06Z in round 2: no vote.", "it was excluded, or its"],
        [WENT_WELL, "could not train", "is excluded"],
    ),
    "admitted again": (
        {"interventions": [intervention("excluded", site="cyd"), intervention("admitted", site="cyd", operator="")]},
        ["cyd was admitted again on 2027"],
        [WENT_WELL, "is excluded"],
    ),
    "revoked": (
        {"interventions": [intervention("revoked", site="bob", reason="stolen laptop")]},
        ["bob's certificate was revoked by operator 'olga'", "in round 2: stolen laptop."],
        [WENT_WELL],
    ),
    "rolled back": (
        {"interventions": [intervention("rolled-back", reason="to round 1")], "rounds.2.outcome": "rolled-back"},
        ["The run was rolled back to round 1 by operator 'olga'", "1 attempt at a round no longer counted", "1 of 2"],
        [WENT_WELL, PLANNED],
    ),
    "paused once": (
        {"interventions": [intervention("paused")]},
        ["The run was paused by operator 'olga'"],
        [WENT_WELL],
    ),
    "excluded after the run": (
        {"sites.cyd.excluded": "no vote", "sites.cyd.excluded_at": BEGAN_AT + 9 * ROUND_S},
        [WENT_WELL],
        ["no vote"],
    ),
    "revoked after the run": (
        {"sites.bob.revoked": "stolen", "sites.bob.revoked_at": BEGAN_AT + 9 * ROUND_S},
        [WENT_WELL],
        ["stolen"],
    ),
    # How good the model is, on whose images
    "headline": (
        {},
        [
            "The global model of round 2, on the test set of eva: balanced accuracy 62.5 % (33.3 % by chance), "
            "accuracy 75.0 % (50.0 % by always naming the commonest class).",
            "The global model was scored by eva.",
            "The global model's: on the test images of eva.",
            "Class mel is found least by the global model: 25.0 %",
        ],
        ["shared test", "No evaluator", "how common is not on record"],
    ),
    "another figure": (
        {"scores.0.sites.eva": TWO, "classes.newest.sites.eva": {f"global.recall.{c}": 0.5 for c in range(4)}}
        | {"recipe.classes": 9, "recipe.class_names": list("abcdefghi")},
        [
            "balanced accuracy 50.0 % (25.0 % by chance), accuracy 25.0 %.",
            "Accuracy says little where one class is common; how common is not on record.",
        ],
        ["by always naming", "33.3 %"],
    ),
    "two evaluators": (
        {"scores.0.sites.fay": TWO},
        ["on the test sets of eva and fay (mean)", "scored by eva and fay."],
        ["the test set of eva"],
    ),
    "three evaluators": (
        {"scores.0.sites": {"eva": TWO, "fay": TWO, "guy": TWO}},
        ["on the test sets of eva, fay and guy (median)"],
        ["(mean)"],
    ),
    "an evaluator that trained": ({"scores.0.sites.ann": TWO}, ["scored by ann and eva (ann also trained)"], []),
    "no evaluator": (
        OWN_ONLY,
        [
            "No evaluator scored the global model.",
            "The global model of round 2, on the sites' own test sets (mean): balanced accuracy 50.0 %.",
            "The own model of ann: 25.0 % (accuracy on the sites' own test sets).",
        ],
        ["test set of eva", "scored by", "shared test", "test images of eva"],
    ),
    "no scores yet": (
        {**NOT_SCORED, "rounds.1": fits(1), "rounds.2": fits()},
        ["No scores were reported: no site has been asked for any."],
        ["Global model", "scored by", "No evaluator"],
    ),
    "no answers": (
        {
            **NOT_SCORED,
            "rounds.1": fits(1),
            "rounds.2": attempt(2, tasks=[*FITS, task("eva", "score", task_status="late")]),
        },
        ["No scores were reported: 1 site had been asked for some."],
        ["no site has been asked"],
    ),
    "kept scores": (
        {"scores.0.sites": {"eva": TWO}},
        ["The sites sent no scores of their own models"],
        ["own models of", "own models: mean"],
    ),
    "scores of single classes alone": (
        {"scores.0.sites": {"eva": TWO}, "classes.newest.sites": {name: {"personal.recall.0": 0.5} for name in SITES}},
        ["Own models find class nv least", "and the scores that 4 sites took."],
        ["sent no scores of their own models"],
    ),
    "never found": (
        {"classes.newest.sites.eva": {"global.recall.0": 1.0, "global.recall.1": 0.0, "global.recall.2": 0.0}},
        ["2 of 3 classes are never found by the global model: mel and bcc."],
        ["is found least"],
    ),
    "all found": (
        {"classes.newest.sites.eva": {f"global.recall.{c}": 1.0 for c in range(3)}},
        ["balanced accuracy"],
        ["is found least"],
    ),
    "a better round": (
        {"best": {"round": 1, "score": "global.accuracy", "value": 0.875, "kept": 1}},
        ["Round 1 was better (`global.accuracy` 87.5; chosen by it, it is optimistic), and its model is kept."],
        ["not kept any more"],
    ),
    "an equal round": (
        {"best": {"round": 1, "score": "global.accuracy", "value": 0.75, "kept": 1}},
        [WENT_WELL],
        ["was better"],
    ),
    "a better round that is gone": (
        {"best": {"round": 1, "score": "global.accuracy", "value": 0.875, "kept": 2}},
        ["and its model is not kept any more."],
        ["is kept."],
    ),
    "a best round by a score that the newest lacks": (
        {"best": {"round": 1, "score": "global.auroc", "value": 0.75, "kept": 1}},
        ["Round 1 is the best of those that have this score (`global.auroc` 0.750;"],
        ["was better"],
    ),
    "received scores of the global model alone, on a site's own test set": (
        {"scores.0.sites": {"ann": {"global.local.accuracy": 0.5}}, **NO_CLASSES},
        ["and the scores that 1 site took."],
        ["scores of the own model"],
    ),
    "stopped early": (
        {"recipe.rounds": 20, "run.reason": "no better score for 5 rounds"},
        ["and 2 of 20 planned rounds: no better score for 5 rounds.", WENT_WELL],
        [PLANNED, "abort"],
    ),
    "a useless model": ({"warnings": [warning()]}, ["The global model names one class for every image."], [WENT_WELL]),
    # What the server received
    "received": (
        {},
        ["The server accepted 6 model updates (6.00 MB), their training losses and the scores that 4 sites took."],
        ["without any image or label", "plug-in"],
    ),
    "received less": (
        {
            "rounds.1": fits(1, ann={"loss": None}, bob={"loss": None}, cyd={"loss": None}),
            "rounds.2": fits(2, "degraded", ann=LATE, bob=LATE, cyd=LATE),
            **NOT_SCORED,
        },
        ["The server accepted 3 model updates (3.00 MB)."],
        ["training losses", "the scores that"],
    ),
    "received nothing": (
        {"rounds": [attempt(0), fits(1, "abandoned", ann=LATE, bob=LATE, cyd=LATE)], **NOT_SCORED},
        ["The server accepted no model update."],
        ["0 model updates"],
    ),
    "a plug-in": ({"recipe.method.name": "ours"}, ["The method is a plug-in", "was trained by ours"], ["FedAvg"]),
    # Smaller ones
    "an order of classes": (
        {"scores.0.sites.eva": {**TWO, "global.many": 0.5}},
        ["The recipe names no order: class 0 is taken for the commonest"],
        ["names the order"],
    ),
    "a state that was rolled back": (
        {"rounds.2.outcome": "rolled-back"},
        ["digest of the state after round 1"],
        ["digest of the state after round 2"],
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_changed_record_is_told_otherwise(row: str) -> None:
    changes, present, absent = ROWS[row]
    text = told(changes)
    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_what_must_be_known_stands_above_and_of_very_many_the_first() -> None:
    found: Document = document(run_record({**ABORTED, "warnings": [warning()]}))
    assert [alert.split(" on ")[0] for alert in found.alerts] == ["The run was aborted", warning()["text"]]
    assert found.sections[0].points == []
    assert document(run_record()).alerts == []
    many = [warning(site=f"site-{number}", text=f"text {number}") for number in range(20)]
    found = document(run_record({"warnings": many}))
    assert (found.alerts[0], len(found.alerts)) == ("text 0", 9)
    assert "12 more warnings" in found.alerts[-1]
    many = [intervention("excluded", site=f"site-{number}") for number in range(300)]
    points = document(run_record({"interventions": many})).sections[0].points
    assert [point.split(" was excluded")[0] for point in points[:20]] == [f"site-{number}" for number in range(20)]
    assert points[20:] == ["280 more things that operators did are in `protofed report --json`."]


def test_a_record_of_an_older_server_has_a_report() -> None:
    old = run_record()
    for key in ("interventions", "warnings", "best"):
        del old[key]
    for fields in old["sites"].values():
        for key in ("excluded_at", "revoked", "revoked_at"):
            del fields[key]
    for one in old["rounds"]:
        for of_site in one["tasks"]:
            del of_site["cause"]
    assert PLANNED in "\n".join(words(document(old)))
