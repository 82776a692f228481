"""A site whose images are in a real PACS, Orthanc: `protofed client check`, and what a daemon would train on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support import orthanc
from tests.support.image_files import input_, settings
from tests.support.pacs import instance, manifest

from protofed.client.data.reading import Reading
from protofed.client.data.site import load_site
from protofed.common.config.data import Data
from protofed.common.config.settings import Cache
from protofed.common.errors import DataError
from protofed.deploy.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(orthanc.MISSING, reason="apt-get install orthanc orthanc-dicomweb"),
]
NAMES = ("mel", "nv")
RECIPE = """\
name = "skin"
rounds = 1
classes = 2
class_names = ["mel", "nv"]
input = { shape = [1, 1, 1], frames = "all" }
method = { name = "fednh" }
model = { name = "mlp" }
"""


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Data]:
    """Twelve patients of each class: a series of three slices, an image, and one with a file of two frames."""
    (tmp_path / "files").mkdir()
    rows = list[list[str]]()
    for patient in range(10, 34):
        for number in (1, 2, 3):
            uids = instance(tmp_path / "files", patient, number=number, value=patient + 40 * number)
        split = "test" if patient % 2 else "train"
        label = NAMES[patient // 22]
        rows.append([*uids[:2], "", label, split])
        rows.append([*instance(tmp_path / "files", patient, series=2, value=patient), label, split])
    rows.append([*instance(tmp_path / "files", 34, frames=[[[240]], [[250]]]), "nv", "train"])
    with orthanc.orthanc(tmp_path) as url:
        for file in (tmp_path / "files").iterdir():
            orthanc.upload(url, file)
        shutil.rmtree(tmp_path / "files")
        table = {"url": f"{url}/dicom-web"}
        yield settings("dicomweb", manifest(tmp_path, rows, "study,series,instance,label,split"), dicomweb=table)


@pytest.mark.parametrize("memory_mb", [0, 100])
def test_slices_frames_and_images_are_what_was_uploaded(memory_mb: int, data: Data, tmp_path: Path) -> None:
    reading = Reading(Cache(folder=tmp_path / "cache", memory_mb=memory_mb, processes=2))
    site = load_site(data, 0, input_((1, 1, 1), frames="all"), 2, NAMES, reading)
    trained = [patient + 40 * number for patient in range(10, 34, 2) for number in (1, 2, 3)]
    trained += [*range(10, 34, 2), 240, 250]
    assert sorted(_levels(site.train.images, site.train.rows)) == sorted(trained)
    assert len(site.test) == 48
    middle = load_site(data, 0, input_((1, 1, 1), frames="middle"), 2, NAMES, reading)
    assert max(_levels(middle.train.images, middle.train.rows)) == 250
    assert len(middle.train) == 25


def test_a_row_that_orthanc_lacks_is_unreadable_and_a_wrong_path_says_where_to_look(data: Data, tmp_path: Path) -> None:
    assert data.root is not None
    with data.root.open("a") as table:
        table.write("1.2.3,1.2.3.4,1.2.3.4.5,nv,train\n1.2.3,1.2.3.9,,nv,train\n")
    run, reading = input_((1, 1, 1), frames="middle"), Reading(Cache(folder=tmp_path / "cache"))
    with pytest.raises(DataError, match=r"2 of 51 images cannot be read: 2 × the PACS does not have it"):
        load_site(data, 0, run, 2, NAMES, reading)
    some = data.model_copy(update={"max_unreadable_fraction": 0.1})
    assert len(load_site(some, 0, run, 2, NAMES, reading).train) == 25
    (tmp_path / "manifest.csv").write_text("study,series,label,split\n1.2,1.2.3,nv,train\n1.3,1.3.4,nv,test\n")
    assert data.dicomweb is not None
    wrong = data.dicomweb.model_copy(update={"url": data.dicomweb.url.replace("dicom-web", "dicomweb")})
    with pytest.raises(DataError, match=r"check its UIDs, and data\.dicomweb\.url"):
        load_site(data.model_copy(update={"dicomweb": wrong}), 0, run, 2, NAMES, reading)


@pytest.mark.parametrize("recipe", [True, False])
def test_check_shows_what_the_pacs_has(
    recipe: bool, data: Data, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    assert data.dicomweb is not None
    keys = f'source = "dicomweb"\nroot = "manifest.csv"\ndicomweb = {{ url = "{data.dicomweb.url}" }}\n'
    (tmp_path / "site.toml").write_text(f"[data]\n{keys}")
    named = [str(tmp_path / "recipe.toml")] if recipe else []
    with pytest.raises(SystemExit) as ended:
        main.main(["client", "check", *named, "--settings", str(tmp_path / "site.toml")])
    said = "".join(capfd.readouterr())
    assert ended.value.code in (0, None), said
    assert "DICOM" in said
    assert "1.2.826" not in said


def _levels(images: object, rows: object) -> list[int]:
    found = np.asarray(images) if rows is None else np.asarray(images)[np.asarray(rows)]
    return [round(level) for level in (found.reshape(-1) / np.iinfo(found.dtype).max * 255).tolist()]
