"""The hospital's pages over real state folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser_client import Browser
from tests.support.command_line import called
from tests.support.partners import confirm, listed
from tests.support.policies import standard_with_plain_updates

from protofed.client.policy.approval import FOLDER as APPROVALS
from protofed.client.policy.approval import Approvals, ApprovalStatus
from protofed.client.policy.dp_accountant import NoisySums
from protofed.client.policy.pause import FILE as PAUSE
from protofed.client.policy.pause import SitePause
from protofed.client.policy.policy import Policy
from protofed.client.secure_aggregation.partners import CONFIRMED, OFFERED, open_membership
from protofed.client.state.disk_store import DiskStore
from protofed.client.state.dp_ledger import FILE as LEDGER
from protofed.client.state.dp_ledger import DpLedger
from protofed.client.state.own_scores import FOLDER as SCORES
from protofed.client.state.own_scores import OwnScores
from protofed.client.transport.audit import FILE as AUDIT
from protofed.client.transport.audit import ClientAudit
from protofed.client.transport.grpc_link import GrpcLink
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import Assignment, Role, Task, TaskKind
from protofed.common.storage import files
from protofed.common.storage.journal import Journal, records
from protofed.deploy.pages import shell
from protofed.deploy.pages.hospital.page import client_page
from protofed.deploy.pages.hospital.site_log import SiteLog
from protofed.deploy.pages.shell import Program
from protofed.deploy.simulation.simulation import EVALUATOR, build_agents

NOON = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
RUN = "fednh"
BUDGET = 'methods = ["fedavg"]\nparts = ["body"]\ndp = { epsilon = 8.0, delta = 1e-6, unit = "patient" }\n'
Pages = Callable[..., Browser]


@pytest.fixture
def pages(state: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """The pages of that site, opened by `ann`."""
    monkeypatch.setenv("SUDO_USER", "ann")
    return lambda policy=None: Browser(client_page(state, policy and str(policy), "site-1"))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return standard_with_plain_updates(tmp_path)


@pytest.fixture
def offered(state: Path, recipe_of: Callable[..., Recipe]) -> Recipe:
    """A run that the site was offered, and has not decided on."""
    recipe = recipe_of("fednh", name=RUN)
    Approvals(state / APPROVALS, lambda: NOON).record_offer(Assignment(RUN, recipe.wire(), min_cohort=3))
    return recipe


def status(state: Path, recipe: Recipe) -> ApprovalStatus:
    return Approvals(state / APPROVALS).status(RUN, recipe.wire())


def decided(state: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """The decisions in the audit log, whose chain is checked."""
    return [(record.event, record.facts) for record in records(state / AUDIT) if "decided_at" in record.facts]


def approval(state: Path) -> dict[str, str]:
    """The form with which the page approves the run."""
    return {"recipe": Approvals(state / APPROVALS).offer(RUN).digest}


def test_the_list_of_partners_is_read_and_confirmed(pages: Pages, state: Path, tmp_path: Path) -> None:
    browser = pages("standard")
    assert "takes part in no secure aggregation: no list of partners is confirmed here" in browser.get("/")
    assert "The server offers no list" in browser.get("/partners")
    sites = {"site-1": state, **{site: tmp_path / "others" / site for site in ("north", "south")}}
    offered_list = listed(sites, coordinator="Hospital north")
    (state / OFFERED).write_text(offered_list.document)
    text = browser.get("/partners")
    assert "Hospital south" in text
    assert "runs the server</small>" in text
    assert offered_list.code not in text, "a person types what was heard, not what the page says"
    for form in ({"code": offered_list.code}, {"code": "0000-0000-0000-0000", "sure": "yes"}):
        browser.post("/partners", form, 400)
        assert not (state / CONFIRMED).exists()
    browser.post("/partners", {"code": offered_list.code, "sure": "yes"})
    assert f"Code <code>{offered_list.code}</code>" in browser.get("/partners")
    assert "takes part in no secure aggregation" not in browser.get("/")
    [(event, facts)] = decided(state)
    assert (event, facts["code"], facts["by"]) == ("partners-confirmed", offered_list.code, "ann")


def test_the_overview_has_what_waits_for_a_decision(pages: Pages, offered: Recipe, tmp_path: Path) -> None:
    text = pages().get("/")
    assert f'href="/runs/{RUN}"><strong>{RUN}</strong>' in text
    for approves, waits in (("automatic", False), ("manual", True)):
        (path := tmp_path / f"{approves}.toml").write_text(f'methods = []\nparts = []\napproval = "{approves}"\n')
        assert (f"<strong>{RUN}</strong>" in pages(path).get("/")) is waits
    assert "<dd" in text
    assert "not running" in text


def test_it_says_whether_a_daemon_runs_and_a_look_is_none(pages: Pages, state: Path) -> None:
    browser, lock = pages(), files.Lock(state)
    assert "daemon running<" in browser.get("/")
    lock.release()
    assert "daemon not running<" in browser.get("/")
    (state / "lock").unlink()
    assert "daemon not running<" in browser.get("/")
    assert not (state / "lock").exists()  # looking makes no file
    browser = pages()
    browser.get("/")
    files.Lock(state).release()  # raises if the page has kept it


def test_what_it_does_is_read_from_the_newest_sign_of_it(pages: Pages, state: Path) -> None:
    browser = pages()
    before = browser.get("/")
    assert "epoch 7 of 12" not in before
    journal = Journal(state / AUDIT)
    heartbeat: dict[str, Any] = {"run": "kept", "activity": "training", "epoch": 7, "epochs": 12}
    journal.append("sent", call="Heartbeat", digest="a", bytes=10, facts=heartbeat)
    journal.close()
    lock = files.Lock(state)
    text = browser.get("/?fragment=1")
    lock.release()
    assert "epoch 7 of 12" in text
    assert "data-going" in text  # the script asks again soon
    assert "<html" not in text
    journal = Journal(state / AUDIT)
    journal.append("sent", call="NextTask", digest="b", bytes=10, facts={"site": "site-1"})
    journal.close()
    lock = files.Lock(state)
    text = browser.get("/?fragment=1")
    lock.release()
    assert "waiting for a task" in text
    assert "epoch 7 of 12" not in text


def test_one_look_tells_what_runs_for_whom_and_what_was_sent(pages: Pages, state: Path, tmp_path: Path) -> None:
    tile = re.compile(r'<dd id="(now|whom|sent)".*?</dd>', re.DOTALL)

    def tiles() -> dict[str, str]:
        return {found[1]: re.sub(r"<[^>]+>", " ", found[0]) for found in tile.finditer(pages().get("/"))}

    log = SiteLog(state)
    log.look()
    sent = sum(one.size for one in log.leavings())
    assert "no daemon" in tiles()["now"]
    assert f"{sent / 1000:.1f} kB" in tiles()["sent"]
    assert "in 2 rounds of 1 run" in tiles()["sent"]
    assert "partner" not in tiles()["whom"]
    journal = Journal(state / AUDIT)
    facts: dict[str, Any] = {"run": "kept", "round": 3, "task_id": "t3", "scores": {}, "server": "hub.example:7443"}
    journal.append("sent", call="ReportScores", digest="c", bytes=1_000_000, facts=facts, server="hub.example:7443")
    journal.append("sent", call="Heartbeat", digest="d", bytes=9, facts={"run": "kept", "activity": "training"})
    journal.close()
    confirm(state, listed({"site-1": state, "site-2": tmp_path / "2", "site-3": tmp_path / "3"}))
    lock = files.Lock(state)
    found = tiles()
    lock.release()
    assert "training" in found["now"]
    assert "1.0 MB" in found["sent"]
    assert "in 3 rounds of 1 run" in found["sent"]
    for said in ("The Hub", "and hub.example:7443", "2 partners"):
        assert said in found["whom"]


def test_spent_privacy_stands_beside_the_budget(pages: Pages, state: Path, tmp_path: Path) -> None:
    task = Task(TaskKind.FIT, "digits", 1, "a", Digest("a" * 64), 1, 60.0)
    DpLedger(state / LEDGER).spend(task, "noise", [NoisySums(0.1, 1.5, 10)])
    (path := tmp_path / "budget.toml").write_text(BUDGET)
    text = pages(path).get("/")
    assert 'id="epsilon"' in text
    assert "of 8 for each patient" in text
    browser = pages()
    once = browser.get("/")
    DpLedger(state / LEDGER).spend(replace(task, task_id="b"), "noise", [NoisySums(0.1, 1.5, 10)])
    assert (once.count("ε 1.3 "), browser.get("/").count("ε 1.3 ")) == (1, 0)  # the newest fit counts at once
    (state / LEDGER).write_bytes(b"{}\n" + (state / LEDGER).read_bytes())
    assert 'id="ledger-damaged"' in pages(path).get("/")


def test_without_a_policy_file_the_overview_says_so_and_nothing_is_approved(
    pages: Pages, state: Path, offered: Recipe, tmp_path: Path
) -> None:
    browser = pages(tmp_path / "none.toml")
    assert 'id="no-policy"' in browser.get("/")
    assert 'id="no-preview"' in browser.get(f"/runs/{RUN}")
    browser.post(f"/runs/{RUN}/approve", approval(state), 400)
    assert status(state, offered) is ApprovalStatus.WAITING
    assert decided(state) == []


def test_each_update_is_one_line_with_its_parts_and_verdict(state: Path, pages: Pages) -> None:
    log = SiteLog(state)
    assert log.look().problem == ""
    updates = [one for one in log.leavings("kept") if one.what == "fit"]
    assert [(one.round, one.outcome) for one in updates] == [(2, "accepted"), (1, "accepted")]
    for one in updates:
        assert sum(size for _, _, size in one.parts) > 0
        assert one.size > 5612  # its chunk, and the messages around it
        assert "parts" in one.rules
        assert "metrics" in one.rules
        assert one.numbers.keys() == {"loss"}
    scores = [one for one in log.leavings("kept") if one.what == "scores"]
    assert [one.round for one in scores] == [2, 1]
    assert scores[0].rules == ["metrics"]
    text = pages().get("/left")
    assert text.index(">2</td>") < text.index(">1</td>")  # the newest first
    assert 'id="log-good"' in text


def test_what_left_has_its_reason_its_values_or_the_rule_about_sums(pages: Pages, state: Path) -> None:
    journal = Journal(state / AUDIT)
    journal.append("policy", policy="ours.toml", digest="b" * 64)
    journal.append("refused", run="kept", round=3, task_id="t", why="part <head> may not leave (parts)")
    scores: dict[str, Any] = {"run": "kept", "round": 3, "task_id": "t3", "scores": {"global.accuracy": 0.5625}}
    journal.append("sent", call="ReportScores", digest="c", bytes=77, facts=scores)
    commit: dict[str, Any] = {"run": "kept", "round": 3, "task_id": "m3"}
    journal.append("task", kind="mask", base_digest="", **commit)
    parts: dict[str, Any] = {**commit, "parts": [["secure-aggregation", 1, 800]]}
    journal.append("sent", call="BeginUpload", digest="d", bytes=90, facts=parts)
    journal.append("sent", call="CommitUpload", digest="e", bytes=10, facts=commit)
    journal.append("answered", call="CommitUpload", digest="e", verdict="not-needed")
    journal.close()
    log = SiteLog(state)
    log.look()
    mask, _, refused = log.leavings()[:3]
    assert (refused.outcome, refused.round, refused.policy.name) == ("refused", 3, "ours.toml")
    assert (mask.what, mask.rules, mask.size, mask.outcome) == ("mask", ["secure"], 100, "not-needed")
    answer = pages().client.get("/left").text
    for said in ("part &lt;head&gt; may not leave", "ours.toml", "global.accuracy 0.5625"):
        assert said in answer
    assert "secure aggregation, step mask" in answer


def test_long_logs_are_paged(pages: Pages, state: Path) -> None:
    journal = Journal(state / AUDIT)
    journal.append_all(
        [("refused", {"run": "kept", "round": n, "why": f"reason {n} of many"}) for n in range(100, 160)]
    )
    journal.close()
    browser = pages()
    assert "reason 159 of many" in browser.get("/left?fragment=1").split('id="notes"')[0]
    first, second = (browser.get(f"/left?page={n}").split('id="notes"')[0] for n in (1, 2))
    assert ("reason 135 of many" in first, "reason 134 of many" in first) == (True, False)
    assert "reason 134 of many" in second


def test_a_damaged_log_is_said_on_both_pages_and_what_was_before_is_shown(pages: Pages, state: Path) -> None:
    browser = pages()
    assert "is good" in browser.order("/left/check")
    lines = (state / AUDIT).read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    lines[middle] = lines[middle].replace(b'"at":"2', b'"at":"1')
    (state / AUDIT).write_bytes(b"".join(lines))
    for path in ("/", "/left", "/runs/kept"):
        assert 'id="log-damaged"' in browser.get(path)
    assert "damaged" in browser.order("/left/check")
    log = SiteLog(state)
    assert log.look().problem
    assert [one.round for one in log.leavings("kept") if one.what == "fit"] == [1]


@pytest.mark.parametrize("secure", [False, True])
def test_a_real_run_is_on_the_page_as_the_server_has_it(
    secure: bool, recipe_of: Callable[..., Recipe], live_server: Callable[..., Any], tmp_path: Path, policy: Path
) -> None:
    federation = {"min_sites": 3, "quorum": 1.0, "heartbeat_s": 0.1, "secure": secure}
    recipe = recipe_of("fednh", rounds=2, federation=federation)
    server, folder = live_server(recipe), tmp_path / "site-2"
    with ExitStack() as opened:

        def connect(site: str, roles: frozenset[Role]) -> GrpcLink:
            opened.callback((journal := Journal(tmp_path / site / AUDIT)).close)
            audit = ClientAudit(journal)
            link = GrpcLink(server.address, site, "tested", roles, identity=None, audit=audit, give_up_after_s=20)
            opened.callback(link.close)
            return link

        def store(site: str) -> DiskStore:
            opened.callback((made := DiskStore(tmp_path / site)).close)
            return made

        agents = build_agents(recipe, connect, store, policy=Policy.read(policy))
        for agent in agents if secure else ():  # as daemons are
            agent._site.simulated = agent.name == EVALUATOR
            agent._work.sums.membership = open_membership(tmp_path / agent.name, agent.name, lambda: None)
        sites = {agent.name: tmp_path / agent.name for agent in agents if agent.name != EVALUATOR}
        for site in sites.values() if secure else ():
            confirm(site, listed(sites))
        browser, log = Browser(client_page(folder)), SiteLog(folder)
        for _ in range(1000):
            for agent in agents:
                agent.step(0.0)
            assert log.look().problem == ""
            if server.runs.finished:
                break
        assert server.runs.failed == []
        assert "daemon running<" in browser.get("/")
    items, again = log.leavings(recipe.name), SiteLog(folder)
    again.look()
    assert again.leavings(recipe.name) == items  # read whole, and as it was written
    assert {one.outcome for one in items} <= {"accepted", "sent"}
    updates = [one for one in items if one.what == "fit"]
    assert [one.round for one in updates] == [2, 1]
    assert {one.in_a_sum for one in updates} == {secure}
    assert all(("secure" in one.rules) is secure for one in updates)
    trained = {"body", "head", "prototypes"} & {part for one in updates for part, _, _ in one.parts}
    assert bool(trained) is not secure
    assert "accepted" in browser.get("/left")


def test_the_overview_pauses_resumes_and_leads_to_leave(pages: Pages, state: Path, offered: Recipe) -> None:
    browser = pages()
    text = browser.get("/")
    assert 'action="/pause"' in text
    assert f'href="/runs/{RUN}/leave"' in text
    assert browser.client.post("/pause").status_code == 403  # without origin
    for path in ("/resume", "/left/check"):
        assert browser.client.get(path).status_code == 405  # an order is no link
    browser.order("/pause")
    assert SitePause(state / PAUSE).current() is not None
    text = browser.get("/")
    assert 'action="/resume"' in text
    assert 'action="/pause"' not in text
    browser.order("/resume")
    assert SitePause(state / PAUSE).current() is None
    browser.get(f"/runs/{RUN}/leave")
    assert status(state, offered) is ApprovalStatus.WAITING, "a link asks, and orders nothing"
    browser.order(f"/runs/{RUN}/leave")
    assert f'href="/runs/{RUN}/leave"' not in browser.get("/")


def test_a_run_shows_what_it_would_send_and_what_the_policy_says(pages: Pages, offered: Recipe, policy: Path) -> None:
    text = pages(policy).get(f"/runs/{RUN}")
    assert 'id="allowed"' in text or 'id="refused"' in text
    for word in ("prototypes", "fednh", "allowed: parts"):
        assert word in text
    assert 'id="unjudged"' in pages().get(f"/runs/{RUN}")


def test_an_approval_is_in_force_and_in_the_audit_with_who_gave_it(
    pages: Pages, state: Path, offered: Recipe, policy: Path
) -> None:
    browser = pages(policy)
    assert 'id="approve"' in browser.get(f"/runs/{RUN}/approve")  # asks first; reading approves nothing
    assert status(state, offered) is ApprovalStatus.WAITING
    assert "approved" in browser.order(f"/runs/{RUN}/approve", **approval(state))
    assert status(state, offered) is ApprovalStatus.APPROVED
    ((event, facts),) = decided(state)
    assert (event, facts["by"], facts["run"]) == ("approved", "ann", RUN)
    assert "approved" in browser.get("/left")
    assert 'id="order-approve"' not in browser.get(f"/runs/{RUN}")


def test_a_run_that_the_policy_refuses_is_not_approved(pages: Pages, state: Path, offered: Recipe) -> None:
    browser = pages("strict")
    assert 'id="refused"' in browser.get(f"/runs/{RUN}")
    assert 'id="approve"' not in browser.get(f"/runs/{RUN}/approve")
    browser.post(f"/runs/{RUN}/approve", approval(state), 400)
    assert status(state, offered) is ApprovalStatus.WAITING
    assert decided(state) == []


def test_a_recipe_that_has_changed_since_it_was_shown_is_not_approved(
    pages: Pages, state: Path, offered: Recipe, policy: Path
) -> None:
    browser, seen = pages(policy), approval(state)
    changed = offered.wire() + " "
    Approvals(state / APPROVALS).record_offer(Assignment(RUN, changed))
    browser.post(f"/runs/{RUN}/approve", seen, 400)
    browser.post(f"/runs/{RUN}/approve", {}, 400)
    assert Approvals(state / APPROVALS).status(RUN, changed) is ApprovalStatus.WAITING


@pytest.mark.parametrize(
    ("took_part", "after", "event"),
    [(False, ApprovalStatus.DENIED, "denied"), (True, ApprovalStatus.WITHDRAWN, "withdrawn")],
)
def test_a_run_is_denied_or_left(
    took_part: bool, after: ApprovalStatus, event: str, pages: Pages, state: Path, offered: Recipe
) -> None:
    if took_part:
        Approvals(state / APPROVALS).record_task(Assignment(RUN, offered.wire()))
    browser = pages()
    browser.get(f"/runs/{RUN}/leave")
    assert decided(state) == []
    browser.order(f"/runs/{RUN}/leave")
    assert status(state, offered) is after
    assert [(name, facts["by"]) for name, facts in decided(state)] == [(event, "ann")]
    assert "already" in browser.order(f"/runs/{RUN}/leave")
    assert len(decided(state)) == 1


def test_own_scores_by_round_and_whether_they_left(pages: Pages, state: Path, offered: Recipe) -> None:
    kept = OwnScores(state / SCORES)
    kept.record("kept", 1, {"personal.pm_l": 0.3125, "personal.local.auroc": 0.875, "personal.recall.3": 0.1234})
    kept.record("kept", 2, {"personal.pm_l": 0.4375})
    browser = pages()
    text = browser.get("/runs/kept")
    assert text.index("0.4375") < text.index("0.3125")
    assert "rounds 1 to 2" in text  # personal.pm_l left, by the audit log
    assert "no, it stayed" in text
    assert "0.1234" not in text
    assert 'id="handed-in"' in text
    (state / SCORES / "kept.jsonl").write_text("{}")
    assert 'id="scores-damaged"' in browser.get("/runs/kept")
    assert 'id="handed-in"' not in browser.get(f"/runs/{RUN}")


def test_own_scores_that_left_in_a_secure_aggregation_have_not_stayed(pages: Pages, state: Path) -> None:
    kept = OwnScores(state / SCORES)
    kept.record("kept", 3, {"loss": 0.5})
    journal = Journal(state / AUDIT)
    at: dict[str, Any] = {"run": "kept", "round": 3, "attempt": 1, "sum_of": "scores"}
    journal.append("masked", scores=["loss"], **at)
    journal.append("aggregated", sites=["ann", "bob", "eva"], **at)
    journal.close()
    text = pages().get("/runs/kept")
    assert "in a secure aggregation, as part of a mean over sites: rounds 3" in text
    assert "scores in a secure aggregation, as part of a mean over sites, rounds 3" in text
    assert "no, it stayed" not in text
    notes = pages().get("/left")
    assert "left under masks, round 3 of run kept, attempt 1: loss" in notes
    assert "secure aggregation opened, round 3 of run kept, attempt 1: the scores of ann, bob, eva" in notes


def test_what_is_not_there_or_cannot_be_used_is_said(pages: Pages, offered: Recipe, state: Path) -> None:
    browser = pages()
    browser.get("/runs/none", 400)
    browser.post("/runs/none/leave", {}, 400)
    browser.get("/nothing", 404)
    assert f'href="/runs/{RUN}"' in browser.get("/runs")
    Approvals(state / APPROVALS).record_offer(Assignment("odd", '{"method": "<b>"}'))
    browser = pages()
    assert 'id="no-preview"' in browser.get("/runs/odd")
    assert "<b>" not in browser.client.get("/runs/odd").text
    browser.post("/runs/odd/approve", {"recipe": Approvals(state / APPROVALS).offer("odd").digest}, 400)


def test_the_site_is_paused_with_an_end_and_a_reason_and_resumed(pages: Pages, state: Path) -> None:
    browser = pages()
    assert "paused" in browser.order("/pause", until="90m", reason="the scanner <is> moved")
    assert (pause := SitePause(state / PAUSE).current()) is not None
    assert pause.until is not None
    assert pause.by == "ann"
    for path in ("/", "/pause"):
        assert 'id="paused"' in browser.get(path)
    assert "the scanner &lt;is&gt; moved" in browser.client.get("/left").text
    assert "resumed" in browser.order("/resume")
    assert SitePause(state / PAUSE).current() is None
    assert [(event, facts["by"]) for event, facts in decided(state)] == [("paused", "ann"), ("resumed-by-site", "ann")]
    assert decided(state)[0][1]["reason"] == "the scanner <is> moved"
    browser.order("/resume")
    assert len(decided(state)) == 2


def test_a_pause_may_have_no_end_and_no_wrong_one(pages: Pages, state: Path) -> None:
    for until in ("soon", "400d", "0m"):
        pages().post("/pause", {"until": until}, 400)
    assert not (state / PAUSE).exists()
    assert decided(state) == []
    pages().order("/pause", until="", reason="")
    assert json.loads((state / PAUSE).read_bytes())["until"] is None


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Browser]:
    """What `client page` served, in place of a socket."""
    found: list[Browser] = []

    def serve(program: Program, address: str, started: Callable[[str], None]) -> None:
        started(f"http://{address}/enter?token=x")
        found.append(Browser(program))

    monkeypatch.setattr(shell, "serve", serve)
    return found


def test_the_command_takes_the_folder_of_the_daemons_settings(
    opened: list[Browser], tmp_path: Path, capfd: pytest.CaptureFixture[str], state: Path
) -> None:
    assert called(capfd, "client", "page")[0] == ConfigError.exit_code
    assert called(capfd, "client", "page", "--state", tmp_path / "none")[0] == ConfigError.exit_code
    assert opened == []
    assert not (tmp_path / "none").exists()
    (settings := tmp_path / "site.toml").write_text(
        f'site = "site-1"\npolicy = "strict"\nstate = "{state}"\n[data]\nsource = "digits"\n'
    )
    code, out, _ = called(capfd, "client", "page", "--settings", settings)
    assert (code, "/enter?token=" in out) == (0, True)
    text = opened[0].get("/")
    assert "site site-1" in text
    assert ">strict" in text
    assert called(capfd, "client", "page", "--state", state)[0] == 0
    assert ">not named" in opened[1].get("/")
