"""Whole rounds under secure aggregation, through the real coordinator, ledger and blobs, with sites in memory.

What a server turns away of one site, so that it does not end the sum of all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tests.common.secure_aggregation.parties import CONTEXT, identity_of
from tests.server.conftest import Lab, announce, daemon, recipe
from tests.support.round_contexts import round_context
from tests.support.sum_sites import SumSite, total_of

from protofed.common import codec
from protofed.common.codec import Digest
from protofed.common.errors import ConflictError, FailureReason
from protofed.common.payload import Part, Payload, SiteId, Update
from protofed.common.protocol.messages import SUM_STEPS, Activity, Receipt, SumOf, Task, TaskKind, Verdict
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.secure_aggregation.keys import ROOT_BYTES, KeyAdvert, SiteSecrets, advertised
from protofed.common.secure_aggregation.masking import Share
from protofed.common.secure_aggregation.messages import RosterMessage, SignatureMessage, pack, unpack
from protofed.server.access.certificates import Certificates
from protofed.server.operator.run_record import overview
from protofed.server.operator.verification import VerificationResult, verify_round
from protofed.server.rounds.context import build_method
from protofed.server.rounds.intake.intake import Commit
from protofed.server.rounds.machine import phases
from protofed.server.rounds.secure_aggregation.steps import SumCheck, manifest_problem
from protofed.server.rounds.secure_aggregation.totals import lay_out, next_state
from protofed.server.storage.blobs import MemoryBlobs
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import UpdateRow, one_a_site
from protofed.server.verdicts import RefusalCode, RejectionCode, UpdateProblem

CHECK = SumCheck(TaskKind.FIT, "ann", CONTEXT, None)
SOUND = advertised(SiteSecrets(bytes(ROOT_BYTES), CONTEXT, "ann"), identity_of("ann"), b"")
CHANGES = {
    "twice the same": {"share_key": SOUND.mask_keys[0]},
    "of no secret": {"share_key": bytes(32)},
    "of another size": {"mask_keys": (b"short", SOUND.mask_keys[1])},
}


def signed(advert: KeyAdvert) -> KeyAdvert:
    return replace(advert, signature=identity_of("ann").sign(CONTEXT.bind("keys", advert.facts)))


def problem_of(advert: KeyAdvert) -> UpdateProblem | None:
    manifest, data = announce(pack(advert))
    return CHECK.problem(data, manifest)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_keys_that_would_end_the_sum_of_all_are_refused_to_their_site(change: dict[str, bytes]) -> None:
    assert problem_of(signed(SOUND)) is None
    problem = problem_of(signed(replace(SOUND, **change)))  # type: ignore[arg-type]
    assert problem is not None
    assert (problem.code, "key" in problem.text) == (RefusalCode.SECURE_AGGREGATION, True)


def test_a_message_with_which_the_roster_would_be_too_large_is_refused() -> None:
    manifest, _ = announce(pack(signed(replace(SOUND, endorsement=bytes(1 << 20)))))
    problem = manifest_problem(manifest, None)
    assert problem is not None
    assert "uint8 [65536 at most]" in problem.text
    assert manifest_problem(announce(pack(SOUND))[0], None) is None


SITES = ("ann", "bob", "cyd", "dan", "eli")
HELD = {"ann": (0, 1), "bob": (0,), "cyd": (0, 2), "dan": (1,), "eli": (0, 1)}  # class 2: cyd alone
METHODS = {"fedavg": False, "fedprp": True}  # whether contributors are counted
FIVE: dict[str, Any] = {"federation": {"secure": True, "min_sites": 3, "quorum": 3, "score_every": 0, "sum_group": 1}}


@dataclass
class Secure:
    """A run of five sites under secure aggregation; round 1 is open."""

    method: str
    ledger: Ledger = field(default_factory=Ledger)
    names: tuple[SiteId, ...] = SITES
    rules: dict[str, Any] = field(default_factory=lambda: FIVE)
    lab: Lab = field(init=False)
    sites: dict[SiteId, SumSite] = field(init=False)
    updates: dict[SiteId, Update] = field(init=False)

    def __post_init__(self) -> None:
        asked = recipe(method={"name": self.method}, **self.rules)
        self.lab = Lab(asked, MemoryBlobs(), self.ledger, keep_rounds=0)
        self.lab.enroll(*self.names)
        self.lab.later(0)
        self.lab.first_models()
        assert self.lab.run.published is not None
        self.start = self.lab.run.published.state
        self.server = build_method(asked)
        self.layout = lay_out(self.server, self.start)
        self.updates = {site: self._update(site) for site in self.names}
        self.sites = {site: self._site(site) for site in self.names}

    def _update(self, site: SiteId) -> Update:
        rng = np.random.default_rng(self.names.index(site))
        expected = self.server.expects(self.start)
        payload: dict[Part, dict[str, np.ndarray]] = {}
        held = [spec for spec in expected.optional if int(spec.name) in HELD.get(site, (0, 1))]
        for spec in (*expected.required, *held):
            payload.setdefault(spec.part, {})[spec.name] = rng.normal(size=spec.shape).astype(spec.dtype)
        return Update(site, payload)

    def _site(self, site: SiteId) -> SumSite:
        fixed = self.lab.recipe.federation.fixed_point
        assert fixed is not None
        update, layout = self.updates[site], self.layout
        flags = layout.flags(update) if layout.classes else None
        read, digest = self.lab.blobs.view, self.lab.recipe.fingerprint()
        return SumSite(site, digest, read, flags, lambda kept: layout.words(update, fixed, kept))

    @property
    def steps(self) -> list[TaskKind]:
        """Those of a round, FIT first."""
        return [TaskKind.FIT, *(kind for kind in SUM_STEPS if METHODS[self.method] or "contributors" not in kind)]

    def answer(self, sites: Iterable[SiteId], task: Task | None = None) -> None:
        for site in sites:
            asked = task or self.lab.task(site)
            receipt = self.lab.push(site, self.sites[site].answer(asked), asked)
            assert receipt.verdict is Verdict.ACCEPTED, receipt.reason

    def asked(self) -> dict[SiteId, TaskKind]:
        return {site: kind for site in self.sites if (kind := self.lab.asked(site)) is not None}

    def go_to(self, step: TaskKind) -> list[SiteId]:
        """Answer everything before this step; who is asked for it."""
        while set(self.asked().values()) != {step}:
            self.answer(list(self.asked()))
        return list(self.asked())

    def finish(self, number: int = 1) -> None:
        """Answer whatever is asked until the round is over."""
        while isinstance(self.lab.phase, phases.Collecting | phases.Summing) and self.lab.phase.round == number:
            self.answer([*self.asked()][:1])

    def bases(self) -> dict[SiteId, Digest | None]:
        return {site: self.lab.task(site).base_digest for site in self.asked()}

    def state_of(self, sites: Iterable[SiteId], contributors: Iterable[SiteId] | None = None) -> Payload:
        """The state that the plain sum of these sites' words gives."""
        fixed = self.lab.recipe.federation.fixed_point
        assert fixed is not None
        kept = None
        if self.layout.classes:
            flags = {site: self.layout.flags(self.updates[site]) for site in contributors or sites}
            kept = total_of(flags) >= 2
        words = {site: self.layout.words(self.updates[site], fixed, kept) for site in sites}
        return next_state(self.server, self.start, self.layout, total_of(words), fixed, round_context())

    def published(self, number: int = 1) -> Digest:
        state = self.ledger.state("test", number)
        assert state is not None
        return state


