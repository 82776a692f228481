"""Images of a PACS by DICOMweb (PS3.18): a manifest has UIDs, QIDO-RS and WADO-RS give the rest, by dicomweb-client.

An image is fetched where it is decoded, and held in memory alone: files on a disk would have patients' names. No error
names the PACS or a UID, because errors reach logs, and some the server.

Of a series the headers are asked once (metadata). Then the run's rule says which of its instances are fetched, one by
one.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from protofed.client.data import dicom
from protofed.client.data.decoding import fit_to_input
from protofed.client.data.file_entry import DIGEST_BYTES, MAX_FILE_BYTES, PacsImage, UnreadableImageError
from protofed.client.data.grey_values import GreyWindow
from protofed.client.data.pictures import DecodedPicture
from protofed.client.data.series import SERIES_TAGS, slice_order
from protofed.client.data.volumes import Volume, gives_several, name_parts, parse_part, read_frame
from protofed.common.config.data import DicomWeb
from protofed.common.config.tables import Frames, Input
from protofed.common.errors import DataError
from protofed.common.version import install_hint

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image
    from pydicom import Dataset

T = TypeVar("T")
ATTEMPTS, PAUSE_S = 4, 1.0  # to ask; the pauses between them are 2, 4 and 8 times as long
TIMEOUT_S = (10, 60)  # to connect, and between two parts of an answer: a PACS may fetch old images from a tape
_DENIED = (401, 403, 407)
_BUSY = (408, 429, 502, 503, 504)
_NOTHING = (404, 410)
_TOO_LARGE = 413
_PART_BYTES = 1 << 20  # of an answer


class PacsPicture(NamedTuple):
    """A `StoredPicture` of a PACS: an instance or a series, and which part of it, as of `FileEntry`."""

    image: PacsImage
    part: str = ""

    @property
    def key(self) -> str:
        """As of `StoredPicture`."""
        return _digest(self.image.pacs.url, *self.image[1:])

    @property
    def serial(self) -> bool:
        """As of `StoredPicture`."""
        return False

    def stamp(self) -> str:
        """Its content: an instance never changes, and of a series all instances are asked for."""
        return self.content()

    def content(self) -> str:
        """A digest of the UIDs of the instance, or of all instances of the series."""
        if self.image.instance:
            return _digest(self.image.instance)
        try:
            return _digest(*sorted(_instances(self.image)))
        except UnreadableImageError:
            return ""

    def decode(self, input_: Input) -> DecodedPicture:
        """Fetch and decode it."""
        return DecodedPicture(fit_to_input(open_image(self.image, input_.window, input_.frames, self.part), input_))


def open_image(image: PacsImage, window: GreyWindow | None, frames: Frames, part: str = "") -> Image:
    """As `decoding.open_image`, of an image of a PACS.

    Raises:
        UnreadableImageError: the PACS does not have it, or it cannot be used.
        DataError: the PACS does not answer or lets nobody in, or dicomweb-client is not installed.
    """
    number = parse_part(part)
    if number is not None and not isinstance(number, int):
        raise UnreadableImageError("a tile of a DICOM image; expected the whole image, or a frame")
    with _reasons():
        return read_frame(_opened(image, window), frames, number, window)


def forget_headers() -> None:
    """Ask for the headers of series anew: a daemon's next run shall see new slices."""
    _headers.cache_clear()


def list_parts(image: PacsImage, frames: Frames) -> Sequence[str]:
    """As `decoding.list_parts`, of an image of a PACS."""
    if gives_several(frames):
        try:
            with _reasons():
                headers = _headers(image)
                return name_parts(dicom.frame_count(headers[0]) if len(headers) == 1 else len(headers), frames)
        except UnreadableImageError:  # who decodes it learns the reason
            pass
    return name_parts(1, frames)


def _opened(image: PacsImage, window: GreyWindow | None) -> Volume:
    if image.instance:
        return dicom.open_dataset(_fetch(image), window)
    headers = _headers(image)
    order = slice_order(headers) if len(headers) > 1 else [0]
    slices = [image._replace(instance=str(headers[place].SOPInstanceUID)) for place in order]
    return _PacsSlices(slices, window) if len(slices) > 1 else _opened(slices[0], window)


