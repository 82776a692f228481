"""A site's own scores as its people read them: what each means, and in which rounds it left the site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from rich.console import RenderableType

from protofed.client.state.own_scores import OwnRoundScores
from protofed.common.protocol.messages import score_family
from protofed.deploy.audit.reader import UNLISTED, HandedIn, rounds_text
from protofed.deploy.run_view import score_text
from protofed.deploy.tables import BOXED, Column, terminal

_MODELS = {
    "personal.local": "this site's own model on this site's own test images",
    "global.local": "the common model on this site's own test images",
    "personal": "this site's own model on the test set of its settings",
}
_MEASURES = {
    "accuracy": "share of right answers",
    "balanced_accuracy": "mean of the classes' recalls, so that a rare class counts as much as a common one",
    "recall": "of each class, the share that is found",
    "pm_v": "PM(V): share of right answers among the classes that this site trains on, which count alike",
    "pm_l": "PM(L): share of right answers, each class weighted by its frequency at this site",
    "auroc": "area under the ROC curve; 0.5 is chance",
    "ece": "calibration error: how far its stated certainty is from its share of right answers; lower is better",
    "many": "share of right answers on the most frequent fifth of the classes",
    "medium": "share of right answers on the classes of medium frequency",
    "few": "share of right answers on the rarest half of the classes",
    "groups": "mean of many, medium and few",
    "average_precision": "mean of the findings' average precision: the area under precision over sensitivity",
    "sensitivity": "mean of the findings' sensitivity at the run's least specificity",
    "brier": "Brier score: mean squared difference of probabilities and truth; lower is better",
    "class_auroc": "of each class or finding against all others, the area under the ROC curve",
    "class_average_precision": "of each class or finding against all others, the average precision",
    "class_sensitivity": "of each class or finding, the sensitivity at the run's least specificity",
    "mae": "mean absolute error, in the unit of the numbers; lower is better",
    "bias": "mean of prediction minus truth (Bland and Altman); 0 is none",
    "agreement_low": "lower limit of agreement: bias less 1.96 standard deviations of the differences",
    "agreement_high": "upper limit of agreement: bias and 1.96 standard deviations of the differences",
}


def meaning(name: str) -> str:
    """What a score is: its model and its images."""
    family = score_family(name)
    if family == "loss":
        return "mean loss over the training images in the last fit; lower is better"
    prefix, _, measure = family.rpartition(".")
    if prefix not in _MODELS or measure not in _MEASURES:
        return "a number that the method's own code reports of its training"
    return f"{_MODELS[prefix]}: {_MEASURES[measure]}"


@dataclass(frozen=True)
class ScoresView:
    """The scores of a run.

    Attributes:
        rounds: the oldest first.
        sent: what was sent for the run.
    """

    rounds: Sequence[OwnRoundScores]
    sent: HandedIn

    @cached_property
    def names(self) -> list[str]:
        """The scores that some rounds have, without those of single classes."""
        return sorted({name for scored in self.rounds for name in scored.scores if score_family(name) == name})

    def alone(self, name: str) -> set[int]:
        """The rounds in which a score left by itself."""
        return self._find_rounds(name, self.sent.names)

    def aggregated(self, name: str) -> set[int]:
        """The rounds in which a score left in a secure aggregation alone."""
        return self._find_rounds(name, self.sent.aggregated)

    @property
    def unlisted(self) -> set[int]:
        """The rounds for which more scores were sent than the log lists."""
        return self._find_rounds(UNLISTED, self.sent.names)

    def _find_rounds(self, name: str, names: Mapping[int, set[str]]) -> set[int]:
        return {scored.round for scored in self.rounds if name in names.get(scored.round, ())}

    def plain(self) -> dict[str, Any]:
        """For programs: each round with the names that left (None: too many for the log), and what the names mean.

        `left` has those that left by themselves, `left_in_sums` those that left in a secure aggregation alone.
        """
        rows = []
        for scored in self.rounds:
            alone, aggregated = (
                by_round.get(scored.round, set()) for by_round in (self.sent.names, self.sent.aggregated)
            )
            listed = None if UNLISTED in alone else sorted(alone & scored.scores.keys())
            rows.append({**asdict(scored), "left": listed, "left_in_sums": sorted(aggregated & scored.scores.keys())})
        families = sorted({score_family(name) for scored in self.rounds for name in scored.scores})
        return {"rounds": rows, "meanings": {name: meaning(name) for name in families}}

    def tables(self, width: int) -> Iterator[RenderableType]:
        """One row a round, one column a score; as many tables as it takes for no number to be cut."""
        heads = {name: name.replace(".", ".\n").replace("balanced_", "balanced_\n") for name in self.names}
        widest = max((len(word) for head in heads.values() for word in head.splitlines()), default=0)
        most = max(1, (width - len("│ round │")) // (widest + 3))
        number = Column[OwnRoundScores]("round", lambda scored: str(scored.round), right=True, wraps=True)
        for first in range(0, max(len(self.names), 1), most):
            names = self.names[first : first + most]
            columns = [Column(heads[name], partial(_score, name), right=True, wraps=True) for name in names]
            yield terminal([number, *columns], self.rounds, BOXED)

    def legend(self) -> Iterator[str]:
        """What each column means, and whether it was sent: by itself, in a secure aggregation, or not at all."""
        for name in self.names:
            yield f"{name}: {meaning(name)}"
        for how, rounds_of in (
            ("sent (the policy names it)", self.alone),
            ("sent in a secure aggregation, as part of a mean over sites", self.aggregated),
        ):
            for name in self.names:
                if rounds := rounds_of(name):
                    yield f"{how}: {name}, rounds {rounds_text(rounds)}"
        stayed = [name for name in self.names if not self.alone(name) and not self.aggregated(name)]
        if self.unlisted:
            more = "more scores were sent than the audit log lists; the policy names them"
            yield f"rounds {rounds_text(self.unlisted)}: {more}"
        elif self.sent.gap:
            yield self.sent.gap
        elif stayed:
            yield f"stayed at this site: {'all of them' if len(stayed) == len(self.names) else ', '.join(stayed)}"


def _score(name: str, scored: OwnRoundScores) -> str:
    return score_text(scored.scores[name]) if name in scored.scores else "–"
