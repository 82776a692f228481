"""Event files for TensorBoard: a folder for each run, a file for each time that somebody began to write.

A reader takes back what a file says from the step on with which the next one begins: so a round that was rolled back is
gone, and one that a killed process had half told is there once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from protofed.common.errors import StateError
from protofed.common.storage import files as storage_files
from protofed.deploy.tracking.pages import Page, TrackedRun, outcome
from protofed.server.storage.rows import RunRow

TOLD = "protofed.json"  # beside the event files: what they hold
_FILES = "events.out.tfevents.*"


class EventFiles:
    """`Tracker` of a folder."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def open(self, row: RunRow) -> Iterator[EventBook]:
        """The folder of a run, which is its alone.

        Raises:
            StateError: another process writes there, or it is of another run with the same name.
        """
        folder = self._folder / row.run
        lock = storage_files.Lock(folder)
        book = None
        try:
            book = EventBook(folder, row)
            yield book
        finally:
            if book is not None:
                book.close()
            lock.release()


class EventBook:
    """One run's event files."""

    def __init__(self, folder: Path, row: RunRow) -> None:
        self._folder, self._row = folder, row
        self._whose = {"run": row.run, "fingerprint": row.fingerprint, "began_at": row.began_at}
        self._told = self._read()
        self._file: Any = None
        self._event = import_module("tensorboardX.proto.event_pb2")
        self._summary = import_module("tensorboardX.summary")

    @property
    def told(self) -> TrackedRun:
        """What the files hold."""
        return self._told

    def take_back(self, rounds: int) -> None:
        """Begin another file, with which the rounds from this one on are gone."""
        self.close()
        self._told = replace(self._told, attempts=self._told.attempts[:rounds])
        self._begin()
        self._keep()

    def write(self, page: Page) -> None:
        """One record: it is there whole, or not at all."""
        if not self._told.attempts:
            self._say("recipe", _block(self._row.recipe), 0, self._row.began_at)
        values = [value for tag, number in page.numbers.items() for value in self._summary.scalar(tag, number).value]
        self._add(page.at, page.round, self._summary.Summary(value=values))
        self._told = replace(self._told, attempts=(*self._told.attempts, page.attempt))
        self._keep()

    def end(self, row: RunRow) -> None:
        """As text, at the last round."""
        said, step = outcome(row), max(0, len(self._told.attempts) - 1)
        self._say("outcome", said or f"goes on after round {step}", step, row.ended_at or time.time())
        self._told = replace(self._told, outcome=said)
        self._keep()

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _say(self, tag: str, text: str, step: int, at: float) -> None:
        self._add(at, step, self._summary.text(tag, text))

    def _add(self, at: float, step: int, summary: Any) -> None:
        if self._file is None:
            self._begin()
        self._put(self._event.Event(wall_time=at, step=step, summary=summary))

    def _begin(self) -> None:
        """Names that sort as they were made, whatever the clock says."""
        files = self._files()
        number = 1 + (int(files[-1].name.split(".")[3]) if files else 0)
        path = self._folder / f"events.out.tfevents.{number:010d}.protofed"
        self._file = import_module("tensorboardX.record_writer").RecordWriter(str(path))
        now, step = time.time(), len(self._told.attempts)
        self._put(self._event.Event(wall_time=now, file_version="brain.Event:2"))
        start = self._event.SessionLog(status=self._event.SessionLog.START)  # from the second one on, readers take back
        self._put(self._event.Event(wall_time=now, step=step, session_log=start))

    def _put(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()  # to the disk: what is told once is kept

    def _files(self) -> Sequence[Path]:
        return sorted(self._folder.glob(_FILES))

    def _keep(self) -> None:
        storage_files.write(self._folder / TOLD, json.dumps({**self._whose, **self._told.pack()}).encode())

    def _read(self) -> TrackedRun:
        path = self._folder / TOLD
        try:
            said = json.loads(path.read_bytes())
            whose, told = {key: said[key] for key in self._whose}, TrackedRun.unpack(said)
        except FileNotFoundError:
            return TrackedRun()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path} cannot be read; remove the folder, and its events are written anew") from error
        if whose != self._whose:
            raise StateError(f"{self._folder} holds another run of this name; give another folder, or remove it")
        return told


def _block(recipe: str) -> str:
    """JSON as the text plugin's Markdown shows it."""
    return "\n".join(f"    {line}" for line in json.dumps(json.loads(recipe), indent=2).splitlines())