@dataclass(frozen=True)
class _PacsSlices:
    """The slices of a series, in their order; each is an instance of one frame."""

    images: Sequence[PacsImage]
    window: GreyWindow | None

    @property
    def count(self) -> int:
        return len(self.images)

    @property
    def several(self) -> str:
        return f"a series of {self.count} DICOM instances; expected one image a row"

    def read(self, index: int) -> Image:
        return open_image(self.images[index], self.window, "one")


# What is asked of the PACS.


def _instances(image: PacsImage) -> frozenset[str]:
    """The UIDs of a series' instances. Some servers give a page at a time, and some give the same page for ever."""
    uids = set[str]()
    while True:
        search = partial(_client(image.pacs).search_for_instances, image.study, image.series, offset=len(uids))
        with _reasons():
            page = {str(found["00080018"]["Value"][0]) for found in _ask(search)}
        if page <= uids:
            break
        uids |= page
    if not uids:
        raise UnreadableImageError(_MISSING)
    return frozenset(uids)


@lru_cache(maxsize=64)  # where each slice is an example, the headers of all would be asked for each
def _headers(image: PacsImage) -> Sequence[Dataset]:
    """What orders the instances of a series, or counts the frames of an instance."""
    client, uids = _client(image.pacs), image[1:]
    if image.instance:
        found = _ask(partial(client.retrieve_instance_metadata, *uids))
        return [_header(found[0] if isinstance(found, list) else found)]
    if not (metadata := _ask(partial(client.retrieve_series_metadata, *uids[:2]))):
        raise UnreadableImageError(_MISSING)
    headers = [_header(one) for one in metadata]
    if any(header.get("SeriesInstanceUID", image.series) != image.series for header in headers):
        raise UnreadableImageError(_ANOTHER)
    return headers


def _header(metadata: dict[str, Any]) -> Dataset:
    from pydicom import Dataset
    from pydicom.datadict import tag_for_keyword

    tags = {f"{tag_for_keyword(name):08X}" for name in ("SOPInstanceUID", *SERIES_TAGS, *dicom.FRAME_TAGS)}
    return Dataset.from_json({tag: element for tag, element in metadata.items() if tag in tags})


def _fetch(image: PacsImage) -> Dataset:
    """An instance. Each thread has its last one: where each frame is an example, it would be fetched for each."""
    if getattr(_thread, "image", None) != image:
        _thread.image = _thread.dataset = None
        fetched = _ask(partial(_client(image.pacs).retrieve_instance, *image[1:]))
        if fetched.get("SOPInstanceUID") != image.instance:  # the row's label may be wrong for it
            raise UnreadableImageError(_ANOTHER)
        _thread.image, _thread.dataset = image, fetched
    dataset: Dataset = _thread.dataset
    return dataset


# The connection, and what its errors mean.

_thread = threading.local()  # a `requests.Session` is of one thread
_MISSING = "the PACS does not have it; check its UIDs, and data.dicomweb.url"
_ANOTHER = "the PACS gives another image than it was asked for; check its UIDs"
_STRANGE = "the PACS answers with no DICOM, or with DICOM that is truncated or damaged"


def _ask(request: Callable[[], T]) -> T:
    """The answer of the PACS.

    Raises:
        UnreadableImageError: the PACS does not have the image.
        DataError: it does not answer, or lets nobody in.
    """
    import requests

    problem = ""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * 2**attempt if attempt else 0)
        try:
            return request()
        except requests.exceptions.SSLError:
            raise DataError(
                "no TLS connection to the PACS: one side does not accept the other's certificate. Check "
                "data.dicomweb.ca_file, and certificate and key if the PACS asks for them"
            ) from None
        except requests.TooManyRedirects:
            raise DataError(
                "the PACS sends this site to another address, as to a page to log in, and protofed does not follow. "
                "Check data.dicomweb.url, and token_file, or certificate and key"
            ) from None
        except requests.HTTPError as error:
            status = 0 if error.response is None else error.response.status_code
            if status not in _BUSY:
                raise _refusal(status) from None
            problem = f"answers with HTTP {status}"
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
            problem = "does not answer"
    raise DataError(
        f"the PACS {problem}, after {ATTEMPTS} attempts. Check data.dicomweb.url, the network and the PACS; images "
        "that were decoded onto the disk are kept"
    )


