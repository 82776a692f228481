"""`protofed runs …` and `protofed sites …`, against a real server."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import typer
from rich.console import Console
from tests.support.command_line import Answers, called
from tests.support.disturbed_run import RUN, SITES, close_channels, disturbed_run, update_of
from tests.support.pki import Authority
from tests.support.tls_server import TlsServer, tls_server

from protofed.common import codec
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.payload import Part
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import Role, TaskKind
from protofed.deploy import shipped
from protofed.deploy.cli import completion, main
from protofed.deploy.cli import operator as cli_operator
from protofed.deploy.operator import tables
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.storage.rows import RoundRow, TaskRow

RecipeOf = Callable[..., Recipe]
FEDNH = "digits-fednh"
RECIPE = shipped.folder("recipes") / f"{FEDNH}.toml"


class Terminal:
    """The command line in this process, told of a server by the environment."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        return called(self._capfd, *arguments)

    def says(self, *arguments: object) -> str:
        """What a command prints that succeeds."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return out

    def json(self, *arguments: object) -> Any:
        """As `says`, read."""
        return json.loads(self.says(*arguments, "--json"))

    def refuses(self, code: int, *arguments: object) -> str:
        """The one line that a command prints that fails."""
        ended, _, err = self(*arguments)
        (said,) = [line for line in err.splitlines() if line.startswith("protofed: ")]
        assert ended == code, err
        assert "Traceback" not in err
        return said


@pytest.fixture
def protofed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(cli_operator.console, "width", 80)  # whatever COLUMNS was when it was made
    yield Terminal(capfd)
    structlog.reset_defaults()  # the server of this process logs on when what is captured has been closed


@pytest.fixture
def server(live_server: Callable[..., Any], recipe_of: RecipeOf, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One run, which waits for sites."""
    return commanded(live_server(recipe_of("fedavg")), monkeypatch)


