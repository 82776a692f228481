"""What the doctors see of secure aggregation: identity, pins and policy, and too few sites; each is provoked."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.support.partners import confirm, listed
from tests.support.pki import Authority

from protofed.client.policy.policy import Policy
from protofed.client.secure_aggregation.partners import (
    IDENTITY_FILE,
    MET,
    OFFERED,
    fingerprint,
    load_identity,
    load_or_create_identity,
)
from protofed.common.config.recipe import Recipe
from protofed.common.pki import certificate
from protofed.common.pki.identity import Identity, Party, read_identity
from protofed.deploy import shipped
from protofed.deploy.doctor.checks import CheckFailedError
from protofed.deploy.doctor.secure_aggregation import ALONE, SiteSums, dropouts, server_message

SECURE = shipped.recipe("digits-fednh-secure")
PLAIN = shipped.recipe("digits-fednh")
HEAD = shipped.recipe("digits-fedavg")  # has a row a class
NOW = datetime.now(UTC)


def policy(**rules: Any) -> Policy:
    read = Policy.read(shipped.policy("open"))
    return Policy(read.rules.model_copy(update=rules))


def checked(
    state: Path, *, certified: Identity | None = None, recipe: Recipe | None = SECURE, by: Policy | None = None
) -> str:
    return SiteSums(state, certified, by or policy(), lambda: recipe, NOW).check()


def refused(state: Path, **told: Any) -> tuple[str, str]:
    with pytest.raises(CheckFailedError) as caught:
        checked(state, **told)
    return caught.value.name, str(caught.value)


def code_of(state: Path) -> str:
    return certificate.code(fingerprint(load_identity(state).public_key().public_bytes_raw()))


def test_there_is_no_identity_before_the_daemon_and_none_that_others_can_read(tmp_path: Path) -> None:
    for by in (policy(), policy(partners="confirmed", secure="required")):
        text = checked(tmp_path, by=by)
        assert "no identity yet" in text
        assert "partners are confirmed once the daemon has started" in text
    assert list(tmp_path.iterdir()) == []
    load_or_create_identity(tmp_path)
    path = tmp_path / IDENTITY_FILE
    path.chmod(0o640)
    assert refused(tmp_path) == ("sum-identity-unusable", f"{path} can be read by others (mode 0640)")
    path.chmod(0o600)
    checked(tmp_path)
    path.write_bytes(b"no key")
    assert refused(tmp_path)[0] == "sum-identity-unusable"


def test_a_site_that_is_ready_shows_its_code_with_a_run_or_without(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "north"):
        load_or_create_identity(folder)
    text = checked(tmp_path)
    assert f"identity {code_of(tmp_path)}, endorsed by no certificate (plain text); no list of partners" in text
    assert f"run {SECURE.name} sums updates under masks, which policy secure = allowed allows" in text
    assert text.endswith(ALONE)
    assert "with no run to compare it with" in checked(tmp_path, recipe=None)
    checked(tmp_path, by=policy(methods=frozenset({"fedavg"})))  # the check `data` says so


def test_the_certificate_endorses_the_identity_after_a_renewal_and_until_its_end(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    authority, code = Authority.make(), code_of(tmp_path)
    for folder in ("first", "renewed"):
        certified = read_identity(authority.issue(tmp_path / folder, Party.SITE, "north"), Party.SITE, NOW)
        assert f"identity {code}, endorsed by the certificate of site 'north'" in checked(tmp_path, certified=certified)
    certified = read_identity(Authority.make().issue(tmp_path / "id", Party.SITE, "north"), Party.SITE, NOW)
    late = certified.certificate.not_after.replace(year=certified.certificate.not_after.year + 1)
    with pytest.raises(CheckFailedError, match="not endorsed"):
        SiteSums(tmp_path, certified, policy(), lambda: None, late).check()


def test_partners_that_nobody_confirmed_and_those_that_were_believed_on_first_use(tmp_path: Path) -> None:
    folders = {site: tmp_path / site for site in ("north", "south", "west")}
    for folder in folders.values():
        load_or_create_identity(folder)
    north, confirmed = folders["north"], policy(partners="confirmed")
    assert refused(north, by=confirmed)[0] == "partners-unconfirmed"
    (north / MET).write_text(json.dumps({"south": {"identity": "a" * 64, "at": "2026-11-24T00:00:00Z"}}))
    name, text = refused(north)
    assert (name, "whoever signs certificates can invent such sites" in text) == ("partners-on-first-use", True)
    confirm(north, listed(folders))
    assert "list 1 of 3 partners confirmed by ann" in checked(north, by=confirmed)
    (north / OFFERED).write_text(listed(folders, number=2).document)
    assert "list 2 of partners waits for a person here" in refused(north, by=confirmed)[1]
    (north / IDENTITY_FILE).unlink()
    load_or_create_identity(north)  # as in a new state folder
    name, text = refused(north, by=confirmed)
    assert name == "partners-unconfirmed"
    assert "does not have this site's key. If this state folder is new" in text
    (north / OFFERED).write_text("no list")
    assert refused(north)[0] == "sum-identity-unusable"


@pytest.mark.parametrize(
    ("secure", "recipe", "named"),
    [("required", PLAIN, True), ("required", HEAD, True), ("allowed", PLAIN, False), ("required", SECURE, False)],
)
def test_the_policys_secure_against_the_recipe(tmp_path: Path, secure: str, recipe: Recipe, named: bool) -> None:
    by = policy(secure=secure)
    if named:
        name, text = refused(tmp_path, recipe=recipe, by=by)
        assert (name, text.startswith(f"run {recipe.name}: ")) == ("run-refused", True)
        assert f"secure = {secure}" in text
    else:
        assert f"which policy secure = {secure} allows" in checked(tmp_path, recipe=recipe, by=by)


@pytest.mark.parametrize(("sites", "spare"), [(3, 0), (4, 1), (5, 1), (10, 3)])
def test_how_many_may_go_away(sites: int, spare: int) -> None:
    assert ("needs all of them" in dropouts(sites)) is (spare == 0)
    assert spare == 0 or f"{spare} may drop out" in dropouts(sites)


def test_a_server_with_too_few_sites_for_a_sum() -> None:
    trainers = [f"site-{number}" for number in range(10)]
    assert server_message(SECURE, trainers) == f"{SECURE.name}: {dropouts(10)}"
    with pytest.raises(CheckFailedError, match="trainers are needed") as caught:
        server_message(SECURE, trainers[:2])
    assert caught.value.name == "sites-few"
