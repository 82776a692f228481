"""Writes runs as event files for TensorBoard: a folder for each run, a new file for each writer and each rollback.

A file begins with the step from which it replaces earlier files (SessionLog.START). So a reader drops a round that was
rolled back, and sees a round once even if a killed process had written it without recording that.
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
from protofed.deploy.tracking.follower import RoundMetrics, TrackedRun, outcome
from protofed.server.storage.rows import RunRow

TRACKED_FILE = "protofed.json"  # beside the event files: the rounds that they hold
_FILES = "events.out.tfevents.*"


class EventFiles:
    """The `Tracker` of a folder."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def open(self, row: RunRow) -> Iterator[EventFileWriter]:
        """The writer of a run, which locks the run's folder.

        Raises:
            StateError: another process writes there, or the folder is of another run with the same name.
        """
        folder = self._folder / row.run
        lock = storage_files.Lock(folder)
        writer = None
        try:
            writer = EventFileWriter(folder, row)
            yield writer
        finally:
            try:
                if writer is not None:
                    writer.close()
            finally:
                lock.release()


class EventFileWriter:
    """Writes one run's event files."""

    def __init__(self, folder: Path, row: RunRow) -> None:
        self._folder, self._row = folder, row
        self._identity = {"run": row.run, "fingerprint": row.fingerprint, "began_at": row.began_at}
        self._tracked = self._load_tracked()
        self._file: Any = None
        self._event = import_module("tensorboardX.proto.event_pb2")
        self._summary = import_module("tensorboardX.summary")

    @property
    def tracked(self) -> TrackedRun:
        """What the files hold of the run."""
        return self._tracked

    def roll_back(self, rounds: int) -> None:
        """Begin another file, whose start makes readers drop the rounds from this one on."""
        self.close()
        self._tracked = replace(self._tracked, attempts=self._tracked.attempts[:rounds])
        self._open_file()
        self._save_tracked()

    def write(self, metrics: RoundMetrics) -> None:
        """Add a round as one event: a reader sees it whole or, with a wrong checksum after a crash, not at all."""
        if not self._tracked.attempts:
            self._add_text("recipe", _block(self._row.recipe), 0, self._row.began_at)
        values = [value for tag, number in metrics.numbers.items() for value in self._summary.scalar(tag, number).value]
        self._add(metrics.at, metrics.round, self._summary.Summary(value=values))
        self._tracked = replace(self._tracked, attempts=(*self._tracked.attempts, metrics.attempt))
        self._save_tracked()

    def end(self, row: RunRow) -> None:
        """Write the outcome as text, at the last round."""
        text, step = outcome(row), max(0, len(self._tracked.attempts) - 1)
        self._add_text("outcome", text or f"goes on after round {step}", step, row.ended_at or time.time())
        self._tracked = replace(self._tracked, outcome=text)
        self._save_tracked()

    def close(self) -> None:
        """Close the current file, if there is one."""
        file, self._file = self._file, None  # one that cannot be closed, on a full disk, is not written to again
        if file is not None:
            file.close()

    def _add_text(self, tag: str, text: str, step: int, at: float) -> None:
        self._add(at, step, self._summary.text(tag, text))

    def _add(self, at: float, step: int, summary: Any) -> None:
        if self._file is None:
            self._open_file()
        self._write_event(self._event.Event(wall_time=at, step=step, summary=summary))

    def _open_file(self) -> None:
        """Open the next file. Names are numbered, so that they sort as they were made even if the clock goes back."""
        files = self._files()
        number = 1 + (int(files[-1].name.split(".")[3]) if files else 0)
        path = self._folder / f"events.out.tfevents.{number:010d}.protofed"
        self._file = import_module("tensorboardX.record_writer").RecordWriter(str(path))
        now, step = time.time(), len(self._tracked.attempts)
        self._write_event(self._event.Event(wall_time=now, file_version="brain.Event:2"))
        # From the second file on, readers drop what earlier files say from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write_event(self._event.Event(wall_time=now, step=step, session_log=start))

    def _write_event(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()  # before `tracked` is recorded: a round that it names must be in the file

    def _files(self) -> Sequence[Path]:
        return sorted(self._folder.glob(_FILES))

    def _save_tracked(self) -> None:
        storage_files.write(
            self._folder / TRACKED_FILE, json.dumps({**self._identity, **self._tracked.pack()}).encode()
        )

    def _load_tracked(self) -> TrackedRun:
        path = self._folder / TRACKED_FILE
        try:
            stored = json.loads(path.read_bytes())
            identity, tracked = {key: stored[key] for key in self._identity}, TrackedRun.unpack(stored)
        except FileNotFoundError:
            return TrackedRun()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"{path} cannot be read; remove the folder, and its events are written anew") from error
        if identity != self._identity:
            raise StateError(f"{self._folder} holds another run of this name; give another folder, or remove it")
        return tracked


def _block(recipe: str) -> str:
    """JSON as a code block of Markdown (indented by 4), as TensorBoard's text plugin shows it."""
    return "\n".join(f"    {line}" for line in json.dumps(json.loads(recipe), indent=2).splitlines())