def digest(state: Payload) -> Digest:
    return codec.digest(codec.encode(state))


@pytest.fixture(params=METHODS)
def run(request: pytest.FixtureRequest) -> Secure:
    return Secure(request.param)


def test_a_round_asks_for_each_step_in_order_and_publishes_what_the_plain_sum_gives(run: Secure) -> None:
    for step in run.steps:
        assert run.asked() == dict.fromkeys(SITES, step)
        task = run.lab.task("ann")
        assert (task.attempt, task.sum_of) == (1, "update")
        run.answer(SITES)
    assert digest(run.state_of(SITES)) == run.published() != digest(run.state_of(SITES[1:]))
    (_, row) = run.ledger.rounds("test")[:2]
    assert row.complete
    assert verify_round(run.ledger, run.lab.blobs, "test", 1, 1).finding is VerificationResult.SAME
    assert sorted(row.task.site for row in one_a_site(run.ledger.updates("test", 1, 1))) == list(SITES)
    seen = overview(run.ledger, "test")
    assert seen is not None
    assert (seen.invited, seen.reported) == (5, 0)
    assert run.asked() == dict.fromkeys(SITES, TaskKind.FIT)
    run.finish(2)
    assert run.asked() == dict.fromkeys(SITES, TaskKind.SCORE_SUM)
    assert run.lab.task("ann").sum_of is SumOf.SCORES


