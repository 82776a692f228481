"""What libraries need in turn, by the metadata of those that are installed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(asked: Iterable[str], there: Mapping[str, str] | None = None, without: Collection[str] = ()) -> list[str]:
    """The names of the libraries that these requirements need, and of all that those need in turn, sorted.

    Args:
        asked: requirements as in pyproject.toml.
        there: markers of another machine; None: this one.
        without: libraries that are left out, with what they need.
    """
    there = there or {}
    waiting, seen = list(_applying(asked, (), there)), set[tuple[str, frozenset[str]]]()
    while waiting:
        name, extras = found = waiting.pop()
        if found not in seen and name not in without:
            seen.add(found)
            waiting += _applying(metadata.requires(name) or (), extras, there)
    return sorted({name for name, _ in seen})


def _applying(
    requirements: Iterable[str], extras: Iterable[str], there: Mapping[str, str]
) -> Iterator[tuple[str, frozenset[str]]]:
    """The requirements that apply there, by name, with the extras that they ask for."""
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**there, "extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)
