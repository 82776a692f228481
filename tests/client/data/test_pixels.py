"""Every kind of pixels is as an independent decoder reads them, or is refused by name and with what to do."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless
from tests.support import dicom_reference, tiff_files
from tests.support.image_files import dicom, save
from tests.support.tiff_files import BLACK_IS_ZERO, CMYK, LAB, PALETTE, RGB, WHITE_IS_ZERO, YCBCR

from protofed.client.data.decoding import open_image
from protofed.client.data.file_entry import UnreadableImageError

Reference = Callable[[Path], NDArray[np.float64]]
UNREAD = "of a kind that Pillow does not read. Save it as PNG"
HALF_STEP = 0.51 / 255  # 16 bits of colour become 8
DEEP_COLOURS = "colours of more than 8 bits; expected"
RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A file, and what it is compared with, or (a text) why it is refused."""

    name: str
    make: Callable[[Path], Path]
    expected: Reference | str
    tolerance: float = 1e-6


def by_opencv(path: Path) -> NDArray[np.float64]:
    """[H, W] or [H, W, 3] in 0..1."""
    values = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert values is not None
    unit = np.asarray(values / (255 if values.dtype == np.uint8 else 65535))
    return unit if unit.ndim == 2 else unit[..., 2::-1]


def values(bits: int, *shape: int) -> NDArray[Any]:
    """Random pixels with the smallest and the largest value among them."""
    dtype = np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32
    drawn = RANDOM.integers(0, 1 << bits, shape or (5, 7), dtype)
    drawn.flat[:2] = (0, (1 << bits) - 1)
    return drawn


def tiff(
    name: str, expected: Reference | str, pixels: NDArray[Any], *rest: Any, tolerance: float = 1e-6, **more: Any
) -> Case:
    return Case(f"tiff-{name}", lambda path: tiff_files.write(path, pixels, *rest, **more), expected, tolerance)


def grey_tiffs() -> list[Case]:
    """Photometric interpretation x depth x byte order x compression x order of bits."""
    cases = []
    for kind, bits, order, deflated, fill in product(
        (WHITE_IS_ZERO, BLACK_IS_ZERO), (1, 2, 4, 8, 12, 16), "<>", (False, True), (1, 2)
    ):
        name = (
            f"{'black' if kind else 'white'}-is-zero-{bits}{order}{'-deflated' * deflated}{'-reversed' * (fill == 2)}"
        )
        unread = (
            (bits == 12 and (kind, order, fill) != (BLACK_IS_ZERO, "<", 1))
            or (bits == 16 and (kind, order, fill) in {(0, ">", 1), (0, "<", 2), (0, ">", 2), (1, ">", 2)})
            or ((bits, kind, fill, deflated) == (8, WHITE_IS_ZERO, 2, False))
        )
        expected = UNREAD if unread else tiff_files.reference
        cases.append(tiff(name, expected, values(bits), bits, kind, order, deflated=deflated, fill_order=fill))
    return cases