@pytest.mark.parametrize("step", SUM_STEPS)
def test_a_site_that_drops_out_at_a_step_ends_nothing_but_where_a_class_could_be_left_alone(
    run: Secure, step: TaskKind
) -> None:
    if step not in run.steps:
        pytest.skip("no such step without class rows")
    run.go_to(step)
    run.answer(SITES[1:])
    run.lab.later(60.0, alive=SITES)
    rows = METHODS[run.method]
    if rows and step in (TaskKind.AGREE_CONTRIBUTORS, TaskKind.REVEAL_CONTRIBUTORS, TaskKind.MASK):
        assert "of the secure aggregation: 4 of 5 sites, 5 are needed; no answer of ann" in str(
            run.ledger.rounds("test")[-1].abandoned
        )
        run.lab.later(0.0)
        assert run.asked() == dict.fromkeys(SITES, TaskKind.FIT)
        assert run.lab.task("ann").attempt == 2
        run.finish()
        assert run.published() == digest(run.state_of(SITES))
        return
    run.finish()
    in_sum = SITES if step in (TaskKind.AGREE, TaskKind.REVEAL) else SITES[1:]
    assert run.published() == digest(run.state_of(in_sum))
    assert run.ledger.rounds("test")[1].complete is (in_sum == SITES)


@pytest.mark.parametrize("step", SUM_STEPS)
def test_with_fewer_than_t_sites_the_attempt_is_abandoned(run: Secure, step: TaskKind) -> None:
    if step not in run.steps:
        pytest.skip("no such step without class rows")
    run.go_to(step)
    run.answer(SITES[:3])  # t = 4 of 5
    run.lab.later(60.0, alive=SITES)
    row = run.ledger.rounds("test")[-1]
    assert f"{step} of the secure aggregation: 3 of 5 sites" in str(row.abandoned)
    assert isinstance(run.lab.phase, phases.Idle)
    assert run.lab.phase.tries == 1
    assert run.ledger.state("test", 1) is None


@pytest.mark.parametrize("step", SUM_STEPS)
def test_a_restart_at_any_step_sends_the_same_and_gives_the_same_state(run: Secure, step: TaskKind) -> None:
    if step not in run.steps:
        pytest.skip("no such step without class rows")
    sites = run.go_to(step)
    before, phase = run.bases(), run.lab.phase
    run.lab.restart()
    assert (run.lab.phase, run.bases()) == (phase, before)
    run.answer(sites[:2])
    half = run.lab.phase
    run.lab.restart()
    assert run.lab.phase == half
    run.answer(sites[2:])
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


@pytest.mark.parametrize("step", [TaskKind.FIT, *SUM_STEPS])
def test_a_process_that_dies_before_it_asks_for_the_next_step_asks_for_it_after_a_restart(
    run: Secure, step: TaskKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step not in run.steps or step is TaskKind.REVEAL:
        pytest.skip("no step follows")
    sites = run.go_to(step)
    run.answer(sites[:-1])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger, "go_on", die)
        with pytest.raises(KeyboardInterrupt):
            run.answer(sites[-1:])
    run.lab.restart()
    run.lab.later(0.0)
    assert set(run.asked().values()) == {run.steps[run.steps.index(step) + 1]}
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


