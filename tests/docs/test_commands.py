"""Every block of commands in README and docs/ is run here, typed by `make e2e` or marked as not run.

A block that nobody can run here has a comment above it, which readers do not see: `<!-- not run: WHY -->`, or
`<!-- not run (docker, runs start): WHY -->` if only the lines that begin like this are not run. Simulations and
comparisons are rehearsed with `--dry-run`.
"""

from __future__ import annotations

import os
import re
import shlex
import string
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from docs.markdown import GENERATED
from numpy.typing import NDArray
from tests.e2e import pilot_guide, tutorials
from tests.support.command_line import Answers, called
from tests.support.image_files import classes, ramp, save

from protofed.client.data import arrays
from protofed.client.data.examples import Examples
from protofed.client.data.split import DataSplit
from protofed.client.transport.audit import ClientAudit
from protofed.common import codec
from protofed.common.config.data import Data
from protofed.common.protocol.audit_fields import audit_fields
from protofed.common.storage.journal import Journal
from protofed.deploy.doctor.checks import DIAGNOSES
from protofed.protos.v1 import federation_pb2 as pb

ROOT = Path(__file__).parents[2]
SHELLS = ("", "sh", "bash", "shell", "console")
FENCE = re.compile(
    r"(?:^ *<!-- not run(?: \((?P<only>[^)]+)\))?: (?P<why>[^\n]+?) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"^```toml\n# file (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # what a page has its reader write
# Pages whose blocks a module of tests/e2e types word for word, with what it reads of them.
TYPED: Mapping[str, str] = {
    "docs/how-to/pilot.md": "tests.e2e.pilot",
    **{f"docs/tutorials/{page}.md": "tests.e2e.tutorials" for page in tutorials.PAGES},
}
# What needs neither a server nor a terminal, by its first words; with the words that are added.
RUN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--version", "--help", "policies", "recipes", "files", "new", "server init", "predict"), ()),
    **dict.fromkeys(("client init", "client check", "client preview", "client doctor"), ()),
    **dict.fromkeys(("certs init", "certs request", "certs sign", "certs issue", "certs install", "certs list"), ()),
    **dict.fromkeys(("audit show", "audit verify", "audit archive", "export", "report", "tracking"), ()),
    "simulate": ("--dry-run",),
    "compare": ("--dry-run", "--seeds", "0"),
}
PROGRAMS = ("mkdir", "cp", "sed", "diff")
# What is typed before a page's first block.
SHORT = "protofed simulate {0} --set rounds=1 --state {1}"
BEFORE: Mapping[str, tuple[str, ...]] = {
    "docs/how-to/certificates.md": ("protofed certs init --ca ca",),
    "docs/how-to/models.md": (
        SHORT.format("digits-fednh", "runs/server"),
        SHORT.format("digits-cwfedavg", "runs/server"),
        SHORT.format("digits-fedprp", "runs/sites"),
        SHORT.format("digits-fedavg", "runs/first"),
        "mkdir -p data && cp -r runs/sites/sites/site-2 runs",
    ),
    "docs/how-to/monitoring.md": (SHORT.format("digits-fedavg", "FOLDER") + " --set 'name=\"lesions\"'",),
    "docs/how-to/notify.md": ("protofed files . prometheus",),
    "docs/how-to/report.md": (SHORT.format("digits-fednh", "runs/demo/server"),),
    "docs/how-to/runbook.md": (
        "protofed certs init --ca ca",
        "protofed certs request --identity identity --site north --out first.request",
        "protofed certs sign first.request --ca ca --site north --out first.bundle",
        "protofed certs install first.bundle --identity identity",
        "protofed client init --site north --server 127.0.0.1:1 --data digits --policy standard",
    ),
}
STANDS_FOR = {"RECIPE": "digits-trio", "RUN": "lesions", "STATE": "state", "/archive/north": "archive/north"}
TYPED_IN = {"client init": "north\n127.0.0.1:1\ndigits\n\n"}
# A new site has no certificate yet, and no server answers it.
EXIT_CODES = {"client doctor": {DIAGNOSES[name].code for name in ("identity-missing", "nothing-listens")}}


@dataclass(frozen=True)
class Block:
    """A block of commands on a page.

    Attributes:
        line: where it begins.
        language: of a console there are outputs, too, and each command begins with `$ `.
        why: it is not run; None: nobody said so.
        only: the beginnings of its lines that are not run; empty: of all.
    """

    line: int
    language: str
    body: str
    why: str | None
    only: tuple[str, ...]

    def commands(self) -> Iterator[str]:
        """Its lines without comments; one that goes on is one."""
        lines = self.body.replace("\\\n", " ").splitlines()
        typed = [line.removeprefix("$ ") for line in lines if self.language != "console" or line.startswith("$ ")]
        for line in typed:
            if command := re.split(r"(?:^|\s)# ", line)[0].strip():
                yield command

    def is_run(self, command: str) -> bool:
        return self.why is None or (bool(self.only) and not _named(command).startswith(self.only))


def _named(command: str) -> str:
    """A command without its folder, `protofed` and what is assigned before it: by what marks and lists name it."""
    return re.sub(r"^(?:[A-Z_]+=\S* )?(?:\S*/)?(?:protofed (?=\S))?", "", command)


def _blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        if found["language"] in SHELLS:
            only = tuple(one.strip() for one in (found["only"] or "").split(",") if one)
            line = text[: found.start("indent")].count("\n") + 1
            yield Block(line, found["language"], found["body"], found["why"], only)


def _read_pages() -> dict[str, str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


PAGES = {page: text for page, text in _read_pages().items() if any(_blocks(text))}


def _what_is_typed(page: str) -> set[str]:
    """The blocks of a page that tests/e2e types."""
    if (ROOT / page) == pilot_guide.GUIDE:
        return {part.body for part in pilot_guide.read() if isinstance(part, pilot_guide.Block)}
    return {body for _, body in tutorials.blocks(PAGES[page])}


@dataclass
class Terminal:
    """Types commands in a folder of its own; a variable that a line sets is known to the next.

    Attributes:
        code: of the key that was shown last, for who asks for it over the telephone.
    """

    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    variables: dict[str, str] = field(default_factory=dict)
    code: str = ""

    def type(self, command: str, *, rehearsed: bool = True) -> str:
        """What went wrong; empty: nothing."""
        if found := re.fullmatch(r"(\w+)=(\$\(.*\))", command):
            self.variables[found[1]] = self._in_shell(f"printf %s {found[2]}").stdout
            return ""
        if command.split()[0] in PROGRAMS:
            done = self._in_shell(command)
            return f"{command}\nended with {done.returncode}: {done.stderr}" if done.returncode else ""
        if re.match(r"(?:\S*/)?protofed ", command) is None:
            return f"{command}\nis not run here: mark it, or add it to this test"
        return self._protofed(command, rehearsed)

    def _protofed(self, command: str, rehearsed: bool) -> str:
        words = [string.Template(word).safe_substitute(self.variables) for word in shlex.split(_named(command))]
        at = words.index(">") if ">" in words else len(words)
        words, into = words[:at], words[at + 1 :]
        kind = next((kind for kind in RUN if words[: len(kind.split())] == kind.split()), None)
        if kind is None:
            return f"{command}\nis not run here: mark it, or add it to this test"
        self.monkeypatch.setattr("sys.stdin", Answers(TYPED_IN.get(" ".join(words), f"{self.code}\n")))
        words = [STANDS_FOR.get(word, word) for word in words]
        code, out, err = called(self.capfd, *words, *(RUN[kind] if rehearsed else ()))
        self.code = next(iter(re.findall(r"\b(?:\w{4}-){3}\w{4}\b", out)), self.code)
        if into:
            Path(into[0]).write_text(out, encoding="utf-8")
        return "" if code in EXIT_CODES.get(kind, {0}) else f"{command}\nended with {code}: {out[-400:]}{err[-800:]}"

    def _in_shell(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.variables}
        return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In a folder with a site's audit log, an image and a folder of each class; public data sets' images are black."""
    for name in [name for name in os.environ if name.startswith("PROTOFED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arrays, "_torchvision_half", _black)
    monkeypatch.setattr(arrays, "_read_npz", _black_file)
    _write_audit_log(tmp_path / "state", STANDS_FOR["RUN"])
    save(tmp_path / "scans" / "one.png", ramp(8, 8, 1))
    classes(tmp_path / "data" / "images", dict.fromkeys(("Melanoma", "Naevus", "Keratosis"), 15))
    return Terminal(capfd, monkeypatch)


def _black(name: str, root: Path, data: Data, train: bool) -> DataSplit:
    """Of CIFAR-10 and MNIST: as large, but fewer."""
    shape = (1, 28, 28) if name == "MNIST" else (3, 32, 32)
    count = 10_000 if train else 2_000
    return DataSplit(Examples(torch.zeros(1).expand(count, *shape), torch.from_numpy(np.arange(count) % 10)))


def _black_file(path: Path) -> dict[str, NDArray[Any]]:
    """What stands in for a file of the results: CIFAR-10 of 16 x 16 pixels, or HAM10000 by its four sites."""
    side, classes = {"cifar16.npz": (16, 10), "ham10000_sites_28.npz": (28, 7)}[path.name]
    numbers = np.arange(10_000)
    half: dict[str, NDArray[Any]] = {
        "images": np.zeros((len(numbers), side, side, 3), np.uint8),
        "labels": numbers % classes,
    }
    half["site"] = np.asarray([f"site-{number % 4 + 1}" for number in numbers])
    return {f"{name}_{key}": column for name in ("train", "test") for key, column in half.items()}


def _write_audit_log(state: Path, run: str) -> None:
    state.mkdir()
    journal = Journal(state / "audit.jsonl")
    message = pb.CommitRequest(run=run, round=1, task_id="t1", digest=codec.digest(b"x"))
    ClientAudit(journal).sent("fl:7443", "ab" * 32, "CommitUpload", audit_fields(message), message.SerializeToString())
    journal.close()


@pytest.mark.parametrize("page", [page for page in PAGES if page in TYPED])
def test_every_block_is_typed_from_end_to_end(page: str) -> None:
    typed = _what_is_typed(page)
    assert [block.line for block in _blocks(PAGES[page]) if block.body.partition("\n")[2] not in typed] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TYPED])
def test_every_command_is_run_or_marked_as_not_run(page: str, terminal: Terminal) -> None:
    todo = [(block, command) for block in _blocks(PAGES[page]) for command in block.commands() if block.is_run(command)]
    for name, body in FILE.findall(PAGES[page]):
        Path(name).write_text(body, encoding="utf-8")
    before = [terminal.type(command, rehearsed=False) for command in BEFORE.get(page, ()) if todo]
    faults = [f"line {block.line}: {fault}" for block, command in todo if (fault := terminal.type(command))]
    assert not any(before), before
    assert not faults, "\n".join(faults)


def test_no_command_is_in_a_block_of_another_language() -> None:
    texts = {page: GENERATED.sub("", text) for page, text in _read_pages().items()}
    others = [(page, found) for page, text in texts.items() for found in FENCE.finditer(text)]
    hidden = re.compile(r"^ *(?:\$ )?(?:\S*/)?protofed ", re.MULTILINE)
    found = [page for page, block in others if block["language"] not in SHELLS and hidden.search(block["body"])]
    assert found == [], "commands are in blocks of `sh`, with their output in blocks of `console`"


@pytest.mark.parametrize("page", PAGES)
def test_every_mark_fits_its_block(page: str) -> None:
    assert PAGES[page].count("<!-- not run") == sum(block.why is not None for block in _blocks(PAGES[page]))
    for block in _blocks(PAGES[page]):
        commands = [_named(command) for command in block.commands()]
        assert [one for one in block.only if not any(command.startswith(one) for command in commands)] == [], block.line
        assert not (page in TYPED and block.why), f"{TYPED.get(page)} types it"


def test_what_nobody_can_run_and_nobody_marked_is_a_fault(terminal: Terminal) -> None:
    text = "```\nprotofed policies\nprotofed server start\ndocker ps\n```\n"
    (block,) = _blocks(text)
    assert [bool(terminal.type(command)) for command in block.commands()] == [False, True, True]
    (all_marked,) = _blocks(f"<!-- not run: a server -->\n\n{text}")
    assert [all_marked.is_run(command) for command in all_marked.commands()] == [False, False, False]
    (marked,) = _blocks(f"<!-- not run (server start, docker): a server -->\n\n{text}")
    assert [marked.is_run(command) for command in marked.commands()] == [True, False, False]


def test_a_command_that_fails_is_a_fault_and_its_output_goes_where_it_is_led(terminal: Terminal) -> None:
    assert terminal.type("protofed recipes digits-fedavg > mine.toml") == ""
    assert "rounds = " in Path("mine.toml").read_text(encoding="utf-8")
    assert "ended with 78" in terminal.type("protofed simulate mine.toml --set plan.lr=fast")
    assert terminal.type("name=$(printf trio)") == ""
    assert terminal.type("venv/bin/protofed client preview digits-$name --policy standard") == ""
