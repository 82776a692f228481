"""The first page of a report: what was trained, by whom, how it ended, how good it is, and what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from protofed.common.config.recipe import Recipe
from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.errors import ConfigError
from protofed.common.errors import count as counted
from protofed.common.protocol.messages import SUM_STEPS
from protofed.common.protocol.scores import JUDGED_BY, MAJORITY, PAIR, Spread
from protofed.common.secure_aggregation.keys import helpers_outside, helpers_within
from protofed.deploy.report.document import (
    LABELS,
    Section,
    Tile,
    duration,
    formatted,
    label,
    listed,
    megabytes,
    percent,
    shown,
    utc,
)
from protofed.deploy.run_view import GROUPS, RunView, from_sum, is_of_update
from protofed.deploy.site.plan_request import planned_lines
from protofed.deploy.tables import Table
from protofed.server.method import server_methods

# Scores of own models, in the order in which the server judges runs by them.
OWN = tuple(name for name in JUDGED_BY if name.startswith("personal."))
BALANCED, ACCURACY = "balanced_accuracy", "accuracy"
MAX_WARNINGS = 8  # that stand above everything; each of hundreds of sites may have one
ENDED_BADLY = ("failed", "aborted")


def summary(record: RunView) -> Section:
    """The run in plain words: method, sites, outcome, quality, problems."""
    outcome = [] if record.run["status"] in ENDED_BADLY else [_outcome(record)]  # those are among the alerts
    return Section(
        "summary",
        "Summary",
        lead=[
            _trained(record),
            _participants(record),
            *outcome,
            *_quality(record),
            _received(record),
            _summed(record),
            *_noise(record),
        ],
        points=problems(record),
        tables=[table] if (table := _model_comparison(record)) is not None else [],
        notes=_test_sets(record),
        missing=_missing(record),
    )


def alerts(record: RunView) -> list[str]:
    """What a reader must know before any number: that the run did not end as planned, that the model is useless."""
    outcome = [_outcome(record)] if record.run["status"] in ENDED_BADLY else []
    texts = [warning["text"] for warning in record.warnings]
    unlisted = len(texts) - MAX_WARNINGS
    more = [f"{counted(unlisted, 'more warning')} are in `protofed report --json`."] if unlisted > 0 else []
    return [*outcome, *texts[:MAX_WARNINGS], *more]


def tiles(record: RunView) -> list[Tile]:
    """The headline numbers: of the global model, of own models, of the worst site, and rounds."""
    latest, headlines = record.latest_spreads, list[Tile]()
    where, prefix = _global_test(record)
    for score in (BALANCED, ACCURACY):
        if (of_global := latest.get(f"{prefix}{score}")) is not None:
            notes = [_baseline(record, prefix, score), f"{where}, round {record.newest}"]
            note = "; ".join(filter(None, notes))
            headlines.append(Tile(f"Global model, {LABELS[score]}", percent(of_global.mean), note))
    if (own := own_score(record)) is not None:
        spread, worst = latest[own], record.worst(own)
        aggregated = ", from a secure aggregation" if worst is None else ""
        apart = "" if spread.std is None else f"± {formatted(own, spread.std)}; "
        note = f"{apart}{label(own)}; {counted(spread.sites, 'site')}{aggregated}"
        headlines.append(Tile("Sites' own models, mean", shown(own, spread.mean), note))
        if worst is not None:
            headlines.append(Tile("Worst site's own model", shown(own, worst[1]), worst[0]))
    headlines.append(Tile("Rounds", f"{record.done} of {record.planned}", _rounds_note(record)))
    return headlines


def own_score(record: RunView) -> str | None:
    """The first score of `JUDGED_BY` that sites reported of their own models; None: they reported none."""
    return next((name for name in OWN if name in record.latest_spreads), None)


def _rounds_note(record: RunView) -> str:
    degraded = sum(attempt["outcome"] == "degraded" for attempt in record.rounds)
    notes = [] if record.run["status"] == "completed" else [record.run["status"]]
    if degraded:
        notes.append(f"{degraded} with fewer updates than wanted")
    elif record.done:
        notes.append("each with every update that it wanted")
    return "; ".join(notes)


def _missing(record: RunView) -> list[str]:
    if record.latest_spreads:
        return []
    if record.keeping:
        return ["No scores are here: no evaluator scored a model of all sites, and the sites sent none of their own."]
    sites = {task["site"] for _, task in record.tasks() if task["kind"] == "score"}
    if sites:
        return [f"No scores were reported: {counted(len(sites), 'site')} had been asked for some."]
    return ["No scores were reported: no site has been asked for any."]


def _trained(record: RunView) -> str:
    learnt = "classes" if record.task == CLASSIFICATION else f"outputs for the task {record.task}"
    model = f"A model of {record.classes} {learnt} (“{record.recipe['model']['name']}”)"
    method = server_methods.about(record.recipe["method"]["name"]).title
    if not record.done:
        return f"{model} was to be trained by {method}: none of the {record.planned} planned rounds is finished."
    return f"{model} was trained by {method}: {record.done} of {record.planned} planned rounds are finished."


def noise_lines(record: RunView) -> list[str]:
    """What the noise of a run is worth, in sentences. The numbers are planned: only a site knows what it spent."""
    try:
        return planned_lines(Recipe.model_validate(record.recipe))
    except (ConfigError, ValueError):  # a method, or a key, that this version does not know
        return []


def _noise(record: RunView) -> list[str]:
    lines = " ".join(noise_lines(record))
    return [f"Each site added noise to what it sent (differential privacy). {lines}"] if lines else []


def _received(record: RunView) -> str:
    """What left the sites as far as the server can tell, which is not what can be inferred from it."""
    kind, what = ("mask", "masked update") if record.sums else ("fit", "model update")
    updates = [task for _, task in record.tasks() if task["kind"] == kind and is_of_update(task) and task["received"]]
    size = megabytes(sum(task["received"] for task in updates))
    sent = [f"{counted(len(updates), what)} ({size} MB)" if updates else f"no {what}"]
    sent += ["their training losses"] if any(task["loss"] is not None for task in updates) else []
    sent += [f"the scores that {counted(len(record.reported), 'site')} took"] if record.reported else []
    sent += ["sums of the sites' own scores"] if any(scored.get("sums") for scored in record.raw["scores"]) else []
    plugin = (
        ""
        if record.recipe["method"]["name"] in set(server_methods)
        else " The method is a plug-in: its code decides what is in one."
    )
    return (
        f"The server accepted {listed(sent)}. protofed sends no images or labels as such. Updates and scores can still "
        f"tell of them: each site's policy limits how much, and this record does not have the policies.{plugin}"
    )


def _summed(record: RunView) -> str:
    """Whether the server saw single updates, by what the record has of the rounds."""
    if not (sums := record.sums):
        if record.secure and record.done:  # a server never publishes such a round without masked numbers
            return (
                "All sites were in one process. It aggregated their updates as secure aggregation does, without masks."
            )
        if record.secure:
            return "The recipe asks for secure aggregation, and no round with one is finished."
        return "The run had no secure aggregation: the server saw the update of each site."
    least, most = min(sums.values()), max(sums.values())
    rounds = f"each of {len(sums)} rounds" if len(sums) > 1 else f"round {min(sums)}"
    sites = f"{least} sites" if least == most else f"{least} to {most} sites"
    smallest = "" if least == most else f", the fewest in round {min(n for n in sums if sums[n] == least)}"
    return (
        f"Updates were aggregated with secure aggregation: in {rounds} the server saw the sum over {sites}{smallest}, "
        f"and no single update. {_groups(record)} What a sum tells about its sites together, the server knows."
    )


def _groups(record: RunView) -> str:
    """Whom each site was aggregated with, and what it takes to read one site's update alone."""
    groups = [group for group in record.groups if set(group) & set(record.contributors)]
    if not groups:
        return "Sites were in no groups: two sums may differ by one site, and so tell what that site sent."
    known = record.partners or {"institutions": {}}
    called = {site: f"{name} ({site})" for site, name in known["institutions"].items() if name != site}
    together = "; ".join(", ".join(called.get(site, site) for site in group) for group in groups)
    needed = {len(group): helpers_within(len(group)) for group in groups}
    within = (
        "all others"
        if all(size - 1 == helpers for size, helpers in needed.items())
        else f"{min(needed.values())} or more others"
    )
    outside = [helpers_outside(size, sum(map(len, groups))) for size in needed]
    fewest = min((helpers for helpers in outside if helpers is not None), default=None)
    lie = "" if fewest is None else f", or with {fewest} sites of other groups, if it lies about who is missing"
    reads = f"The server can read a site's own update only together with {within} of the site's group{lie}."
    return f"Aggregated together: {together}. {reads} {_list(record.partners)}"


