"""Examinations of the site that its page starts: one at a time, in a process of its own, followed line by line."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

from protofed.common.config.settings import ClientSettings, read_settings
from protofed.common.errors import count, short
from protofed.deploy.doctor.checks import State

SITE: Final = ""  # in place of a run's name: the examination of machine and settings
COMMAND: Final = (sys.executable, "-P", "-m", "protofed.deploy.pages.hospital.examine")
KEPT: Final = 20  # results, one a run
ENDS_S: Final = 10.0  # for a process that was told to end
LAST_WORDS: Final = 600  # characters of an examination that failed


@dataclass(frozen=True)
class SiteSettings:
    """The settings of the site's daemon, as the page was started with them.

    Attributes:
        options: what overrides the file.
    """

    file: Path
    options: Mapping[str, str]

    def read(self) -> ClientSettings:
        """What they are now; ConfigError if they cannot be used."""
        return read_settings(ClientSettings, self.file, self.options)


@dataclass(frozen=True)
class Examination:
    """What is known of one, by now.

    Attributes:
        run: whose data are checked, or `SITE`.
        whole: of `SITE`: whether the data are loaded.
        began, ended: Unix times; `ended` is 0 while it goes on.
        rows: of the doctor, as of its `--json`.
        recipe: the digest of the run's recipe.
        data: as of `client check --json`.
        problem: why there is no (full) result.
    """

    run: str
    whole: bool
    began: float
    ended: float = 0.0
    doing: str = "starting"
    rows: Sequence[Mapping[str, Any]] = ()
    recipe: str = ""
    data: Mapping[str, Any] | None = None
    problem: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended yet."""
        return not self.ended

    @property
    def verdict(self) -> str:
        """What the doctor has found, in numbers; empty where it was not asked."""
        if not self.rows:
            return ""
        states = Counter(row["state"] for row in self.rows)
        worst = [count(states[state], state) for state in (State.FINDING, State.WARNING) if states[state]]
        checks = len(self.rows) - states[State.SKIPPED]
        return f"{', '.join(worst) or 'all well'}: {count(checks, 'check')}, {states[State.SKIPPED]} not made"

    @property
    def what(self) -> str:
        """In a few words."""
        return f"the check of the data for run {self.run}" if self.run else "the check of this site"


@dataclass
class Examiner:
    """Examines one site. Threads share it."""

    settings: SiteSettings
    _examinations: OrderedDict[str, Examination] = field(default_factory=OrderedDict)  # by run
    _process: subprocess.Popen[str] | None = None
    _follows: threading.Thread | None = None
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, run: str = SITE, *, whole: bool = False) -> bool:
        """Begin an examination; False: another one goes on."""
        with self._lock:
            if self._going() is not None:
                return False
            errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by the thread that follows it)
            process = subprocess.Popen(  # noqa: S603  (our own module)
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
            )
            self._process, self._stopped = process, False
            atexit.register(process.kill)  # with the page
            self._examinations[run] = Examination(run, whole, time.time())
            self._examinations.move_to_end(run)
            while len(self._examinations) > KEPT:
                self._examinations.popitem(last=False)
            order = {
                "settings": str(self.settings.file),
                "given": dict(self.settings.options),
                "run": run,
                "whole": whole,
            }
            args = run, process, errors, order
            self._follows = threading.Thread(target=self._follow, args=args, name="examination", daemon=True)
            self._follows.start()
        return True

    def stop(self) -> bool:
        """End what goes on; False: nothing does."""
        with self._lock:
            if self._going() is None or self._process is None:
                return False
            self._stopped, follows = True, self._follows
            self._process.terminate()
        if follows is not None:
            follows.join(ENDS_S)  # so that the page after it has the end
        return True

    def going(self) -> Examination | None:
        """The examination that runs now."""
        with self._lock:
            return self._going()

    def newest(self, run: str = SITE) -> Examination | None:
        """The newest one of a run's data, or of the site; None: there was none since the page was started."""
        with self._lock:
            return self._examinations.get(run)

    def _going(self) -> Examination | None:
        return next((one for one in self._examinations.values() if one.goes_on), None)

    def _follow(self, run: str, process: subprocess.Popen[str], errors: IO[str], request: Mapping[str, Any]) -> None:
        with errors, process:
            if process.stdin is not None and process.stdout is not None:
                try:
                    process.stdin.write(json.dumps(request))
                    process.stdin.close()
                    for line in process.stdout:
                        if line.endswith("\n"):  # half a line is of one that was stopped
                            self._hear(run, json.loads(line))
                except BrokenPipeError:  # it has ended already: its last words say why
                    pass
            code = process.wait()
            atexit.unregister(process.kill)
            errors.seek(0)
            self._end(run, code, errors.read())

    def _hear(self, run: str, answer: dict[str, Any]) -> None:
        with self._lock:
            before = self._examinations[run]
            row = answer.pop("row", None)
            rows = before.rows if row is None else (*before.rows, row)
            self._examinations[run] = replace(before, rows=rows, **answer)

    def _end(self, run: str, code: int, errors: str) -> None:
        with self._lock:
            current, why = self._examinations[run], ""
            if self._stopped and code:
                why = "stopped by a person before its end"
            elif code:
                words = " ".join(errors.split())
                why = f"it ended with code {code}: {short(words[-LAST_WORDS:], LAST_WORDS) or 'without a word'}"
            self._examinations[run] = replace(current, ended=time.time(), doing="", problem=current.problem or why)
