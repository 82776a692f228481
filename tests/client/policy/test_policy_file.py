"""A policy that is edited counts at once; one that cannot be read counts for nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protofed.client.policy.policy import UNREADABLE, Policy, PolicyFile
from protofed.client.policy.rules import PolicyRules
from protofed.common.codec import Digest, digest
from protofed.common.config.recipe import read_toml
from protofed.common.errors import OutOfSpaceError

TEXT = 'methods = ["fedavg"]\nparts = ["body"]\ntelemetry = ["disk_free_bytes"]\n'
MEASURED = {"disk_free_bytes": 5.0, "step_seconds": 1.0}


def test_an_edit_counts_from_the_next_question_on_and_a_link_that_is_moved_too(tmp_path: Path) -> None:
    (path := tmp_path / "policy.toml").symlink_to("first.toml")
    path.write_text(TEXT)
    policy = PolicyFile(path)
    assert policy() is policy()  # a file that has not changed is parsed once
    assert policy() == Policy.read(path)
    path.write_text(TEXT.replace("fedavg", "fednh"))
    assert policy().rules.methods == {"fednh"}
    (tmp_path / "second.toml").write_text(TEXT.replace("fedavg", "fednhh"))
    (tmp_path / "link").symlink_to("second.toml")
    os.replace(tmp_path / "link", path)
    assert policy().rules.methods == {"fednhh"}


def test_each_version_is_recorded_once_before_it_counts(tmp_path: Path) -> None:
    (path := tmp_path / "policy.toml").write_text(TEXT)
    policy, recorded = PolicyFile(path), list[Digest]()
    policy()
    policy.record_versions(recorded.append)
    policy()
    path.write_text(changed := TEXT.replace("fedavg", "fednh"))
    for _ in range(2):
        assert policy().rules.methods == {"fednh"}
    assert recorded == [digest(TEXT.encode()), digest(changed.encode())]


def test_rules_never_count_under_the_digest_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "policy.toml").write_text(TEXT)
    policy, recorded = PolicyFile(path), list[Digest]()
    policy.record_versions(recorded.append)

    def edited_meanwhile(file: Path, model: type[PolicyRules]) -> PolicyRules:
        monkeypatch.undo()
        file.write_text(newest)
        return read_toml(file, model)

    monkeypatch.setattr("protofed.client.policy.policy.read_toml", edited_meanwhile)
    path.write_text(TEXT.replace("fedavg", "fednh"))
    newest = TEXT.replace("fedavg", "fedproc")
    assert policy().rules.methods == {"fedproc"}
    assert recorded == [digest(TEXT.encode()), digest(newest.encode())]


def test_a_version_that_cannot_be_recorded_allows_nothing_until_it_can(tmp_path: Path) -> None:
    (path := tmp_path / "policy.toml").write_text(TEXT)
    policy, full = PolicyFile(path), True

    def record(_version: Digest) -> None:
        if full:
            raise OutOfSpaceError("the disk is full")

    with pytest.raises(UNREADABLE):
        policy.record_versions(record)
    path.write_text(TEXT.replace("fedavg", "fednh"))
    with pytest.raises(UNREADABLE):
        policy()
    full = False
    assert policy().rules.methods == {"fednh"}


@pytest.mark.parametrize("text", [None, "methods = [", "", TEXT + "allow_all = true\n", TEXT + "[limits]\nlr = 0\n"])
def test_a_file_that_cannot_be_read_allows_nothing_until_it_can(text: str | None, tmp_path: Path) -> None:
    (path := tmp_path / "policy.toml").write_text(TEXT)
    policy = PolicyFile(path)
    assert dict(policy.telemetry(MEASURED).numbers) == {"disk_free_bytes": 5.0}
    path.unlink()
    if text is not None:
        path.write_text(text)
    for _ in range(2):
        with pytest.raises(UNREADABLE):
            policy()
    assert dict(policy.telemetry(MEASURED).numbers) == {}
    path.write_text(TEXT)
    assert policy().rules.methods == {"fedavg"}


def test_a_policy_that_releases_the_sites_own_scores_is_warned_of_once_for_each_version(tmp_path: Path) -> None:
    own = 'metrics = ["global.accuracy", "loss", "personal.pm_l"]\n'
    (path := tmp_path / "policy.toml").write_text(TEXT + own)
    policy = PolicyFile(path)
    with capture_logs() as logs:
        policy()
        policy()
    assert [(line["log_level"], line["scores"]) for line in logs] == [("warning", ["loss", "personal.pm_l"])]
    path.write_text(TEXT + own.replace(', "loss", "personal.pm_l"', ""))
    with capture_logs() as logs:
        policy()
    assert logs == []