def other_tiffs() -> list[Case]:
    """Numbers with a sign or of 32 bits, colours, palettes, planes apart."""
    by_tifffile, deep = tiff_files.reference, RANDOM.random((5, 7), np.float32)
    colours, wide = values(8, 5, 7, 3), values(16, 5, 7, 3)
    two_by_two, whole = {530: (2, 2)}, {530: (1, 1)}
    map_ = {320: tuple(values(16, 768).tolist())}
    small = {320: tuple(values(8, 768).tolist())}
    return [
        *(tiff(f"float{order}", by_tifffile, deep, 32, BLACK_IS_ZERO, order, sample_format=3) for order in "<>"),
        tiff("float-white-is-zero", "0 is white; expected 0 to be black", deep, 32, WHITE_IS_ZERO, sample_format=3),
        tiff("float-of-64", UNREAD, deep.astype(float), 64, BLACK_IS_ZERO, sample_format=3),
        tiff("signed-8", "8 bits with a sign; expected", values(8).view(np.int8), 8, BLACK_IS_ZERO, sample_format=2),
        tiff("signed-16", r"need input\.window", values(15).astype(np.int16), 16, BLACK_IS_ZERO, sample_format=2),
        tiff("unsigned-32", r"need input\.window", values(15).astype(np.uint32), 32, BLACK_IS_ZERO),
        *(tiff(f"rgb-8{o}{p}", by_tifffile, colours, 8, RGB, o, planes=p) for o, p in product("<>", (1, 2))),
        *(tiff(f"rgb-8{o}-deflated", by_tifffile, colours, 8, RGB, o, deflated=True) for o in "<>"),
        *(tiff(f"rgb-16{o}{p}", DEEP_COLOURS, wide, 16, RGB, o, planes=p) for o in "<>" for p in (1, 2)),
        tiff("planes-of-reversed-bits", "planes are stored apart; expected", colours, 8, RGB, planes=2, fill_order=2),
        tiff("one-inverted-plane", "planes are stored apart; expected", values(8), 8, WHITE_IS_ZERO, planes=2),
        tiff("one-plane-of-16", "planes are stored apart; expected", values(16), 16, BLACK_IS_ZERO, planes=2),
        *(tiff(f"palette{o}", by_tifffile, values(8), 8, PALETTE, o, tags=map_, tolerance=HALF_STEP * 2) for o in "<>"),
        tiff("palette-of-8-bits-in-16", by_tifffile, values(8), 8, PALETTE, tags=small),
        tiff("ycbcr-subsampled", "subsampling; expected", colours, 8, YCBCR, tags=two_by_two),
        tiff("ycbcr-subsampled-by-default", "subsampling; expected", colours, 8, YCBCR),
        tiff("ycbcr", lambda _: ycbcr_to_rgb(colours), colours, 8, YCBCR, tags=whole, tolerance=HALF_STEP * 4),
        *(
            tiff(f"rotated-{bits}", rotated, values(bits), bits, kind, tags={274: (6,)})
            for bits, kind in product((8, 16), (WHITE_IS_ZERO, BLACK_IS_ZERO))
        ),
        *(
            tiff(f"deflated-big-endian-{bits}-{sign}", "expected little endian", pixels, bits, 1, ">", **more)
            for sign, bits, pixels in (
                (3, 32, deep),
                (2, 16, values(15).astype(np.int16)),
                (2, 32, values(15).astype(np.int32)),
            )
            for more in ({"deflated": True, "sample_format": sign},)
        ),
        tiff("volume", "a volume; expected one image", values(8), 8, BLACK_IS_ZERO, tags={32997: (3,)}),
        tiff("cmyk", "as CMYK; expected", values(8, 5, 7, 4), 8, CMYK),
        tiff("lab", "as LAB; expected", colours, 8, LAB),
    ]


def rotated(path: Path) -> NDArray[np.float64]:
    """What tifffile reads, a quarter turn clockwise: orientation 6."""
    return np.rot90(tiff_files.reference(path), -1)


def ycbcr_to_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """As OpenCV converts them; its order is Y, Cr, Cb."""
    return cv2.cvtColor(pixels[..., [0, 2, 1]], cv2.COLOR_YCrCb2RGB) / 255


def raster(name: str, suffix: str, pixels: NDArray[Any], tolerance: float = 1e-6, **more: Any) -> Case:
    """A file that Pillow writes and OpenCV reads."""

    def make(path: Path) -> Path:
        return save(path.with_suffix(suffix), pixels, **more)

    return Case(f"{name}{suffix}", make, by_opencv, tolerance)


def rasters() -> list[Case]:
    """PNG, BMP, WebP, JPEG, JPEG 2000: grey of 8 and 16 bits and colours."""
    grey, deep, colours = values(8), values(16), values(8, 5, 7, 3)
    smooth = np.add.outer(np.arange(16), np.arange(24)).astype(np.uint8) * 6  # decoders of JPEG round differently
    return [
        *(raster("grey", suffix, grey) for suffix in (".png", ".bmp", ".jp2")),
        *(raster("rgb", suffix, colours) for suffix in (".png", ".bmp", ".jp2")),
        *(raster("deep", suffix, deep) for suffix in (".png", ".jp2")),
        raster("lossless", ".webp", colours, lossless=True),
        raster("grey", ".jpg", smooth, HALF_STEP * 4),
        raster("rgb", ".jpg", np.dstack((smooth, smooth[::-1], smooth[:, ::-1])), HALF_STEP * 6),
        Case("png-rgb-16", lambda path: opencv(path, values(16, 64, 64, 3), ".png"), DEEP_COLOURS),
        Case("jp2-rgb-16", lambda path: opencv(path, values(16, 64, 64, 3), ".jp2"), DEEP_COLOURS),
        *(
            Case(f"png-transparent-grey-{bits}", partial(transparent_png, bits=bits), "expected an opaque image")
            for bits in (1, 2, 4, 8, 16)
        ),
        Case("bmp-of-5-6-5-bits", bmp_565, by_opencv, 8.5 / 255),
        Case("jp2-12", lambda path: jpeg_2000(path, 12), lambda _: JPEG_2000_OF_12 / 4095),
        Case("jp2-4", lambda path: jpeg_2000(path, 4), "less than 8 or more than 16 bits; expected"),
    ]


