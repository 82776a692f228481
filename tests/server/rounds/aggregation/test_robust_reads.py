"""How often a robust rule's updates are read, and for how long they are mapped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protofed.common.codec import Buffer, Digest
from protofed.common.protocol.messages import Role
from protofed.server.storage.blobs import Blobs, FolderBlobs, MemoryBlobs

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab

HONEST = {"ann": 1.0, "bob": 1.5, "cyd": 1.75, "dan": 2.0}
NEAR, FAR = 2.25, -30.0  # what the fifth site sends: nobody is left out by Krum, or this one is


def opened(make: MakeLab, blobs: Blobs, rule: str) -> Lab:
    """Round 1 is open, for five sites, whose norms no other screen looks at."""
    federation: dict[str, Any] = {
        "min_sites": 5,
        "quorum": 5 if rule == "krum" else 4,
        "outlier_factor": None,
        "max_relative_norm": 1e9,
    }
    lab = make(blobs=blobs, federation={**federation, "robust": rule})
    lab.enroll("eva", role=Role.EVALUATOR)
    lab.enroll(*HONEST, "eve")
    lab.later(0)
    lab.first_models()
    return lab


class Counting(MemoryBlobs):
    """Knows how often each blob was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[Digest] = Counter()

    def view(self, address: Digest) -> Buffer:
        """Count it."""
        self.reads[address] += 1
        return super().view(address)


@pytest.mark.parametrize(
    ("rule", "value", "reads"),
    [("krum", NEAR, 1), ("krum", FAR, 2), ("clip", NEAR, 1), ("geometric-median", NEAR, 1)],
    ids=["krum", "krum leaves one out", "clip", "geometric median"],
)
def test_an_update_is_read_and_checked_once_for_its_rule_and_its_method(
    make: MakeLab, rule: str, value: float, reads: int
) -> None:
    blobs = Counting()
    lab = opened(make, blobs, rule)
    for site, sent in HONEST.items():
        lab.push(site, lab.model(sent))
    blobs.reads.clear()
    lab.push("eve", lab.model(value))
    digests = [row.digest for row in lab.ledger.updates("test", 1) if row.task.site in HONEST]
    assert [blobs.reads[digest] for digest in digests] == [reads] * 4


@pytest.mark.parametrize("rule", ["none", "clip", "krum", "geometric-median"])
def test_no_update_is_mapped_any_more_when_its_cached_pages_are_given_back(
    make: MakeLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
) -> None:
    """The kernel keeps pages that somebody has mapped."""
    mapped: list[bool] = []

    def watched(_: FolderBlobs, address: Digest) -> None:
        path = str(tmp_path / address)
        mapped.append(path in Path("/proc/self/maps").read_text(encoding="utf-8"))

    monkeypatch.setattr(FolderBlobs, "uncache", watched)
    lab = opened(make, FolderBlobs(tmp_path), rule)
    mapped.clear()  # of the first model, which is the state
    lab.round(**HONEST, eve=NEAR)
    assert mapped == [False] * 5


@pytest.mark.parametrize("rule", ["clip", "median"])
def test_row_72_a_damaged_update_is_left_out_by_name_under_a_rule(make: MakeLab, tmp_path: Path, rule: str) -> None:
    lab = opened(make, FolderBlobs(tmp_path), rule)
    for site, value in HONEST.items():
        lab.push(site, lab.model(value))
    (damaged,) = (row for row in lab.ledger.updates("test", 1) if row.task.site == "ann")
    path = tmp_path / damaged.digest
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    lab.push("eve", lab.model(NEAR))
    assert {row.task.site for row in lab.ledger.updates("test", 1) if row.rejected is not None} == {"ann"}
    assert lab.value == pytest.approx((1.5 + 1.75 + 2.0 + 2.25) / 4)
