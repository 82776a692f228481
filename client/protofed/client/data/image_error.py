"""What one image file may be, and the error of one that is not."""

from __future__ import annotations

from protofed.common.errors import DataError

MOST_PIXELS = 100_000_000  # of one image, in its file: beyond it is a decompression bomb, or a whole slide
MOST_FILE_BYTES = 1 << 30


class UnreadableImageError(DataError):
    """A file that is no image that the run can use; its text is the reason, and names neither file nor content."""
