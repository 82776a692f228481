"""The limits of an image file, and the error for files that cannot be used."""

from __future__ import annotations

from protofed.common.errors import DataError

MOST_PIXELS = 100_000_000  # of one image as stored: a larger one is a decompression bomb, or a whole slide
MOST_FILE_BYTES = 1 << 30


class UnreadableImageError(DataError):
    """A file that is not an image that the run can use. Its text is the reason; it names neither file nor content."""