@pytest.mark.parametrize("step", SUM_STEPS)
def test_two_different_uploads_for_a_step_are_equivocation(run: Secure, step: TaskKind) -> None:
    if step not in run.steps:
        pytest.skip("no such step without class rows")
    run.go_to(step)
    if step is TaskKind.MASK:
        short = pack(SignatureMessage(b""), np.zeros(run.layout.size - 1, np.uint64))
        assert f"expected uint64 [{run.layout.size}]" in run.lab.push("ann", short).reason
    task, bobs = run.lab.task("ann"), run.lab.task("bob")
    run.answer(["ann"])
    assert run.lab.push("ann", run.sites["ann"].answer(task), task).verdict is Verdict.DUPLICATE
    receipt = run.lab.push("ann", pack(SignatureMessage(b"another")), task)
    assert receipt.verdict is Verdict.REFUSED
    assert "another update was already accepted" in receipt.reason
    run.lab.later(60.0, alive=SITES)
    assert run.lab.push("bob", run.sites["bob"].answer(bobs), bobs).verdict is Verdict.LATE  # its step is over


def test_what_is_not_signed_for_this_very_sum_is_refused_by_name(run: Secure) -> None:
    task = run.lab.task("ann")
    run.sites["ann"].recipe = codec.digest(b"another recipe")
    receipt = run.lab.push("ann", run.sites["ann"].answer(task), task)
    assert (receipt.verdict, "did not sign a message in its name" in receipt.reason) == (Verdict.REFUSED, True)
    run.sites["ann"] = run._site("ann")
    stranger = run.sites["bob"].answer(run.lab.task("bob"))
    assert "expected the keys of ann" in run.lab.push("ann", stranger, task).reason
    run.go_to(TaskKind.AGREE)
    task = run.lab.task("ann")
    false = pack(SignatureMessage(bytes(64)))
    assert run.lab.push("ann", false, task).verdict is Verdict.REFUSED
    plain: Payload = {Part.BODY: {"w": np.zeros(3, np.float32)}}
    assert "expected the tensors message of part" in run.lab.push("ann", plain, task).reason
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


def commits_of(run: Secure) -> list[Commit]:
    """What all sites that are asked now send, each started and examined."""
    commits = []
    for site in run.asked():
        task = run.lab.task(site)
        manifest, data = run.lab.announce(run.sites[site].answer(task))
        intake = run.lab.intake
        assert intake.begin(site, daemon(site), task.task_id, 1, task.base_digest, manifest) is None
        found = intake.examine(site, task.task_id, manifest, data, task.base_digest)
        run.lab.blobs.put(data)
        commits.append(Commit(site, daemon(site), task.task_id, manifest, {}, None, found))
    return commits


def test_uploads_of_a_step_that_are_committed_together_count_as_one_by_one(run: Secure) -> None:
    while isinstance(run.lab.phase, phases.Collecting | phases.Summing) and run.lab.phase.round == 1:
        answers = run.lab.intake.commit_all(commits_of(run))
        assert [getattr(answer, "verdict", answer) for answer in answers] == [Verdict.ACCEPTED] * len(SITES)
    assert run.published() == digest(run.state_of(SITES))
    assert {row.norm for row in run.ledger.updates("test", 1)} == {None}


