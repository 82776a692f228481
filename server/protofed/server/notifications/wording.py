"""What is said of each event, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, assert_never

from blake3 import blake3

from protofed.common.clock import stamp
from protofed.common.config.settings import NotifyEvent
from protofed.common.storage.journal import Fact
from protofed.server.notifications.notice import TEST, Notice
from protofed.server.rounds.machine.waiting import WaitReason
from protofed.server.verdicts import RoundOutcome

OVERDUE, ABANDONED = "overdue", "abandoned"  # why a run does not go on, beside the reasons that a run waits for
RUNBOOK: Final = "docs/how-to/alerts.md#"  # each alert has a section; what is told here is of the same kinds
Words = tuple[str, str]


@dataclass(frozen=True)
class Occurrence:
    """Something that people should be told of.

    Attributes:
        key: identifies what was told; the same after a restart. The end of something has the key of what was told at
            first.
        facts: codes, names, times and numbers, from which the message is made.
    """

    key: str
    event: NotifyEvent
    run: str | None = None
    site: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


_STALLED: Final[Mapping[str, Words]] = {
    WaitReason.TRAINERS: (
        "Too few sites are there for the next round.",
        "Contact the missing sites, or re-admit excluded ones with `protofed sites admit SITE`.",
    ),
    WaitReason.REQUIRED_SITES: (
        "A site that the recipe requires in every round is missing.",
        "Contact the site: does its daemon run, and what does `protofed client doctor` say there?",
    ),
    WaitReason.EVALUATOR: (
        "No evaluator is there to refine the model.",
        "Start the evaluator's daemon, or look at its log.",
    ),
    WaitReason.BACK_OFF: (
        "Rounds are opened and abandoned again and again, because updates are missing.",
        "Look which sites fail, and why. The run ends as failed when its attempts are used up.",
    ),
    ABANDONED: (
        "Rounds are opened and abandoned again and again, because updates are missing.",
        "Look which sites fail, and why. The run ends as failed when its attempts are used up.",
    ),
    WaitReason.DISK: (
        "The server's disk is full.",
        "Make room on it. Nothing is lost, and the run then goes on by itself.",
    ),
    OVERDUE: (
        "A round is open past its deadline: the server is stuck, or aggregates for very long.",
        "Look at the server's log and disk. Restart it with the same state folder: it goes on with the same round.",
    ),
}
_STALLED_ALERTS: Final = {
    WaitReason.BACK_OFF: "RoundsDegraded",
    ABANDONED: "RoundsDegraded",
    OVERDUE: "RoundStuck",
}
_ENDED: Final[Mapping[str, tuple[str, str, str]]] = {  # severity, what happened, what to do
    RoundOutcome.COMPLETED: (
        "info",
        "It is complete.",
        "`protofed report {run}` has its scores and the warnings about the model. `protofed export {run}` exports "
        "the model.",
    ),
    RoundOutcome.FAILED: (
        "critical",
        "It failed; the ledger has the reason.",
        "`protofed runs show {run}` says why. When the reason is gone, `protofed runs rollback {run} ROUND` goes on "
        "from a published round.",
    ),
    RoundOutcome.ABORTED: (
        "warning",
        "An operator aborted it.",
        "Nothing, if this was meant. `protofed runs show {run}` says who aborted it, and why.",
    ),
}


def notice(occurrence: Occurrence, server: str, now: float) -> Notice:
    """The message of an occurrence.

    Args:
        server: its name.
        now: Unix time.
    """
    severity, title, text, todo = _WORDS[occurrence.event](occurrence)
    at = stamp(datetime.fromtimestamp(now, UTC))
    number = blake3(f"{server}\n{occurrence.key}\n{at}".encode()).hexdigest()[:32]
    named = occurrence.run, occurrence.site
    facts, runbook = occurrence.facts, _runbook(occurrence)
    return Notice(number, occurrence.event.value, severity, at, server, *named, title, text, todo, facts, runbook)


def trial_notice(server: str, now: float) -> Notice:
    """A message that only shows that messages arrive."""
    at = stamp(datetime.fromtimestamp(now, UTC))
    number = blake3(f"{server}\n{TEST}\n{now}".encode()).hexdigest()[:32]
    title = "a test of the notifications"
    text = "This is a test that an operator asked for. Nothing has happened."
    return Notice(number, TEST, "info", at, server, None, None, title, text, "Nothing.", {}, "")


def _run_ended(of: Occurrence) -> tuple[str, str, str, str]:
    outcome = str(of.facts["outcome"])
    severity, text, todo = _ENDED[outcome]
    return severity, f"run {of.run} ended: {outcome}", f"Run {of.run} has ended. {text}", todo.format(run=of.run)


def _run_stalled(of: Occurrence) -> tuple[str, str, str, str]:
    what, todo = _STALLED[str(of.facts["reason"])]
    missing = of.facts.get("missing") or []
    listed = f" Missing: {', '.join(map(str, missing))}." if isinstance(missing, list) and missing else ""
    since = f"Run {of.run} has not advanced for {_duration(of.facts['for_s'])}, in round {of.facts['round']}."
    todo = f"{todo} `protofed runs show {of.run}` says more."
    return "critical", f"run {of.run} does not go on ({of.facts['reason']})", f"{since} {what}{listed}", todo


def _run_goes_on(of: Occurrence) -> tuple[str, str, str, str]:
    stood = f"Before, it had not advanced for {_duration(of.facts['for_s'])}, in round {of.facts['stalled_round']}."
    return (
        "info",
        f"run {of.run} goes on",
        f"Run {of.run} goes on: it is in round {of.facts['round']}. {stood}",
        "Nothing.",
    )


def _site_silent(of: Occurrence) -> tuple[str, str, str, str]:
    since = f"Site {of.site} has made no progress for {_duration(of.facts['for_s'])}."
    text = f"{since} Rounds of run {of.run} no longer wait for it."
    todo = (
        "Ask its IT whether the daemon runs, and what its log says. `protofed client doctor` there finds most causes. "
        f"`protofed sites exclude {of.site}` stops inviting it, and these messages."
    )
    return "warning", f"site {of.site} is silent", text, todo


def _site_back(of: Occurrence) -> tuple[str, str, str, str]:
    text = f"Site {of.site} makes progress again. Before, it had made none for {_duration(of.facts['for_s'])}."
    return "info", f"site {of.site} is back", text, "Nothing."


def _certificate_ends(of: Occurrence) -> tuple[str, str, str, str]:
    holder = f"{of.facts['party']} {of.facts['name']}"
    days = of.facts["days_left"]
    until = f"in {days} days" if isinstance(days, int) and days >= 2 else "within two days"
    text = f"The certificate of {holder} ends {until}, on {of.facts['until']}. From then on its calls are refused."
    todo = (
        "Renew it while it is valid. Run `protofed certs request --renew` where its key is. The coordinator runs "
        "`protofed certs sign --server …`. Then run `protofed certs install` where the key is; a running process takes "
        "the new certificate up."
    )
    severity = "critical" if isinstance(days, int) and days < 7 else "warning"
    return severity, f"the certificate of {holder} ends {until}", text, todo


_WORDS: Final[Mapping[NotifyEvent, Callable[[Occurrence], tuple[str, str, str, str]]]] = {
    NotifyEvent.RUN_ENDED: _run_ended,
    NotifyEvent.RUN_STALLED: _run_stalled,
    NotifyEvent.RUN_GOES_ON: _run_goes_on,
    NotifyEvent.SITE_SILENT: _site_silent,
    NotifyEvent.SITE_BACK: _site_back,
    NotifyEvent.CERTIFICATE_ENDS: _certificate_ends,
}


def _runbook(of: Occurrence) -> str:
    """The section on the alert of the same kind, which a Prometheus would raise; empty: nothing is to be done."""
    match of.event:
        case NotifyEvent.RUN_ENDED:
            alert = "RunFailed" if of.facts["outcome"] == RoundOutcome.FAILED else ""
        case NotifyEvent.RUN_STALLED:
            alert = _STALLED_ALERTS.get(str(of.facts["reason"]), "RunWaiting")
        case NotifyEvent.SITE_SILENT:
            alert = "SiteSilent"
        case NotifyEvent.CERTIFICATE_ENDS:
            days = of.facts["days_left"]
            alert = f"CertificateExpires{7 if isinstance(days, int) and days < 7 else 30}Days"
        case NotifyEvent.RUN_GOES_ON | NotifyEvent.SITE_BACK:
            alert = ""
        case _:
            assert_never(of.event)
    return f"{RUNBOOK}{alert.lower()}" if alert else ""


def _duration(seconds: Fact) -> str:
    """A duration in the largest unit that gives at least 2."""
    span = float(seconds) if isinstance(seconds, int | float) else 0.0
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if span >= 2 * size:
            return f"{span / size:.0f} {unit}"
    return f"{span:.0f} s"
