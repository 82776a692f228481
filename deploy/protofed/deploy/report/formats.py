"""How numbers, dates and lists are written in a report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

LABELS = {  # without the model's test set: a record does not have whether two sites were given the same images
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "pm_v": "accuracy on the classes that the site has, PM(V)",
    "pm_l": "accuracy by how common the classes are at the site, PM(L)",
    "local.balanced_accuracy": "balanced accuracy on the sites' own test sets",
    "local.accuracy": "accuracy on the sites' own test sets",
    "majority": "accuracy of always naming the test set's commonest class",
    "auroc": "area under the ROC curve",
    "local.auroc": "area under the ROC curve on the sites' own test sets",
    "ece": "calibration error (ECE; lower is better)",
    "local.ece": "calibration error on the sites' own test sets (lower is better)",
}
MANY_ROUNDS = 40  # rows of a table by round; of more rounds it shows some


def listed(names: Sequence[str], most: int = 12) -> str:
    """`a`, `a and b`, or `a, b and c`; of more than `most` names the first ones and how many more there are."""
    if len(names) > most:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def percent(share: float) -> str:
    """A share in percent with one decimal: 0.928 is 92.8 %."""
    return f"{100 * share:.1f} %"


def formatted(name: str, value: float) -> str:
    """A score's value: shares in percent, without the sign; calibration errors, losses and areas as they are."""
    return f"{value:.3f}" if name.rpartition(".")[2] in ("ece", "loss", "auroc") else f"{100 * value:.1f}"


def label(name: str) -> str:
    """A score's name in words, without the model (`global.`, `personal.`) that it is of."""
    score = name.partition(".")[2]
    return LABELS.get(score, score)


def utc(seconds: float | None) -> str:
    """A Unix time as `2026-01-31 12:00:00Z`."""
    return "–" if not seconds else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: `90 s`, `3 min`, `2 h 5 min`, `3.2 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, left = divmod(minutes, 60)
    return f"{minutes} min" if hours < 2 else f"{hours} h {left} min" if hours < 48 else f"{hours / 24:.1f} days"


def megabytes(count: float) -> str:
    """Bytes in MB of 10^6 bytes, without the unit."""
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:,.0f}"


def thinned(numbers: Sequence[int], most: int = MANY_ROUNDS) -> list[int]:
    """At most `most` of the numbers, evenly spaced, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]