def test_a_deadline_that_passes_while_uploads_are_recorded_together_parts_none_from_the_others(
    run: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.go_to(TaskKind.SHARE)
    commits, judge_all = commits_of(run), run.ledger.judge_all
    run.lab.clock.now += 40.0  # of a step's 60

    def slow(rows: Sequence[UpdateRow]) -> list[Receipt]:
        run.lab.clock.now += 30.0
        return judge_all(rows)

    with monkeypatch.context() as patch:
        patch.setattr(run.ledger, "judge_all", slow)
        run.lab.intake.commit_all(commits)
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


def test_random_numbers_of_a_site_that_keeps_its_update_back_end_the_attempt_and_name_nobody(run: Secure) -> None:
    run.go_to(TaskKind.MASK)
    cyd, draw = run.sites["cyd"], np.random.default_rng(0)
    given, cyd.numbers = cyd.numbers, lambda _: draw.integers(2**64, size=run.layout.size, dtype=np.uint64)
    run.answer(SITES)
    run.go_to(TaskKind.REVEAL)
    run.answer(list(run.asked()))
    row = run.ledger.rounds("test")[-1]
    assert "the secure aggregation cannot be opened: its numbers are random" in str(row.abandoned)
    assert not set(SITES) & set(re.findall(r"\w+", str(row.abandoned)))
    assert isinstance(run.lab.phase, phases.Idle)
    cyd.numbers = given
    run.lab.later(run.lab.phase.again_at, alive=SITES)
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


@pytest.mark.parametrize("liars", [1, 2])
def test_one_false_share_does_no_harm_and_too_many_end_the_attempt_and_not_the_run(run: Secure, liars: int) -> None:
    run.go_to(TaskKind.REVEAL)
    for site in SITES[:liars]:  # of two, three true shares of five are left, t is four
        shares = run.sites[site].party.shares
        for dealer, dealt in shares.items():
            shares[dealer] = {vector: Share(bytes(16), bytes(16)) for vector in dealt}
    run.answer(SITES)
    if liars == 2:
        row = run.ledger.rounds("test")[-1]
        assert "2 or more of ann, bob, cyd, dan, eli revealed false shares" in str(row.abandoned)
        assert isinstance(run.lab.phase, phases.Idle)
        run.lab.later(run.lab.phase.again_at, alive=SITES)
        run.finish()
    assert run.published() == digest(run.state_of(SITES))


def test_an_attempt_that_sites_decline_by_their_policy_is_followed_by_one_far_above(run: Secure) -> None:
    """A ledger from a backup: its sites know attempts that it does not, and take part in none of them again."""

    def decline(reason: FailureReason) -> int:
        for site in SITES:
            if run.lab.asked(site) is not None:
                task = run.lab.task(site)
                run.lab.beat(site, task.task_id, activity=Activity.FAILED, failure=reason)
        assert isinstance(run.lab.phase, phases.Idle)
        run.lab.clock.now = max(run.lab.clock.now, run.lab.phase.again_at)
        run.lab.later(0.0, alive=SITES)
        return run.lab.task("ann").attempt

    reasons = FailureReason.POLICY, FailureReason.POLICY, FailureReason.DATA, FailureReason.POLICY
    assert [decline(reason) for reason in reasons] == [2, 4, 5, 10]
    run.finish()
    assert run.published() == digest(run.state_of(SITES))


def test_the_numbers_of_attempts_end_to_double_where_a_site_declines_each_for_another_reason(run: Secure) -> None:
    (task, *_), sums = run.ledger.tasks("test", 1, 1), run.lab.run.sums
    assert sums is not None
    last = 1
    for number in range(100):
        declined = replace(task, task_id=f"again {number}", attempt=last, task_status="failed", reason="policy")
        run.ledger.invite([declined])
        following = sums.attempt_after(1, last)
        assert following > last
        last = following
    assert last < 1 << 22


@pytest.mark.parametrize("step", [TaskKind.SHARE, TaskKind.REVEAL])
def test_a_damaged_upload_ends_the_attempt_and_not_the_run(run: Secure, step: TaskKind) -> None:
    run.go_to(step)
    run.answer(SITES[1:])
    (lost,) = [row for row in run.ledger.updates("test", 1) if (row.task.kind, row.task.site) == (step, "bob")]
    run.lab.blobs.discard(lost.digest)
    run.answer(SITES[:1])
    row = run.ledger.rounds("test")[-1]
    assert "secure aggregation" in str(row.abandoned)
    assert isinstance(run.lab.phase, phases.Idle)
    assert run.ledger.state("test", 1) is None


def test_a_run_says_which_sites_a_step_waits_for(run: Secure) -> None:
    run.go_to(TaskKind.SHARE)
    run.answer(SITES[:2])
    waits = run.lab.run.waiting(Certificates(run.ledger))
    assert waits is not None
    assert waits.text == "waits for cyd, dan, eli in step share of a secure aggregation; has 2, needs 4"
    assert run.lab.task("cyd").remaining_s == 60.0


NAMES = tuple(f"s{number:02}" for number in range(1, 13))
RULES: dict[str, Any] = {
    "rounds": 4,
    "federation": {"secure": True, "min_sites": 3, "quorum": 3, "score_every": 0, "sum_group": 3},
}


def run_of(count: int, method: str = "fedavg", ledger: Ledger | None = None) -> Secure:
    return Secure(method, ledger or Ledger(), NAMES[:count], RULES)


def told(run: Secure, site: SiteId) -> Groups:
    """The groups that a site is told when it is asked to share."""
    base = run.lab.task(site).base_digest
    assert base is not None
    return unpack(run.lab.blobs.view(base), RosterMessage)[0].groups


def others(run: Secure, site: SiteId) -> list[SiteId]:
    """The sites of all groups but this one's."""
    return [name for group in run.ledger.groups() if site not in group for name in group]


def statuses(run: Secure, number: int, sites: Iterable[SiteId]) -> set[tuple[str, str]]:
    rows = run.ledger.tasks("test", number)
    return {(row.task_status, row.reason) for row in rows if row.kind is TaskKind.FIT and row.site in sites}


@pytest.mark.parametrize("method", ["fedavg", "fedprp"])
def test_a_site_that_does_not_report_leaves_its_group_out_and_the_round_counts_over_the_others(method: str) -> None:
    run = run_of(6, method)
    run.finish()
    first, second = run.ledger.groups()
    assert (len(first), len(second)) == (3, 3)
    lost = first[0]
    run.start = run.lab.run.published.state  # type: ignore[union-attr]
    run.answer([site for site in run.asked() if site != lost])
    run.lab.later(600.0, alive=run.names)
    assert run.asked() == dict.fromkeys(second, TaskKind.SHARE)
    assert told(run, second[0]) == (second,)
    assert statuses(run, 2, first[1:]) == {
        ("rejected", f"waits for {lost}: its group is aggregated as a whole, or not at all")
    }
    run.finish(2)
    assert run.published(2) == digest(run.state_of(second))
    assert verify_round(run.ledger, run.lab.blobs, "test", 2, 1).finding is VerificationResult.SAME
    assert run.ledger.groups() == (first, second)


@pytest.mark.parametrize("step", [TaskKind.SHARE, TaskKind.MASK, TaskKind.AGREE])
def test_a_site_that_drops_out_of_a_sum_takes_its_group_along_before_its_numbers_are_there(step: TaskKind) -> None:
    """Of twelve sites nine are left, and t is nine."""
    run = run_of(12)
    run.go_to(step)
    behind = step is TaskKind.AGREE
    lost = {group[0] for group in run.ledger.groups()[: 3 if behind else 1]}
    run.answer([site for site in run.asked() if site not in lost])
    run.lab.later(60.0, alive=run.names)
    expected = run.names if behind else others(run, *lost)
    if not behind:
        assert sorted(run.asked()) == sorted(expected)
    phase = run.lab.phase
    run.lab.restart()
    assert run.lab.phase == phase
    run.finish()
    assert run.published() == digest(run.state_of(expected))
    assert verify_round(run.ledger, run.lab.blobs, "test", 1, 1).finding is VerificationResult.SAME
    run.finish(2)
    assert run.ledger.state("test", 2) is not None


def test_newcomers_whose_others_do_not_report_are_rejected_with_what_they_wait_for() -> None:
    run = run_of(7)
    run.answer(NAMES[:2])
    run.lab.later(600.0, alive=run.names)  # the first groups wait for enough sites
    said = str(run.ledger.rounds("test")[-1].abandoned)
    assert (run.ledger.groups(), "2 updates at the deadline, 0 of them in whole groups, quorum 3" in said) == ((), True)
    run.lab.later(0.0)
    run.answer(NAMES[:4])
    run.lab.later(600.0, alive=run.names)
    run.finish()
    assert run.ledger.groups() == (NAMES[:4],)
    assert set(run.asked()) == set(run.names)
    run.answer(NAMES[:6])
    run.lab.later(600.0, alive=run.names)
    assert set(run.asked()) == set(NAMES[:4])
    text = "waits for 1 more new site: its sums are over groups of 3"
    assert statuses(run, 2, NAMES[4:6]) == {("rejected", text)}
    aside = {row.task.site: row.code for row in run.ledger.updates("test", 2) if row.rejected is not None}
    assert aside == dict.fromkeys(NAMES[4:6], RejectionCode.GROUP)
    run.finish(2)
    assert run.ledger.groups() == (NAMES[:4],)
    run.answer(NAMES[:7])
    assert run.ledger.groups() == (NAMES[:4], NAMES[4:7])


@pytest.mark.parametrize("method", ["fedavg", "fedprp"])
def test_a_server_that_is_restarted_between_any_two_events_forms_the_same_groups(method: str) -> None:
    expected, run = run_of(7, method), run_of(7, method)
    expected.finish()
    while isinstance(run.lab.phase, phases.Collecting | phases.Summing) and run.lab.phase.round == 1:
        run.lab.restart()
        run.answer([*run.asked()][:1])
        assert run.ledger.groups() in ((), expected.ledger.groups())
        run.lab.restart()
    assert run.ledger.groups() == expected.ledger.groups()
    assert run.published() == expected.published()
    run.finish(2)
    assert run.ledger.groups() == expected.ledger.groups()


def test_groups_stay_when_a_run_is_rolled_back() -> None:
    run = run_of(6)
    run.finish()
    run.finish(2)
    before = run.ledger.groups()
    run.lab.run.roll_back(1)
    run.lab.later(0.0)
    run.lab.restart()
    run.go_to(TaskKind.SHARE)
    assert told(run, "s01") == before == run.ledger.groups()


def next_run(run: Secure, name: str, names: tuple[SiteId, ...] = (), **federation: Any) -> Secure:
    """Another run of the same server, whose first one has ended."""
    run.lab.run.stop("enough")
    changes = {**RULES, "name": name, "federation": {**RULES["federation"], **federation}}
    return Secure("fedavg", run.ledger, names or run.names, changes)


def test_a_run_of_any_sites_sums_those_without_a_group_alone_and_gives_them_none() -> None:
    run = run_of(3)
    run.finish()
    later = next_run(run, "any", NAMES[:5], sum_group=1)
    later.go_to(TaskKind.SHARE)
    assert told(later, "s01") == (NAMES[:3], ("s04",), ("s05",))
    later.lab.restart()
    later.finish()
    assert later.ledger.groups() == (NAMES[:3],)
    assert later.ledger.state("any", 1) == digest(later.state_of(NAMES[:5]))


def test_a_group_that_was_dissolved_is_formed_anew_of_those_that_are_left_and_past_rounds_stay_verified() -> None:
    run = run_of(5)
    run.finish()
    (group,) = run.ledger.groups()
    assert isinstance(run.lab.phase, phases.Collecting)
    run.ledger.dissolve(group)
    run.lab.run.regrouped()
    run.answer(NAMES[:4])
    run.lab.later(600.0, alive=run.names)
    assert run.ledger.groups() == (NAMES[:4],)
    assert told(run, "s01") == (NAMES[:4],)
    run.finish(2)
    assert run.ledger.state("test", 2) is not None
    for number in (1, 2):
        found = verify_round(run.ledger, run.lab.blobs, "test", number, 1)
        assert found.finding is VerificationResult.SAME, number


def test_a_clock_that_was_set_back_hides_no_group_from_a_verification() -> None:
    run = run_of(6)
    run.finish()
    run.finish(2)
    assert len(run.ledger.groups()) == 2
    with run.ledger._write() as connection:
        connection.exec_driver_sql("update rounds set closed_at = closed_at - 3600 where round = 2")
    assert run.ledger.groups(run.ledger.rounds("test")[2].closed_at) == ()
    assert verify_round(run.ledger, run.lab.blobs, "test", 2, 1).finding is VerificationResult.SAME


def test_no_group_is_dissolved_while_a_sum_is_open() -> None:
    run = run_of(3)
    run.lab.run.check_regrouping()
    run.go_to(TaskKind.SHARE)
    with pytest.raises(ConflictError, match="Pause the run"):
        run.lab.run.check_regrouping()
    run.finish()
    run.lab.run.check_regrouping()
