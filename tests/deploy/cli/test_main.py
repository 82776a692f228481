"""Bad input gets one or two lines that say what was expected, and a documented exit code."""

from __future__ import annotations

import io
import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import called
from typer.main import get_command

from protofed.common.deprecated import Renamed, rename_command
from protofed.common.storage.files import Lock
from protofed.deploy import logs, shipped
from protofed.deploy.cli import completion, main
from protofed.deploy.simulation import run_tables

Cli = Callable[..., tuple[int, str, str]]
RECIPE = shipped.folder("recipes") / "digits-fednh.toml"
POLICY = shipped.folder("policies") / "standard.toml"
SERVER = ("server", "start", "--identity=none")
CLIENT = ("client", "start", "--identity=none")
SITE = shipped.folder("sites") / "digits.toml"
SITE_A = ["--settings", SITE, "--site", "a", "--policy", POLICY]


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process: exit code, standard output, standard error."""
    logs.configure()  # a daemon's command of another test left its log's form behind
    return partial(called, capfd)


def altered(folder: Path, *changes: tuple[str, str]) -> Path:
    """The demo's recipe with replaced lines."""
    text = RECIPE.read_text(encoding="utf-8")
    for old, new in changes:
        assert re.search(old, text, re.MULTILINE)
        text = re.sub(old, new, text, count=1, flags=re.MULTILINE)
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def expect(answer: tuple[int, str, str], code: int, *phrases: str) -> None:
    exit_code, _, err = answer
    assert exit_code == code, err
    events = [json.loads(line) for line in err.splitlines() if line.startswith("{")]  # a daemon's log, off a terminal
    said = [line for line in err.splitlines() if line.startswith("protofed: ")]
    said += [event["why"] for event in events if event["event"] == "the process ends"]
    assert len(said) == 1, err
    assert "Traceback" not in err
    for phrase in phrases:
        assert phrase in said[0]


BAD_RECIPES: Sequence[tuple[tuple[str, str], str]] = [
    (('^name = "fednh"', 'name = "fedhn"'), "did you mean 'fednh'?"),
    (("^rounds", "ronds"), "unknown key 'ronds': did you mean 'rounds'?"),
    (("^min_sites", "min_site"), "unknown key 'federation.min_site': did you mean 'min_sites'?"),
    (("^prototype_momentum", "prototype_momentm"), "did you mean 'prototype_momentum'?"),
    (("^prototype_momentum = 0.9", "prototype_momentum = 9"), "prototype_momentum = 9"),
    (("^rounds = 20", "rounds = 0"), "rounds = 0"),
    (('^name = "digits-cnn"', 'name = "digit-cnn"'), "unknown model 'digit-cnn': did you mean 'digits-cnn'?"),
    (("^min_sites", "min_contributors = 1\nmin_sites"), "is for simulations"),
]


@pytest.mark.parametrize(("change", "phrase"), BAD_RECIPES)
def test_a_server_refuses_a_recipe_that_it_cannot_use(
    change: tuple[str, str], phrase: str, protofed: Cli, tmp_path: Path
) -> None:
    recipe = altered(tmp_path, change)
    expect(protofed(*SERVER, "--recipe", recipe, "--state", tmp_path / "s", "--listen", "127.0.0.1:0"), 78, phrase)


@pytest.mark.parametrize(
    ("change", "code", "phrase"),
    [
        (('"digits-cnn"', '"digit-cnn"'), 78, "did you mean 'digits-cnn'?"),
        (("^classes = 10", "classes = 8"), 65, "labels are 0 to 9, but the run has 8 classes"),
        ((r"shape = \[1, 8, 8\]", "shape = [3, 32, 32]"), 65, "[1, 8, 8]"),
        (('source = "digits"', 'source = "npz"\nroot = "nowhere.npz"'), 65, "nowhere.npz"),
        (("sites = 5, beta", "sites = 500, beta"), 65, "500"),
        (("^min_sites = 5", "min_sites = 6"), 78, "min_sites is 6"),
    ],
)
def test_a_simulation_refuses_what_cannot_be_simulated(
    change: tuple[str, str], code: int, phrase: str, protofed: Cli, tmp_path: Path
) -> None:
    expect(protofed("simulate", altered(tmp_path, change)), code, phrase)


