"""Orthanc, a PACS, with its plug-in DICOMweb: on a free port, in a temporary folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.free_ports import free_port
from tests.support.waiting import wait_for

PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
MISSING = shutil.which("Orthanc") is None or not PLUGIN.exists()


@contextmanager
def orthanc(folder: Path, **settings: Any) -> Iterator[str]:
    """The URL of its REST API; DICOMweb is below `/dicom-web`."""
    port = free_port()
    says = {"HttpPort": port, "DicomServerEnabled": False, "AuthenticationEnabled": False, "Plugins": [str(PLUGIN)]}
    says |= {"StorageDirectory": str(folder / "db"), "IndexDirectory": str(folder / "db"), **settings}
    (folder / "orthanc.json").write_text(json.dumps(says))
    with (
        (folder / "orthanc.log").open("w") as log,
        subprocess.Popen(["Orthanc", folder / "orthanc.json"], stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: _answers(url))
            yield url
        finally:
            process.terminate()


def upload(url: str, file: Path) -> None:
    """Give Orthanc a file."""
    request = urllib.request.Request(f"{url}/instances", file.read_bytes(), method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=30):  # noqa: S310
        pass


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/dicom-web/studies", timeout=5):  # noqa: S310
            return True
    except OSError:
        return False
