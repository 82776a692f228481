"""Groups, such as all images of one patient: no group is in two parts."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protofed.client.data.partition import Indices
from protofed.common.errors import DataError

Groups: TypeAlias = NDArray[Any]  # [N], one value an example


def check_apart(groups: Groups, parts: list[Indices], of: str) -> None:
    """Check that no group is in two parts.

    Args:
        groups: [N].
        parts: indices into `groups`.
        of: what the parts are, for the message.

    Raises:
        DataError: with the number of groups that are; never their names.
    """
    names = np.concatenate([np.unique(groups[part]) for part in parts]) if parts else groups[:0]
    _, times = np.unique(names, return_counts=True)
    if crossing := int((times > 1).sum()):
        raise DataError(f"{crossing} groups are in more than one of {of}; expected each group in one")