def _list(partners: Mapping[str, Any] | None) -> str:
    """Which list of partners was offered, and whether who runs the server is one of them."""
    if partners is None:
        return "No list of partners was offered: whoever signs certificates could have invented sites."
    runs = partners["coordinator"]
    also = [site for site, name in partners["institutions"].items() if runs.casefold() in (name.casefold(), site)]
    besides = f", and is a partner, too ({', '.join(also)})" if also else ""
    return f"The offered list of partners is number {partners['number']}; {runs} runs the server{besides}."


def _participants(record: RunView) -> str:
    invited, sites = record.invited, record.contributors
    scored = _scored_by(record)
    if not invited:
        return f"No site was asked to train.{scored}"
    if not sites:
        was = "was" if len(invited) == 1 else "were"
        return f"{counted(len(invited), 'site')} {was} asked to train, and no update of any was used.{scored}"
    return f"{len(sites)} of {counted(len(invited), 'invited site')} took part: {listed(sites, NAMED_SITES)}.{scored}"


def _scored_by(record: RunView) -> str:
    if record.newest is None:
        return ""
    if not record.evaluators:
        return " No evaluator scored the global model."
    training = [site for site in record.evaluators if site in record.invited]
    also = f" ({listed(training)} also trained)" if training else ""
    return f" The global model was scored by {listed(record.evaluators, NAMED_SITES)}{also}."


