"""A site's part in one sum: what it does for an honest server, and what it never does for another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.common.secure_aggregation.parties import CONTEXT, identity_of, numbers_of
from tests.support.sum_server import SumServer, steps_of

from protofed.client.secure_aggregation import session as steps
from protofed.client.secure_aggregation import sessions
from protofed.client.secure_aggregation.session import Session
from protofed.client.secure_aggregation.sessions import FOLDER, GROUP, MAX_ROUNDS, Sessions, forget_group
from protofed.common import codec
from protofed.common.codec import digest
from protofed.common.errors import CodecError, SecureAggregationError, StateError
from protofed.common.payload import Array, Part, Payload, SiteId
from protofed.common.protocol.messages import SumOf, TaskKind
from protofed.common.secure_aggregation import keys
from protofed.common.secure_aggregation.groups import Group, Groups, alone, in_order
from protofed.common.secure_aggregation.keys import KeyAdvert, SumContext, Vector
from protofed.common.secure_aggregation.linear_form import Field, SumForm, SumLayout
from protofed.common.secure_aggregation.messages import (
    RosterMessage,
    SharesMessage,
    SurvivorsMessage,
    pack,
    unpack,
)
from protofed.server.rounds.secure_aggregation.steps import choose_vector

SITES = ("ann", "bob", "cleo", "dan")
EACH = alone(SITES)
LAYOUT = SumLayout(SumForm((Part.HEAD,)), (Field("mean/head/bias", (9,), "float32"),), 0)
PLAIN = replace(CONTEXT, vectors=(Vector.VALUES,))
HELD = {"ann": [1, 0, 1], "bob": [1, 0, 0], "cleo": [1, 1, 0], "dan": [0, 1, 0]}  # by three, two and one


def flags_of(site: SiteId) -> Array:
    return np.array(HELD[site], dtype=np.uint64)


class Sites:
    """Four sites and their server, whose sessions pass through their files at every step."""

    def __init__(self, folder: Path, context: SumContext = CONTEXT, groups: Groups = EACH, fewest: int = 1) -> None:
        self.context, self.server, self.fewest = context, SumServer(context, groups), fewest
        self.stores = {site: Sessions(folder / site / FOLDER) for site in SITES}
        self.numbers = numbers_of(SITES, 9)
        for site in SITES:
            session = steps.started(context, LAYOUT, site, identity_of(site), b"")
            self.stores[site].save(session)
            self.server.take(TaskKind.FIT, site, codec.encode(steps.advertise(self.session(site))))

    def session(self, site: SiteId) -> Session:
        context = self.context
        found = self.stores[site].find(context.run, context.round, context.attempt, context.sum_of)
        assert found is not None
        return found

    def group(self, site: SiteId) -> Group | None:
        found = self.stores[site].group()
        return None if found is None else found.group

    def answer(self, site: SiteId, step: TaskKind, blob: bytes | None = None) -> bytes:
        """What a site sends for a blob, the server's own unless told otherwise; its session is stored."""
        session, payload = self._worked(self.session(site), step, blob or self.server.blob(step, site))
        self.stores[site].save(session)
        return codec.encode(payload)

    def _worked(self, session: Session, step: TaskKind, blob: bytes) -> tuple[Session, Payload]:
        before, identity = self.stores[session.site].opened(session), identity_of(session.site)
        match step:
            case TaskKind.SHARE:
                pinned = self.group(session.site)
                return steps.share(session, blob, lambda _: None, pinned=pinned, fewest=self.fewest)
            case TaskKind.CONTRIBUTORS:
                return steps.send_flags(session, blob, flags_of(session.site), identity)
            case TaskKind.MASK:
                kept = steps.open_flags(session, blob, flags_of(session.site), 3)
                if kept is not None:
                    assert kept.tolist() == [True, False, False]
                return steps.send_values(session, blob, self.numbers[session.site])
            case TaskKind.AGREE | TaskKind.AGREE_CONTRIBUTORS:
                return steps.agree(session, blob, choose_vector(step), identity, before)
            case _:
                return steps.reveal(session, blob, choose_vector(step), before)

    def until(self, last: TaskKind | None, silent: dict[TaskKind, SiteId] | None = None) -> Sites:
        """Work through all steps before `last`; sites fall silent from a step on."""
        alive = list(SITES)
        for step in steps_of(self.context):
            if step is last:
                break
            if silent and step in silent:
                alive.remove(silent[step])
            for site in alive:
                self.server.take(step, site, self.answer(site, step))
        return self


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(SecureAggregationError) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("context", [CONTEXT, PLAIN], ids=["rows", "no rows"])
def test_the_server_learns_the_sum(tmp_path: Path, context: SumContext) -> None:
    sites = Sites(tmp_path, context).until(None)
    expected = sum(sites.numbers.values(), np.zeros(9, dtype=np.uint64))
    assert sites.server.total().tolist() == expected.tolist()
    if context is CONTEXT:
        assert sites.server.counts().tolist() == [3, 2, 1]


