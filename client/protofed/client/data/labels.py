"""Map a site's own labels to the run's classes: by its `data.label_map`, or by equal names; nothing is guessed."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from protofed.client.data.file_entry import parse_split
from protofed.client.data.partition import Indices, Labels
from protofed.common.config.data import Data
from protofed.common.errors import DataError, short

MAX_NAMED = 50  # labels in one error: a wrong column may have as many as rows
_DECIMAL = re.compile(r"[0-9]{1,6}")


class LabelsError(DataError):
    """Labels that are no class of the run, or a `data.label_map` that leads to none."""


@dataclass(frozen=True)
class LabelMap:
    """Maps a site's own labels to a run's classes.

    Attributes:
        classes: own label -> class 0..C-1, both for mapped labels and for the run's own names.
        ignored: own labels whose examples are left out.
        class_names: the run's class names, in the order of their indices.
    """

    classes: Mapping[str, int]
    ignored: frozenset[str]
    class_names: Sequence[str]

    @classmethod
    def of(cls, data: Data, class_names: Sequence[str]) -> LabelMap:
        """The map of the settings' `label_map` and `ignore_labels`, for a run with these classes.

        Raises:
            LabelsError: `label_map` leads to a name that is no class of the run.
        """
        indices = {normalise(name): index for index, name in enumerate(class_names)}
        mapped = {normalise(own): normalise(name) for own, name in data.label_map.items()}
        if wrong := sorted(set(mapped.values()) - set(indices)):
            if all(own in indices for own, name in mapped.items() if name in wrong):
                own, name = next((own, name) for own, name in data.label_map.items() if normalise(name) in wrong)
                raise LabelsError(
                    f'data.label_map is the wrong way round: expected "own" = "the run\'s"; write '
                    f'"{short(name)}" = "{short(own)}"'
                )
            raise LabelsError(
                f"data.label_map leads to names that are no class of the run: {_listed(wrong, class_names)}; "
                f"expected one of: {', '.join(map(short, class_names[:MAX_NAMED]))}"
            )
        ignored = frozenset(map(normalise, data.ignore_labels))
        same = {name: index for name, index in indices.items() if name not in ignored}
        return cls({**same, **{own: indices[name] for own, name in mapped.items()}}, ignored, class_names)

    def check(self, unmapped: Iterable[str]) -> None:
        """Refuse unmapped labels.

        Raises:
            LabelsError: there is one; the text names up to `MAX_NAMED`, each with the nearest class.
        """
        if names := sorted(unmapped):
            raise LabelsError(
                f"labels that are no class of the run: {_listed(names, self.class_names)}. Say in data.label_map "
                'which class each is ("own" = "the run\'s"), or name it in data.ignore_labels' + _hint(names)
            )


def normalise(name: str) -> str:
    """A label in the form in which labels are compared: stripped, in Unicode's NFC.

    Bytes of a file name that are not UTF-8 become backslash escapes. Some file systems store names decomposed:
    without NFC, an umlaut from there would not equal the one in the recipe.
    """
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", text).strip()


def by_number(labels: Labels, data: Data, class_names: Sequence[str], *, noisy: bool = False) -> tuple[Indices, Labels]:
    """Map the labels of a source that has numbers for labels.

    A number without an entry in `data.label_map` is the class of that number; but where entries lead to names, each
    number needs an entry.

    Args:
        labels: [N].
        class_names: the run's; empty: entries lead to numbers.
        noisy: as of `sources.load`: examples of unmapped labels are left out.

    Returns:
        Indices [n] of the examples that `data.ignore_labels` does not name, and their classes [n].

    Raises:
        DataError: as `LabelMap.of` and `LabelMap.check`.
    """
    if not data.label_map and not data.ignore_labels:
        return np.arange(len(labels)), labels
    present, inverse = np.unique(labels, return_inverse=True)
    own = [str(number) for number in present]
    ignored = frozenset(map(normalise, data.ignore_labels))
    if data.label_map and class_names:
        label_map = LabelMap.of(data, class_names)
        mapped, unmapped = label_map.classes, frozenset(own) - label_map.classes.keys() - ignored
        if noisy:
            ignored |= unmapped
        else:
            label_map.check(unmapped)
    else:
        mapped = _map_to_numbers(data)
    classes = np.array([mapped.get(name, number) for name, number in zip(own, present, strict=True)], np.int64)
    rows = np.flatnonzero(np.array([name not in ignored for name in own], bool)[inverse])
    return rows, classes[inverse][rows]


def _map_to_numbers(data: Data) -> Mapping[str, int]:
    if wrong := sorted(name for name in data.label_map.values() if not _DECIMAL.fullmatch(normalise(name))):
        raise LabelsError(
            f"data.label_map leads to '{short(wrong[0])}', but the recipe has no `class_names`; "
            "expected numbers of classes"
        )
    return {normalise(own): int(name) for own, name in data.label_map.items()}


def _listed(names: Sequence[str], class_names: Sequence[str]) -> str:
    listed = [_with_nearest(name, class_names) for name in names[:MAX_NAMED]]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def _hint(names: Sequence[str]) -> str:
    """What to do where a label is the name of a split: folders of splits that are none to `folder.read`."""
    splits = [f"'{short(name)}'" for name in names if parse_split(re.split(r"[^a-z]", name.casefold())[0]) is not None]
    if not splits:
        return ""
    return (
        f". If {', '.join(splits)} are splits and no classes, name the folders train, val and test. Put nothing "
        "else beside them, and a folder for each class in them"
    )


def _with_nearest(name: str, class_names: Sequence[str]) -> str:
    folded = {class_name.casefold(): class_name for class_name in class_names}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return f"'{short(name)}'" + (f" (nearest: '{folded[near[0]]}')" if near else "")
