"""What a site has sent, as its page says it: a sentence and a line a round, made from the audit log's records."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser_client import Browser

from protofed.client.transport.audit import FILE as AUDIT
from protofed.common.storage.journal import Journal, records, segment_path
from protofed.deploy.audit.archive import archive
from protofed.deploy.pages.hospital import site_log
from protofed.deploy.pages.hospital.left import round_lines, summary
from protofed.deploy.pages.hospital.page import client_page
from protofed.deploy.pages.hospital.site_log import SiteLog
from protofed.deploy.pages.shell import stamp


def secure_round(journal: Journal, number: int) -> None:
    """What a site sends in a round under a secure aggregation, in the form of a daemon's records."""

    def sent(call: str, size: int, task: str, **facts: Any) -> None:
        about = {"run": "sum", "round": number, "task_id": task, **facts}
        journal.append("sent", call=call, digest=f"{call}-{task}", bytes=size, facts=about, server="hub:8443")

    for begin in ("fit", "score-sum"):
        for kind in (begin, "share", "mask", "agree", "reveal"):
            task = f"{number}-{begin}-{kind}"
            about: dict[str, Any] = {"run": "sum", "round": number, "task_id": task}
            journal.append("task", kind=kind, base_digest="", **about)
            if kind == "fit":
                journal.append("privacy", **about)
            sent("BeginUpload", 90, task, parts=[["secure-aggregation", 1, 800]])
            sent("CommitUpload", 10, task)
            journal.append("answered", call="CommitUpload", digest=f"CommitUpload-{task}", verdict="accepted")


