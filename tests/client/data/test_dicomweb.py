"""Images of a PACS: what is asked of it and when, and what its refusals mean."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import ValidationError
from tests.support.free_ports import free_port
from tests.support.image_files import input_, settings
from tests.support.pacs import Answer, Pacs, instance, manifest, serving
from tests.support.pki import Authority

from protofed.client.data import dicomweb
from protofed.client.data.decoding import silence_decoders
from protofed.client.data.file_entry import UnreadableImageError
from protofed.client.data.hold_out import units_of_groups
from protofed.client.data.image_cache import ImageCache
from protofed.client.data.image_files import Scan, as_picture, scan
from protofed.client.data.reading import Reading
from protofed.client.data.sources import infer_class_names, infer_input, read_files
from protofed.common.config.data import Data
from protofed.common.config.settings import Cache
from protofed.common.errors import DataError
from protofed.common.pki.identity import Party

RUN = ("mel", "nv")
DOT = input_((1, 1, 1), frames="middle")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dicomweb, "PAUSE_S", 0.001)
    dicomweb._headers.cache_clear()
    vars(dicomweb._thread).clear()


@pytest.fixture
def pacs(tmp_path: Path) -> Iterator[Pacs]:
    (tmp_path / "files").mkdir()
    with serving(tmp_path / "files") as served:
        yield served


def source(pacs: Pacs, rows: list[list[str]], heading: str = "study,series,instance,label", **more: Any) -> Data:
    table = {"url": pacs.url, **more}
    return settings("dicomweb", manifest(pacs.folder.parent, rows, heading), dicomweb=table)


def series(pacs: Pacs, patient: int, values: list[int]) -> list[str]:
    """Slices of these values, from the head to the feet as the PACS lists them; the row of the series."""
    for place, value in enumerate(values):
        uids = instance(pacs.folder, patient, number=len(values) - place, value=value)
    return [*uids[:2], ""]


def values(found: Scan, **rules: Any) -> list[int]:
    run = input_((1, 1, 1), **rules)
    decoded = [as_picture(item).decode(run).pixels for item in found.items]
    return [round(float(pixels[0, 0, 0]) / np.iinfo(pixels.dtype).max * 255) for pixels in decoded]


def test_an_instance_is_an_image_and_a_series_alone_a_volume_of_one_study(pacs: Pacs) -> None:
    rows = [[*instance(pacs.folder, 7, value=70), "mel"], [*series(pacs, 8, [30, 20, 10, 5]), "nv"]]
    data = source(pacs, rows)
    found = scan(data, RUN, 2, "middle")
    assert [(item.name, item.group, item.target) for item in found.items] == [
        ("row 2", "1.2.826.7", 0),
        ("row 3", "1.2.826.8", 1),
    ]
    assert not pacs.asked, "listing asks nothing"
    assert values(found, frames="middle") == [70, 20], "of 5, 10, 20 and 30, from the feet"
    assert sum("/instances/" in path for path in pacs.asked) == 2, "of the series the one slice alone is fetched"
    assert values(found, frames="max") == [70, 30]
    assert "1.2.826" not in repr(found.items[0])


def test_frames_are_counted_by_metadata_and_fetched_once(pacs: Pacs) -> None:
    rows = [
        [*instance(pacs.folder, 7, frames=[[[1]], [[2]], [[3]]]), "mel"],
        [*series(pacs, 8, [12, 11]), "nv"],
        [*instance(pacs.folder, 9, series=3, value=9)[:2], "", "nv"],
    ]
    found = scan(source(pacs, rows), RUN, 2, "all")
    assert [item.name for item in found.items] == [
        *(f"row 2, frame {number}" for number in (1, 2, 3)),
        *("row 3, frame 1", "row 3, frame 2", "row 4"),
    ]
    assert sum("metadata" in path for path in pacs.asked) == len(pacs.asked) == 3
    assert values(found, frames="all") == [1, 2, 3, 11, 12, 9]
    assert len(pacs.asked) == 3 + 1 + 2 + 1, "a file of three frames is fetched once"


def test_a_restart_asks_for_no_image_and_sees_a_new_slice(pacs: Pacs, tmp_path: Path) -> None:
    data = source(pacs, [[*instance(pacs.folder, 7, value=70), "mel"], [*series(pacs, 8, [3, 2, 1]), "nv"]])
    pictures = [as_picture(item) for item in scan(data, RUN, 2).items]
    cache = ImageCache(Cache(folder=tmp_path / "cache", processes=1), DOT)
    first = cache.prepare(pictures)
    assert first.reasons == [None, None]
    pacs.asked.clear()
    assert np.array_equal(cache.prepare(pictures).rows, first.rows)
    search = "/dicom-web/studies/1.2.826.8/series/1.2.826.8.1/instances"
    assert {path.partition("?")[0] for path in pacs.asked} == {search}
    instance(pacs.folder, 8, number=4, value=90)
    assert cache.prepare(pictures).rows.tolist() == [first.rows[0], 2]
    named = b"".join(file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert b"1.2.826" not in named
    assert b"127.0.0.1" not in named


def test_sets_and_units_are_of_studies_or_of_the_column_group(pacs: Pacs) -> None:
    uids = [[*instance(pacs.folder, 7, series=part), "mel"] for part in (1, 2)]
    uids.append([*instance(pacs.folder, 8), "nv"])
    run = input_((1, 1, 1))
    train, _ = read_files(source(pacs, uids), run, RUN, Reading(), noisy=True)
    test = read_files(source(pacs, uids), run, RUN, Reading(), noisy=True)[1]
    assert train.units is not None
    assert test.units is not None
    assert {*train.units, *test.units} == set(units_of_groups(np.array(["1.2.826.7", "1.2.826.8"])))
    rows = [[*row, split, "P1"] for row, split in zip(uids, ("train", "train", "test"), strict=True)]
    found = scan(source(pacs, rows, "study,series,instance,label,split,group"), RUN, 2)
    assert [(item.split, item.group) for item in found.crossing] == [("train", "P1")] * 2 + [("test", "P1")]


def test_an_input_and_names_are_found_without_a_recipe(pacs: Pacs) -> None:
    data = source(pacs, [[*series(pacs, 8, [3, 2, 1]), "nv"]])
    assert infer_input(data)[0].shape == (1, 1, 1)
    assert infer_class_names(data) == ("nv",)


HTML = (200, "text/html", b"<html>Log in</html>")


@pytest.mark.parametrize(
    ("answer", "raised", "said", "attempts"),
    [
        ((401, "text/plain", b""), DataError, r"lets this site not in \(HTTP 401\)\. Check data\.dicomweb\.token", 1),
        ((403, "text/plain", b""), DataError, r"lets this site not in \(HTTP 403\)", 1),
        ((404, "text/plain", b""), UnreadableImageError, "does not have it; check its UIDs", 1),
        ((500, "text/plain", b""), UnreadableImageError, "answers with HTTP 500", 1),
        ((503, "text/plain", b""), DataError, r"answers with HTTP 503, after 4 attempts", 4),
        ((502, "text/plain", b""), DataError, r"answers with HTTP 502, after 4 attempts", 4),
        (HTML, UnreadableImageError, "answers with no DICOM", 1),
        ((200, "application/dicom", b"no"), UnreadableImageError, "answers with no DICOM", 1),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.filterwarnings("ignore:message sent by origin server")
def test_a_refusal_is_told_without_the_pacs_and_the_image(
    whole: bool,
    answer: Any,
    raised: type[Exception],
    said: str,
    attempts: int,
    pacs: Pacs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    uids = instance(pacs.folder, 7)
    data = source(pacs, [[*uids[:2], "" if whole else uids[2], "mel"]])
    pacs.answer = lambda _: answer
    with caplog.at_level(logging.DEBUG), pytest.raises(DataError, match=said) as refused:
        values(scan(data, RUN, 2, "middle"), frames="middle")
    assert type(refused.value) is raised
    assert len(pacs.asked) == attempts
    assert not any(hint in str(refused.value) + caplog.text for hint in ("1.2.826", "127.0.0.1"))
    if raised is UnreadableImageError:
        assert [item.part for item in scan(data, RUN, 2, "all").items] == [""], "who decodes it learns the reason"


def test_a_pacs_that_does_not_answer_refuses_the_load(tmp_path: Path) -> None:
    pacs = Pacs(tmp_path / "files")
    pacs.url = f"http://127.0.0.1:{free_port()}"
    data = source(pacs, [["1.2", "1.2.3", "1.2.3.4", "mel", "test"]], "study,series,instance,label,split")
    with pytest.raises(DataError, match=r"the PACS does not answer, after 4 attempts\. Check data\.dicomweb\.url"):
        read_files(data, DOT, RUN, Reading())


def test_certificates_of_both_sides_and_a_token_that_is_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.make()
    for party, name in ((Party.SERVER, "hub"), (Party.SITE, "north")):
        authority.issue(tmp_path / name, party, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "hub" / "cert.pem", tmp_path / "hub" / "key.pem")
    context.load_verify_locations(tmp_path / "hub" / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    token = tmp_path / "token"
    token.write_text("one\n")
    own: dict[str, Any] = {"certificate": tmp_path / "north" / "cert.pem", "key": tmp_path / "north" / "key.pem"}
    trusted: dict[str, Any] = {"ca_file": tmp_path / "hub" / "ca.pem", **own, "token_file": token}
    (tmp_path / "files").mkdir()

    def ask(**table: Any) -> list[int]:
        vars(dicomweb._thread).pop("image", None)
        return values(scan(source(pacs, rows, **table), RUN, 2))

    with serving(tmp_path / "files", context) as pacs, caplog.at_level(logging.DEBUG):
        rows = [[*instance(pacs.folder, 7, value=70), "mel"]]
        assert ask(**trusted) == [70]
        token.write_text("two\n")
        assert ask(**trusted) == [70]
        assert pacs.tokens == ["Bearer one", "Bearer two"]
        with pytest.raises(DataError, match="one side does not accept the other's certificate"):
            ask(**own)
        token.write_text("two words")
        with pytest.raises(DataError, match=r"token_file: expected a file with one token in it"):
            ask(**trusted)
        token.unlink()
        with pytest.raises(DataError, match=r"data\.dicomweb\.token_file cannot be read: No such file"):
            ask(**trusted)
        with pytest.raises(DataError, match=r"no TLS connection|does not answer"):  # without its certificate
            ask(ca_file=tmp_path / "hub" / "ca.pem")
    assert "Bearer" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "heading", "said"),
    [
        ([["1.2", "", "", "mel"]], "study,series,instance,label", "row 2 has no series"),
        ([["1.2", "P1", "", "mel"]], "study,series,instance,label", "row 2: its series is no UID"),
        ([["1.2", "1.3", "mel"]] * 2, "study,series,label", "row 3 has the UIDs of row 2"),
        ([["1.2", "mel"]], "study,label", r"one column 'series' in the heading"),
    ],
)
def test_rows_that_are_refused(rows: list[list[str]], heading: str, said: str, pacs: Pacs) -> None:
    with pytest.raises(DataError, match=said):
        scan(source(pacs, rows, heading), RUN, 2)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, r"expected a table \[data\.dicomweb\] with source dicomweb"),
        ({"url": "ftp://pacs"}, "expected https://host"),
        ({"url": "https://me:secret@pacs/dicom-web"}, "expected https://host"),
        ({"url": "https://pacs/dicom-web?key=1"}, "expected https://host"),
        ({"url": "http://pacs/dicom-web", "token_file": "t"}, "token_file needs a url that begins with https://"),
        ({"url": "http://pacs/dicom-web", "ca_file": "t"}, "are for a url that begins with https://"),
        ({"url": "https://pacs", "key": "k"}, "expected certificate and key together"),
        ({"url": "https://pacs", "token": "secret"}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_are_refused(table: dict[str, str] | None, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings("dicomweb", Path("a.csv"), dicomweb=table)


def test_a_token_may_go_to_this_machine_in_plain_text_and_other_sources_have_no_pacs() -> None:
    data = settings("dicomweb", Path("a.csv"), dicomweb={"url": "http://localhost:1/a/", "token_file": "t"})
    assert data.dicomweb is not None
    assert data.dicomweb.url == "http://localhost:1/a"
    with pytest.raises(ValidationError, match="and with no other source"):
        settings("manifest", Path("a.csv"), dicomweb={"url": "https://pacs"})


def test_without_the_library_the_extra_is_named(pacs: Pacs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dicomweb_client.api", None)
    with pytest.raises(DataError, match=r"source dicomweb needs dicomweb-client, .*\[dicom\]"):
        values(scan(source(pacs, [["1.2", "1.3", "1.4", "mel"]]), RUN, 2))


def test_values_that_a_library_would_quote_are_not_logged(pacs: Pacs, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("pydicom").setLevel(logging.NOTSET)  # as of a process that has read no DICOM file yet
    uid = {"00080018": {"vr": "UI", "Value": ["1.2.826.7.1.02"]}}  # as some devices write it
    pacs.answer = lambda _: (200, "application/dicom+json", json.dumps([uid, uid]).encode())
    with caplog.at_level(logging.WARNING), silence_decoders():
        scan(source(pacs, [["1.2.826.7", "1.2.826.7.1", "", "mel"]]), RUN, 2, "all")
    assert pacs.asked
    assert not caplog.text


def test_an_image_of_another_patient_gets_no_label_of_this_row(pacs: Pacs) -> None:
    asked, other = ["1.2.826.7", "1.2.826.7.1", "1.2.826.7.1.1"], instance(pacs.folder, 8, value=80)
    rows = [[*asked, "mel"], [*asked[:2], "", "mel"], [*other, "nv"]]

    def confused(path: str) -> Answer | None:
        return None if "826.8" in path else pacs.respond(path.replace("826.7", "826.8"))

    found = scan(source(pacs, rows), RUN, 2)
    pacs.answer = confused
    for item in found.items[:2]:
        with pytest.raises(UnreadableImageError, match="gives another image than it was asked for"):
            as_picture(item).decode(DOT)
    assert as_picture(found.items[2]).decode(DOT).pixels.any()


@pytest.mark.parametrize("whole", [False, True])
def test_a_redirect_is_not_followed(whole: bool, pacs: Pacs) -> None:
    uids = instance(pacs.folder, 7)
    data = source(pacs, [[*uids[:2], "" if whole else uids[2], "mel"]])
    pacs.answer = lambda path: HTML if path == "/login" else (302, "text/html", b"")
    pacs.headers = {"Location": "/login"}
    with pytest.raises(DataError, match="to a page to log in") as refused:
        values(scan(data, RUN, 2, "all"), frames="middle")
    assert not isinstance(refused.value, UnreadableImageError), "it is not the image's fault"
    assert "/login" not in pacs.asked


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_that_is_too_large_is_not_held_in_memory(
    whole: bool, pacs: Pacs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[*instance(pacs.folder, 7, value=70), "mel"], ["1.2.3", "1.2.3.4", "" if whole else "1.2.3.5", "nv"]]
    found = scan(source(pacs, rows), RUN, 2)
    monkeypatch.setattr(dicomweb, "MAX_FILE_BYTES", 3 << 20)
    monkeypatch.setattr(pacs, "answer", lambda path: None if "826" in path else (200, "text/html", bytes(4 << 20)))
    assert as_picture(found.items[0]).decode(DOT).pixels.any()
    with pytest.raises(UnreadableImageError, match="answer is larger than"):
        as_picture(found.items[1]).decode(DOT)
    assert len(pacs.asked) == 2, "it is not asked again"


@pytest.mark.parametrize("frames", ["all", "max"])
def test_the_next_run_of_a_daemon_sees_a_new_slice(frames: Literal["all", "max"], pacs: Pacs) -> None:
    data = source(pacs, [[*series(pacs, 8, [30, 20, 10]), "nv"]])
    assert max(values(scan(data, RUN, 2, frames), frames=frames)) == 30
    instance(pacs.folder, 8, number=4, value=90)
    assert max(values(scan(data, RUN, 2, frames), frames=frames)) == 90