def test_a_recipe_is_known_by_name_or_file(protofed: Cli, tmp_path: Path) -> None:
    expect(protofed("simulate", "digits-fedhn"), 78, "did you mean 'digits-fednh'?")
    expect(protofed(*SERVER, "--recipe", tmp_path / "no.toml", "--state", tmp_path), 78, "no.toml", "No such file")


@pytest.mark.parametrize("kind", ["policies", "recipes"])
def test_what_comes_along_is_listed_and_printed_as_it_is(kind: str, protofed: Cli) -> None:
    listed = json.loads(protofed(kind, "--json")[1])
    files = shipped.files(kind)
    assert {row["name"]: row["what"] for row in listed} == {name: shipped.what(file) for name, file in files.items()}
    for name in ("standard", "open") if kind == "policies" else ("digits-fednh", "ham10000-fednh"):
        code, out, _ = protofed(kind, name)
        assert (code, out) == (0, files[name].read_text(encoding="utf-8"))
    expect(protofed(kind, "digits-fedhn" if kind == "recipes" else "standart"), 78, "did you mean")


def test_a_recipe_that_extends_another_says_so_beside_its_text(protofed: Cli) -> None:
    assert "digits-fedavg.toml" in protofed("recipes", "digits-fedprp")[2]
    code, out, err = protofed("recipes", "digits-fedprp", "--resolved")
    assert (code, out, err) == (0, shipped.resolved("digits-fedprp"), "")


def test_a_policy_can_be_named_wherever_its_file_can(protofed: Cli, tmp_path: Path) -> None:
    by_name = protofed("client", "preview", "digits-fednh-secure", "--policy", "standard", "--json")
    assert by_name == protofed("client", "preview", "digits-fednh-secure", "--policy", POLICY, "--json")
    for words in (("client", "preview", "digits-fednh"), ("simulate", "digits-fednh")):
        expect(protofed(*words, "--policy", "standart"), 78, "did you mean 'standard'?")
    site = ("--settings", SITE, "--site", "a", "--policy", "standart")
    expect(protofed("client", "check", "--settings", SITE, "--policy", "standart"), 78, "did you mean 'standard'?")
    expect(protofed(*CLIENT, *site, "--state", tmp_path / "s"), 78, "did you mean 'standard'?")


def test_a_server_without_recipe_serves_and_has_nothing_left_to_do(protofed: Cli, tmp_path: Path) -> None:
    code, told, err = protofed(*SERVER, "--state", tmp_path, "--listen", "127.0.0.1:0", "--until-finished")
    assert code == 0, err
    assert "listening on 127.0.0.1:" in told


@pytest.mark.parametrize("listen", ["0.0.0.0:7443", "192.0.2.7:7443", "example.org:7443", "7443", "127.0.0.1:x"])
def test_plain_text_never_leaves_the_machine(listen: str, protofed: Cli, tmp_path: Path) -> None:
    expect(protofed(*SERVER, "--recipe", RECIPE, "--state", tmp_path / "s", "--listen", listen), 78, "loopback")
    arguments = [*SITE_A, "--state", tmp_path / "c", "--server", listen]
    expect(protofed(*CLIENT, *arguments), 78, "loopback")
    expect(protofed("runs", "show", "--server", listen, "--identity=none"), 78, "loopback")


def test_nothing_is_plain_text_unless_it_is_asked_for(protofed: Cli, tmp_path: Path) -> None:
    said = ("--identity FOLDER", "--identity none")
    expect(protofed("server", "start", "--state", tmp_path / "s"), 78, *said)
    expect(protofed("client", "start", *SITE_A, "--state", tmp_path / "c"), 78, *said)
    expect(protofed("runs", "show"), 78, *said)