def commanded(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server, which the operator's commands now call."""
    monkeypatch.setenv("PROTOFED_OPERATOR_SERVER", server.address)
    monkeypatch.setenv("PROTOFED_OPERATOR_IDENTITY", "none")
    return server


@pytest.fixture
def troubled(
    live_server: Callable[..., Any], recipe_of: RecipeOf, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    """A run in which several things went wrong, and the daemons of its sites."""
    found, daemons = disturbed_run(live_server, recipe_of)
    yield commanded(found, monkeypatch), daemons
    close_channels(daemons)


@pytest.mark.usefixtures("server")
def test_a_run_is_started_by_its_file_or_name_and_listed(protofed: Terminal) -> None:
    assert protofed.says("runs", "start", RECIPE) == f"{FEDNH}: queued\n"
    assert protofed.json("runs", "start", FEDNH, "--name", "again")["status"] == "queued"
    out = protofed.says("runs", "show")
    assert [line.split()[:5] for line in out.splitlines()[1:] if not line.startswith(" ")] == [
        [RUN, "fedavg", "running", "0/3", "0/0"],
        [FEDNH, "fednh", "queued", "0/20", "0/0"],
        ["again", "fednh", "queued", "0/20", "0/0"],
    ]
    assert [info["run"] for info in protofed.json("runs", "show")] == [RUN, FEDNH, "again"]


@pytest.mark.usefixtures("server")
def test_a_run_is_paused_resumed_and_ended(protofed: Terminal) -> None:
    assert protofed.says("runs", "pause", RUN) == f"{RUN}: paused, no round opens after round 0\n"
    assert protofed.says("runs", "resume", RUN) == f"{RUN}: running\n"
    told = protofed.says("runs", "abort", RUN, "--yes", "--reason", "wrong [data] [/]")
    assert told == f"{RUN}: aborted in round 0: wrong [data] [/]\n"
    for command in (["pause"], ["resume"], ["abort", "--yes"]):
        assert f"run '{RUN}' has ended: wrong [data] [/]" in protofed.refuses(78, "runs", *command, RUN)
    assert "wrong [data] [/]" in protofed.says("runs", "show", RUN)
    assert "aborted" in protofed.says("runs", "show")


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("order", [("abort", RUN), ("rollback", RUN, "0")], ids=" ".join)
def test_what_cannot_be_taken_back_is_asked_first(
    protofed: Terminal, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--yes" in protofed.refuses(78, "runs", *order)  # nobody can be asked
    monkeypatch.setattr(sys, "stdin", Answers("n\n"))
    code, _, asked = protofed("runs", *order)
    assert code == 1
    assert f"{RUN} (running, round 0 of 3)" in asked
    assert protofed.json("runs", "show")[0]["status"] == "running"
    monkeypatch.setattr(sys, "stdin", Answers("y\n"))
    assert protofed("runs", "abort", RUN)[0] == 0
    assert protofed.json("runs", "show")[0]["status"] == "aborted"


@pytest.mark.usefixtures("server")
def test_orders_are_told_as_json(protofed: Terminal) -> None:
    assert protofed.json("runs", "pause", RUN)["status"] == "paused"
    assert protofed.json("runs", "resume", RUN)["status"] == "running"
    assert protofed.json("runs", "abort", RUN, "-y")["reason"] == "aborted by the operator"


@pytest.mark.usefixtures("troubled")
def test_what_went_wrong_is_shown_and_the_run_goes_back(protofed: Terminal) -> None:
    out = protofed.says("runs", "show", RUN)
    said = " ".join(out.split())
    for phrase in (
        f"{RUN} · fedavg · running · round 2 of 3 · 0 of 6 sites reported",
        "DEGRADED: 1 round used fewer sites than wanted",
        "1 1 degraded",
        "1 failed, 1 late, 1 rejected, 3",
        "1 1 site-1 fit reported refused as not-finite: body/w has values that are not finite",
        "1 1 site-5 fit failed out-of-memory",
        "1 1 site-6 fit late training, epoch 1/3, last progress",
        "1 1 site-4 fit rejected its norm of",
    ):
        assert phrase in said, out
    assert "site-2" not in out[out.index("what failed") :]  # above it is whose updates the open round waits for
    everything = protofed.says("runs", "show", RUN, "--all")
    assert all(site in everything for site in SITES)
    detail = protofed.json("runs", "show", RUN)
    assert detail["info"]["degraded"] == 1
    tasks = {task["site"]: task["task_status"] for task in detail["rounds"][1]["sites"]}
    assert [tasks[site] for site in SITES] == ["reported", "reported", "reported", "rejected", "failed", "late"]
    assert protofed.says("runs", "rollback", RUN, 0, "--yes") == f"{RUN}: continues after round 0 (running)\n"
    assert protofed.json("runs", "rollback", RUN, 0, "--yes")["rolled_back"] >= 2
    out = protofed.says("runs", "show", RUN)
    assert "rolled-back" in out
    assert "attempts rolled back" in " ".join(out.split())
    assert "expected one of 0" in protofed.refuses(78, "runs", "rollback", RUN, 9, "--yes")


def test_states_are_verified_and_one_that_differs_is_an_error(
    troubled: tuple[Any, Any], protofed: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = troubled
    out = protofed.says("runs", "verify", RUN)
    assert [line.split()[0::3] for line in out.splitlines() if line[:1].isdigit()] == [["0", "same"], ["1", "same"]]
    found = protofed.json("runs", "verify", RUN)
    assert [(row["round"], row["attempt"], row["finding"]) for row in found] == [(0, 1, "same"), (1, 1, "same")]
    with monkeypatch.context() as patched:
        patched.setattr(FedAvgServer, "aggregate", lambda *_: update_of(9.0))
        said = protofed.refuses(1, "runs", "verify", RUN)
    assert f"run {RUN}: the states of rounds 1 cannot be reproduced" in said
    blob = server.blobs._path(found[1]["published"])
    blob.write_bytes(b"rotten")
    code, out, _ = protofed("runs", "verify", RUN)
    assert (code, "damaged" in out, "has changed on disk" in " ".join(out.split())) == (1, True, True)
    blob.unlink()
    assert "not-kept" in protofed.says("runs", "verify", RUN)


@pytest.mark.usefixtures("troubled")
def test_sites_are_listed_kept_out_and_let_in_again(protofed: Terminal) -> None:
    rows = {line.split()[0]: line.split() for line in protofed.says("sites", "list").splitlines()[1:]}
    assert list(rows) == SITES
    assert rows["site-6"][1:4] == ["trainer", "working", "0"]  # none of its epochs is done
    assert "task" in protofed.says("sites", "list").splitlines()[0]
    assert protofed.says("sites", "exclude", "site-6", "--reason", "[wrong]") == "site-6: excluded ([wrong])\n"
    rows = {line.split()[0]: line.split() for line in protofed.says("sites", "list").splitlines()[1:]}
    assert rows["site-6"][1:] == ["trainer", "excluded", "[wrong]"]
    assert protofed.json("sites", "exclude", "site-5")["excluded"] == "by the operator"
    assert protofed.says("sites", "admit", "site-6") == "site-6: admitted\n"
    assert protofed.json("sites", "admit", "site-5")["status"] == "away"
    assert [info["site"] for info in protofed.json("sites", "list")] == SITES
    assert "is not excluded" in protofed.refuses(78, "sites", "admit", "site-5")
    assert "is no id" in protofed.refuses(78, "sites", "exclude", "Site 5")
    for order in ("exclude", "admit", "forget"):
        assert "did you mean 'site-5'?" in protofed.refuses(78, "sites", order, "sit-5")
    assert "no secure aggregation was opened yet" in protofed.refuses(78, "sites", "regroup", "site-5", "--yes")
    assert protofed.says("sites", "forget", "site-5") == "site-5: forgotten\n"
    protofed.says("sites", "exclude", "site-6", "--reason", "[wrong]")
    assert protofed.says("sites", "forget", "site-6") == "site-6: forgotten, and its exclusion with it ([wrong])\n"
    assert [info["site"] for info in protofed.json("sites", "list")] == SITES[:-2]


@pytest.mark.usefixtures("server")
def test_a_server_of_nothing_says_what_to_do_and_the_shell_offers_its_runs(
    protofed: Terminal, unused_port: int
) -> None:
    assert protofed.says("sites", "list") == "No site has enrolled yet.\n"
    console = Console(width=80)
    with console.capture() as shown:
        console.print(tables.runs_table([]))
    assert shown.get() == "No runs yet. Start one with: protofed runs start RECIPE\n"
    context = typer.Context(typer.main.get_command(main.app))
    context.params = {"server": os.environ["PROTOFED_OPERATOR_SERVER"], "identity": "none"}
    assert completion.runs(context, "") == [RUN]
    assert completion.runs(context, "other") == []
    context.params["server"] = f"127.0.0.1:{unused_port}"
    assert completion.runs(context, "") == completion.sites(context, "") == []


# Refusals

COMMANDS = [
    ("runs", "show"),
    ("runs", "show", "x"),
    ("runs", "watch", "x"),
    ("runs", "start", FEDNH),
    ("runs", "pause", "x"),
    ("runs", "resume", "x"),
    ("runs", "abort", "x", "--yes"),
    ("runs", "rollback", "x", "0", "--yes"),
    ("runs", "verify", "x"),
    ("sites", "list"),
    ("sites", "exclude", "x"),
    ("sites", "admit", "x"),
    ("sites", "forget", "x"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_where_no_server_is_every_command_says_so(
    protofed: Terminal, command: tuple[str, ...], unused_port: int
) -> None:
    said = protofed.refuses(69, *command, "--server", f"127.0.0.1:{unused_port}", "--identity=none")
    assert f"no answer from the server at 127.0.0.1:{unused_port}; nothing listens at the server" in said


@pytest.mark.usefixtures("server")
def test_what_the_server_refuses_is_said_in_its_words(protofed: Terminal, tmp_path: Path) -> None:
    for command in ("show", "watch", "pause", "resume", "abort", "verify"):
        said = protofed.refuses(78, "runs", command, "other")
        assert f"there is no run 'other'; expected one of: {RUN}" in said
    said = protofed.refuses(78, "runs", "start", FEDNH, "--name", RUN)
    assert said.endswith(f"there is a run '{RUN}' already; give the recipe another name, or --name")
    assert "did you mean 'digits-fednh'?" in protofed.refuses(78, "runs", "start", "digits-fedhn")
    assert "is no id" in protofed.refuses(78, "runs", "start", FEDNH, "--name", "../x")
    (tmp_path / "bad.toml").write_text(RECIPE.read_text("utf-8").replace('"fednh"', '"fedhn"', 1), "utf-8")
    assert "fedhn" in protofed.refuses(78, "runs", "start", tmp_path / "bad.toml")


@pytest.fixture
def tls(live_server: Callable[..., Any], recipe_of: RecipeOf, tmp_path: Path) -> Iterator[TlsServer]:
    with tls_server(tmp_path / "identities", live_server, recipe_of("fedavg")) as made:
        yield made


def test_an_operator_is_known_by_its_certificate(
    protofed: Terminal, tls: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_OPERATOR_SERVER", tls.server.address)
    boss = tls.identity("boss", Party.OPERATOR)
    assert RUN in protofed.says("runs", "show", "--identity", boss)
    monkeypatch.setenv("PROTOFED_OPERATOR_IDENTITY", str(boss))
    assert protofed.json("runs", "pause", RUN)["status"] == "paused"
    protofed.refuses(69, "runs", "show", "--identity=none")  # the option counts: the server speaks TLS only


def test_who_is_no_operator_is_told_why(protofed: Terminal, tls: TlsServer) -> None:
    def refuses(code: int, identity: Path) -> str:
        return protofed.refuses(code, "runs", "show", "--server", tls.server.address, "--identity", identity)

    stranger = tls.identity("stranger", Party.OPERATOR)
    assert "of operator 'stranger' is not registered here" in refuses(76, stranger)
    assert "is the certificate of site 'site-1'" in refuses(78, tls.identity("site-1", Party.SITE))
    assert "certificate missing" in refuses(78, tls.folder / "nowhere")
    foreign = Authority.make().issue(tls.folder / "foreign", Party.OPERATOR, "boss")
    assert "its certificate is not of a CA in our ca.pem" in refuses(69, foreign)
    (foreign / "ca.pem").write_bytes((foreign / "ca.pem").read_bytes() + tls.authority.pem)
    assert "it does not know the CA of our certificate" in refuses(69, foreign)


def test_a_run_that_the_registered_sites_cannot_make_up_is_refused_until_it_is_forced(
    protofed: Terminal, tls: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOFED_OPERATOR_SERVER", tls.server.address)
    monkeypatch.setenv("PROTOFED_OPERATOR_IDENTITY", str(tls.identity("boss", Party.OPERATOR)))
    with tls.operator() as operator:
        operator.register((tls.identity("site-1", Party.SITE) / "cert.pem").read_text("ascii"))
    order = ("runs", "start", FEDNH, "--set", 'federation.required_sites=["sit-1"]')
    said = protofed.refuses(78, *order)
    assert "5 trainers are needed (min_sites = 5), and 1 may take part: site-1" in said
    assert "did you mean 'site-1'?" in said
    assert said.endswith("--force queues it as it is")
    code, out, err = protofed(*order, "--force")
    assert (code, out) == (0, f"{FEDNH}: queued\n")
    remarks = [line.partition(":")[0] for line in err.splitlines() if not line.startswith("{")]  # the server logs too
    assert remarks == ["note", "note", "warning", "warning"]
    assert "sites under the policies standard and strict decline such a run" in err
    assert "warning: required_sites names 'sit-1'" in protofed.says("runs", "show", FEDNH)
    assert len(protofed.json("runs", "show", FEDNH)["info"]["unmet"]) == 2


def test_certificates_are_registered_listed_and_revoked(protofed: Terminal, tls: TlsServer) -> None:
    pem = (tls.identity("site-1", Party.SITE) / "cert.pem").read_text("ascii")
    with tls.operator() as operator:
        info = operator.register(pem)
        assert (info.party, info.name, info.status) == ("site", "site-1", "valid")
        assert operator.register(pem) == info
        assert list(info.roles) == ["trainer"]
        assert list(operator.register(pem, ["evaluator"]).roles) == ["evaluator"]
        with pytest.raises(ConfigError, match="role 'operator' is none of a site"):
            operator.register(pem, ["operator"])
        second = tls.authority.issue(tls.folder / "second", Party.SITE, "site-1") / "cert.pem"
        with pytest.raises(ConfigError, match="--renewal"):
            operator.register(second.read_text("ascii"))
        assert [(one.party, one.name) for one in operator.certificates()] == [("operator", "boss"), ("site", "site-1")]
        with pytest.raises(ConfigError, match=r"no certificate .*'site-2'"):
            operator.revoke("site-2", "lost")
        (gone,) = operator.revoke("site-1", "laptop lost")
        assert (gone.fingerprint, gone.status, gone.reason) == (info.fingerprint, "revoked", "laptop lost")
        assert gone.revoked_at > gone.added_at
        with pytest.raises(ConfigError, match=r"was revoked on .*: laptop lost; that is for ever"):
            operator.register(pem)


def test_sites_are_listed_with_the_end_of_their_certificates_and_its_revocation(
    protofed: Terminal, tls: TlsServer
) -> None:
    tls.site("site-1")
    with tls.operator() as operator:
        (info,) = operator.sites()
    (row,) = [row for row in tls.server.ledger.certificates() if row.name == "site-1"]
    assert info.certificate_until == row.not_after
    where = ("--server", tls.server.address, "--identity", tls.identity("boss", Party.OPERATOR))
    assert time.strftime("%Y-%m-%d", time.gmtime(row.not_after)) in protofed.says("sites", "list", *where)
    current = tls.server.runs.current
    assert current is not None
    presence = current._context.presence
    with tls.operator() as operator:
        assert presence.enrolled(Role.TRAINER) == {"site-1"}
        operator.revoke("site-1", "laptop lost")
        (info,) = operator.sites()
        assert (info.status, info.activity_text, info.certificate_until) == ("revoked", "laptop lost", 0.0)
        assert presence.enrolled(Role.TRAINER) == frozenset()


def scored(server: Any, *values: float) -> None:
    """Rounds of the run that the server has published, from the first, with their accuracies."""
    for number, value in enumerate(values, 1):
        address = server.blobs.put(codec.encode({Part.BODY: {"w": np.full(1, value, np.float32)}}))
        task = TaskRow(f"score-{number}", RUN, number, 1, "eva", TaskKind.SCORE, address, 0)
        server.ledger.open_round(RoundRow(RUN, number, 1, 1, 1), [task])
        server.ledger.publish(RUN, number, 1, address, complete=True)
        server.ledger.add_scores(task, {"global.accuracy": value})


def test_no_round_follows_the_last_one_also_if_it_is_the_best(server: Any, protofed: Terminal) -> None:
    scored(server, 0.5, 0.75, 0.9)
    said = protofed.refuses(78, "runs", "rollback", RUN, "best", "--yes")
    assert "is its last one, 3" in said
    assert f"protofed export {RUN} --round best" in said
    assert "round 3 is the last" in protofed.refuses(78, "runs", "rollback", RUN, 3, "--yes")
    assert "continues after round 2" in protofed.says("runs", "rollback", RUN, 2, "--yes")


def test_a_run_goes_back_to_its_best_round(server: Any, protofed: Terminal) -> None:
    assert "no best round" in protofed.refuses(78, "runs", "rollback", RUN, "best", "--yes")
    assert "expected a number, or best" in protofed.refuses(78, "runs", "rollback", RUN, "first", "--yes")
    scored(server, 0.75, 0.5)
    assert protofed.json("runs", "show", RUN)["best"] == {
        "round": 1,
        "score": "global.accuracy",
        "value": 0.75,
        "kept": 1,
    }
    assert "best: round 1, global.accuracy 0.7500" in protofed.says("runs", "show", RUN)
    assert protofed.says("runs", "rollback", RUN, "best", "--yes") == f"{RUN}: continues after round 1 (running)\n"


def published(server: Any, rounds: range) -> None:
    """Rounds of the run that the server has published, each with a state of its own."""
    for number in rounds:
        address = server.blobs.put(codec.encode({Part.BODY: {"w": np.full(1, number, np.float32)}}))
        task = TaskRow(f"fit-{number}", RUN, number, 1, "ann", TaskKind.FIT, None, 0)
        server.ledger.open_round(RoundRow(RUN, number, 1, 1, 1), [task])
        server.ledger.publish(RUN, number, 1, address, complete=True)


def test_more_rounds_back_than_sites_go_need_force(
    live_server: Callable[..., Any], recipe_of: RecipeOf, protofed: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = commanded(live_server(recipe_of("fedavg", rounds=9)), monkeypatch)
    published(server, range(1, 9))
    said = protofed.refuses(78, "runs", "rollback", RUN, 2, "--yes")
    assert "round 2 is 6 rounds back" in said
    assert f"protofed export {RUN} --round 2." in said
    assert said.endswith("set limits.max_rollback_rounds to 6 or more, then give --force")
    monkeypatch.setattr(sys, "stdin", Answers("n\n"))
    _, _, asked = protofed("runs", "rollback", RUN, 3)
    assert "back to round 3, 5 rounds back? Sites under policy standard go 5 rounds back, under strict 2" in asked
    assert protofed.says("runs", "rollback", RUN, 5, "--yes") == f"{RUN}: continues after round 5 (running)\n"
    assert "6 rounds back" in protofed.refuses(78, "runs", "rollback", RUN, 2, "--yes")  # sites have been in round 8
    assert "continues after round 2" in protofed.says("runs", "rollback", RUN, 2, "--yes", "--force")
