"""`[data]`: where images come from, and how one source is cut into sites."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from protofed.common.address import is_loopback
from protofed.common.config.tables import Share, StrictModel
from protofed.common.errors import short, unknown
from protofed.common.plugins import PluginKind, is_plugin


class Whole(StrictModel):
    """Every site has all of the source: for a daemon whose source is its own data."""

    kind: Literal["whole"] = "whole"


class Dirichlet(StrictModel):
    """Each class is divided among the sites by a Dirichlet draw (FedNH's partition)."""

    kind: Literal["dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # number of sites
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 10  # for each site
    min_classes: Annotated[int, Field(ge=1)] = 2  # for each site


class PfllibDirichlet(StrictModel):
    """As `Dirichlet` without a minimum of classes, as PFLlib draws it (cwFedAVG's practical setting)."""

    kind: Literal["pfllib-dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # number of sites
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 1  # for each site; later versions of PFLlib ask for 40


class NiidBenchDirichlet(StrictModel):
    """As `Dirichlet`, as NIID-Bench and MOON draw it (FedProc's partition)."""

    kind: Literal["niid-bench-dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # number of sites
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed
    min_examples: Annotated[int, Field(ge=1)] = 10  # for each site


class CreffDirichlet(StrictModel):
    """As `Dirichlet`, as FedDF and CReFF draw it, cut anew into sites of one size (FedPRP's Dirichlet setting)."""

    kind: Literal["creff-dirichlet"]
    sites: Annotated[int, Field(ge=1)]  # number of sites; each ten share a part of the examples
    beta: Annotated[float, Field(gt=0)]  # of the Dirichlet distribution: the smaller, the more skewed


class Pathological(StrictModel):
    """Every site has shares of a few classes and no others (PFLlib's and cwFedAVG's pathological setting)."""

    kind: Literal["pathological"]
    sites: Annotated[int, Field(ge=1)]  # number of sites
    classes_each: Annotated[int, Field(ge=1)]  # for each site
    balanced: bool = (
        False  # true: equal shares of a class; false: each share is drawn, at least a tenth of the mean share
    )


class Shards(StrictModel):
    """Each class is cut into shards, and every site gets the same number of them (FedPRP's sharding)."""

    kind: Literal["shards"]
    sites: Annotated[int, Field(ge=1)]  # number of sites
    shards: Annotated[int, Field(ge=1)]  # for each site


class ColumnPartition(StrictModel):
    """One site for each value of the source's own site column, in sorted order; of folders, for each first folder."""

    kind: Literal["column"]


class PluginPartition(BaseModel):
    """A plug-in's partition; its options are checked where it is called."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    kind: str

    @model_validator(mode="after")
    def _check_kind(self) -> PluginPartition:
        if not is_plugin(PluginKind.PARTITION, self.kind):
            raise ValueError(str(unknown("partition", self.kind, KINDS)))
        return self

    @property
    def options(self) -> dict[str, Any]:
        """All keys of the table but `kind`."""
        return dict(self.model_extra or {})


KINDS = (
    "whole",
    "dirichlet",
    "pfllib-dirichlet",
    "niid-bench-dirichlet",
    "creff-dirichlet",
    "pathological",
    "shards",
    "column",
)
_PLUGIN = "plug-in"


def _tag(table: Any) -> str:
    kind = table.get("kind") if isinstance(table, dict) else getattr(table, "kind", None)
    return kind if kind in KINDS else _PLUGIN


Partition = Annotated[
    Annotated[Whole, Tag("whole")]
    | Annotated[Dirichlet, Tag("dirichlet")]
    | Annotated[PfllibDirichlet, Tag("pfllib-dirichlet")]
    | Annotated[NiidBenchDirichlet, Tag("niid-bench-dirichlet")]
    | Annotated[CreffDirichlet, Tag("creff-dirichlet")]
    | Annotated[Pathological, Tag("pathological")]
    | Annotated[Shards, Tag("shards")]
    | Annotated[ColumnPartition, Tag("column")]
    | Annotated[PluginPartition, Tag(_PLUGIN)],
    Discriminator(_tag),
]


Source: TypeAlias = Literal[
    "digits",
    "spiral",
    "npz",
    "folder",
    "manifest",
    "dicomweb",
    "medmnist",
    "cifar10",
    "cifar100",
    "mnist",
    "fashion-mnist",
]
SOURCES: tuple[str, ...] = get_args(Source)
_GROUPS = {"npz": "add arrays train_group and test_group", "dicomweb": "add a column group"}


def data_folder() -> Path | None:
    """The folder that the environment variable `PROTOFED_DATA` names, if it is set."""
    folder = os.environ.get("PROTOFED_DATA")
    return Path(folder) if folder else None


def _check_source(source: str) -> str:
    if source not in SOURCES and not is_plugin(PluginKind.DATASET, source):
        raise ValueError(str(unknown("source", source, SOURCES)))
    return source


_Heading: TypeAlias = Annotated[str, Field(min_length=1)]
_OF_ONE_SOURCE = (
    ("series", "folder", "remove it. In a manifest the path of a row may be the folder of a series"),
    ("tile_size", "manifest", "remove it, or list the tiles in a manifest"),
)
_COLUMNS = ("path_column", "label_column", "group_column", "subgroup_columns", "site_column")


def _check_pacs_url(url: str) -> str:
    expected = "expected https://host[:port]/path of a DICOMweb service, without a user, a query and a fragment"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(expected) from None
    plain = url.isascii() and url.isprintable() and " " not in url
    # dicomweb-client does not know IPv6 addresses.
    if not plain or not host or ":" in host or parts.scheme not in ("http", "https") or re.search("[@?#]", url):
        raise ValueError(expected)
    return url.rstrip("/")


class DicomWeb(StrictModel):
    """A PACS that gives images by DICOMweb: QIDO-RS and WADO-RS."""

    url: Annotated[str, AfterValidator(_check_pacs_url)]  # of the service, as https://pacs.example/dicom-web
    ca_file: Path | None = None  # PEM file of the CAs that may issue its certificate; None: those of certifi
    certificate: Path | None = None  # PEM file of this site's certificate, if the PACS asks for one
    key: Path | None = None  # PEM file of the certificate's key, without a passphrase
    token_file: Path | None = None  # file with a bearer token, read for each request

    @model_validator(mode="after")
    def _check_secrets(self) -> DicomWeb:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("expected certificate and key together, or neither")
        parts = urlsplit(self.url)
        if parts.scheme == "http":
            if self.token_file is not None and not is_loopback(parts.hostname or ""):
                raise ValueError("token_file needs a url that begins with https://, or others read the token")
            if self.ca_file is not None or self.certificate is not None:
                raise ValueError("ca_file, certificate and key are for a url that begins with https://; remove them")
        return self


class Data(StrictModel):
    """Where images come from, and how one source is cut into sites; a simulation's, or one daemon's own."""

    source: Annotated[str, AfterValidator(_check_source)]  # one of `Source`, or a plug-in
    options: Mapping[str, Any] = {}  # options for a source that is a plug-in
    root: Path | None = None  # the folder of images or of a library's set; the file of an npz or a manifest (.csv)
    dicomweb: DicomWeb | None = None  # dicomweb only: the PACS that has the images which the manifest `root` lists
    dataset: str | None = None  # medmnist only: which of its sets, as dermamnist or dermamnist_64
    download: bool = False  # download torchvision's and medmnist's sets
    label_map: Mapping[
        str, str
    ] = {}  # the site's own class names, or numbers as text -> the run's; equal names need no entry
    ignore_labels: frozenset[str] = frozenset()  # own names whose images are left out
    max_unreadable_fraction: Annotated[float, Field(ge=0, lt=1)] = (
        0.0  # share of image files that may be left out as unreadable
    )
    group_pattern: str | None = (
        None  # folder and manifest: regex over the path below root or the site's folder; its (group) stays together
    )
    path_column: _Heading = "path"  # manifest only: heading of the column with the path, name or image id
    label_column: _Heading | Annotated[tuple[_Heading, ...], Field(min_length=1)] = (
        "label"  # manifest only: heading of the label; or one heading for each label, whose column has 1 or 0
    )
    group_column: _Heading | None = None  # manifest only: heading of the group; None: `group`, if there is one
    subgroup_columns: tuple[
        _Heading, ...
    ] = ()  # manifest only: columns by whose values an evaluator's scores may be given
    site_column: _Heading = "site"  # manifest only: heading of the site's column, with partition "column"
    series: Literal["folder"] | None = (
        None  # folder only: "folder": the DICOM files of each folder below a class's folder are one volume
    )
    tile_size: Annotated[int, Field(ge=1, le=10_000)] | None = (
        None  # manifest only: side of the square tile at a row's columns x and y, in pixels of the full resolution
    )
    preprocessing_digest: Annotated[str, Field(min_length=1)] | None = (
        None  # digest that a run's must equal, or it is refused
    )
    long_tail: Share | None = None  # imbalance factor: the rarest class's share of the most frequent one
    test_fraction: Share | None = (
        None  # share of each class held out of a source without a test set; None: 0.3, or 0 with local_test_fraction
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] | None = (
        None  # share of each class's training examples that replaces the test set in scores; for tuning
    )
    auxiliary_per_class: Annotated[int, Field(ge=1)] | None = (
        None  # training examples of each class that no site gets: an evaluator refines models on them (fedic)
    )
    merge_test_into_train: bool = False  # add the source's test set to its training set; then only sites have test sets
    local_test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = (
        None  # share of each class held out of a site's own
    )
    local_test: Literal["by-class"] | None = None  # the test set, each class divided among the sites that hold it
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # seed of the partition and of held-out images
    held_out_sites: Annotated[int, Field(ge=0)] = (
        0  # simulations only: so many last sites take no part; afterwards each trains one round from the run's model
    )
    partition: Partition = Whole()  # how a simulation, or a daemon's `partition_index`, cuts the source into sites

    @property
    def place(self) -> Path | None:
        """`root`, a relative one below the folder that `PROTOFED_DATA` names, if it is set."""
        folder = data_folder()
        return folder / self.root if folder is not None and self.root is not None else self.root

    @model_validator(mode="after")
    def _check_source_options(self) -> Data:
        if self.options and self.source in SOURCES:
            raise ValueError(f"source {self.source} has no options; remove them")
        if (self.dataset is not None) != (self.source == "medmnist"):
            raise ValueError("expected dataset with source medmnist, and with no other source")
        if (self.dicomweb is not None) != (self.source == "dicomweb"):
            raise ValueError("expected a table [data.dicomweb] with source dicomweb, and with no other source")
        # By their values: a recipe that was read and written again has all keys.
        columns = [key for key in _COLUMNS if getattr(self, key) != type(self).model_fields[key].default]
        if columns and self.source != "manifest":
            raise ValueError(f"{columns[0]} is of source manifest; remove it")
        for key, source, instead in _OF_ONE_SOURCE:
            if getattr(self, key) is not None and self.source != source:
                raise ValueError(f"{key} is of source {source}; {instead}")
        if "site_column" in columns and not isinstance(self.partition, ColumnPartition):
            raise ValueError('site_column is of partition = { kind = "column" }; set that, or remove it')
        if both := sorted(self.ignore_labels & set(self.label_map)):
            raise ValueError(f"'{short(both[0])}' is in label_map and in ignore_labels; expected it in one of them")
        return self

    @model_validator(mode="after")
    def _check_group_pattern(self) -> Data:
        if self.group_pattern is None:
            return self
        if self.source not in ("folder", "manifest"):
            raise ValueError(
                f"group_pattern is of sources folder and manifest; for source {self.source} "
                f"{_GROUPS.get(self.source, 'remove it')}"
            )
        if self.group_column is not None:
            raise ValueError("group_pattern and group_column both name the groups; remove one")
        if _group_count(self.group_pattern) != 1:
            raise ValueError("group_pattern: expected a regular expression with one (group) in it, as '/(P[0-9]+)_'")
        return self

    @model_validator(mode="after")
    def _check_test_set(self) -> Data:
        if self.local_test is not None and self.local_test_fraction is not None:
            raise ValueError("expected local_test or local_test_fraction, not both")
        if self.merge_test_into_train and self.local_test_fraction is None:
            raise ValueError("merge_test_into_train leaves no test set; expected local_test_fraction beside it")
        if self.merge_test_into_train and self.test_fraction is not None:
            raise ValueError("merge_test_into_train takes in the test set; remove test_fraction")
        if self.validation_fraction is not None and self.local_test_fraction is not None:
            raise ValueError("validation_fraction and local_test_fraction both hold out training images; remove one")
        return self


def _group_count(pattern: str) -> int | None:
    """Number of groups in a regular expression; None: `pattern` is none."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return None
