"""A PACS by DICOMweb on a port of loopback: it gives the DICOM files of a folder, and counts what it is asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pydicom
from tests.support.image_files import dicom, dicom_frames

Answer = tuple[int, str, bytes]  # status, content type, body


def instance(folder: Path, patient: int, series: int = 1, number: int = 1, value: int = 0, **more: Any) -> list[str]:
    """A file of 1 x 1 pixels, at the height `number` in the patient; the UIDs of study, series and instance."""
    uids = [f"1.2.826.{patient}", f"1.2.826.{patient}.{series}", f"1.2.826.{patient}.{series}.{number}"]
    pixels = np.array(more.pop("frames", [[[value]]]), np.uint8)
    write = dicom_frames if len(pixels) > 1 else lambda path, one, *rest, **tags: dicom(path, one[0], *rest, **tags)
    names = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
    place = {"ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "ImagePositionPatient": [0, 0, number]}
    write(folder / f"{uids[2]}.dcm", pixels, 8, **dict(zip(names, uids, strict=True)), **place, **more)
    saved = pydicom.dcmread(folder / f"{uids[2]}.dcm")
    saved.SOPClassUID = saved.file_meta.MediaStorageSOPClassUID
    saved.file_meta.MediaStorageSOPInstanceUID = saved.SOPInstanceUID
    saved.PatientID = f"P{patient}"
    saved.save_as(folder / f"{uids[2]}.dcm")
    return uids


def manifest(folder: Path, rows: Sequence[Sequence[str]], heading: str = "study,series,instance,label") -> Path:
    """A list of these rows."""
    (folder / "manifest.csv").write_text("\n".join([heading, *map(",".join, rows)]) + "\n")
    return folder / "manifest.csv"


class Pacs:
    """What it has, and what it was asked.

    Attributes:
        url: of the service.
        asked: the paths of all requests.
        tokens: the authorization of each request.
        answer: what it says to a path in place of the files; None: the files.
        headers: of each answer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, ""
        self.asked, self.tokens = list[str](), list[str | None]()
        self.answer: Callable[[str], Answer | None] = lambda _: None
        self.headers = dict[str, str]()

    def respond(self, path: str) -> Answer:
        """To a request for a path with its query."""
        if (said := self.answer(path)) is not None:
            return said
        parts = urlsplit(path)
        kinds = parts.path.removeprefix("/dicom-web/").split("/")
        uids = [pydicom.dcmread(file) for file in sorted(self.folder.glob(f"{kinds[3]}.*dcm"))]
        if kinds[-2] == "instances":
            found = [file for file in self.folder.glob("*.dcm") if file.stem == kinds[-1]]
            body = b"--x\r\nContent-Type: application/dicom\r\n\r\n" + found[0].read_bytes() if found else b""
            kind = 'multipart/related; type="application/dicom"; boundary=x'
            return (200, kind, body + b"\r\n--x--\r\n") if found else (404, "text/plain", b"")
        if kinds[-1] == "metadata":
            uids = [one for one in uids if "instances" not in kinds or one.SOPInstanceUID == kinds[5]]
            headers = [one.to_json_dict(bulk_data_element_handler=lambda _: "x") for one in uids]
            return (200 if headers else 404), "application/dicom+json", json.dumps(headers).encode()
        page = uids[int(parse_qs(parts.query)["offset"][0]) :][:2]  # pages of two
        found_uids = [{"00080018": {"vr": "UI", "Value": [one.SOPInstanceUID]}} for one in page]
        return 200, "application/dicom+json", json.dumps(found_uids).encode()


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[Pacs]:
    """A PACS that has the files of a folder."""
    pacs = Pacs(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            pacs.asked.append(self.path)
            pacs.tokens.append(self.headers.get("Authorization"))
            status, kind, body = pacs.respond(self.path)
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **pacs.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a client that does not trust it goes away

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        pacs.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}/dicom-web"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield pacs
        finally:
            server.shutdown()
            thread.join()
