"""What no line of a log may show: names of data files, passwords, tokens, keys, and numbers by the list."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

DATA, SECRET, NUMBERS = "<data>", "<secret>", "<numbers>"
MOST_NAMES = 20_000  # of files below one root that are known by name; others still by their suffix or folder
SHORTEST_NAME = 5  # of one without a suffix: shorter ones are words
SHORTEST_SECRET = 6  # one that is shorter is looked for as a word only
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
    """What a process hides; threads share it."""

    def __init__(self) -> None:
        self._folders: tuple[re.Pattern[str], ...] = ()
        self._secrets: tuple[re.Pattern[str], ...] = _ALWAYS
        self._names: frozenset[str] = frozenset()

    def folder(self, root: Path) -> None:
        """Hide a file or folder of data, all that lies below it, and the names of its files wherever they stand."""
        said, there = str(root), os.path.abspath(root)
        ways = {there, os.path.realpath(root)} | ({said} if "/" in said or root.suffix else set())
        ways |= {quote(way) for way in ways}
        self._folders += tuple(_below(way) for way in sorted(ways - {"/"}, key=len, reverse=True))
        names = set(islice(_files(root), MOST_NAMES))
        spaced = {name for name in names if not _WORD.fullmatch(name)}
        self._folders += tuple(re.compile(re.escape(name)) for name in spaced)
        self._names |= {name for name in names - spaced if "." in name.strip(".") or len(name) >= SHORTEST_NAME}

    def secret(self, text: str) -> None:
        """Hide these characters, also as they stand in a URL or an HTTP header."""
        for one in {text, quote(text, safe=""), unquote(text)} - {""}:
            found = re.escape(one) if len(one) >= SHORTEST_SECRET else rf"(?<!\w){re.escape(one)}(?!\w)"
            self._secrets += (re.compile(found),)

    def url(self, url: str) -> None:
        """Hide the password of a URL, and the header that is made of it."""
        try:
            parts = urlsplit(url)
        except ValueError:
            self.secret(url)
            return
        if parts.password:
            self.secret(parts.password)
            said = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
            self.secret(b64encode(said.encode()).decode("ascii"))

    def clean(self, text: str) -> str:
        """The text without any of it."""
        for secret in self._secrets:
            text = secret.sub(SECRET, text)
        for folder in self._folders:
            text = folder.sub(DATA, text)
        text = _QUOTED.sub(rf"\1{DATA}\1", text)
        text = _WORD.sub(self._word, text)
        return _COUNT.sub(NUMBERS, _NUMBERS.sub(NUMBERS, text))

    def _word(self, found: re.Match[str]) -> str:
        word = found[0].rstrip(".")
        named = word.rpartition("/")[2] in self._names or _IMAGE.search(word)
        return DATA + found[0][len(word) :] if named else found[0]


def _below(way: str) -> re.Pattern[str]:
    """A path as it stands in a text, with what follows it; names may have spaces, so that more may go than the path."""
    here = rf"(?<![\w.-]){re.escape(way)}(?![\w-])(?!\.\w)"
    return re.compile(rf"""{here}(?:/+(?:(?!; | \(|: |, )[^'"\n])*)?""")


def _files(root: Path) -> Iterable[str]:
    if root.is_file():
        yield root.name
    for _, _, files in os.walk(root):  # of what cannot be read there is nothing
        yield from files
