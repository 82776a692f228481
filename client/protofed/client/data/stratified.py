"""Samples that take its share of each class. `partition`, by contrast, is imported where there is no PyTorch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stratified_sample(labels: Tensor, count: int, seed: int) -> Tensor:
    """Indices [count] int64, ascending, of examples drawn from each class by its share; one of each class at least.

    Equal labels, count and seed give equal indices, so that sites with one test set are scored on the same images. All
    indices, if there are not more; as many as there are classes, if `count` is less.

    Args:
        labels: [N] int64, on the CPU.
    """
    if count >= len(labels):
        return torch.arange(len(labels))
    by_class, place, totals = _shuffled(labels, seed)
    taken = _allotted(totals, count)
    return by_class[place < taken[labels[by_class]]].sort().values


def stratified_share(labels: Tensor, fraction: float) -> Tensor:
    """[N] bool: this share of each class's examples, rounded down, drawn by a seed of its own; equal for equal labels.

    Args:
        labels: [N] int64, on the CPU.
    """
    by_class, place, totals = _shuffled(labels, "share")
    taken = torch.zeros(len(labels), dtype=torch.bool)
    taken[by_class] = place < (fraction * totals[labels[by_class]].double()).floor()
    return taken


def _shuffled(labels: Tensor, seed: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """[N] indices class by class, in random order within each; their places within their class; [C] the totals."""
    digest = hashlib.blake2b(f"stratified/{seed}".encode(), digest_size=7).digest()
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
    by_class, totals = drawn[labels[drawn].argsort(stable=True)], labels.bincount()
    return by_class, torch.arange(len(labels)) - (totals.cumsum(0) - totals)[labels[by_class]], totals


def _allotted(totals: Tensor, count: int) -> Tensor:
    """[C] int64: how many examples of each class are taken, by largest remainders; `count` is below their sum."""
    share = count * totals.double() / totals.sum()
    taken = share.floor().long().maximum((totals > 0).long())
    missing = count - int(taken.sum())
    if missing > 0:
        taken[(share - taken).argsort(descending=True, stable=True)[:missing]] += 1
    for _ in range(-missing):  # rare classes were given one each: the classes that are above their share by most pay
        excess = (taken - share).masked_fill(taken < 2, -torch.inf)
        if excess.max() > -torch.inf:
            taken[int(excess.argmax())] -= 1
    return taken
