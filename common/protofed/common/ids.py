"""Ids of runs, sites, tasks and daemons: what they may look like, wherever they come from."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from protofed.common.errors import ConfigError, ProtocolError

PATTERN: Final = r"[a-z0-9][a-z0-9-]{0,63}"
Id = Annotated[str, Field(pattern=f"^{PATTERN}$")]  # of a recipe or a settings file
_ID = re.compile(PATTERN)


def check_id(kind: str, value: str) -> str:
    """`value`, if it can be an id.

    Raises:
        ConfigError: it has other characters than a-z, 0-9 and '-', begins with '-', or has not 1 to 64 of them.
    """
    if not _ID.fullmatch(value):
        raise ConfigError(f"{kind} {value[:80]!r} is no id: expected 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value


def read_id(value: str) -> str:
    """`value`, if it can be an id (run, site, task_id, instance)."""
    if not _ID.fullmatch(value):
        raise ProtocolError("an id is 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value
