"""A site's pictures: what can be decoded at any time, also by another process, and what tells that one has changed."""

from __future__ import annotations

import hashlib
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from protofed.client.data.decoding import Pixels, decode_file
from protofed.client.data.file_entry import digest_content
from protofed.common.config.tables import Input

if TYPE_CHECKING:  # a process that decodes does without PyTorch
    from protofed.client.task import Target


class Facts(NamedTuple):
    """What a picture itself says beside its pixels. Of a file nothing: its name or a table says it.

    Attributes:
        label: as the source numbers classes, or another number, or a row of numbers.
        group: names its patient, or another group that stays together, without saying who it is.
    """

    label: Target | None = None
    group: str | None = None


class DecodedPicture(NamedTuple):
    """A picture's pixels as the run's input says, [channels, H, W] as of `decode`, and its facts."""

    pixels: Pixels
    facts: Facts = Facts()


class StoredPicture(Protocol):
    """A picture of a site, not decoded. Another process may get a copy of it."""

    @property
    def key(self) -> str:
        """Where the picture is, in hex: no name of a patient is in it."""

    @property
    def part(self) -> str:
        """Which part of what is there, as of `FileEntry`."""

    @property
    def serial(self) -> bool:
        """Whether pictures are to be read one at a time in a process, as foreign code may ask."""

    def stamp(self) -> str:
        """What changes with it; empty: it cannot be said, and the content is read each time."""

    def content(self) -> str:
        """A digest of its content; empty: it cannot be read, and `decode` says why."""

    def decode(self, input_: Input) -> DecodedPicture:
        """Read and decode it.

        Raises:
            UnreadableImageError: it cannot be used.
            DataError: something is missing that all of the source's pictures need.
        """


class FilePicture(NamedTuple):
    """A file, or the folder of a series; and which part of it, as of `FileEntry`."""

    path: Path
    part: str = ""

    @property
    def key(self) -> str:
        """As of `StoredPicture`."""
        return _key(self.path)

    @property
    def serial(self) -> bool:
        """As of `StoredPicture`."""
        return False

    def stamp(self) -> str:
        """Sizes and times of the file, or of the files of the folder."""
        return _stamp(self.path)

    def content(self) -> str:
        """As `digest_content`."""
        try:
            return digest_content(self.path)
        except OSError:
            return ""

    def decode(self, input_: Input) -> DecodedPicture:
        """As `decode_file`."""
        return DecodedPicture(decode_file(self.path, input_, self.part))


def digest_module(plugin: Any) -> str:
    """As `digest_content`, of the module that has a plug-in's function or class."""
    return digest_content(Path(str(import_module(plugin.__module__).__file__)))


def _key(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()


def _stamp(path: Path) -> str:
    try:
        if path.is_dir():
            inner = sorted(path.iterdir())
            return hashlib.blake2b("|".join(f"{_key(file)}{_stamp(file)}" for file in inner).encode()).hexdigest()
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}"
