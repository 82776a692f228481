"""The limits of an image file, and the error for files that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

from protofed.common.errors import DataError

MOST_PIXELS = 100_000_000  # of one image as stored: a larger one is a decompression bomb, or a whole slide
MOST_FILE_BYTES = 1 << 30


class UnreadableImageError(DataError):
    """A file that is not an image that the run can use. Its text is the reason; it names neither file nor content."""


class UnreadableImagesError(DataError):
    """More unreadable files than `data.max_unreadable_fraction` allows; the text, which is logged, names none of them.

    Attributes:
        files: name and reason of each.
    """

    def __init__(self, message: str, files: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.files = files
