"""Groups that are in two parts are refused by their number, never by name."""

from __future__ import annotations

import numpy as np
import pytest

from protofed.client.data.groups import check_apart
from protofed.common.errors import DataError


def test_groups_in_two_parts_are_counted_and_not_named() -> None:
    groups = np.array(["Doe", "Doe", "Roe", "Poe"])
    check_apart(groups, [np.array([0, 1]), np.array([2]), np.array([3])], "the sites")
    with pytest.raises(DataError, match="1 groups are in more than one of the sites") as caught:
        check_apart(groups, [np.array([0, 2]), np.array([1, 3])], "the sites")
    assert "oe" not in str(caught.value)