def test_a_taken_port_and_a_taken_folder_are_said_to_be(protofed: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        expect(protofed(*SERVER, "--recipe", RECIPE, "--state", tmp_path / "s", "--listen", listen), 69, "taken")
    lock = Lock(tmp_path)
    expect(protofed(*SERVER, "--recipe", RECIPE, "--state", tmp_path, "--listen", "127.0.0.1:0"), 74, "in use")
    lock.release()


def test_a_site_does_not_start_without_policy_data_server_or_settings(
    protofed: Cli, tmp_path: Path, unused_port: int
) -> None:
    arguments = ["--settings", SITE, "--site", "a", "--policy", tmp_path / "none.toml", "--state", tmp_path / "c"]
    expect(protofed(*CLIENT, *arguments), 77, "none.toml", "policies standard")
    settings = tmp_path / "site.toml"
    settings.write_text(f'[data]\nsource = "cifar10"\nroot = "{tmp_path / "nowhere"}"\n', encoding="utf-8")
    arguments = ["--settings", settings, "--site", "a", "--policy", POLICY, "--state", tmp_path / "c"]
    expect(protofed(*CLIENT, *arguments), 65, "no data at <data>; mount or copy them there")  # its log hides where
    server = f"127.0.0.1:{unused_port}"
    arguments = [*SITE_A, "--state", tmp_path / "c", "--server", server]
    expect(protofed(*CLIENT, *arguments, "--give-up-after", 0.5), 69, server, "start the server")
    expect(protofed(*CLIENT, "--settings", SITE, "--site", "A b", "--policy", POLICY, "--state", tmp_path), 78, "site")
    expect(protofed(*CLIENT, "--site", "a", "--policy", POLICY, "--state", tmp_path), 78, "'data' is missing")


def test_errors_of_the_program_are_one_line_or_quiet(protofed: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = RuntimeError("Error calling __set_name__")
    interrupted.__cause__ = KeyboardInterrupt()
    errors = iter((RuntimeError("unforeseen"), ModuleNotFoundError(name="torch"), interrupted, RuntimeError("again")))

    def broken(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(shipped, "recipe", broken)
    expect(protofed("simulate", "digits-fednh"), 70, "unforeseen", "--debug")
    expect(protofed("simulate", "digits-fednh"), 78, "torch is not installed", "[client]'")
    assert protofed("simulate", "digits-fednh")[::2] == (130, "")
    with pytest.raises(RuntimeError, match="again"):
        main.main(["--debug", "simulate", "digits-fednh"])


def test_a_simulation_that_stops_early_says_after_which_round(protofed: Cli, tmp_path: Path) -> None:
    # No share improves by 1.
    changes = ("--set", "federation.patience=1", "--set", "federation.min_improvement=1.0")
    code, out, err = protofed("simulate", altered(tmp_path, ("^rounds = 20", "rounds = 4")), *changes, "--json")
    assert code == 0
    (run,) = json.loads(out)
    reason = "stopped early after round 2: global.balanced_accuracy no better by 1 since round 1"
    assert (run["round"], run["phase"], run["failed"]) == (2, reason, False)
    assert reason in err
    assert "best: round " in err
    assert '"global.accuracy"' in out


def test_a_simulation_says_at_its_end_that_its_model_is_of_no_use(protofed: Cli, tmp_path: Path) -> None:
    recipe = altered(tmp_path, ("^rounds = 20", "rounds = 1"))
    code, out, err = protofed("simulate", recipe, "--set", "plan.lr=5", "--json")
    assert code == 0
    (run,) = json.loads(out)
    (warning,) = run["warnings"]
    assert run["phase"] == "completed"
    assert warning["code"] in ("one-class", "chance")
    assert f"{warning['code']}: {warning['text']}" in " ".join(err.split())  # its own line: the log has the text, too


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*path, name))
    if path and not hasattr(command, "commands"):
        yield path, command


GROUPS = [(name,) for name in ("server", "client", "runs", "sites", "certs", "audit")] + [("runs", "show")]


@pytest.mark.parametrize("help_option", ["-h", "--help"])
def test_help_has_two_names_at_every_depth(help_option: str, protofed: Cli) -> None:
    assert [protofed(*words, help_option)[0] for words in ((), *GROUPS)] == [0] * 8


@pytest.mark.parametrize(
    ("path", "command"), list(every_command(get_command(main.app))), ids=lambda value: str(value)[:40]
)
def test_every_command_has_help_with_an_example_that_it_understands(
    path: tuple[str, ...], command: Any, protofed: Cli
) -> None:
    assert "Usage" in protofed(*path, "--help")[1]
    examples = re.findall(r"`protofed (.*?)`", command.help.partition("Example")[2].replace("\n", " "))
    own = [words for words in map(shlex.split, examples) if tuple(words[: len(path)]) == path]
    assert own, f"protofed {' '.join(path)} --help has no example"
    for words in own:
        command.make_context(path[-1], words[len(path) :], resilient_parsing=False)


def test_a_terminal_without_utf_8_gets_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit):
        main.main(["--version"])
    sys.stdout.write("Zürich …")
    sys.stdout.flush()
    assert written.getvalue().endswith(b"Z?rich ?")


