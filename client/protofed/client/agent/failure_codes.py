"""Which reason code the server is told for which error: all else about it stays in the site's log."""

from __future__ import annotations

import torch

from protofed.common.errors import CodecError, ConfigError, DataError, Failure, PolicyViolation, StateError

_REASONS: dict[type[Exception], Failure] = {
    PolicyViolation: Failure.POLICY,
    ConfigError: Failure.REFUSED,
    CodecError: Failure.REFUSED,
    DataError: Failure.DATA,
    StateError: Failure.DISK,
    torch.OutOfMemoryError: Failure.OUT_OF_MEMORY,
}
FORESEEN = tuple(_REASONS)


def reason_of(error: Exception) -> Failure:
    """The code; INTERNAL for what nobody foresaw."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return Failure.DEVICE if isinstance(error, torch.AcceleratorError) else Failure.INTERNAL