def _outcome(record: RunView) -> str:
    run, current, of_rounds = record.run, record.current, f"{record.done} of {record.planned} planned rounds"
    is_open = current is not None and current["outcome"] == "open"
    if run["ended_at"] is None:
        at = f", and round {current['round']} is open" if current is not None and is_open else ""
        return f"The run is {run['status']}: {of_rounds} are finished{at}. It was queued on {utc(run['began_at'])}."
    # From the first round, not from the start: a run may have waited in the queue for days.
    first_opened_at = min((attempt["opened_at"] for attempt in record.attempts), default=run["began_at"])
    took = duration(run["ended_at"] - first_opened_at)
    outcome = {"completed": "was completed", "failed": "failed", "aborted": "was aborted"}.get(run["status"], "ended")
    by = next((who(act) for act in reversed(record.interventions) if act["action"] == "aborted"), "")
    when = f" in the middle of round {current['round']}" if current is not None and is_open else ""
    reason = "" if run["reason"] in ("", run["status"]) else f": {run['reason']}"
    hand = by if run["status"] == "aborted" else ""
    return (
        f"The run {outcome}{hand} on {utc(run['ended_at'])}{when}, after {took} and {of_rounds}"
        f"{reason.removesuffix('.')}."
    )


def _quality(record: RunView) -> list[str]:
    sentences = [*_global_quality(record), *_own_quality(record), *_least_found(record), *_better_round(record)]
    kept_note = record.kept_scores
    return [*([" ".join(sentences)] if sentences else []), *([kept_note] if kept_note else [])]


def _global_test(record: RunView) -> tuple[str, str]:
    """Whose test set the headline of the global model is from, in words, and the prefix of its scores."""
    if any(f"global.{score}" in record.latest_spreads for score in (BALANCED, ACCURACY)):
        evaluators = record.evaluators
        if len(evaluators) == 1:
            return f"on the test set of {evaluators[0]}", "global."
        middle = "mean" if len(evaluators) <= PAIR else "median"
        return f"on the test sets of {listed(evaluators, 3)} ({middle})", "global."
    return "on the sites' own test sets (mean)", "global.local."


