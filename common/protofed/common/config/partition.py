"""`[data.partition]`: how one source is cut into sites, chosen by its kind; another kind is a plug-in's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from protofed.common.config.table import StrictModel
from protofed.common.errors import unknown
from protofed.common.plugins import PluginKind, is_plugin


class Whole(StrictModel):
    """Every site holds all of the source: for a daemon whose source is its own data."""

    kind: Literal["whole"] = "whole"


class Dirichlet(StrictModel):
    """Every class is dealt by a Dirichlet draw (FedNH's partition)."""

    kind: Literal["dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # into how many
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 10  # a site
    min_classes: Annotated[int, Field(ge=1)] = 2  # a site


class PfllibDirichlet(StrictModel):
    """The same without a minimum of classes, as PFLlib draws it (cwFedAVG's practical setting)."""

    kind: Literal["pfllib-dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # into how many
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 1  # a site; later versions of PFLlib ask for 40


class NiidBenchDirichlet(StrictModel):
    """The same as NIID-Bench and MOON draw it (FedProc's partition)."""

    kind: Literal["niid-bench-dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # into how many
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 10  # a site


class Pathological(StrictModel):
    """Every site holds a few whole classes' shares (PFLlib's and cwFedAVG's pathological setting)."""

    kind: Literal["pathological"]
    sites: Annotated[int, Field(ge=1)]  # into how many
    classes_each: Annotated[int, Field(ge=1)]  # a site
    balanced: bool = False  # equal shares of a class, else drawn from a tenth of that upwards


class Shards(StrictModel):
    """Every class is cut into shards and every site is dealt as many (FedPRP's sharding)."""

    kind: Literal["shards"]
    sites: Annotated[int, Field(ge=1)]  # into how many
    shards: Annotated[int, Field(ge=1)]  # a site


class ColumnPartition(StrictModel):
    """One site for each value of the source's own site column, in sorted order."""

    kind: Literal["column"]


class PluginPartition(BaseModel):
    """As a plug-in cuts it; its options are checked where it is called."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    kind: str

    @model_validator(mode="after")
    def _known(self) -> PluginPartition:
        if not is_plugin(PluginKind.PARTITION, self.kind):
            raise ValueError(str(unknown("partition", self.kind, KINDS)))
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the kind."""
        return dict(self.model_extra or {})


KINDS = ("whole", "dirichlet", "pfllib-dirichlet", "niid-bench-dirichlet", "pathological", "shards", "column")
_PLUGIN = "plug-in"


def _tag(table: Any) -> str:
    kind = table.get("kind") if isinstance(table, dict) else getattr(table, "kind", None)
    return kind if kind in KINDS else _PLUGIN


Partition = Annotated[
    Annotated[Whole, Tag("whole")]
    | Annotated[Dirichlet, Tag("dirichlet")]
    | Annotated[PfllibDirichlet, Tag("pfllib-dirichlet")]
    | Annotated[NiidBenchDirichlet, Tag("niid-bench-dirichlet")]
    | Annotated[Pathological, Tag("pathological")]
    | Annotated[Shards, Tag("shards")]
    | Annotated[ColumnPartition, Tag("column")]
    | Annotated[PluginPartition, Tag(_PLUGIN)],
    Discriminator(_tag),
]