def _refusal(status: int) -> DataError:
    if status in _DENIED:
        return DataError(
            f"the PACS lets this site not in (HTTP {status}). Check data.dicomweb.token_file, or certificate and key, "
            "and ask the PACS's administrator which images the site may read"
        )
    if status == _TOO_LARGE:
        return UnreadableImageError(f"the PACS's answer is larger than {MAX_FILE_BYTES >> 30} GiB")
    return UnreadableImageError(_MISSING if status in _NOTHING else f"the PACS answers with HTTP {status}")


@contextmanager
def _reasons() -> Iterator[None]:
    """Libraries raise anything on strange answers, and their texts may quote the content: instead say what is wrong."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception:
        raise UnreadableImageError(_STRANGE) from None


def _client(pacs: DicomWeb) -> Any:
    """This thread's client of a PACS."""
    clients = _thread.__dict__.setdefault("clients", {})
    if pacs not in clients:
        clients[pacs] = _connected(pacs)
    return clients[pacs]


def _connected(pacs: DicomWeb) -> Any:
    try:
        import requests
        from dicomweb_client.api import DICOMwebClient
    except ModuleNotFoundError as error:
        raise DataError(
            f"source dicomweb needs dicomweb-client, which is not installed: {install_hint('dicom')}"
        ) from error
    for library in ("dicomweb_client", "pydicom", "urllib3"):  # they log UIDs, and the content of elements
        logging.getLogger(library).setLevel(logging.CRITICAL)
    for key in ("ca_file", "certificate", "key"):
        _read(getattr(pacs, key), key)
    session = requests.Session()
    session.max_redirects = 0  # another host's image is not the PACS's, and a page to log in is no image
    session.trust_env = False  # no proxy, no CAs and no .netrc of the environment: the settings say who gets what
    session.headers["Accept-Encoding"] = "identity"  # to compress costs a PACS more than to send, within a hospital
    session.verify = True if pacs.ca_file is None else str(pacs.ca_file)
    session.cert = None if pacs.certificate is None else (str(pacs.certificate), str(pacs.key))
    if pacs.token_file is not None:
        session.auth = partial(_authorised, file=pacs.token_file)
    session.hooks["response"].append(_read_answer)
    client = DICOMwebClient(pacs.url, session, permissive_uid=True, timeout=TIMEOUT_S)
    client.set_http_retry_params(retry=False)  # it would repeat what cannot succeed, as a wrong certificate
    return client


def _read_answer(response: Any, **_: Any) -> None:
    """Read an answer into memory as `requests` would, which has no limit; one that is too large becomes HTTP 413."""
    parts, nbytes = list[bytes](), 0
    for part in response.iter_content(_PART_BYTES):
        parts.append(part)
        nbytes += len(part)
        if nbytes > MAX_FILE_BYTES:
            response.close()
            parts, response.status_code = [], _TOO_LARGE
            break
    response._content = b"".join(parts)


def _authorised(request: Any, file: Path) -> Any:
    token = _read(file, "token_file").strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise DataError("data.dicomweb.token_file: expected a file with one token in it, and nothing else")
    request.headers["Authorization"] = f"Bearer {token}"
    return request


def _read(file: Path | None, key: str) -> str:
    try:
        return "" if file is None else file.read_text(encoding="latin-1")
    except OSError as error:
        raise DataError(f"data.dicomweb.{key} cannot be read: {error.strerror}") from error


def _digest(*texts: str) -> str:
    return hashlib.blake2b("|".join(texts).encode(), digest_size=DIGEST_BYTES).hexdigest()