def _global_quality(record: RunView) -> list[str]:
    where, prefix = _global_test(record)
    figures = []
    for score in (BALANCED, ACCURACY):
        if (spread := record.latest_spreads.get(f"{prefix}{score}")) is not None:
            baseline = _baseline(record, prefix, score)
            figures.append(f"{LABELS[score]} {percent(spread.mean)}" + (f" ({baseline})" if baseline else ""))
    return [f"The global model of round {record.newest}, {where}: {', '.join(figures)}."] if figures else []


def _baseline(record: RunView, prefix: str, score: str) -> str:
    """What a model that has learnt nothing reaches: by guessing, or by always naming the commonest class.

    Empty for an accuracy if the test set's commonest class is not on record. A model that names one class for every
    image may reach 65 %. Chance beside it would make it look good.
    """
    if prefix != "global.":  # what classes the sites' own test sets have, nobody here knows
        return ""
    if score != ACCURACY:
        return f"{percent(record.chance)} by chance"
    majority = record.latest_spreads.get(MAJORITY)
    return "" if majority is None else f"{percent(majority.mean)} by always naming the commonest class"


def _own_quality(record: RunView) -> list[str]:
    if (own := own_score(record)) is None:
        return []
    last, worst_site = record.latest_spreads, record.worst(own)
    prefix = own.rpartition(".")[0]
    balanced = last.get(f"{prefix}.{BALANCED}") if not own.endswith(BALANCED) else None
    beside = f", balanced {percent(balanced.mean)}" if balanced is not None else ""
    if worst_site is None:
        worst, models = f"; {from_sum(last[own].sites)}", f"The own models of {counted(last[own].sites, 'site')}"
    elif last[own].sites > 1:
        worst = f"; the worst is that of {worst_site[0]} with {shown(own, worst_site[1])}"
        models = f"The own models of {counted(last[own].sites, 'site')}"
    else:
        worst, models = "", f"The own model of {worst_site[0]}"
    average = " on average" if last[own].sites > 1 else ""
    return [f"{models}: {shown(own, last[own].mean)}{average} ({label(own)}){beside}{worst}."]


def _least_found(record: RunView) -> list[str]:
    if not (recalls := record.recalls("newest", "global")):
        return []
    if never := [record.name(c) for c, recall in recalls.items() if recall == 0]:
        are = "is" if len(never) == 1 else "are"
        return [f"{len(never)} of {len(recalls)} classes {are} never found by the global model: {listed(never)}."]
    c = min(recalls, key=lambda number: recalls[number])
    if (least := percent(recalls[c])) == percent(1.0):  # of all classes alike
        return []
    return [f"Class {record.name(c)} is found least by the global model: {least} of its test images."]


def _better_round(record: RunView) -> list[str]:
    """That another round was better, or has a score that the newest one lacks, and whether its model is still there."""
    best = record.best
    if best is None or best.round == record.newest:
        return []
    newest = record.latest_spreads.get(best.score)
    if newest is not None and newest.mean > best.value - 1e-9:  # the earliest of equals is the best, not better
        return []
    state = "is kept" if best.kept == best.round else "is not kept any more"
    score = f"`{best.score}` {formatted(best.score, best.value)}"
    was = "was better" if newest is not None else "is the best of those that have this score"
    return [f"Round {best.round} {was} ({score}; chosen by it, it is optimistic), and its model {state}."]


def _model_comparison(record: RunView) -> Table | None:
    """The global model beside the sites' own models, one row for each score, in the order of `LABELS`."""
    names = [name for name in record.latest_spreads if name.startswith(("global.", "personal."))]
    order = list(LABELS)
    scores = {name.partition(".")[2] for name in names} - set(GROUPS)
    ordered = sorted(scores, key=lambda score: (order.index(score) if score in order else len(order), score))
    if not ordered:
        return None
    title = f"Scores of round {record.newest}, in % where nothing else is said"
    if not any(name.startswith("personal.") for name in names):
        rows = [[label(f"global.{score}"), _pair(record, score)[0]] for score in ordered]
        return Table(title, ["score", "global model"], rows)
    return Table(
        title,
        ["score", "global model", "own models: mean", "± std", "worst", "worst site"],
        [[label(f"global.{score}"), *_pair(record, score)] for score in ordered],
    )


