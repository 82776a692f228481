"""What is no image is unreadable, with a reason that names neither the file nor what is in it."""

from __future__ import annotations

import io
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image
from tests.support.image_files import RGB, ramp, save

from protofed.client.data import decoding
from protofed.client.data.decoding import decode
from protofed.client.data.file_entry import UnreadableImageError


def png(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    """The head of a PNG, and an end, with nothing between."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    rows = zlib.compress(b"\0" * (height * (1 + width * 3 * depth // 8))) if width < 100 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def frames(suffix: str) -> bytes:
    file = io.BytesIO()
    images = [Image.fromarray(ramp() + n) for n in (0, 90)]
    images[0].save(file, suffix, save_all=True, append_images=images[1:])
    return file.getvalue()


def cut_short() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()[:60]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"no image", "no known type"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known type"),
        (cut_short(), "truncated"),
        (png(20_000, 20_000), "at most 100,000,000"),
        (png(10_001, 10_000), "expected at most 100,000,000"),
        (png(4, 4, depth=16), "colours of more than 8 bits"),
        (frames("GIF"), "2 frames"),
        (frames("TIFF"), "2 frames"),
        (frames("PNG"), "2 frames"),
        (frames("WEBP"), "2 frames"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 40, "damaged"),
    ],
)
def test_what_is_no_image_is_refused_with_a_reason(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "of_a_patient.png").write_bytes(content)
    with pytest.raises(UnreadableImageError, match=said) as caught:
        decode(tmp_path / "of_a_patient.png", RGB)
    assert "patient" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_what_is_no_file_and_a_huge_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnreadableImageError, match="no such file"):
        decode(tmp_path / "none.png", RGB)
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", ""):
        with pytest.raises(UnreadableImageError, match="no regular file"):
            decode(tmp_path / name, RGB)
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 10)
    with pytest.raises(UnreadableImageError, match="larger than"):
        decode(save(tmp_path / "a.png"), RGB)


@given(noise=st.binary(max_size=200), at=st.integers(0, 80))
@hypothesis_settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_damage_is_either_an_image_or_unreadable(noise: bytes, at: int, tmp_path: Path) -> None:
    whole = bytearray(save(tmp_path / "a.png").read_bytes())
    whole[at : at + len(noise)] = noise
    (tmp_path / "a.png").write_bytes(whole)
    with suppress(UnreadableImageError):
        assert decode(tmp_path / "a.png", RGB).shape == (3, 4, 4)


def test_a_file_that_may_not_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_patient.png").write_bytes(png(4, 4))

    def denied(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UnreadableImageError, match=r"^permission denied$"):
        decode(tmp_path / "of_a_patient.png", RGB)
