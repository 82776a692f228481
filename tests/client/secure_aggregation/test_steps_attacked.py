"""A server that lies in a secure aggregation: the daemon refuses it by name, and the site's audit log says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.client.secure_aggregation.test_steps import BASE, OTHER, SITES, Daemon, Round
from tests.support.command_line import called
from tests.support.sum_server import SumServer

from protofed.client.agent.agent import Agent
from protofed.client.secure_aggregation.partners import load_or_create_identity, open_membership
from protofed.client.transport.audit import FILE, ClientAudit
from protofed.common import codec
from protofed.common.protocol.messages import TaskKind
from protofed.common.secure_aggregation.keys import KeyAdvert, SiteSecrets, advertised
from protofed.common.secure_aggregation.messages import RosterMessage, SurvivorsMessage, pack
from protofed.common.storage.journal import Journal


class Audited(Daemon):
    def _start(self) -> Agent:
        agent = super()._start()
        if not hasattr(self, "audit"):
            self.audit = ClientAudit(Journal(self.folder / FILE))
        agent._work.sums.membership = open_membership(
            self.folder, self.made.name, lambda: None, record=self.audit.secure_aggregation
        )

        def refused(task: object, violation: Exception) -> None:
            self.refused.append(str(violation))
            self.audit.refused(task, violation)  # type: ignore[arg-type]

        agent._work.tools.on_refusal = refused
        return agent


@pytest.fixture
def round_(tmp_path: Path) -> Round:
    """Round 1, whose sites have sent their keys; ann has an audit log."""
    daemons = {site: (Audited if site == "ann" else Daemon)(tmp_path, site) for site in SITES}
    return Round(tmp_path, daemons=daemons)


def shown(round_: Round, capfd: pytest.CaptureFixture[str]) -> str:
    code, text, _ = called(capfd, "audit", "show", round_.daemons["ann"].folder)
    assert code == 0
    return " ".join(text.split())


def asked(round_: Round, kind: TaskKind, blob: bytes, name: str) -> bytes | None:
    return round_.daemons["ann"].work(round_.task(kind, blob, name), blob)


def with_keys(round_: Round, *replaced: KeyAdvert) -> bytes:
    """The roster, with other keys in the name of some sites."""
    by_site = {advert.site: advert for advert in (*round_.server.roster.adverts, *replaced)}
    return codec.encode(pack(RosterMessage(tuple(by_site[site] for site in sorted(by_site)), round_.server.groups)))


def of_the_server(round_: Round, folder: Path, site: str) -> KeyAdvert:
    folder.mkdir()
    return advertised(SiteSecrets(bytes(32), round_.server.context, site), load_or_create_identity(folder), b"")


def test_a_key_put_in_place_of_the_sites_own(round_: Round, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lie = with_keys(round_, of_the_server(round_, tmp_path / "mallory", "ann"))
    assert asked(round_, TaskKind.SHARE, lie, "lie") is None
    assert "(secure-aggregation.replaced-keys)" in shown(round_, capfd)


def test_a_key_put_in_place_of_another_sites(round_: Round, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a site that ann knows; of one that it does not, the certificate speaks, or a person."""
    round_.until(None)
    again = Round(tmp_path, 2, round_.daemons)
    lie = with_keys(again, of_the_server(again, tmp_path / "mallory", "bob"))
    assert asked(again, TaskKind.SHARE, lie, "lie") is None
    text = shown(again, capfd)
    assert "(secure-aggregation.changed-identity)" in text
    assert "bob has another identity than on " in text


FEWER = SurvivorsMessage(SITES[:3], {})
SIGNED = SurvivorsMessage(SITES[:3], dict.fromkeys(SITES[:3], bytes(64)))


