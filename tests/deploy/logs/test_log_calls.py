"""Every log call of the sources: an event that can be searched for, and keys that everybody knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("server", "client", "common", "deploy")
LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception", "msg", "log"})
IDS = frozenset({"run", "round", "site", "incident"})  # what belongs together is found by these
UNITS = ("_s", "_bytes", "_mb", "_left")
KEYS = IDS | {
    *(
        "why",
        "reason",
        "code",
        "because",
        "number",
        "verdict",
        "outcome",
        "task_status",
        "phase",
        "hold",
        "event",
        "exc_info",
        *("epsilon", "delta"),  # of a privacy budget
        *("classes", "needed", "norm", "scale"),  # of a robust rule
    ),  # in words
    *("attempt", "cohort", "sites", "scores", "complete", "task_id", "digest", "blob", "kind", "roles", "training"),
    *("after_epoch", "tried", "promises", "first", "blobs", "uploads", "count", "of", "calls", "refused"),  # numbers
    *("operator", "party", "name", "peer", "call", "fingerprint", "certificate", "until", "days_left", "kept"),
    *("server", "address", "listen", "url", "metrics", "device", "software", "version", "state", "folder", "path"),
    *("missing", "where"),
    *("connections", "descriptors", "in_s", "for_s", "limit_mb", "update_bytes"),
    *("library", "text", "line", "thread", "exit_code"),  # of what others say
    *("tracker", "runs", "rounds", "ranks", "budget", "claimed", "counted", "mode"),
    *("channel", "notice", "id", "answer", "aside", "subgroups"),  # of what people are told
}
SPLATS = frozenset({"fields", "caller", "told", "whose", "at", "_holder(row)", "why", "peer.site()", "more"})


def log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("log", "logger", "_log")
            and node.func.attr in LEVELS
        ):
            yield node


SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder / "protofed").rglob("*.py"))
USERS = [path for path in SOURCES if any(log_calls(ast.parse(path.read_text(encoding="utf-8"))))]


def events(node: ast.expr) -> list[str]:
    """The event of a call; of one that depends, all."""
    if isinstance(node, ast.IfExp):
        return events(node.body) + events(node.orelse)
    assert isinstance(node, ast.Constant), f"line {node.lineno}: an event is a literal, and its values are keys"
    return [str(node.value)]


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_events_are_fixed_sentences_with_known_keys_that_say_which_run(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for call in log_calls(tree):
        (said,) = call.args
        if path.name != "logs.py" or not isinstance(said, ast.Attribute):  # one hook, two events
            for event in events(said):
                assert re.fullmatch(r"[a-z][a-z ,;:/'`-]*", event), f"line {call.lineno}: {event!r}"
                assert event == event.strip()
        for word in call.keywords:
            if word.arg is None:
                assert ast.unparse(word.value) in SPLATS, f"line {call.lineno}: **{ast.unparse(word.value)}"
            else:
                assert word.arg in KEYS or word.arg.endswith(UNITS), f"line {call.lineno}: unknown key {word.arg}"
    for call in log_calls(ast.parse(path.read_text(encoding="utf-8"))):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
        for key, value in given.items():
            last = value.rpartition(".")[2]
            assert last not in IDS or key == last, f"line {call.lineno}: {key}={value}; expected the key {last}"
            assert key not in ("task", "error", "exception", "message"), f"line {call.lineno}: {key}; say why"


def test_there_are_log_calls_in_server_client_common_and_deploy() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in USERS} == set(FOLDERS)