def _test_sets(record: RunView) -> list[str]:
    """On whose images the table's scores were taken."""
    names, notes = record.latest_spreads, []
    if record.evaluators:
        notes.append(f"The global model's: on the test images of {listed(record.evaluators, NAMED_SITES)}.")
    if any(name.startswith("personal.") and ".local." not in name for name in names):
        notes.append(f"Own models': each on {_own_test_images(record)} that its site was set up with.")
    if any(".local." in name for name in names):
        notes.append("“On the sites' own test sets”: each site on images of its own that it did not train on.")
    if sums := [of.sites for name, of in record.latest_spreads.items() if record.is_aggregated(name)]:
        notes.append(f"Of the sites' own scores: {from_sum(max(sums))}.")
    if MAJORITY not in names and record.task == CLASSIFICATION:
        notes.append("Accuracy says little where one class is common; how common is not on record.")
    note = f"{' '.join(notes)} This record does not show whether two sites were given the same test images."
    return [note] if notes else []


def _own_test_images(record: RunView) -> str:
    most = record.recipe.get("evaluation", {}).get("personal_test_images")
    return "the test images" if most is None else f"a stratified sample, at most {most:,}, of the test images"


def _pair(record: RunView, score: str) -> list[str]:
    of_global = record.latest_spreads.get(f"global.{score}")
    own = record.latest_spreads.get(f"personal.{score}")
    first = "–" if of_global is None else formatted(score, of_global.mean)
    if own is None:
        return [first, "–", "–", "–", "–"]
    middle = [first, formatted(score, own.mean), _std(score, own)]
    if (worst := record.worst(f"personal.{score}")) is None:
        return [*middle, "–", "–"]
    return [*middle, formatted(score, worst[1]), worst[0] if own.sites > 1 else "–"]


def _std(name: str, spread: Spread) -> str:
    return formatted(name, spread.std) if spread.sites > 1 and spread.std is not None else "–"


NAMED_SITES = 12
NAMED_ROUNDS = 8
MAX_TOLD = 20  # sentences of one kind: hundreds of sites may have been excluded, or have left
DONE = {"paused": "The run was paused", "resumed": "It was resumed", "rolled-back": "The run was rolled back"}
HANDS = {
    "excluded": "{} was excluded",
    "admitted": "{} was admitted again",
    "revoked": "{}'s certificate was revoked",
    "forgotten": "{} was forgotten",
    "offered": "a new list of partners was offered to the sites",
    "regrouped": "the group of {} was dissolved",
}


def problems(record: RunView) -> list[str]:
    """One sentence for each problem of the run; a single one that there was none, if rounds were finished."""
    exits = [*_first(_interventions(record), "things that operators did"), *_first(_left(record), "sites that left")]
    exits += _first(_held_by_budget(record), "sites whose privacy budget ended")
    sentences = [*exits, *_round_problems(record), *_site_problems(record)]
    # A run that failed or was aborted, or made a useless model, has said so above: this would contradict it.
    ended_well = record.run["status"] not in ("failed", "aborted")
    if sentences or not record.done or not ended_well or record.warnings:
        return sentences
    so_far = "" if record.run["status"] == "completed" else " so far"
    used = all(task["task_status"] == "reported" for _, task in record.tasks() if task["kind"] in ("fit", "mask"))
    updates = "the update of every invited site was used" if used else "every update that a round needed came"
    return [f"Nothing went wrong{so_far}: no round was repeated, no update was refused, and {updates}."]


def who(act: Mapping[str, Any]) -> str:
    """` by operator 'anna'`, or nothing: in plain text callers have no names."""
    return f" by operator '{act['operator']}'" if act["operator"] else ""


def _first(sentences: Iterable[str], what: str) -> list[str]:
    lines = list(sentences)
    unlisted = len(lines) - MAX_TOLD
    more = [f"{unlisted:,} more {what} are in `protofed report --json`."] if unlisted > 0 else []
    return [*lines[:MAX_TOLD], *more]


def _interventions(record: RunView) -> Iterator[str]:
    for act in record.interventions:
        if (what := DONE.get(act["action"]) or HANDS.get(act["action"])) is None:
            continue  # an abort, which is the run's outcome
        during = "" if act["round"] is None else f" in round {act['round']}"
        reason = f" {act['reason']}" if act["action"] == "rolled-back" else f": {act['reason']}" * bool(act["reason"])
        if act["action"] == "rolled-back":
            yield f"{what}{reason}{who(act)} on {utc(act['at'])}{during}."
        else:
            yield f"{what.format(act['site'])}{who(act)} on {utc(act['at'])}{during}{reason}."


