"""Lines of a log: one event each, never a failure, never what is hidden."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from protofed.common.config.settings import ClientSettings, ServerSettings
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import Verdict
from protofed.deploy import logs
from protofed.deploy.logs import Hidden

Read = Callable[[], list[dict[str, Any]]]
log = structlog.get_logger()


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves its hooks behind."""
    root = logging.getLogger()
    before, hooks, shown = list(root.handlers), (threading.excepthook, sys.unraisablehook), warnings.showwarning
    for variable in (logs.FORMAT, logs.LEVEL):
        monkeypatch.delenv(variable, raising=False)
    yield
    root.handlers, warnings.showwarning = before, shown
    threading.excepthook, sys.unraisablehook = hooks
    logs.LineRenderer._torn = False
    logs._Setup.hidden, logs._Setup.fields, logs._Setup.stream = Hidden(), dict, False
    logs._Setup.debug = False


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Read:
    """What was logged since it was asked last, as JSON."""
    logs.configure()
    return lambda: [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def alone() -> None:
    logging.getLogger().handlers = []
    logs.configure()


def only(read: Read) -> dict[str, Any]:
    (line,) = read()
    return line


def test_off_a_terminal_an_event_is_a_line_of_json_at_the_level_asked_for(
    said: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.info("round opened", run="r", round=3)
    line = only(said)
    assert (line["event"], line["level"], line["run"], line["round"]) == ("round opened", "info", "r", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])
    written = datetime.fromisoformat(line["timestamp"])
    assert abs((datetime.now(UTC) - written).total_seconds()) < 60
    log.debug("trying to write audit records again")
    assert said() == []
    monkeypatch.setenv(logs.LEVEL, "error")
    logs.configure(debug=True)
    log.debug("trying to write audit records again")
    assert only(said)["level"] == "debug"


def test_the_environment_chooses_format_and_level(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.FORMAT, "console")
    monkeypatch.setenv(logs.LEVEL, "WARNING")
    logs.configure()
    log.info("not told")
    log.warning("site declined", site="ann")
    (line,) = capfd.readouterr().err.splitlines()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert re.match(r"\d\d:\d\d:\d\d \[warning +\] site declined +site=ann$", plain)


@pytest.mark.parametrize(("variable", "value"), [(logs.FORMAT, "jsn"), (logs.LEVEL, "trace")])
def test_a_format_or_level_that_there_is_not_is_refused(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable}.*'{value}'"):
        logs.configure()


def test_on_a_terminal_lines_are_for_people() -> None:
    script = "import structlog, protofed.deploy.logs as s; s.configure(); structlog.get_logger().info('ready')"
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != logs.FORMAT}
    subprocess.run([sys.executable, "-c", script], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    text = os.read(ours, 1000).decode()
    os.close(ours)
    assert "ready" in text
    assert "{" not in text


def test_what_peers_wrote_moves_no_cursor_and_begins_no_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.FORMAT, "console")
    logs.configure()
    log.info("call refused", why="one\n12:00:00 [info] run finished\x1b[2J\r")
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b[2J" not in err
    try:
        raise OSError("\x1b[2J\r")
    except OSError:
        log.exception("task failed unforeseen")
    assert r"OSError: \x1b[2J\r" in capfd.readouterr().err


def test_every_event_names_its_site_and_its_own_keys_first(said: Read) -> None:
    work: dict[str, object] = {"run": "r", "round": 2}
    logs.bind_fields(lambda: {"site": "ann", **work})
    thread = threading.Thread(target=lambda: log.info("handed in", round=1))
    thread.start()
    thread.join()
    work.clear()
    log.info("ready")
    first, second = said()
    assert (first["site"], first["run"], first["round"]) == ("ann", "r", 1)
    assert second["site"] == "ann"
    assert "run" not in second
    logs.bind_fields(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    log.info("ready")
    assert only(said)["event"] == "ready"


def test_warnings_and_libraries_logs_are_events(said: Read) -> None:
    alone()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = logs._warned
        warnings.warn_explicit("old\nand slow", UserWarning, "/x/lib/site-packages/torch/nn/conv.py", 7)
    logging.getLogger("sqlalchemy.pool").warning("a connection of %s", "mine")
    logging.getLogger("alembic").info("not told")
    try:
        raise ValueError("in a callback")
    except ValueError:
        logging.getLogger("asyncio").exception("wrong %d", "arguments")
    first, second, third = said()
    assert (first["event"], first["library"], first["text"]) == ("a library warns", "torch.nn.conv", "old\nand slow")
    assert (second["event"], second["library"]) == ("a library says", "sqlalchemy.pool")
    assert second["text"] == "a connection of mine"
    assert third["level"] == "error"
    assert "ValueError: in a callback" in third["exception"]


def test_libraries_are_listened_to_once_also_those_with_lines_of_their_own(said: Read) -> None:
    alone()
    logs.configure()
    logging.getLogger("alembic").error("once")
    assert len(said()) == 1
    loud = logging.getLogger("loud.inner")
    loud.propagate = False
    loud.addHandler(logging.StreamHandler())
    logs.redirect("loud")
    loud.warning("no kernel")
    assert only(said)["library"] == "loud.inner"


def test_what_a_thread_dies_of_is_an_event_and_other_hooks_are_still_asked(said: Read) -> None:
    seen: list[object] = []
    threading.excepthook = seen.append
    logs.configure(daemon=True)
    thread = threading.Thread(target=lambda: 1 / 0, name="pulse")
    thread.start()
    thread.join()
    line = only(said)
    assert (line["event"], line["level"], line["thread"]) == ("a thread ended with an error", "error", "pulse")
    assert "ZeroDivisionError" in line["exception"]
    assert len(seen) == 1


def test_a_daemons_last_words_are_an_event_and_a_commands_are_not(said: Read) -> None:
    error = ConfigError("why")
    assert not logs.log_exit("no such recipe", 78, error)
    logs.configure(daemon=True)
    assert logs.log_exit("no such recipe", 78, error)
    line = only(said)
    assert (line["event"], line["why"], line["exit_code"]) == ("the process ends", "no such recipe", 78)
    assert "exception" not in line
    logs.configure(daemon=True, debug=True)
    assert logs.log_exit("no such recipe", 78, error)
    assert "ConfigError: why" in only(said)["exception"]
    logs.configure(debug=True)
    with pytest.raises(ConfigError):
        logs.log_exit("no such recipe", 78, error)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "lesions of north"
    (root / "Jane Doe").mkdir(parents=True)
    for name in ("Jane Doe/scan one.tif", "Jane Doe/p0817.bin", "t10k-labels", "a"):
        (root / name).write_bytes(b"")
    return root


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read {root}/Jane Doe/x.npz (no such file); expected", "cannot read <data> (no such file); expected"),
        ("no data at {root}; mount", "no data at <data>; mount"),
        ("[Errno 13] Permission denied: '{root}/Jane Doe/scan one.tif'", "[Errno 13] Permission denied: '<data>'"),
        ("file://{quoted}/Jane%20Doe/p.bin", "file://<data>"),
        ("{root} has neither", "<data> has neither"),
        ("{root}-of-others stays", "{root}-of-others stays"),
        ("truncated file p0817.bin", "truncated file <data>"),
        ("scan one.tif is no image", "<data> is no image"),
        ("Jane Doe/p0817.bin: damaged", "Jane <data>: damaged"),
        ("t10k-labels, a", "<data>, a"),
        ("cannot identify 'images/pat 4711.JPG'", "cannot identify '<data>'"),
        ("of 4711.nii.gz.", "of <data>."),
        ("holding out 0.3 of the rarest class's 12 examples", "of the rarest class's <numbers> examples"),
        ("counts tensor([ 12, 30,  7], dtype=torch.int64)", "counts <numbers>"),
        ("counts array([[12, 30], (7, 8)])", "counts <numbers>"),
        ("counts [12, 30, 7, 2, 0, 1]", "counts <numbers>"),
        ("shape [64, 3, 32, 32]", "shape [64, 3, 32, 32]"),
    ],
)
def test_data_are_not_shown(text: str, shown: str, data: Path, said: Read) -> None:
    logs.hide(data)
    known = {"root": data, "quoted": str(data).replace(" ", "%20")}
    log.error("task declined", why=text.format(**known), error=OSError(text.format(**known)), at=[text.format(**known)])
    line = only(said)
    for found in (line["why"], line["error"], line["at"][0]):
        assert shown.format(**known) in found