@pytest.mark.parametrize("step", [TaskKind.SHARE, TaskKind.MASK, TaskKind.AGREE])
def test_a_site_drops_out(tmp_path: Path, step: TaskKind) -> None:
    sites = Sites(tmp_path, PLAIN).until(None, {step: "bob"})
    there = SITES if step is TaskKind.AGREE else ("ann", "cleo", "dan")
    expected = sum((sites.numbers[site] for site in there), np.zeros(9, dtype=np.uint64))
    assert sites.server.total().tolist() == expected.tolist()


@pytest.mark.parametrize("step", steps_of(CONTEXT))
def test_the_same_bytes_again(tmp_path: Path, step: TaskKind) -> None:
    sites = Sites(tmp_path).until(step)
    blob = sites.server.blob(step, "ann")
    unsaved, _ = sites._worked(sites.session("ann"), step, blob)  # killed before it was stored
    first = sites.answer("ann", step, blob)
    assert sites.answer("ann", step, blob) == first
    if step is not TaskKind.SHARE:  # whose shares are drawn at random, and sent by nobody who has not stored them
        assert unsaved == sites.session("ann")
    sites.until(None)
    assert sites.answer("ann", step, blob) == first


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    session, agreed = Sites(tmp_path).session("ann"), survivors(*SITES)
    for call in (
        lambda: steps.agree(session, agreed, Vector.VALUES, identity_of("ann")),
        lambda: steps.reveal(session, agreed, Vector.VALUES),
        lambda: steps.send_values(session, b"", flags_of("ann")),
    ):
        assert refusal(call) == "out-of-order"


def test_a_session_is_for_its_owner_only_says_no_secret_and_a_damaged_one_is_no_new_one(tmp_path: Path) -> None:
    sites = Sites(tmp_path).until(None)
    [path] = (tmp_path / "ann" / FOLDER / CONTEXT.run).glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "root" not in repr(sites.session("ann"))
    path.write_bytes(b"{}")
    with pytest.raises(StateError, match="damaged"):
        sites.session("ann")


def other_roster(sites: Sites) -> bytes:
    """The roster with another advert of bob's, soundly signed by him."""
    adverts = {advert.site: advert for advert in sites.server.roster.adverts}
    secrets = keys.SiteSecrets(b"2" * keys.ROOT_BYTES, CONTEXT, "bob")
    adverts["bob"] = keys.advertised(secrets, identity_of("bob"), b"")
    return codec.encode(pack(RosterMessage(tuple(adverts.values()), sites.server.roster.groups)))


