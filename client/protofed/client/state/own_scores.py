"""The site's own scores, kept where they were taken: one file a run in the state folder, which nothing sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from protofed.client.policy.rules import is_own
from protofed.common.clock import utc_now
from protofed.common.errors import ConfigError, StateError, unknown
from protofed.common.ids import check_id
from protofed.common.protocol.messages import Scores
from protofed.common.storage import files

FOLDER = ".scores"  # in the state folder; run names cannot begin with a dot
SUFFIX = ".jsonl"
MAX_BYTES = 1 << 20  # of a run's file, about 3000 rounds; the lines that were written first go first


@dataclass(frozen=True)
class OwnRoundScores:
    """A site's own scores of one round.

    Attributes:
        at: when the last of them was taken, UTC, RFC 3339.
        scores: by name, those of single classes too; `loss` is the training's.
    """

    round: int
    at: str
    scores: Mapping[str, float]


_LINE = TypeAdapter(OwnRoundScores)


class OwnScores:
    """The daemon writes, the command line reads; each write replaces the file at once.

    Args:
        folder: `FOLDER` of the site's state folder; created by the first write.
        now: the current time, UTC.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime] = utc_now) -> None:
        self._folder, self._now = folder, now

    def record(self, run: str, round: int, scores: Scores) -> None:
        """Add scores of the site's own data and model to those of a round; an evaluator's are left out.

        Lines of other rounds stay, of later ones too: a server that repeats an old round must not erase them.

        Raises:
            StateError: the file is damaged, or cannot be written.
        """
        rounds = {scored.round: scored for scored in self._read(run)}
        before = rounds.pop(round, OwnRoundScores(round, "", {}))
        own = {name: value for name, value in scores.items() if is_own(name)}
        at = f"{self._now():%Y-%m-%dT%H:%M:%SZ}"
        rounds[round] = replace(before, at=at, scores={**before.scores, **own})  # at the end: the newest
        lines = [json.dumps(asdict(scored)).encode() + b"\n" for scored in rounds.values()]
        while sum(map(len, lines)) > MAX_BYTES:
            del lines[0]
        files.write(self._path(run), b"".join(lines))

    def rounds(self, run: str) -> list[OwnRoundScores]:
        """The scored rounds of a run, by number.

        Raises:
            ConfigError: the site has none of this run.
            StateError: the file is damaged.
        """
        if not self._path(run).exists():
            runs = self.runs()
            none = ConfigError(f"the site of {self._folder.parent} has no scores yet, of run {run} or any other")
            raise unknown("run", run, runs) if runs else none
        return sorted(self._read(run), key=lambda scored: scored.round)

    def latest(self, run: str) -> dict[str, float]:
        """The newest value of each score of a run; StateError as `rounds`."""
        newest: dict[str, float] = {}
        for scored in self._read(run):  # in the order in which they were written
            newest |= scored.scores
        return newest

    def runs(self) -> list[str]:
        """The runs with scores, the last scored run at the end."""
        paths = sorted(self._folder.glob(f"[!.]*{SUFFIX}"), key=lambda path: (path.stat().st_mtime, path.name))
        return [path.name.removesuffix(SUFFIX) for path in paths]

    def _read(self, run: str) -> list[OwnRoundScores]:
        path = self._path(run)
        try:
            return [_LINE.validate_json(line) for line in path.read_bytes().splitlines()]
        except FileNotFoundError:
            return []
        except (OSError, ValidationError) as error:
            why = error.strerror if isinstance(error, OSError) else "a line is not a round's scores"
            raise StateError(f"{path} cannot be read ({why}); restore it, or remove it to start over") from error

    def _path(self, run: str) -> Path:
        return self._folder / (check_id("run", run) + SUFFIX)  # the name becomes a file's: check it first