def transparent_png(path: Path, bits: int) -> Path:
    """A ramp of grey of which the brightest is transparent; Pillow writes none of less than 8 bits."""
    row = np.arange(8, dtype=np.uint16) & (1 << bits) - 1
    row[-1] = (1 << bits) - 1
    packed = np.packbits((row[:, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)).tobytes()
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0), b"tRNS": struct.pack(">H", row[-1])}
    chunks |= {b"IDAT": zlib.compress(b"\0" + packed), b"IEND": b""}
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks.items()
        )
    )
    return path


def bmp_565(path: Path) -> Path:
    pixels = values(16, 6, 8).astype("<u2").tobytes()
    head = struct.pack("<IiiHHIIiiII", 40, 8, 6, 1, 16, 3, len(pixels), 0, 0, 0, 0)
    masks = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 66 + len(pixels), 0, 0, 66) + head + masks + pixels)
    return path


def opencv(path: Path, pixels: NDArray[Any], suffix: str) -> Path:
    assert cv2.imwrite(str(path.with_suffix(suffix)), pixels)
    return path.with_suffix(suffix)


JPEG_2000_OF_12 = values(12)


def jpeg_2000(path: Path, bits: int) -> Path:
    """Lossless, of 12 or 4 bits: no encoder here writes these, so one of 16 or 8 bits and another number of them.

    A decoder adds half of the range to what it decodes, so the values are moved by the difference first.
    """
    written = 8 if bits < 8 else 16
    pixels = JPEG_2000_OF_12 >> 12 - bits
    moved = (pixels + (1 << written - 1) - (1 << bits - 1)).astype(np.uint8 if written == 8 else np.uint16)
    content = bytearray(save(path.with_suffix(".j2k"), moved).read_bytes())
    place = content.index(b"\xff\x4f\xff\x51") + 42
    assert content[place] == written - 1
    content[place] = bits - 1
    path.with_suffix(".j2k").write_bytes(content)
    return path.with_suffix(".j2k")


def lut(first: int, bits: int, entries: Sequence[int]) -> Dataset:
    """An item of a modality or VOI LUT sequence."""
    table = Dataset()
    table.LUTDescriptor = [len(entries), first, bits]
    table.LUTData = list(entries)
    table["LUTDescriptor"].VR = "US" if first >= 0 else "SS"
    table["LUTData"].VR = "US"
    return table


def palette(bits: int, *, cells: int, dark: bool = False, **more: Any) -> dict[str, Any]:
    """Elements of a palette of 256 entries of `bits`, each in `cells` bits; `dark`: of values below 256."""
    tables: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR", **more}
    for colour in ("Red", "Green", "Blue"):
        entries = values(8 if dark else bits, 256).astype(f"<u{cells // 8}")
        tables[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, bits]
        tables[f"{colour}PaletteColorLookupTableData"] = entries.tobytes()
    return tables