def test_ctrl_c_while_the_command_line_is_imported_ends_quietly() -> None:
    interrupted = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'protofed.deploy.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from protofed.deploy.cli.script import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupted_simulation_with_a_state_says_how_it_goes_on(
    protofed: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_tables, "simulate_with_progress", interrupted)
    code, _, err = protofed("simulate", "digits-fednh", "--state", tmp_path / "mine")
    assert (code, "same command" in err, "mine" in err) == (130, True, True)
    assert protofed("simulate", "digits-fednh")[::2] == (130, "")


def test_the_shell_offers_recipes_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    assert "digits-fednh" in completion.recipes("digits")
    assert completion.recipes("mi") == ["mine.toml"]
    assert completion.recipes("fol") == ["folder/"]
    assert completion.recipes("no") == completion.recipes("nowhere/") == []
    assert completion.recipes("x" * 300 + "/") == [], "a folder that cannot be asked for"


def test_version_exit_codes_and_brackets_are_in_the_help(protofed: Cli) -> None:
    code, out, _ = protofed("--version")
    assert code == 0
    assert re.search(r"protofed \d+\.\d+\.\d+", out)
    from protofed.common import errors

    codes = {e.exit_code for e in vars(errors).values() if isinstance(e, type) and hasattr(e, "exit_code")}
    documented = {int(number) for number in re.findall(r"(\d+) [a-z]", main.app.info.epilog or "")}
    assert codes <= documented
    for path, command in every_command(get_command(main.app)):
        texts = [command.help, *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        assert not [text for text in texts if re.search(r"(?<!\\)\[[a-z/]", text)], path  # rich takes it for markup


TRIED = {
    "runs stop a": "did you mean `protofed runs abort`",
    "runs status a": "did you mean `protofed runs show`",
    "sites remove a": "`protofed sites forget`",
}


@pytest.mark.parametrize(("tried", "meant"), TRIED.items())
def test_a_command_that_never_was_is_refused_by_the_right_name(tried: str, meant: str, protofed: Cli) -> None:
    code, _, err = protofed(*tried.split())
    assert code == 2
    assert meant in err


def test_the_help_has_every_command_once_and_an_old_one_does_its_work(
    protofed: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = protofed("--help")
    places = [out.index(f"{panel} \u2500") for panel in (main.HOSPITAL, main.COORDINATOR, main.RESEARCHER)]
    assert places == sorted(places)
    listed = re.findall(r"^\W*([a-z]+) {2,}", out, re.MULTILINE)
    assert [name for name in listed if name in main.COMMANDS] == list(main.COMMANDS)
    renamed = partial(rename_command, commands={"shipped list": Renamed("recipes", "9.0.0")})
    monkeypatch.setattr(main, "rename_command", renamed)
    code, out, err = protofed("shipped", "list")
    assert (code, "digits-fednh" in out) == (0, True)
    assert "`protofed shipped list` is now called `protofed recipes`. Version 9.0.0 does not accept" in out + err


@pytest.mark.parametrize("words", [("runs", "--help"), ("runs", "show", "--help"), ("report", "--help")], ids=" ".join)
def test_a_named_command_is_run_without_reading_the_options_of_all_others(
    words: tuple[str, ...], protofed: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "app", None)
    assert protofed(*words)[0] == 0