def test_a_second_roster_or_one_without_the_site_its_keys_or_its_model_is_refused(tmp_path: Path) -> None:
    sites = Sites(tmp_path)
    second = other_roster(sites)
    sites.answer("ann", TaskKind.SHARE)
    before = sites.session("ann")
    assert refusal(lambda: sites.answer("ann", TaskKind.SHARE, second)) == "second-roster"
    assert sites.session("ann") == before
    sites = Sites(tmp_path / "1")
    others = tuple(advert for advert in sites.server.roster.adverts if advert.site != "ann")
    without = codec.encode(pack(RosterMessage(others, alone(SITES[1:]))))
    assert refusal(lambda: sites.answer("ann", TaskKind.SHARE, without)) == "not-in-roster"
    assert refusal(lambda: sites.answer("bob", TaskKind.SHARE, other_roster(sites))) == "replaced-keys"
    few = codec.encode(pack(RosterMessage(sites.server.roster.adverts[:2], alone(SITES[:2]))))
    assert refusal(lambda: sites.answer("ann", TaskKind.SHARE, few)) == "too-few-sites"
    sites = Sites(tmp_path / "2")
    adverts = {advert.site: advert for advert in sites.server.roster.adverts}
    other = replace(CONTEXT, base=digest(b"another model"))
    adverts["bob"] = keys.advertised(keys.SiteSecrets(b"2" * 32, other, "bob"), identity_of("bob"), b"")
    blob = codec.encode(pack(RosterMessage(tuple(adverts.values()), sites.server.roster.groups)))
    assert refusal(lambda: sites.answer("ann", TaskKind.SHARE, blob)) == "bad-signature"
    assert refusal(lambda: steps.check_same(sites.session("ann"), other)) == "other-base"
    steps.check_same(sites.session("ann"), CONTEXT)


def test_an_identity_that_is_not_pinned_is_refused(tmp_path: Path) -> None:
    sites = Sites(tmp_path)

    def trust(adverts: Iterable[KeyAdvert]) -> None:
        assert [advert.site for advert in adverts] == ["bob", "cleo", "dan"]
        raise SecureAggregationError("changed-identity", "")

    blob = sites.server.blob(TaskKind.SHARE, "ann")
    assert refusal(lambda: steps.share(sites.session("ann"), blob, trust, pinned=None, fewest=1)) == "changed-identity"


def survivors(*sites: SiteId) -> bytes:
    return codec.encode(pack(SurvivorsMessage(sites, {})))


@pytest.mark.parametrize("step", [TaskKind.AGREE_CONTRIBUTORS, TaskKind.AGREE])
def test_a_second_set_of_survivors_is_refused(tmp_path: Path, step: TaskKind) -> None:
    sites = Sites(tmp_path).until(step)
    assert refusal(lambda: sites.answer("ann", step, survivors("bob", "cleo", "dan"))) == "other-survivors"
    assert refusal(lambda: sites.answer("ann", step, survivors("ann", "bob"))) == "too-few-sites"
    sites.answer("ann", step)
    assert refusal(lambda: sites.answer("ann", step, survivors("ann", "bob", "cleo"))) == "second-survivors"
    reveal = TaskKind.REVEAL if step is TaskKind.AGREE else TaskKind.REVEAL_CONTRIBUTORS
    assert refusal(lambda: sites.answer("ann", reveal, survivors("ann", "bob", "dan"))) == "second-survivors"
    assert refusal(lambda: sites.answer("ann", reveal, survivors(*SITES))) == "too-few-sites"  # signatures
    assert sites.session("ann").revealed == (() if step is TaskKind.AGREE_CONTRIBUTORS else (Vector.CONTRIBUTORS,))


@pytest.mark.parametrize("step", [TaskKind.AGREE, TaskKind.REVEAL])
def test_numbers_without_a_site_whose_rows_were_counted_are_refused(tmp_path: Path, step: TaskKind) -> None:
    sites = Sites(tmp_path).until(step)
    session = replace(sites.session("ann"), survivors={Vector.CONTRIBUTORS: SITES})
    sites.stores["ann"].save(session)
    fewer = survivors("ann", "cleo", "dan")  # enough of them; row 0, which three hold, would be the sum of two
    assert refusal(lambda: sites.answer("ann", step, fewer)) == "other-survivors"
    assert sites.session("ann") == session