@pytest.mark.parametrize(
    ("before", "step", "lie", "code"),
    [
        (
            TaskKind.MASK,
            TaskKind.SHARE,
            lambda r: RosterMessage(r.server.roster.adverts[:3], (SITES[:3],)),
            "second-roster",
        ),
        # Two sums that differ by one site would be its numbers. (Of whole groups: see test_session.)
        (TaskKind.REVEAL, TaskKind.AGREE, lambda _: FEWER, "broken-group"),
        (TaskKind.REVEAL, TaskKind.REVEAL, lambda _: SIGNED, "broken-group"),
        (TaskKind.MASK, TaskKind.FIT, lambda _: None, "other-base"),  # another model for one site
    ],
)
def test_a_second_word_on_the_same_step(
    before: TaskKind, step: TaskKind, lie: Any, code: str, round_: Round, capfd: pytest.CaptureFixture[str]
) -> None:
    message = lie(round_.until(before))
    assert asked(round_, step, OTHER if message is None else codec.encode(pack(message)), "lie") is None
    assert f"(secure-aggregation.{code})" in shown(round_, capfd)


def test_one_site_begins_from_another_model_and_no_sum_comes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its keys are signed for another sum than those of the others: each site refuses the roster."""
    daemons = {site: (Audited if site == "ann" else Daemon)(tmp_path, site) for site in SITES}
    honest = Round(tmp_path, daemons={site: daemon for site, daemon in daemons.items() if site != "ann"})
    lied = Round.__new__(Round)
    lied.server = SumServer(replace(honest.server.context, base=codec.digest(OTHER)), honest.server.groups)
    lied.daemons = daemons
    keys = lied.sent(daemons["ann"], TaskKind.FIT, OTHER)
    honest.server.take(TaskKind.FIT, "ann", keys)
    blob = honest.server.blob(TaskKind.SHARE, "ann")
    for site in SITES:
        assert daemons[site].work(honest.task(TaskKind.SHARE, blob, f"share-{site}"), blob) is None
    assert "bob did not sign a message in its name" in shown(lied, capfd)
    assert all("(secure-aggregation.bad-signature)" in daemons[site].refused[-1] for site in SITES[1:])


def test_what_it_took_part_in_is_in_its_audit_log(round_: Round, capfd: pytest.CaptureFixture[str]) -> None:
    round_.until(TaskKind.REVEAL)
    before = shown(round_, capfd)
    assert all(f"identity of {site} believed on first use, code " in before for site in SITES[1:])
    assert "secure aggregation opened" not in before
    round_.until(None)
    after = shown(round_, capfd)
    assert "secure aggregation opened, round 1 of run run, attempt 1: the update of ann, bob, cleo, dan" in after
    asked(round_, TaskKind.REVEAL, round_.server.blob(TaskKind.REVEAL, "ann"), "again")
    assert shown(round_, capfd).count("secure aggregation opened") == 1


def test_models_alone_are_compared_between_sites(round_: Round, capfd: pytest.CaptureFixture[str]) -> None:
    """What a site is sent for other steps of a sum is for it alone."""
    ann = round_.daemons["ann"]
    assert isinstance(ann, Audited)
    for kind, base in (("fit", "a" * 64), ("share", "b" * 64), ("contributors", "c" * 64)):
        ann.audit.task({"kind": kind, "run": "run", "round": 1, "task_id": kind, "base_digest": base})
    code, text, _ = called(capfd, "audit", "show", ann.folder, "--bases")
    assert (code, text) == (0, f"run 1 fit {'a' * 64}\n")


def test_numbers_beyond_the_limit_of_a_sum_are_not_declined(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    far = {part: {name: array + 1e5 for name, array in tensors.items()} for part, tensors in BASE.items()}
    ann, base = Daemon(tmp_path, "ann"), codec.encode(far)
    at = Round.__new__(Round)
    at.server = Round(tmp_path / "others").server
    assert ann.work(at.task(TaskKind.FIT, base), base) is not None
    assert ann.refused == []
    assert len(ann.made.store.unsettled("run")) == 1
    assert "numbers leave clipped in a sum" in capfd.readouterr().out
