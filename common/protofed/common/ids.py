"""Ids of runs, sites, tasks and daemons: 1 to 64 of a-z, 0-9 and '-', the first no '-'."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from protofed.common.errors import ConfigError, ProtocolError

PATTERN: Final = r"[a-z0-9][a-z0-9-]{0,63}"
_ID = re.compile(PATTERN)


def _in_words(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        raise ValueError(_expected(str(value))) from None


Id = Annotated[str, Field(pattern=f"^{PATTERN}$"), WrapValidator(_in_words)]  # of a recipe or a settings file


def check_id(kind: str, value: str) -> str:
    """`value`, checked; for ids that users give.

    Raises:
        ConfigError: it has other characters than a-z, 0-9 and '-', begins with '-', or has not 1 to 64 of them.
    """
    if not _ID.fullmatch(value):
        raise ConfigError(f"{kind} {value[:80]!r} is no id: {_expected(value)}")
    return value


def _expected(value: str) -> str:
    """What an id is, with one that is like `value`, as 'south-clinic' of 'South Clinic'."""
    letters = unicodedata.normalize("NFKD", value[:200]).encode("ascii", "ignore").decode().lower()
    similar = re.sub(r"[^a-z0-9]+", "-", letters).strip("-")
    such = f", such as '{similar}'" if _ID.fullmatch(similar) else ""
    return f"expected 1 to 64 of a-z, 0-9 and '-', the first no '-'{such}"


def is_id(value: str) -> bool:
    """Whether `value` has the form of an id."""
    return _ID.fullmatch(value) is not None


def read_id(value: str) -> str:
    """`value`, checked; for ids in messages (run, site, task_id, instance).

    Raises:
        ProtocolError: as `check_id`; the text does not repeat the value, which is a peer's.
    """
    if not _ID.fullmatch(value):
        raise ProtocolError("an id is 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value