def test_other_shares_numbers_and_rows_are_refused(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN).until(TaskKind.MASK)
    sites.answer("ann", TaskKind.MASK)
    session, blob = sites.session("ann"), sites.server.blob(TaskKind.MASK, "ann")
    other = sites.numbers["ann"] + np.uint64(1)
    assert refusal(lambda: steps.send_values(session, blob, other)) == "other-numbers"
    fewer = codec.encode(pack(SharesMessage({"bob": b"", "cleo": b""})))
    assert refusal(lambda: sites.answer("ann", TaskKind.MASK, fewer)) == "second-shares"
    assert refusal(lambda: sites.answer("bob", TaskKind.MASK, fewer)) == "bad-shares"
    sites = Sites(tmp_path / "1").until(TaskKind.MASK)
    session, blob = sites.session("ann"), sites.server.blob(TaskKind.MASK, "ann")
    without = np.array([0, 0, 1], dtype=np.uint64)
    assert refusal(lambda: steps.open_flags(session, blob, without, 3)) == "other-numbers"
    lonely, pairs = (steps.open_flags(session, blob, flags_of("ann"), fewest) for fewest in (1, 2))
    assert lonely is not None
    assert lonely.tolist() == (pairs.tolist() if pairs is not None else None)  # a row of one site alone never leaves


@pytest.mark.parametrize(
    ("context", "step", "silent"),
    [(PLAIN, TaskKind.AGREE, TaskKind.MASK), (CONTEXT, TaskKind.AGREE_CONTRIBUTORS, TaskKind.CONTRIBUTORS)],
    ids=["values", "contributors"],
)
def test_another_attempt_after_revealing_only_with_the_same_survivors(
    tmp_path: Path, context: SumContext, step: TaskKind, silent: TaskKind
) -> None:
    Sites(tmp_path, context).until(None)
    again = Sites(tmp_path, replace(context, attempt=2)).until(step, {silent: "bob"})
    for site in ("ann", "cleo", "dan"):
        assert refusal(partial(again.answer, site, step)) == "other-survivors"
    third = Sites(tmp_path, replace(context, attempt=3)).until(None)
    assert third.server.total().tolist() == sum(third.numbers.values(), np.zeros(9, np.uint64)).tolist()


def test_what_is_over_is_wiped_and_never_begins_again(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN).until(None)
    store, opened = sites.stores["ann"], sites.session("ann")
    store.wipe_before(PLAIN.run, PLAIN.round, PLAIN.attempt, PLAIN.sum_of)  # the same sum: nothing is over
    assert sites.session("ann") == opened
    store.wipe_before(PLAIN.run, PLAIN.round + 1, 1, PLAIN.sum_of)
    assert not list((tmp_path / "ann" / FOLDER / PLAIN.run).glob("*"))
    assert refusal(lambda: sites.session("ann")) == "attempt-over"
    assert store.find(PLAIN.run, PLAIN.round, PLAIN.attempt + 1, PLAIN.sum_of) is None
    assert store.opened(opened) == SITES
    store.save(replace(opened, attempt=2, revealed=(), survivors={}))
    store.wipe_all_but(PLAIN.run)
    assert store.find(PLAIN.run, PLAIN.round, 2, PLAIN.sum_of) is not None
    store.wipe_all_but("another")
    assert refusal(lambda: store.find(PLAIN.run, PLAIN.round, 2, PLAIN.sum_of)) == "attempt-over"


