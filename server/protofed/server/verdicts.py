"""How a run ends, and why an update is refused: words that the ledger, the metrics and the rounds share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protofed.common.protocol.messages import Verdict

# Updates whose blobs stay: those that count, and those that were refused for what they are.
BLOB_KEPT = (Verdict.ACCEPTED, Verdict.REFUSED)


class RoundOutcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"  # by the operator


# Why a task ended without its site's doing, at the beginning of its reason in the ledger.
EXCLUDED, REVOKED, RUN_ENDED, ROLLED_BACK = "excluded: ", "certificate revoked: ", "the run ended", "rolled back to "


class RefusalCode(StrEnum):
    """Why an update is REFUSED, for counting; `UpdateProblem.text` says it in words."""

    SIZE = "size"  # the announced total is over the limit, or cannot be that of the announced tensors
    BASE = "base"  # it starts from another model than the task names
    TENSORS = "tensors"  # announced names, dtypes or shapes are not those of the method's update
    DIGEST = "digest"  # all chunks came, and are not together what was announced
    DAMAGED = "damaged"  # the bytes are no payload
    CONTENTS = "contents"  # the bytes are a payload of other tensors than were announced
    NOT_FINITE = "not-finite"  # a tensor holds NaN or infinity
    NORM = "norm"  # the update is further from its base than the run allows
    SCALARS = "scalars"  # the metrics have a name or value that no training gives, or are too many
    COUNT = "count"  # the example count is withheld where it is needed, or cannot be
    SECURE_AGGREGATION = (
        "secure-aggregation"  # a message of a secure aggregation is not signed by its site, or is for other sites
    )
    EQUIVOCATION = "equivocation"  # another update was already accepted for the same task


class RejectionCode(StrEnum):
    """Why an accepted update was left out of its round's aggregation; `Rejection.text` says it in words."""

    OUTLIER = "outlier"  # its norm is far above its cohort's
    ROBUST = "robust"  # the run's robust rule left it out
    FIRST_MODEL = "first-model"  # it is not the first model that enough sites made
    GROUP = "group"  # its group of secure aggregation is not whole
    UNREADABLE = "unreadable"  # its blob is gone or damaged


@dataclass(frozen=True)
class Rejection:
    """Why an accepted update is left out; the text goes into the ledger, and the code beside it."""

    code: RejectionCode
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class UpdateProblem:
    """What is wrong with an update; the text goes to its site and into the ledger."""

    code: RefusalCode
    text: str

    def __str__(self) -> str:
        return self.text
