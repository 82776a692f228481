"""What every table of a TOML file has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(gt=0, le=1)]


class StrictModel(BaseModel):
    """A TOML table whose keys are all known and whose numbers are all finite: JSON has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


LONGEST, MOST, DEEPEST, LARGEST = 200, 1000, 4, 1e12  # characters, values of a list, lists in lists, a number


class NamedOptions(BaseModel):
    """A name with the options that its registry checks: `[method]` and `[model]`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, Field(max_length=LONGEST)]

    @model_validator(mode="after")
    def _plain(self) -> NamedOptions:
        for name, value in self.options.items():
            _check_plain(name, value)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name."""
        return dict(self.model_extra or {})


def _check_plain(name: str, value: object, deep: int = 0) -> None:
    """Options come over the wire: numbers are finite, and nothing is larger than any method or model asks for."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if len(items) > MOST or deep > DEEPEST or (isinstance(value, str) and len(value) > LONGEST):
        raise ValueError(f"{name[:40]} is larger than any option: expected at most {MOST} values, {LONGEST} characters")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:  # nor not a number
        raise ValueError(f"{name[:40]}: expected a finite number of at most {LARGEST:g}")
    for item in items:
        _check_plain(name, item, deep + 1)
