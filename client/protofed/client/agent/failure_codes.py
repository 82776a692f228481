"""The reason code that the server gets for an error. Its text stays in the site's log: it may name paths or data."""

from __future__ import annotations

import torch

from protofed.common.errors import (
    CodecError,
    ConfigError,
    DataError,
    FailureReason,
    PolicyViolationError,
    StateError,
    WithdrawnError,
)

_REASONS: dict[type[Exception], FailureReason] = {
    PolicyViolationError: FailureReason.POLICY,
    ConfigError: FailureReason.REFUSED,
    CodecError: FailureReason.REFUSED,
    DataError: FailureReason.DATA,
    StateError: FailureReason.DISK,
    WithdrawnError: FailureReason.WITHDRAWN,
    torch.OutOfMemoryError: FailureReason.OUT_OF_MEMORY,
}
FORESEEN = tuple(_REASONS)  # errors that need no traceback in the log


def reason_of(error: Exception) -> FailureReason:
    """The code of an error; INTERNAL for unforeseen ones."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return FailureReason.DEVICE if isinstance(error, torch.AcceleratorError) else FailureReason.INTERNAL
