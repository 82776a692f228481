"""TIFF files of any depth, meaning and order of bits, with the pixels that tifffile and NumPy read from them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tifffile
from numpy.typing import NDArray

WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
ByteOrder = Literal["<", ">"]
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def write(
    path: Path,
    pixels: NDArray[Any],
    bits: int,
    photometric: int,
    order: ByteOrder = "<",
    *,
    deflated: bool = False,
    fill_order: int = 1,
    planes: int = 1,
    sample_format: int = 1,
    tags: dict[int, tuple[int, ...]] | None = None,
) -> Path:
    """One strip of pixels [H, W] or [H, W, channels].

    Args:
        planes: 2: the channels are stored one after another.
        tags: further tags, of 16 bits each.
    """
    height, width = pixels.shape[:2]
    samples = pixels.shape[2] if pixels.ndim == 3 else 1
    layers = np.moveaxis(np.atleast_3d(pixels), 2, 0) if planes == 2 else [pixels.reshape(height, -1)]
    strips = [_packed(layer, bits, order) for layer in layers]
    strips = [zlib.compress(strip) if deflated else strip for strip in strips]
    strips = [strip.translate(_REVERSED) if fill_order == 2 else strip for strip in strips]
    places = (8, 8 + len(strips[0]), 8 + 2 * len(strips[0]))[: len(strips)]
    entries: dict[int, tuple[int, ...]] = {256: (width,), 257: (height,), 258: (bits,) * samples, 262: (photometric,)}
    entries |= {259: (8 if deflated else 1,), 266: (fill_order,), 273: places, 277: (samples,), 278: (height,)}
    entries |= {279: tuple(map(len, strips)), 284: (planes,), 339: (sample_format,) * samples, **(tags or {})}
    path.write_bytes(_file(b"".join(strips), entries, order))
    return path


def _packed(rows: NDArray[Any], bits: int, order: ByteOrder) -> bytes:
    """Whole bytes in the file's order; other depths packed, the highest bit first, each row to whole bytes."""
    if bits in (8, 16, 32, 64):
        return rows.astype(rows.dtype.newbyteorder(order)).tobytes()
    singles = (rows[..., None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)
    return np.packbits(singles.reshape(len(rows), -1), axis=1).tobytes()


def _file(content: bytes, entries: dict[int, tuple[int, ...]], order: ByteOrder) -> bytes:
    """Header, pixels, values that do not fit into their entry, directory."""
    content += bytes(len(content) % 2)  # libtiff expects words
    extra, directory = b"", b""
    for tag, values in sorted(entries.items()):
        kind, letter = (4, "I") if tag in (273, 279) else (3, "H")
        packed = struct.pack(f"{order}{len(values)}{letter}", *values)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", 8 + len(content) + len(extra))
            extra, packed = extra + packed, place
        directory += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    start = 8 + len(content) + len(extra)
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, start)
    return head + content + extra + struct.pack(f"{order}H", len(entries)) + directory + bytes(4)


def reference(path: Path) -> NDArray[np.float64]:
    """[H, W] or [H, W, 3] in 0..1 by tifffile; depths that it cannot unpack without its codecs, by NumPy."""
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        bits, photometric = page.bitspersample, page.photometric
        values = page.asarray() if bits in (8, 16, 32) and page.fillorder == 1 else _unpacked(page)
        if page.planarconfig == 2 and values.ndim == 3:
            values = np.moveaxis(values, 0, 2)
        if photometric == PALETTE:
            colours = np.asarray(page.colormap)  # [3, entries]
            return np.asarray(np.moveaxis(colours[:, values], 0, 2) / (65535 if colours.max() > 255 else 255))
        unit = values.astype(np.float64) / (1 if values.dtype.kind == "f" else (1 << bits) - 1)
        return 1 - unit if photometric == WHITE_IS_ZERO else unit


def _unpacked(page: Any) -> NDArray[np.int64]:
    content = page.parent.filehandle
    content.seek(page.dataoffsets[0])
    strip = content.read(page.databytecounts[0])
    strip = strip.translate(_REVERSED) if page.fillorder == 2 else strip
    strip = zlib.decompress(strip) if page.compression == 8 else strip
    height, width = page.shape
    if page.bitspersample == 16:
        return np.frombuffer(strip, f"{page.parent.byteorder}u2").reshape(height, width).astype(np.int64)
    rows = np.unpackbits(np.frombuffer(strip, np.uint8).reshape(height, -1), axis=1)[:, : width * page.bitspersample]
    weights = 1 << np.arange(page.bitspersample)[::-1]
    return np.asarray(rows.reshape(height, width, -1).astype(np.int64) @ weights)
