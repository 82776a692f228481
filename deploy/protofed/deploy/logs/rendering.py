"""The last steps of logging: values as plain JSON, and lines that are written whole or not at all."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import UTC, date, datetime
from enum import Enum
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

LONGEST_TEXT = 20_000  # characters of one value
MOST_ITEMS = 200
DEEPEST = 4
FIRST_KEYS = ("timestamp", "level", "event", "site", "run", "round", "incident")  # not redacted: our own words and ids
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_LAST_WORD = re.compile(r"\S*\Z")


def plain(value: Any, clean: Callable[[str], str], depth: int = 0) -> Any:
    """A value as plain JSON, its texts redacted by `clean`.

    Of arrays, lists of numbers and other objects only the type is shown: they could be pixels, labels or weights.
    """
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value, clean, depth)
        case Integral():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(value)
        case str():
            return _cut(clean(_cut(value)))
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case Path() | date():
            return clean(str(value))
        case BaseException():
            return _cut(clean(f"{type(value).__name__}: {_text(value)}"))
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
    return _collection(value, clean, depth)


def _collection(value: Any, clean: Callable[[str], str], depth: int) -> Any:
    if depth >= DEEPEST or not isinstance(value, Mapping | Sequence | Set):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        if any(isinstance(key, Integral) for key in value):
            return "<numbers>"
        items = list(value.items())[:MOST_ITEMS]
        return {clean(str(key)): plain(item, clean, depth + 1) for key, item in items}
    some = list(value)[:MOST_ITEMS]
    if any(isinstance(item, Integral | float) for item in some):
        return "<numbers>"
    return [plain(item, clean, depth + 1) for item in some]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a library's __str__ may itself fail
        return "<no text>"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return _LAST_WORD.sub("…", text[:LONGEST_TEXT])  # not within a word: half a secret would not be recognized


def printable(text: str) -> str:
    """Text with its control characters escaped, except for newlines: it cannot move a terminal's cursor."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class LineRenderer:
    """A structlog logger that writes to the current standard error; a line that cannot be written is dropped.

    Lock and state belong to the class, as structlog makes many loggers for the one stream.
    """

    _writing = threading.Lock()
    _torn = False  # the last write broke off within a line

    def msg(self, message: str) -> None:
        """Write one line; never raises, since logging must not end a daemon."""
        with suppress(OSError, ValueError, AttributeError), LineRenderer._writing:  # closed, full, or None
            self._write(f"{message}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _write(self, data: bytes) -> None:
        try:
            handle = sys.stderr.fileno()
        except (OSError, ValueError):  # a replacement without a file, as in tests and notebooks
            sys.stderr.write(data.decode(errors="replace"))
            return
        # os.write, unbuffered: a killed process leaves no line in a buffer, and one call per line keeps lines whole.
        left = b"\n" + data if LineRenderer._torn else data
        whole = len(left)
        try:
            while left:
                left = left[os.write(handle, left) :]
        finally:
            LineRenderer._torn = LineRenderer._torn if len(left) == whole else bool(left)


DATA, SECRET, NUMBERS = "<data>", "<secret>", "<numbers>"
MOST_NAMES = 20_000  # files of one folder hidden by name; further ones are still hidden by suffix or folder
SHORTEST_NAME = 5  # characters of a name without suffix: a shorter one would hide ordinary words
SHORTEST_SECRET = 6  # characters: a shorter secret is hidden only where it is a whole word
_SUFFIXES = (
    r"avif|bmp|dcm|dicom|gif|h5|hdf5|jp2|jpe?g|mha|mhd|mrxs|ndpi|nii|nii\.gz|npy|npz|nrrd|png|svs|tga|tiff?|webp"
)
_QUOTED = re.compile(rf"""(['"])[^'"\n]*\.(?:{_SUFFIXES})\1""", re.IGNORECASE)
_WORD = re.compile(r"""[^\s'"<>|,;:()\[\]{}=]+""")
_IMAGE = re.compile(rf"[^./]\.(?:{_SUFFIXES})$", re.IGNORECASE)
_NUMBERS = re.compile(r"\b(?:tensor|array)\([^()]*(?:\([^()]*\)[^()]*)*\)|\[\s*[-+.\de]+(?:[,\s]+[-+.\de]+){5,}\s*\]")
_COUNT = re.compile(r"\b\d[\d,]*(?= (?:examples?|images?|labels?|rows?)\b)")
_ALWAYS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^\s/@'\"]+(?=@)"),  # user:password of a URL
    re.compile(r"(?<=\bBearer )[^\s'\"]+|(?<=\bBasic )[^\s'\"]+", re.IGNORECASE),
)


