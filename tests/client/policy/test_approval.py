"""Which runs a site has been offered, and which a person has approved: files that nobody fills or confuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.clock import Clock
from tests.support.scripted_server import RUN

from protofed.client.policy.approval import FOLDER, MAX_OFFERED, Approvals, ApprovalStatus
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError
from protofed.common.protocol.messages import MAX_RECIPE_BYTES, Assignment

OTHER = Recipe.model_validate({**RUN, "rounds": 2}).wire()


def test_what_is_offered_is_written_down_once(approvals: Approvals, clock: Clock) -> None:
    offered = Assignment("run", OTHER)
    approvals.record_offer(offered)
    first = approvals.offer("run")
    assert (first.recipe, first.at) == (OTHER, "2026-06-01T12:00:00Z")
    clock.now += timedelta(hours=1)
    approvals.record_offer(offered)
    assert approvals.offers() == [first]
    approvals.record_offer(replace(offered, recipe=OTHER + " "))
    assert [offer.at for offer in approvals.offers() if offer.digest != first.digest] == ["2026-06-01T13:00:00Z"]


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"run": "run", "digest": "x", "at": ""}', b"\xff\xfe"])
def test_an_approval_that_is_damaged_or_of_another_run_is_none(
    text: bytes, approvals: Approvals, tmp_path: Path
) -> None:
    offered = Assignment("run", OTHER)
    approvals.record_offer(offered)
    approvals.approve(approvals.offer("run"))
    path = tmp_path / "state" / FOLDER / "run.json"
    assert json.loads(path.read_text())["digest"] == approvals.offer("run").digest
    path.write_bytes(text)
    assert approvals.status("run", OTHER) is not ApprovalStatus.APPROVED
    approvals.approve(approvals.offer("run"))
    os.rename(path, path.with_name("two.json"))
    assert approvals.status("two", OTHER) is ApprovalStatus.CHANGED


def test_a_server_cannot_fill_the_disk_with_runs(approvals: Approvals, clock: Clock, tmp_path: Path) -> None:
    for number in range(MAX_OFFERED + 3):
        clock.now += timedelta(seconds=1)
        approvals.record_offer(Assignment(f"run-{number}", "{}"))
        approvals.approve_by_policy(Assignment(f"run-{number}", "{}"), "policy.toml", "a" * 64)
        approvals.record_task(Assignment(f"run-{number}", "{}"))
    assert len(approvals.offers()) == MAX_OFFERED
    assert len(list((tmp_path / "state" / FOLDER).iterdir())) == 3 * MAX_OFFERED
    assert approvals.offers()[-1].run == f"run-{MAX_OFFERED + 2}"
    approvals.record_offer(Assignment("large", "x" * (MAX_RECIPE_BYTES + 1)))
    assert not (tmp_path / "state" / FOLDER / "large.seen.json").exists()


@pytest.mark.parametrize("run", ["../run", "a/b", "", ".hidden"])
def test_a_name_that_is_no_id_touches_no_file(run: str, approvals: Approvals, tmp_path: Path) -> None:
    for call in (lambda: approvals.record_offer(Assignment(run, OTHER)), lambda: approvals.offer(run)):
        with pytest.raises(ConfigError, match="is no id"):
            call()
    assert list(tmp_path.rglob("*")) == []


def test_a_run_that_was_never_offered_cannot_be_approved(approvals: Approvals) -> None:
    with pytest.raises(ConfigError, match="was offered no run yet"):
        approvals.offer("run")
    approvals.record_offer(Assignment("other-run", OTHER))
    with pytest.raises(ConfigError, match="'other-run'"):
        approvals.offer("othr-run")
