"""Which reason code the server is told for which error: all else about it stays in the site's log."""

from __future__ import annotations

import torch

from protofed.common.errors import CodecError, ConfigError, DataError, FailureReason, PolicyViolationError, StateError

_REASONS: dict[type[Exception], FailureReason] = {
    PolicyViolationError: FailureReason.POLICY,
    ConfigError: FailureReason.REFUSED,
    CodecError: FailureReason.REFUSED,
    DataError: FailureReason.DATA,
    StateError: FailureReason.DISK,
    torch.OutOfMemoryError: FailureReason.OUT_OF_MEMORY,
}
FORESEEN = tuple(_REASONS)


def reason_of(error: Exception) -> FailureReason:
    """The code; INTERNAL for what nobody foresaw."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return FailureReason.DEVICE if isinstance(error, torch.AcceleratorError) else FailureReason.INTERNAL
