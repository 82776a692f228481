"""When a resumed fit counts as the undisturbed one."""

from __future__ import annotations

import pytest
from tests.gpu.checkpoints import compared
from tests.gpu.report import Status


@pytest.mark.parametrize(
    ("same", "resumed", "undisturbed", "expected"),
    [
        (True, 0.0, 0.0, Status.PASSED),
        (True, 0.0, 1e-6, Status.PASSED),
        (False, 1e-9, 0.0, Status.FAILED),  # the device is deterministic: then bytes are owed
        (False, 2e-6, 1e-6, Status.PASSED),
        (False, 5e-6, 1e-6, Status.FAILED),
        (False, float("nan"), 1e-6, Status.FAILED),
    ],
)
def test_bytes_are_owed_where_the_device_is_deterministic(
    same: bool, resumed: float, undisturbed: float, expected: Status
) -> None:
    assert compared(same, resumed, undisturbed).status is expected
