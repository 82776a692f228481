"""From a site's own labels to the run's classes: by its map, or where the names are equal; nothing is guessed."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protofed.client.data.partition import Indices, Labels
from protofed.common.config.recipe import Data
from protofed.common.errors import DataError, short

MOST_NAMED = 50  # labels in one error: a column of something else has as many as rows
_DECIMAL = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class LabelMap:
    """What a site's own labels mean in a run.

    Attributes:
        classes: own name -> class 0..C-1, for all names that are known.
        ignored: own names that are left out.
        class_names: the run's classes by name.
    """

    classes: Mapping[str, int]
    ignored: frozenset[str]
    class_names: Sequence[str]

    @classmethod
    def of(cls, data: Data, class_names: Sequence[str]) -> LabelMap:
        """The settings' map beside the run's own names.

        Raises:
            DataError: the map leads to what is no class of the run.
        """
        places = {plain(name): index for index, name in enumerate(class_names)}
        meant = {plain(own): plain(name) for own, name in data.label_map.items()}
        if wrong := sorted(set(meant.values()) - set(places)):
            raise DataError(
                f"data.label_map leads to what is no class of the run: {_listed(wrong, class_names)}; "
                f"expected one of: {', '.join(map(short, class_names[:MOST_NAMED]))}"
            )
        ignored = frozenset(map(plain, data.ignore_labels))
        same = {name: index for name, index in places.items() if name not in ignored}
        return cls({**same, **{own: places[name] for own, name in meant.items()}}, ignored, class_names)

    def check(self, unmapped: Iterable[str]) -> None:
        """That there are none.

        Raises:
            DataError: naming all of them, each with the nearest class.
        """
        if names := sorted(unmapped):
            raise DataError(
                f"labels that are no class of the run: {_listed(names, self.class_names)}; "
                'say in data.label_map what each is ("own" = "the run\'s"), or name it in data.ignore_labels'
            )


def plain(name: str) -> str:
    """A label as it is compared: no spaces around it, composed letters; bytes that are no text are shown as such."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text).strip()


def by_number(labels: Labels, data: Data, class_names: Sequence[str]) -> tuple[Indices, Labels]:
    """What a source with numbers for labels holds of the run's classes.

    A number without an entry in `data.label_map` is the class of that number; but where the entries lead to names, each
    number needs one.

    Args:
        labels: [N].
        class_names: the run's; empty: entries lead to numbers, too.

    Returns:
        Rows [n] that `data.ignore_labels` does not name, and their classes [n].

    Raises:
        DataError: as `LabelMap.of` and `LabelMap.check`.
    """
    if not data.label_map and not data.ignore_labels:
        return np.arange(len(labels)), labels
    present, places = np.unique(labels, return_inverse=True)
    own = [str(number) for number in present]
    ignored = frozenset(map(plain, data.ignore_labels))
    meant = _names(own, ignored, data, class_names) if data.label_map and class_names else _numbers(data)
    classes = np.array([meant.get(name, number) for name, number in zip(own, present, strict=True)], np.int64)
    rows = np.flatnonzero(np.array([name not in ignored for name in own], bool)[places])
    return rows, classes[places][rows]


def _names(own: Sequence[str], ignored: frozenset[str], data: Data, class_names: Sequence[str]) -> Mapping[str, int]:
    known = LabelMap.of(data, class_names)
    known.check(name for name in own if name not in known.classes and name not in ignored)
    return known.classes


def _numbers(data: Data) -> Mapping[str, int]:
    if wrong := sorted(name for name in data.label_map.values() if not _DECIMAL.fullmatch(plain(name))):
        raise DataError(
            f"data.label_map leads to '{short(wrong[0])}', but the recipe has no `class_names`; "
            "expected numbers of classes"
        )
    return {plain(own): int(name) for own, name in data.label_map.items()}


def _listed(names: Sequence[str], known: Sequence[str]) -> str:
    told = [_with_nearest(name, known) for name in names[:MOST_NAMED]]
    more = len(names) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


def _with_nearest(name: str, known: Sequence[str]) -> str:
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return f"'{short(name)}'" + (f" (nearest: '{folded[near[0]]}')" if near else "")