class Hidden:
    """What a process hides; any thread may use it.

    Tuples are replaced, never changed, so that `clean` needs no lock.
    """

    def __init__(self) -> None:
        self._folders: tuple[re.Pattern[str], ...] = ()
        self._secrets: tuple[re.Pattern[str], ...] = _ALWAYS
        self._names: frozenset[str] = frozenset()

    def folder(self, root: Path) -> None:
        """Hide a data file or folder with every path below it, and its files' names wherever they occur."""
        given, absolute = str(root), os.path.abspath(root)
        # Libraries write a path as they were given it, resolved, or quoted in a URL. A bare word would hide too much.
        paths = {absolute, os.path.realpath(root)} | ({given} if "/" in given or root.suffix else set())
        paths |= {quote(path) for path in paths}
        # The longest first: a shorter one would leave the rest of a longer one behind.
        self._folders += tuple(_below(path) for path in sorted(paths - {"/"}, key=len, reverse=True))
        names = set(islice(_files(root), MOST_NAMES))
        spaced = {name for name in names if not _WORD.fullmatch(name)}  # `clean` compares names word by word
        self._folders += tuple(re.compile(re.escape(name)) for name in spaced)
        self._names |= {name for name in names - spaced if "." in name.strip(".") or len(name) >= SHORTEST_NAME}

    def secret(self, text: str) -> None:
        """Hide a secret, also in its quoted form of URLs."""
        for form in {text, quote(text, safe=""), unquote(text)} - {""}:
            pattern = re.escape(form) if len(form) >= SHORTEST_SECRET else rf"(?<!\w){re.escape(form)}(?!\w)"
            self._secrets += (re.compile(pattern),)

    def url(self, url: str) -> None:
        """Hide the password of a URL, and the Basic authorization header made of it; an invalid URL wholly."""
        try:
            parts = urlsplit(url)
        except ValueError:
            self.secret(url)
            return
        if parts.password:
            self.secret(parts.password)
            credentials = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
            self.secret(b64encode(credentials.encode()).decode("ascii"))

    def clean(self, text: str) -> str:
        """The text with "<data>", "<secret>" and "<numbers>" in place of all that is hidden."""
        for secret in self._secrets:
            text = secret.sub(SECRET, text)
        for folder in self._folders:
            text = folder.sub(DATA, text)
        text = _QUOTED.sub(rf"\1{DATA}\1", text)
        text = _WORD.sub(self._word, text)
        return _COUNT.sub(NUMBERS, _NUMBERS.sub(NUMBERS, text))

    def _word(self, match: re.Match[str]) -> str:
        word = match[0].rstrip(".")
        is_data = word.rpartition("/")[2] in self._names or _IMAGE.search(word)
        return DATA + match[0][len(word) :] if is_data else match[0]


def _below(path: str) -> re.Pattern[str]:
    """Matches a path and what follows it; since names may have spaces, it may take more of the text than the path."""
    itself = rf"(?<![\w.-]){re.escape(path)}(?![\w-])(?!\.\w)"
    return re.compile(rf"""{itself}(?:/+(?:(?!; | \(|: |, )[^'"\n])*)?""")


def _files(root: Path) -> Iterable[str]:
    if root.is_file():
        yield root.name
    for _, _, files in os.walk(root):  # leaves out folders that cannot be read
        yield from files
