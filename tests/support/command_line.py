"""`protofed` in this process, as a shell would run it."""

from __future__ import annotations

import io

import pytest

from protofed.deploy.cli import main


class Answers(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def called(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a command; what was printed before it is left out."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main.main([str(word) for word in words])
    return int(ended.value.code or 0), *capfd.readouterr()
