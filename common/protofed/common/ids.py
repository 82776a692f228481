"""The form of all ids, of runs, sites, tasks and daemons, wherever they come from."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from protofed.common.errors import ConfigError, ProtocolError

PATTERN: Final = r"[a-z0-9][a-z0-9-]{0,63}"
Id = Annotated[str, Field(pattern=f"^{PATTERN}$")]  # of a recipe or a settings file
_ID = re.compile(PATTERN)


def check_id(kind: str, value: str) -> str:
    """`value`, checked; for ids that users give.

    Raises:
        ConfigError: it has other characters than a-z, 0-9 and '-', begins with '-', or has not 1 to 64 of them.
    """
    if not _ID.fullmatch(value):
        raise ConfigError(f"{kind} {value[:80]!r} is no id: expected 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value


def read_id(value: str) -> str:
    """`value`, checked; for ids in messages (run, site, task_id, instance).

    Raises:
        ProtocolError: as `check_id`; the text does not repeat the value, which is a peer's.
    """
    if not _ID.fullmatch(value):
        raise ProtocolError("an id is 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value