def test_both_sums_of_a_round_are_remembered_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_ROUNDS", 3)
    store = Sessions(tmp_path)
    sums_of = (SumOf.UPDATE, SumOf.SCORES)
    for number in range(1, 5):
        for sum_of in sums_of:
            store.wipe_before(PLAIN.run, number, 1, sum_of)
            at = replace(PLAIN, round=number, sum_of=sum_of)
            store.save(steps.started(at, LAYOUT, "ann", identity_of("ann"), b""))
            past = range(max(1, number - 2), number)
            assert all(store.is_over(PLAIN.run, earlier, 1, each) for earlier in past for each in sums_of)
    assert all(store.is_over(PLAIN.run, 1, 99, each) for each in sums_of), "forgotten"
    assert not any(store.is_over(PLAIN.run, 2, 2, each) for each in sums_of), "remembered"


# Groups

BROKEN: Groups = (("ann", "bob", "cleo"), ("dan",))


def test_survivors_and_shares_that_split_a_group_are_not_taken(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN, BROKEN).until(TaskKind.AGREE)
    there = ("ann", "bob", "dan")  # t of them
    blob = codec.encode(pack(SurvivorsMessage(there, {})))
    for site in there:
        assert refusal(partial(sites.answer, site, TaskKind.AGREE, blob)) == "broken-group"
        assert refusal(partial(sites.answer, site, TaskKind.REVEAL, blob)) == "broken-group"
        assert sites.session(site).survivors == {}
    sites.until(None)
    assert sites.server.total().tolist() == sum(sites.numbers.values(), np.zeros(9, np.uint64)).tolist()
    sites = Sites(tmp_path / "1", PLAIN, BROKEN).until(TaskKind.MASK)
    sealed = unpack(sites.server.blob(TaskKind.MASK, "ann"), SharesMessage)[0].sealed
    blob = codec.encode(pack(SharesMessage({site: sealed[site] for site in ("bob", "dan")})))
    assert refusal(lambda: sites.answer("ann", TaskKind.MASK, blob)) == "broken-group"


def test_groups_that_are_small_or_no_partition_are_refused(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN, BROKEN, fewest=3)
    assert sites.answer("ann", TaskKind.SHARE)
    assert refusal(lambda: sites.answer("dan", TaskKind.SHARE)) == "small-group"
    assert sites.group("dan") is None
    sites = Sites(tmp_path / "1", PLAIN)
    for groups in ((SITES[:3],), (SITES[:3], SITES[2:]), ((*SITES, "eve"),), (("bob", "ann", "cleo", "dan"),)):
        blob = codec.encode(pack(RosterMessage(sites.server.roster.adverts, groups)))
        codes = (refusal(partial(share_or_refuse, sites, site, blob)) for site in SITES)
        assert set(codes) == {"other-group"}


def share_or_refuse(sites: Sites, site: SiteId, blob: bytes) -> bytes:
    try:
        return sites.answer(site, TaskKind.SHARE, blob)
    except CodecError as error:  # of a site that is in two groups
        raise SecureAggregationError("other-group", str(error)) from error


def test_a_second_group_is_refused_for_ever_in_whichever_run(tmp_path: Path) -> None:
    """By a daemon that was killed, too, and when the rounds before are forgotten."""
    Sites(tmp_path, PLAIN, BROKEN).until(None)
    store = Sessions(tmp_path / "ann" / FOLDER)
    for number in range(1, MAX_ROUNDS + 10):
        past = replace(PLAIN, round=PLAIN.round + number)
        store.wipe_before(PLAIN.run, past.round, 1, past.sum_of)
        store.save(steps.started(past, LAYOUT, "ann", identity_of("ann"), b""))
    assert store.is_over(PLAIN.run, PLAIN.round, 99, PLAIN.sum_of), "its first round is forgotten"
    others: Groups = (("ann", "bob", "dan"), ("cleo",))
    for run in (PLAIN.run, "another"):
        later = replace(PLAIN, run=run, round=PLAIN.round + 1000)
        sites = Sites(tmp_path, later, others)
        for site in ("ann", "bob", "cleo"):
            assert refusal(partial(sites.answer, site, TaskKind.SHARE)) == "other-group"
            assert sites.session(site).roster == b""
        for attempt, groups in ((2, (SITES,)), (3, alone(SITES))):
            other = Sites(tmp_path, replace(later, attempt=attempt), groups)
            assert refusal(partial(other.answer, "ann", TaskKind.SHARE)) == "other-group"
        again = Sites(tmp_path, replace(later, attempt=4), BROKEN).until(None)
        assert len(again.server.total()) == 9