def test_a_link_to_the_data_is_hidden_and_the_root_folder_hides_not_everything(
    tmp_path: Path, said: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "cohort").write_bytes(b"")
    link = tmp_path / "link"
    link.symlink_to(real)
    logs.hide(link / "cohort")
    log.error("task declined", why=f"{link / 'cohort'}, {real / 'cohort'}, cohort")
    assert only(said)["why"] == "<data>, <data>, <data>"
    monkeypatch.setattr(os, "walk", lambda _: iter(()))  # not all of this machine
    logs.hide(Path("/"))
    log.info("ready", device="/dev/nvidia")
    assert only(said)["device"] == "/dev/nvidia"


def test_paths_and_tracebacks_are_cleaned(data: Path, said: Read) -> None:
    logs.hide(data)
    folder = next(path for path in data.iterdir() if path.is_dir())
    try:
        (folder / "lost").read_bytes()
    except OSError:
        log.exception("task failed unforeseen", path=folder)
    line = only(said)
    assert line["path"] == "<data>"
    assert "FileNotFoundError: [Errno 2] No such file or directory: '<data>'" in line["exception"]
    assert "Jane" not in str(line)


@pytest.mark.parametrize(
    "text",
    [
        "http://ann:hunter%212@proxy:3128 refused",
        "password hunter!2 is wrong",
        "Proxy-Authorization: Basic YW5uOmh1bnRlciEy",
        "postgresql://u:hunter3@db/x",
        "authorization: bearer hunter4.x-y",
        "-----BEGIN PRIVATE KEY-----\nhunter5\n-----END PRIVATE KEY-----",
        "-----BEGIN EC PRIVATE KEY-----\nhunter6 and so on",
        "the token is hunter7",
    ],
)
def test_secrets_are_not_shown(text: str, said: Read, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hunter7\n", encoding="utf-8")
    table = {
        "site": "ann",
        "policy": "p.toml",
        "state": "s",
        "data": {"source": "digits"},
        "proxy": "http://ann:hunter%212@proxy:3128",
        "metrics": {"listen": "127.0.0.1:0", "token": str(token)},
    }
    logs.hide_site(ClientSettings.model_validate(table))
    log.error("the server does not answer", why=text)
    shown = only(said)["why"]
    assert "hunter" not in shown
    assert "aHVudGVy" not in shown
    assert "YW5uOmh1" not in shown
    assert "<secret>" in shown


def test_a_servers_passwords_and_the_folder_of_all_data_sets_are_hidden(
    said: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc123def")
    logs.hide_server(ServerSettings(ledger="postgresql+psycopg://me:pw@db/x", mlflow="https://you:other-word@ml"))
    log.error("no connection", why="pw, spwd, other-word, abc123def")
    assert only(said)["why"] == "<secret>, spwd, <secret>, <secret>"
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    (tmp_path / "skin").mkdir()
    (tmp_path / "skin" / "ann.bin").write_bytes(b"")
    data = {"source": "cifar10", "root": "skin"}
    table = {"site": "ann", "policy": "p.toml", "state": "s", "data": data}
    logs.hide_site(ClientSettings.model_validate(table))
    log.error("task declined", why=f"{tmp_path}/skin/x and ann.bin", path=tmp_path / "other")
    line = only(said)
    assert (line["why"], line["path"]) == ("<data>", "<data>")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (True, True),
        (None, None),
        (Verdict.LATE, "late"),
        (b"weights", "<7 bytes>"),
        (np.array([12, 30, 7]), "<ndarray>"),
        ([12, 30, 7], "<numbers>"),
        ({0: 12, 1: 30}, "<numbers>"),
        ({"accuracy": 0.5}, {"accuracy": 0.5}),
        (("ann", "bob"), ["ann", "bob"]),
        (frozenset({"ann"}), ["ann"]),
        (object(), "<object>"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        ("\ud800 half a character", "\ud800 half a character"),
    ],
)
def test_every_value_becomes_json(value: object, shown: object, said: Read) -> None:
    log.info("an event", value=value)
    assert only(said)["value"] == shown


class Wrong(Exception):
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


def test_what_cannot_be_shown_costs_no_line(said: Read) -> None:
    endless: list[object] = []
    endless.append(endless)
    try:
        raise Wrong
    except Wrong as error:
        log.exception("task failed unforeseen", error=error, endless=endless, long="x y" * 100_000)
    line = only(said)
    assert line["event"] == "task failed unforeseen"
    assert "Wrong" in line["exception"]
    assert len(line["long"]) <= logs.LONGEST_TEXT + 1


SCRIPT = """
import logging, os, sys, warnings
from protofed.deploy import logs
import structlog
logs.configure(daemon=True)
for number in range(3):
    structlog.get_logger().info("ready", text="x" * 3000)
logging.getLogger("torch").error("a library")
warnings.warn("too")
print(os.fstat(2).st_size if sys.argv[1:] else "lives")
"""


@pytest.mark.parametrize("closing", ["2>&-", "2>/dev/full", "2> >(exit)"])
def test_a_standard_error_that_takes_nothing_ends_no_process(closing: str) -> None:
    command = ["bash", "-c", f'"$0" -c "$1" {closing}', sys.executable, SCRIPT]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.stdout, done.returncode) == ("lives\n", 0)


def test_after_half_a_line_the_next_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure()
        room, write = [10, 0], os.write

        def full_then_free(handle: int, data: bytes) -> int:
            if not room:
                return write(handle, data)
            if not (left := room.pop(0)):
                raise OSError(28, "No space left on device")
            return write(handle, data[:left])

        monkeypatch.setattr(os, "write", full_then_free)
        log.info("lost in the middle")
        log.info("ready")
        lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"timestam'
    assert json.loads(lines[1])["event"] == "ready"
    assert len(lines) == 2