def dicoms() -> list[Case]:
    """Interpretation x depth x sign x syntax, the tables, and what is refused."""
    by_pydicom = dicom_reference.reference

    def case(
        name: str, expected: Reference | str, pixels: NDArray[Any], *rest: Any, by: float = 1e-6, **more: Any
    ) -> Case:
        return Case(f"dicom-{name}", lambda path: dicom(path, pixels, *rest, **more), expected, by)

    depths = ["uint8 6", "uint8 8", "int8 8", "uint16 10", "uint16 12", "int16 12", "uint16 16", "int16 16"]
    syntaxes = (ImplicitVRLittleEndian, ExplicitVRLittleEndian, RLELossless)
    grey = [
        case(f"{kind}-{depth}-{syntax.keyword}", by_pydicom, pixels, bits, syntax, PhotometricInterpretation=kind)
        for kind, depth, syntax in [
            *product(("MONOCHROME1", "MONOCHROME2"), depths, syntaxes),
            *product(("MONOCHROME1", "MONOCHROME2"), ("uint32 32", "int32 32"), syntaxes[:2]),
        ]
        for bits in [int(depth.split()[1])]
        for pixels in [signed(values(bits), bits, depth.split()[0])]
    ]
    deep, small, rgb = values(12), values(8), values(8, 6, 8, 3)
    squares = [value**2 % 65536 for value in range(4096)]
    highest = (deep.astype(np.int32) * 16 - 32768).astype(np.int16)
    ybr_422: dict[str, Any] = {"PhotometricInterpretation": "YBR_FULL_422", "SamplesPerPixel": 3}
    falling = list(range(4095, -1, -1))
    return [
        *grey,
        case("rescaled", by_pydicom, deep, 12, RescaleSlope=-2.5, RescaleIntercept=30),
        case("empty-rescale", lambda _: deep / 4095, deep, 12, RescaleSlope=None, RescaleIntercept=None),
        *(
            case(f"only-{name}", "only one of a rescale slope and intercept; expected both", deep, 12, **{name: 2})
            for name in ("RescaleSlope", "RescaleIntercept")
        ),
        case("modality-lut", by_pydicom, deep, 12, ModalityLUTSequence=[lut(0, 16, squares)]),
        case("modality-lut-12", "other than 8 or 16 bits", deep, 12, ModalityLUTSequence=[lut(0, 12, falling)]),
        case("voi-lut", by_pydicom, deep, 12, VOILUTSequence=[lut(0, 12, falling)]),
        case("voi-lut-of-8-bits", lambda _: deep.clip(0, 255) / 255, deep, 12, VOILUTSequence=[lut(0, 8, range(256))]),
        case("voi-lut-of-9-bits", "other than 8 or 10 to 16 bits", deep, 12, VOILUTSequence=[lut(0, 9, [0, 511])]),
        case("empty-voi-lut", by_pydicom, deep, 12, VOILUTSequence=[], WindowCenter=2000, WindowWidth=999),
        case(
            "voi-lut-without-data", by_pydicom, deep, 12, VOILUTSequence=[Dataset()], WindowCenter=2000, WindowWidth=9
        ),
        case("high-bit-15", lambda _: deep / 4095, deep << 4, 12, HighBit=15),
        case("high-bit-13", lambda _: deep / 4095, (deep << 2) | 0xC003, 12, HighBit=13),
        case("high-bit-15-signed", lambda _: deep / 4095, highest, 12, HighBit=15),
        case("high-bit-9", "HighBit does not match its BitsStored; expected", deep, 12, HighBit=9),
        *(case(f"rgb-8-{s.keyword}", by_pydicom, rgb, 8, s) for s in (ImplicitVRLittleEndian, RLELossless)),
        case(
            "rgb-8-planes",
            by_pydicom,
            np.moveaxis(rgb, 2, 0),
            8,
            PhotometricInterpretation="RGB",
            SamplesPerPixel=3,
            PlanarConfiguration=1,
            Rows=6,
            Columns=8,
        ),
        case("rgb-16", "RGB with 16 bits a colour; expected 8", values(16, 6, 8, 3)),
        case("rgb-5", "RGB with 5 bits a colour; expected 8", values(5, 6, 8, 3), 5),
        case("ybr-full", by_pydicom, rgb, 8, PhotometricInterpretation="YBR_FULL"),
        case("ybr-full-422", by_pydicom, values(8, 6, 16), 8, PlanarConfiguration=0, Columns=8, **ybr_422),
        *(
            case(f"colours-{kind}", "colours other than RGB", rgb, 8, PhotometricInterpretation=kind)
            for kind in ("YBR_ICT", "YBR_RCT", "YBR_PARTIAL_422", "YBR_PARTIAL_420", "HSV", "ARGB", "CMYK")
        ),
        case("palette-16", by_pydicom, small, 8, by=HALF_STEP * 2, **palette(16, cells=16)),
        case("palette-8", by_pydicom, small, 8, **palette(8, cells=8)),
        case("palette-8-in-16", by_pydicom, small, 8, **palette(8, cells=16)),
        case("palette-16-below-256", by_pydicom, small, 8, **palette(16, cells=16, dark=True)),
        case("palette-8-of-deep-pixels", by_pydicom, small.astype(np.uint16), 12, **palette(8, cells=8)),
    ]


def signed(pixels: NDArray[Any], bits: int, dtype: str) -> NDArray[Any]:
    """The same values from the smallest that `dtype` can hold in so many bits."""
    return (pixels.astype(np.int64) - (1 << bits - 1) * (dtype[0] == "i")).astype(dtype)


CASES = [*grey_tiffs(), *other_tiffs(), *rasters(), *dicoms()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pixels_are_those_of_an_independent_decoder_or_the_file_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    path = case.make(tmp_path / "file")
    if isinstance(case.expected, str):
        with pytest.raises(UnreadableImageError, match=case.expected):
            open_image(path, None)
        return
    image = open_image(path, None)
    got = np.asarray(image) / (1 if image.mode == "F" else 255)
    np.testing.assert_allclose(got, case.expected(path), atol=case.tolerance)