def _left(record: RunView) -> Iterator[str]:
    """Sites that took themselves out of the run, with the round; they may have come back."""
    first: dict[str, int] = {}
    for attempt, task in record.tasks():
        if task.get("cause") == "withdrawn":
            first.setdefault(task["site"], attempt["round"])
    for site, number in first.items():
        yield f"{site} left the run, by its own decision, in round {number}."


def _held_by_budget(record: RunView) -> Iterator[str]:
    """Sites whose privacy budget ended during the run, with the round; it may have been raised."""
    first: dict[str, int] = {}
    for attempt, task in record.tasks():
        if task.get("cause") == "budget":
            first.setdefault(task["site"], attempt["round"])
    for site, number in first.items():
        yield f"{site}'s privacy budget allowed no further round from round {number} on."


def _round_problems(record: RunView) -> list[str]:
    outcomes = Counter(attempt["outcome"] for attempt in record.attempts)
    sentences = []
    if degraded := [str(attempt["round"]) for attempt in record.attempts if attempt["outcome"] == "degraded"]:
        which = listed(degraded, NAMED_ROUNDS)
        sentences.append(f"{counted(len(degraded), 'round')} went on with fewer updates than wanted: {which}.")
    if abandoned := [attempt for attempt in record.attempts if attempt["outcome"] == "abandoned"]:
        last = f"the last one in round {abandoned[-1]['round']}: {abandoned[-1]['reason']}"
        sentences.append(f"{counted(len(abandoned), 'attempt')} at a round had to be abandoned, {last}.")
    if count := outcomes["rolled-back"]:
        sentences.append(f"{counted(count, 'attempt')} at a round no longer counted after the run was rolled back.")
    refused = [update for _, task in record.tasks() for update in task["refused"]]
    if refused:
        size = megabytes(sum(update["bytes"] for update in refused))
        were = "was" if len(refused) == 1 else "were"
        sentences.append(
            f"{counted(len(refused), 'update')} ({size} MB) {were} not accepted; each is listed below with its reason."
        )
    return sentences


def _site_problems(record: RunView) -> list[str]:
    # A task with a cause ended without its site's doing: it was excluded, or the run ended.
    tasks = [task for _, task in record.tasks() if not task.get("cause")]
    sentences = []
    for kind, which, problem in (
        ("fit", "rejected", "sent updates that were rejected"),
        ("initialise", "failed", "reported that they could not make the first model"),
        ("fit", "failed", "reported that they could not train or send an update"),
        ("fit", "late", "had not reported when the round closed"),
        ("refine", "failed", "reported that they could not refine the model"),
        ("refine", "late", "had not refined the model in time"),
        ("score", "failed", "reported that they could not take scores"),
        ("score", "late", "did not answer a request for scores"),
    ):
        if failures := [task for task in tasks if (task["kind"], task["task_status"]) == (kind, which)]:
            sentences.append(f"Sites that {problem}: {listed(_named(failures), NAMED_SITES)}.")
    if failures := [task for task in tasks if task["kind"] in SUM_STEPS and task["task_status"] in ("failed", "late")]:
        sentences.append(f"Sites that dropped out of a secure aggregation: {listed(_named(failures), NAMED_SITES)}.")
    if record.done and (never := sorted(set(record.invited) - set(record.contributors))):
        sentences.append(f"No update of {listed(never, NAMED_SITES)} was ever used.")
    return sentences


def _named(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """`ann (2 times)` for each site of some tasks, the most frequent first; with the codes that failed ones gave."""
    codes: dict[str, list[str]] = {}
    for task in tasks:
        # The first word is the code; what follows is a text, which the table of refusals has.
        codes.setdefault(task["site"], []).append(task["reason"].partition(";")[0] * (task["task_status"] == "failed"))
    return [
        f"{site} ({counted(len(reasons), 'time')}{': ' * any(reasons)}{', '.join(sorted({*reasons} - {''}))})"
        for site, reasons in sorted(codes.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