def test_who_was_aggregated_alone_may_be_in_any_group_and_in_it_alone_then(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN, BROKEN).until(None)
    assert [sites.group(site) for site in SITES] == [BROKEN[0]] * 3 + [None]
    elsewhere = Sites(tmp_path, replace(PLAIN, run="another"), (("ann", "bob", "dan"), ("cleo",)))
    assert elsewhere.answer("dan", TaskKind.SHARE)
    assert elsewhere.group("dan") == ("ann", "bob", "dan")


def test_sums_of_four_runs_tell_who_holds_what_if_sites_forget_their_group_and_not_otherwise(tmp_path: Path) -> None:
    """Contributors are the same in all runs: from counts over all threes of four sites, each site's own follow."""
    threes: list[Group] = [tuple(site for site in SITES if site != lost) for lost in SITES]

    def run_of(number: int) -> Sites:
        lost = SITES[number]
        sites = Sites(tmp_path, replace(CONTEXT, run=f"run-{number}"), in_order([threes[number], [lost]]))
        return sites.until(TaskKind.MASK, {TaskKind.SHARE: lost})

    counts = [run_of(0).server.counts()]
    for number in range(1, 4):
        assert refusal(partial(run_of, number)) == "other-group"
        for site in SITES:
            forget_group(tmp_path / site / FOLDER)
        counts.append(run_of(number).server.counts())
    members = np.array([[site in three for site in SITES] for three in threes], dtype=np.float64)
    told = np.linalg.solve(members, np.array(counts, dtype=np.float64))
    assert told.round().astype(int).tolist() == list(HELD.values())


def test_what_a_person_can_do_is_said_where_a_group_is_refused(tmp_path: Path) -> None:
    Sites(tmp_path, PLAIN, BROKEN).until(None)
    asked = Sites(tmp_path, replace(PLAIN, run="larger"), BROKEN, fewest=5)
    remedy = ".* `protofed client consortium --forget-group`"
    with pytest.raises(SecureAggregationError, match=f"group has 3 sites; expected 5 {remedy}"):
        asked.answer("ann", TaskKind.SHARE)
    with pytest.raises(SecureAggregationError, match=f"before.*{remedy}"):
        Sites(tmp_path, replace(PLAIN, run="another"), (SITES,)).answer("ann", TaskKind.SHARE)


def test_a_group_that_was_forgotten_stays_so_until_the_next_sum_begins(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN, BROKEN).until(TaskKind.AGREE)
    for site in SITES:
        forget_group(tmp_path / site / FOLDER)
    assert sites.answer("ann", TaskKind.AGREE), "the sum that goes on is of the old group, and pins it no more"
    assert sites.group("ann") is None
    Sites(tmp_path, replace(PLAIN, run="another"), (SITES,)).until(None)
    assert sites.group("ann") == SITES
    found = sites.stores["ann"].group()
    assert found is not None
    assert found.run == "another"


def test_the_group_stays_when_its_run_is_over_and_a_damaged_one_is_no_reason_to_take_another(tmp_path: Path) -> None:
    sites = Sites(tmp_path, PLAIN, BROKEN).until(None)
    sites.stores["ann"].wipe(PLAIN.run)
    sites.stores["ann"].wipe_all_but("another")
    assert sites.group("ann") == BROKEN[0]
    path = tmp_path / "ann" / FOLDER / GROUP
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{")
    sites = Sites(tmp_path, replace(PLAIN, run="another"), BROKEN)
    with pytest.raises(StateError, match="damaged"):
        sites.answer("ann", TaskKind.SHARE)
