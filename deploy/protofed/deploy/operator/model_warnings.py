"""What a server says against a run's models."""

from __future__ import annotations

from protofed.deploy.operator.snapshot import ModelWarning
from protofed.deploy.operator.snapshot_sites import printable
from protofed.protos.v1 import operator_pb2 as pb


def model_warnings(detail: pb.RunDetail) -> tuple[ModelWarning, ...]:
    """What the server says, the worst first."""
    return tuple(
        ModelWarning(printable(one.code), one.round, printable(one.site), printable(one.text))
        for one in detail.model_warnings
    )
