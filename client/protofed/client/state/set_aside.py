"""Rounds that a roll-back left behind: moved aside, so that repeating an old round erases no later model."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from protofed.common.codec import digest
from protofed.common.protocol.messages import Task

_NAME = re.compile(r"(aside|moving)-([0-9]{6,})-[0-9a-f]{8}")  # the round that was staged in their place, its task


class SetAside:
    """Folders `aside-ROUND-TASK` beside the rounds of a run, each with the folders of the rounds that were moved there.

    It is called `moving-…` until all are: several cannot move at once, and a crash in between must move back the first.

    Args:
        folder: of the site's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, task: Task, rounds: Iterable[Path]) -> None:
        """Move rounds out of the way of this task's outcome, the earliest first."""
        if not (rounds := list(rounds)):
            return
        aside = self._of(task)
        # The same task staged once more moves what has counted meanwhile to what it moved before, which must stay.
        moving = aside if aside.exists() else aside.with_name(aside.name.replace("aside", "moving", 1))
        moving.mkdir(exist_ok=True)
        try:
            for path in rounds:
                os.replace(path, moving / path.name)
            os.replace(moving, aside)
        except OSError:
            if moving != aside:
                _restore(moving)
            raise

    def restore(self, task: Task) -> None:
        """Move back what was moved for this task: its update does not count."""
        _restore(self._of(task))

    def recover(self, run: str) -> None:
        """After a crash in `put`, or before the staging: move back what nothing has taken the place of."""
        for path in list((self._folder / run).glob("moving-*")):
            if _NAME.fullmatch(path.name):
                _restore(path)
        rounds = [int(path.name) for path in (self._folder / run).iterdir() if path.name.isdecimal()]
        for number, path in self._all(run):
            if max(rounds, default=-1) < number:
                _restore(path)

    def discard(self, run: str, counted: int) -> None:
        """Remove the rounds up to the one that has counted now."""
        for _, path in self._all(run):
            for moved in list(path.iterdir()):
                if moved.name.isdecimal() and int(moved.name) <= counted:
                    shutil.rmtree(moved, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty yet
                path.rmdir()

    def newest(self, run: str) -> int:
        """The newest round that was moved aside and has not counted again; 0: none."""
        moved = [int(moved.name) for _, path in self._all(run) for moved in path.iterdir() if moved.name.isdecimal()]
        return max(moved, default=0)

    def _of(self, task: Task) -> Path:
        return self._folder / task.run / f"aside-{task.round:06d}-{digest(task.task_id.encode())[:8]}"

    def _all(self, run: str) -> list[tuple[int, Path]]:
        folder = self._folder / run
        names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
        return [(int(name[2]), folder / name[0]) for name in names if name]


def _restore(folder: Path) -> None:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not (home := folder.parent / path.name).exists():
            os.replace(path, home)
    with contextlib.suppress(OSError):
        folder.rmdir()
