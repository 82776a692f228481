"""The doctor's table, verdict and exit code; every finding is registered and told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.doctor_rows import findings, rows, skipped

from protofed.client.transport.diagnosis import DiagnosisCode
from protofed.common.errors import ConfigError, StateError
from protofed.common.pki.identity import IdentityError, IdentityProblem
from protofed.deploy import shipped
from protofed.deploy.cli import doctor, main
from protofed.deploy.doctor.checks import (
    DIAGNOSES,
    Check,
    CheckFailedError,
    CheckRow,
    CheckSkippedError,
    State,
    diagnosis,
    first_finding,
    plain,
    run_checks,
    verdict,
)
from protofed.deploy.doctor.checks import table as shown

Run = Callable[..., tuple[int, str, str]]
FINE, WARNED = CheckRow("a", State.FINE, "good"), CheckRow("b", State.WARNING, "low", diagnosis("disk-low"))
BAD, WORSE = (
    CheckRow("c", State.FINDING, "x", diagnosis("disk-full")),
    CheckRow("d", State.FINDING, "y", diagnosis("not-tls")),
)
GONE = CheckRow("e", State.SKIPPED, "needs `c`")


def fails(error: Exception) -> Callable[[], str]:
    def look() -> str:
        raise error

    return look


def test_all_checks_are_made_in_order_but_what_depends_on_a_finding() -> None:
    found = rows(
        [
            Check("one", lambda: "seen"),
            Check("two", fails(CheckFailedError("disk-full", "0.1 GiB"))),
            Check("three", fails(AssertionError("never")), needs=("two",)),
            Check("four", fails(AssertionError("never")), needs=("one", "three")),
            Check("five", lambda: "seen too", needs=("one",)),
        ]
    )
    assert [row.state for row in found.values()] == ["fine", "finding", "skipped", "skipped", "fine"]
    assert skipped(found) == {"three": "needs `two`", "four": "needs `three`"}
    look = [
        Check("one", fails(CheckFailedError("disk-low", "2 GiB"))),
        Check("two", fails(CheckSkippedError("not asked for"))),
    ]
    found = rows([*look, Check("three", lambda: "seen", needs=("one", "two"))])
    assert [row.state for row in found.values()] == ["warning", "skipped", "fine"]
    told: list[str] = []
    list(run_checks([Check("one", lambda: ""), Check("two", lambda: "", needs=("one",))], told.append))
    assert told == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (IdentityError(IdentityProblem.KEY_OPEN, "said"), "key-readable-by-others"),
        (ConfigError("said"), "recipe-invalid"),
        (StateError("said"), "recipe-invalid"),
        (ZeroDivisionError("said"), "check-failed"),
    ],
)
def test_errors_have_names(error: Exception, name: str) -> None:
    found = rows([Check("one", fails(error), "recipe-invalid"), Check("two", lambda: "seen")])
    assert findings(found) == [("one", name)]
    assert "said" in found["one"].message


@pytest.mark.parametrize(
    ("seen", "strict", "name", "said"),
    [
        ([FINE, GONE], True, None, "all well: 1 check, 1 did not apply"),
        ([FINE, WARNED], False, None, "all well but for 1 warning: 2 checks"),
        ([FINE, WARNED], True, "disk-low", "1 warning; disk-low: exit code 27"),
        ([WARNED, BAD, GONE, WORSE], False, "disk-full", "2 findings, 1 warning; the first is disk-full: exit code 26"),
        ([WARNED, BAD], True, "disk-low", "1 finding, 1 warning; the first is disk-low: exit code 27"),
    ],
)
def test_the_verdict_names_the_first_finding(seen: list[CheckRow], strict: bool, name: str | None, said: str) -> None:
    worst = first_finding(seen, strict=strict)
    assert (worst and worst.name) == name
    assert said in verdict(seen, strict=strict)


def test_a_finding_is_told_by_name_with_what_was_seen_and_what_to_do() -> None:
    console = Console(file=StringIO(), width=200)
    console.print(shown([FINE, WARNED, BAD, GONE]))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines == [
        "✓  a  good",
        "!  b  disk-low: low",
        "      → Free space before it runs out.",
        "✗  c  disk-full: x",
        "      → Free space or inodes, but not in the state folder; or move --state to another disk.",
        "–  e  needs `c`",
    ]
    told = plain([FINE, BAD], strict=False)
    assert told["exit_code"] == 26
    assert told["checks"][0] == {"check": "a", "state": "fine", "seen": "good"}
    assert told["checks"][1]["finding"] == "disk-full"
    assert told["checks"][1]["remedy"] == diagnosis("disk-full").remedy
    assert told["checks"][1]["code"] == 26


def test_every_finding_has_a_name_and_a_code_of_its_own() -> None:
    assert len({one.code for one in DIAGNOSES.values()}) == len(DIAGNOSES)
    assert sorted(codes := [one.code for one in DIAGNOSES.values()]) == codes, "the table is in their order"
    for one in DIAGNOSES.values():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", one.name)
        assert 10 <= one.code <= 63 or 80 <= one.code < 100, "64 to 78 are codes of errors"
        assert one.remedy.endswith(".")
    assert {flaw.value for flaw in IdentityProblem} <= DIAGNOSES.keys()
    told_otherwise = {DiagnosisCode.FINE, DiagnosisCode.OWN_CERTIFICATE, DiagnosisCode.BUSY}
    assert {kind.value for kind in DiagnosisCode if kind not in told_otherwise} <= DIAGNOSES.keys()
    with pytest.raises(ConfigError, match="'disk-full'"):
        diagnosis("disk-ful")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(doctor.console, "width", 400)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.main([str(arguments[0]), "doctor", *map(str, arguments[1:])])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_the_exit_code_is_the_first_findings_or_a_strict_warnings(run: Run, tmp_path: Path) -> None:
    code, out, err = run("server", "--identity=none", "--state", tmp_path / "s", "--listen", "127.0.0.1:0", "--recover")
    assert (code, err) == (0, ""), out
    assert out.splitlines()[-1].startswith("all well: ")
    assert not list(tmp_path.iterdir())
    code, out, _ = run("server", "--state", tmp_path, "--recipe", tmp_path / "none.toml")
    assert code == diagnosis("connection-not-chosen").code
    assert "✗  recipes" in out
    assert "none.toml" in out
    assert out.splitlines()[-1] == "2 findings; the first is connection-not-chosen: exit code 11"
    known = ("server", "--identity=none", "--state", tmp_path / "s", "--listen", "127.0.0.1:0")
    limited = tmp_path / "server.toml"
    limited.write_text("memory_limit_mb = 100\n", encoding="utf-8")
    code, out, _ = run(*known, "--settings", limited)
    assert (code, "all well but for 1 warning" in out) == (0, True)
    code, out, _ = run(*known, "--settings", limited, "--strict")
    assert (code, "1 warning; memory-small: exit code 36" in out) == (36, True)


def test_a_typo_in_the_settings_is_named_and_the_rest_is_looked_at_all_the_same(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('lisen = "127.0.0.1:7443"\n', encoding="utf-8")
    code, out, _ = run("server", "--settings", file, "--json")
    told = json.loads(out)
    by_name = {check["check"]: check for check in told["checks"]}
    assert code == told["exit_code"] == 10
    assert "unknown key 'lisen': did you mean 'listen'?" in by_name["settings"]["seen"]
    assert by_name["software"]["state"] == "fine"
    assert by_name["ledger"] == {"check": "ledger", "state": "skipped", "seen": "needs `settings`"}


def test_options_are_those_of_the_daemon(run: Run, tmp_path: Path, unused_port: int) -> None:
    site = shipped.folder("sites") / "digits.toml"
    policy = shipped.folder("policies") / "strict.toml"
    code, out, _ = run(
        *(
            "client",
            "--settings",
            site,
            "--site",
            "a",
            "--policy",
            policy,
            "--state",
            tmp_path / "c",
            "--identity=none",
        ),
        *("--server", f"127.0.0.1:{unused_port}", "--role", "evaluator", "--device", "cpu", "--partition-index", "1"),
        *("--give-up-after", "3", "--until-finished", "--quick", "--json"),
    )
    told = {check["check"]: check for check in json.loads(out)["checks"]}
    assert told["settings"]["seen"] == f"site a, evaluator, server 127.0.0.1:{unused_port}"
    assert code == told["server"]["code"] == diagnosis("nothing-listens").code
    assert "metrics" in doctor.options({"metrics": "127.0.0.1:9464"})
    assert run("client", "--polcy", policy)[0] == 2
