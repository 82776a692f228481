"""What every table of a TOML file has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(gt=0, le=1)]


class StrictModel(BaseModel):
    """A TOML table whose keys are all known and whose numbers are all finite: JSON has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
