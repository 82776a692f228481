"""`protofed report`: a run as one HTML file for people who were not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from protofed.common.config.tasks import CLASSIFICATION
from protofed.common.storage import files
from protofed.common.version import VERSION
from protofed.deploy.plots import STYLE
from protofed.deploy.report import details, models, rounds, scores, summary
from protofed.deploy.report.document import Document, Section, render, utc
from protofed.deploy.run_view import RunView

WORDS = (
    ("site, round", "A site is a hospital or another holder of data; in a round the sites train and send an update."),
    (
        "global model, own model",
        "What the sites' updates were combined into; what one site predicts with, after its own training.",
    ),
    ("accuracy, recall", "The share of all test images, or of those of one class, that a model names rightly."),
    ("balanced accuracy", "The mean of the recalls of all classes: rare classes count as much as common ones."),
    ("PM(V), PM(L)", "Accuracy of own models on the site's classes; with each class weighted by its frequency there."),
    (
        "by chance, commonest class",
        "What guessing reaches, 1 of the number of classes in the test set; what naming one class for every image "
        "reaches. A model that is no better has learnt nothing.",
    ),
    ("std", "Population standard deviation over sites: the smaller, the more alike the sites' models are."),
    (
        "update, refused, rejected",
        "What a site sends after training; not accepted; accepted, but left out later.",
    ),
    ("degraded round", "One that went on with fewer updates than it wanted."),
)


SECTIONS: Sequence[Callable[[RunView], Section | None]] = (  # None: there is nothing of it, and none is missed
    summary.summary,
    scores.curves,
    scores.by_class,
    scores.groups,
    scores.fairness,
    scores.calibration,
    details.details,
    models.prototypes,
    models.norms,
    rounds.participation,
    rounds.refusals,
    rounds.transfers,
    models.settings,
    models.provenance,
)


OF_CLASSES = (scores.by_class, scores.groups, scores.fairness, scores.calibration)  # that say nothing of other tasks


def report(run_record: Mapping[str, Any]) -> str:
    """A run record (JSON) as one HTML page, which needs no network, no script and no other file."""
    return render(document(run_record))


def document(run_record: Mapping[str, Any]) -> Document:
    """All that a report says of a run record. Each sentence is made from the record's own fields."""
    record = RunView(run_record)
    with rc_context(STYLE):
        of_task = (section for section in SECTIONS if record.task == CLASSIFICATION or section not in OF_CLASSES)
        sections = [made for section in of_task if (made := section(record)) is not None]
    run = record.run
    ended = f"ended {utc(run['ended_at'])}" if run["ended_at"] else "not ended"
    return Document(
        f"Run {run['name']}",
        f"Federated learning, {run['status']}, queued {utc(run['began_at'])}, {ended}",
        summary.tiles(record),
        sections,
        f"Made by protofed {VERSION}. Times are UTC. Scores are those that the sites reported.",
        summary.alerts(record),
        WORDS,
    )


def write_report(run_record: Mapping[str, Any], out: Path) -> Path:
    """Write the report of a run record to `out`, replacing a file that is there.

    Raises:
        OutOfSpaceError, DiskFailureError: it cannot be written.
    """
    files.write(out, report(run_record).encode())
    return out
