"""What every table of a TOML file has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(gt=0, le=1)]


class StrictModel(BaseModel):
    """A TOML table whose keys are all known and whose numbers are all finite: JSON has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def later(default: Any) -> Any:
    """The field of a key that came after version 0.1: left out of JSON where it is as it was before there was one.

    So sites of the older version take the recipes that they understand, and a restarted server goes on with its runs.
    """
    return Field(default, exclude_if=lambda value: value == default)