class Outside(HTMLParser):
    """The texts of a page's main part that are seen before anything is unfolded, without what explains."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._folded, self._summary, self._kept = 0, False, False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes).get("id") or ""
        if tag == "details":
            self._folded += 1
            self._kept = named.startswith("left-")
        elif tag == "summary":
            self._summary = self._kept and self._folded == 1
        if (self._summary and tag == "summary") or (tag == "p" and not self._folded):
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self._folded -= tag == "details"
        self._summary = self._summary and tag != "summary"

    def handle_data(self, data: str) -> None:
        if (self._summary or not self._folded) and self.lines:
            self.lines[-1] += data


def outside(html: str) -> list[str]:
    parser = Outside()
    parser.feed(html.partition("<h1>")[2].partition("</main>")[0])
    return [line.strip() for line in parser.lines if line.strip()]


def test_three_rounds_of_secure_aggregation_are_a_sentence_and_three_lines_made_from_the_records(state: Path) -> None:
    (state / AUDIT).unlink()
    journal = Journal(state / AUDIT)
    for number in (1, 2, 3):
        secure_round(journal, number)
    journal.close()
    read = list(records(state / AUDIT))
    browser = Browser(client_page(state, None, "site-1"))
    sentence, *lines = outside(browser.client.get("/left").text)
    assert lines == [
        f"sum, round {number}: update in a secure aggregation with noise, scores in a secure aggregation; 1.0 kB"
        for number in (3, 2, 1)
    ]
    since = stamp(next(record.at for record in read if record.event == "sent"))
    assert sentence.startswith(f"Since {since} UTC, this site has sent 3.0 kB in 3 rounds of 1 run to hub:8443: ")
    assert sentence.endswith(
        "3 updates in a secure aggregation, scores in a secure aggregation of 3 rounds; 3 rounds had noise."
    )
    log = SiteLog(state)
    log.look()
    for line in round_lines(log.leavings()):
        made_from = [read[number - 1] for item in line.items for number in item.records]
        assert {record.event for record in made_from} == {"sent"}
        facts: list[Any] = [record.facts for record in made_from]
        assert sum(of["bytes"] for of in facts) == line.size
        assert {of["facts"]["round"] for of in facts} == {line.round}
    assert f"records {line.records} of the audit log" in browser.get("/left")


def test_a_line_says_what_left_alone_what_in_a_sum_and_what_the_policy_kept(state: Path) -> None:
    journal = Journal(state / AUDIT)
    journal.append("refused", run="kept", round=2, task_id="t", why="no")
    journal.append("refused", run="other", round=1, task_id="u", why="no")
    journal.append("task", kind="fit", run="sum", round=1, task_id="f", base_digest="")
    facts: dict[str, Any] = {"run": "sum", "round": 1, "task_id": "f", "parts": [["secure-aggregation", 1, 8]]}
    journal.append("sent", call="BeginUpload", digest="d", bytes=9, facts=facts)
    journal.close()
    log = SiteLog(state)
    log.look()
    lines = round_lines(log.leavings())
    told = {(line.run, line.round): line.what for line in lines}
    assert told["kept", 2] == "update alone, scores alone, kept by the policy"
    assert told["other", 1] == "kept by the policy"
    assert told["sum", 1] == "keys and shares of a secure aggregation", "no masked update has left"
    assert "in 3 rounds of 2 runs" in summary(lines)
    assert summary(lines).endswith("; the policy kept back 2 items.")
    assert summary([line for line in lines if line.run == "other"]) == (
        "This site has sent nothing, and the policy kept back 1 item."
    )
    assert summary([]) == ""


def test_totals_are_those_of_the_audit(state: Path) -> None:
    log = SiteLog(state)
    log.look()
    announced: dict[str, int] = {}
    sent = 0
    for record in records(state / AUDIT):
        fields: Any = record.facts
        if record.event == "sent":
            sent += fields["bytes"]
            for part, _, size in fields["facts"].get("parts", ()):
                announced[part] = announced.get(part, 0) + size
    totals = log.totals()
    assert {part: size for (_, part), (_, size) in totals.parts.items()} == announced
    assert sum(size for _, size in totals.calls.values()) == sent


def test_the_log_is_followed_across_segments(state: Path) -> None:
    log = SiteLog(state)
    before = log.look()
    journal = Journal(state / AUDIT, 1)  # every line begins a new one
    for number in (3, 4):
        journal.append("refused", run="kept", round=number, why="no")
        assert log.look().problem == ""
    journal.close()
    assert segment_path(state / AUDIT, 3).exists()
    assert [one.round for one in log.leavings() if one.why] == [4, 3]
    after = log.look()
    assert after.read_at == before.read_at  # not read whole again
    assert after.last_number == before.last_number + 4
    assert log.look(whole=True).last_number == after.last_number
    assert [one.round for one in log.leavings() if one.why] == [4, 3]


def test_half_a_line_is_no_damage_and_is_read_once_it_is_whole(state: Path) -> None:
    log = SiteLog(state)
    count = log.look().last_number
    whole = (state / AUDIT).read_bytes()
    journal = Journal(state / AUDIT)
    journal.append("refused", run="kept", round=3, why="no")
    journal.close()
    line = (state / AUDIT).read_bytes()[len(whole) :]
    for cut in (5, len(line) - 1):
        (state / AUDIT).write_bytes(whole + line[:cut])
        assert (log.look().problem, log.look().last_number) == ("", count)
        assert SiteLog(state).look().problem == ""
    (state / AUDIT).write_bytes(whole + line)
    assert log.look().last_number == count + 1


def test_what_an_archive_has_is_said_to_be_missing_and_never_that_nothing_left(tmp_path: Path) -> None:
    state = tmp_path / "site-1"
    journal = Journal(state / AUDIT, 2000)
    for number in range(1, 4):
        secure_round(journal, number)
    journal.append("note", text="x" * 3000)  # the newest segment begins after it, with nothing that left
    journal.append("note", text="the newest")
    journal.close()
    assert "in an archive" not in Browser(client_page(state)).get("/left")
    archive(state / AUDIT, tmp_path / "archive", visible=False)
    text = Browser(client_page(state)).get("/left")
    assert "files are in an archive: this list lacks" in text
    assert "has sent no update" not in text


def test_items_that_are_no_longer_listed_are_counted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_log, "MAX_LINES", 3)
    monkeypatch.setattr(site_log, "DROPPED_AT_ONCE", 1)
    journal = Journal(state / AUDIT)
    for number in range(5):
        journal.append("refused", run="kept", round=9 + number, why="by the policy")
    journal.close()
    text = Browser(client_page(state)).get("/left")
    assert re.search(r"older items are not listed here \(.protofed audit show.\): [1-9]", text)
