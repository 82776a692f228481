"""Whatever cleans up removes files of its own making: a user's file that lies beside them stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from google_crc32c import value as crc32c

from protofed.client.state.disk_store import DiskStore
from protofed.client.state.downloads import DiskDownloads
from protofed.client.training.progress import DiskCheckpoints
from protofed.common.codec import digest
from protofed.common.errors import ConfigError
from protofed.common.protocol.chunks import MARKS
from protofed.common.protocol.messages import Task, TaskKind
from protofed.common.storage import files
from protofed.deploy.experiments.curves import draw
from protofed.deploy.experiments.experiment import ExperimentJob
from protofed.deploy.export import model_folder
from protofed.server.storage.blobs import Quota, Uploads
from protofed.testing.small_recipe import small_recipe

THEIRS = ("thesis.txt", "a.b.c", "notes.safetensors", ".tmp-notes", "2023", "no-suffix", "results.part", "x.held")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a user keeps files."""
    for name in THEIRS:
        (tmp_path / name).write_text("years of work", encoding="utf-8")
    return tmp_path


def check(folder: Path) -> None:
    assert [name for name in THEIRS if (folder / name).read_text(encoding="utf-8") != "years of work"] == []


def test_unfinished_uploads(folder: Path) -> None:
    left = folder / f"site-1.task_id.{digest(b'')}{MARKS}"
    left.touch()
    Uploads(folder, Quota())
    check(folder)
    assert not left.exists()


def test_checkpoints(tmp_path: Path, folder: Path) -> None:
    ours = DiskCheckpoints(folder, Task(TaskKind.FIT, "run", 1, "n1", None, 0, 60.0))
    other = folder / f"{'0' * 16}-000.safetensors"
    other.touch()
    ours.write(0, {})
    ours.clear(other_tasks=True)
    ours.clear()
    check(folder)
    assert not other.exists()
    assert len(list(folder.iterdir())) == len(THEIRS)


def test_fetched_blobs(folder: Path) -> None:
    downloads = DiskDownloads(folder, keep=1)
    for data in (b"old", b"new"):
        downloads.begin(digest(data), len(data))
        downloads.write(digest(data), 0, data, crc32c(data))
        downloads.seal(digest(data))
    check(folder)
    assert {path.name for path in folder.iterdir()} == {*THEIRS, digest(b"new")}


def test_the_state_of_a_site(tmp_path: Path) -> None:
    theirs = [tmp_path / "run" / name / "scan.dcm" for name in (".tmp-notes", "2023", ".tmp-2023")]
    left = tmp_path / "run" / f"{files.TEMPORARY}000001-0123abcd" / "task.json"
    for path in (*theirs, left):
        path.parent.mkdir(parents=True)
        path.touch()
    store = DiskStore(tmp_path)
    assert store.unsettled("run") == []
    store.close()
    assert [path.exists() for path in (*theirs, left)] == [True, True, True, False]


def test_temporary_files_that_a_killed_process_left(folder: Path) -> None:
    left = folder / f"{files.TEMPORARY}blob-0123abcd"
    left.touch()
    assert files.sweep([folder]) == 1
    check(folder)
    assert not left.exists()


@pytest.mark.parametrize("force", [False, True])
def test_an_export_over_files_that_are_no_model(force: bool, folder: Path) -> None:
    (folder / model_folder.CARD).write_text("of another model", encoding="utf-8")
    with pytest.raises(ConfigError, match="--out"):
        model_folder.check_vacant(folder, force=force)
    check(folder)


def test_curves_of_an_earlier_comparison(tmp_path: Path) -> None:
    theirs, earlier = tmp_path / "curve-of-mine.png", tmp_path / "curve-global-accuracy-bytes.svg"
    theirs.write_text("years of work")
    earlier.touch()
    assert draw([], tmp_path) == []
    assert theirs.read_text() == "years of work"
    assert not earlier.exists()


def test_a_run_of_other_code_is_rejected_each_time(tmp_path: Path) -> None:
    job = ExperimentJob(small_recipe("solo"), tmp_path)
    for number in (1, 2):
        job.state.mkdir()
        (job.state / "thesis.txt").write_text(f"{number} years of work")
        (tmp_path / "result.json").write_text(f"{number}")
        job.begin_again()
        assert not job.state.exists()
        assert (tmp_path / f"state-before-{number}" / "thesis.txt").read_text() == f"{number} years of work"
        assert (tmp_path / f"result-before-{number}.json").read_text() == f"{number}"
