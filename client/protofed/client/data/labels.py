"""Map a site's own labels to the run's classes: by its `data.label_map`, or by equal names; nothing is guessed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from numpy.typing import NDArray

from protofed.client.data.file_entry import normalise, parse_split
from protofed.client.data.partition import Indices
from protofed.client.task import ADVICE, ClientTask, LeftOut, OwnLabel
from protofed.common.config.data import Data
from protofed.common.errors import DataError, short

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger()

MAX_NAMED = 50  # labels in one error: a wrong column may have as many as rows
_DECIMAL = re.compile(r"[0-9]{1,6}")


class LabelsError(DataError):
    """Labels that the run cannot use, or a `data.label_map` that leads to none."""


@dataclass(frozen=True)
class LabelMap:
    """Maps a site's own labels to a run's classes.

    Attributes:
        classes: own label -> the classes 0..C-1 that it stands for, both for mapped labels and for the run's own names.
            It is one class, or of findings any number.
        ignored: own labels whose examples are left out; of findings the names that say nothing.
        class_names: the run's class names, in the order of their indices.
    """

    classes: Mapping[str, tuple[int, ...]]
    ignored: frozenset[str]
    class_names: Sequence[str]

    @property
    def count(self) -> int:
        """C."""
        return len(self.class_names)

    @classmethod
    def of(cls, data: Data, class_names: Sequence[str]) -> LabelMap:
        """The map of the settings' `label_map` and `ignore_labels`, for a run with these classes.

        Raises:
            LabelsError: `label_map` leads to a name that the run does not have.
        """
        indices = {normalise(name): index for index, name in enumerate(class_names)}
        mapped = {normalise(own): _names(normalise(name), indices) for own, name in data.label_map.items()}
        if wrong := sorted(set().union(*mapped.values()) - set(indices)):
            if all(own in indices for own, several in mapped.items() if not {*several}.isdisjoint(wrong)):
                own, name = next((own, name) for own, name in data.label_map.items() if normalise(name) in wrong)
                raise LabelsError(
                    f'data.label_map is the wrong way round: expected "own" = "the run\'s"; write '
                    f'"{short(name)}" = "{short(own)}"'
                )
            raise LabelsError(
                f"data.label_map leads to names that the run does not have: {_listed(wrong, class_names)}; "
                f"expected one of: {', '.join(map(short, class_names[:MAX_NAMED]))}"
            )
        ignored = frozenset(map(normalise, data.ignore_labels))
        classes: dict[str, tuple[int, ...]] = {name: (index,) for name, index in indices.items() if name not in ignored}
        classes |= {own: tuple(indices[name] for name in several) for own, several in mapped.items()}
        return cls(classes, ignored, class_names)

    def check(self, unmapped: Iterable[str]) -> None:
        """Refuse unmapped labels.

        Raises:
            LabelsError: there is one; the text names up to `MAX_NAMED`, each with the nearest class.
        """
        if names := sorted(unmapped):
            listed = _listed(names, self.class_names)
            raise LabelsError(f"labels that the run cannot use: {listed}. {advice(names)}{_hint(names)}")


def advice(labels: Iterable[str]) -> str:
    """What to do about labels that have no target, without a full stop."""
    marks = {next((mark for mark in ADVICE if mark in label), None) for label in labels}
    say = [ADVICE[mark] for mark in ADVICE if mark in marks]
    if None in marks:
        say.append('Say in data.label_map what each name is ("own" = "the run\'s"), or name it in data.ignore_labels')
    return ". ".join(say)


def _names(text: str, indices: Mapping[str, int]) -> tuple[str, ...]:
    """The classes that an entry of `data.label_map` names: one, or findings with | between them, or none."""
    return (text,) if text in indices else tuple(filter(None, map(str.strip, text.split("|"))))


def by_number(
    labels: NDArray[Any], task: ClientTask, data: Data, class_names: Sequence[str], classes: int, *, noisy: bool = False
) -> tuple[Indices, Tensor]:
    """The targets of a source that has numbers for labels.

    A number without an entry in `data.label_map` is the class of that number; but where entries lead to names, each
    number needs an entry.

    Args:
        labels: [N, ...].
        class_names: the run's; empty: entries lead to numbers.
        noisy: as of `sources.load`: examples of unmapped labels are left out.

    Returns:
        Indices [n] of the examples that have a target, and the targets [n, ...].

    Raises:
        DataError: as `LabelMap.of`, `LabelMap.check` and `ClientTask.from_array`.
    """
    if not data.label_map and not data.ignore_labels:
        return np.arange(len(labels)), task.from_array(labels, classes)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise LabelsError(
            "data.label_map and ignore_labels are for labels that are names, or one whole number each; these have "
            f"shape {list(labels.shape)}. Remove the two keys"
        )
    present, inverse = np.unique(labels, return_inverse=True)
    names = [str(number) for number in present]
    own_names = _map_of_numbers(names, data, class_names, classes)
    read = [task.read(OwnLabel(name, (name,)), own_names) for name in names]
    unmapped = [one.label if isinstance(one, LeftOut) and not one.ignored else None for one in read]
    if not noisy:
        own_names.check(filter(None, unmapped))
    elif any(unmapped):
        count = sum(unmapped[place] is not None for place in inverse)
        log.warning("images whose labels the run does not know are left out", count=count)
    usable = np.array([not isinstance(one, LeftOut) for one in read], bool)
    targets = np.array([one for one in read if not isinstance(one, LeftOut)])
    rows = np.flatnonzero(usable[inverse])
    places = (usable.cumsum() - 1)[inverse[rows]]
    return rows, as_targets(targets[places] if len(rows) else np.empty(0, np.int64))


def as_targets(targets: NDArray[Any]) -> Tensor:
    """Targets [N, ...] as a tensor: whole numbers stay whole."""
    import torch  # images are read without it, too

    return torch.from_numpy(targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))


def _map_of_numbers(present: Sequence[str], data: Data, class_names: Sequence[str], classes: int) -> LabelMap:
    """Of labels that are numbers."""
    if data.label_map and class_names:
        return LabelMap.of(data, class_names)
    ignored = frozenset(map(normalise, data.ignore_labels))
    mapped: dict[str, tuple[int, ...]] = {name: (int(name),) for name in present if name not in ignored}
    return LabelMap(mapped | _map_to_numbers(data), ignored, [str(number) for number in range(classes)])


def _map_to_numbers(data: Data) -> dict[str, tuple[int, ...]]:
    if wrong := sorted(name for name in data.label_map.values() if not _DECIMAL.fullmatch(normalise(name))):
        raise LabelsError(
            f"data.label_map leads to '{short(wrong[0])}', but the recipe has no `class_names`; "
            "expected numbers of classes"
        )
    return {normalise(own): (int(name),) for own, name in data.label_map.items()}


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
