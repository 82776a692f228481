"""Faults of the network, between real processes: what was acknowledged stays, and the result is that of a quiet run."""

from __future__ import annotations

import random
import re
import time

import pytest
from tests.faults.conftest import SITES, MakeRun, ProxiedProcesses
from tests.support.fault_proxy import BOTH, PASS, Direction, Mode
from tests.support.invariants import Baseline, serves

pytestmark = pytest.mark.timeout(900)  # three processes, two of which import PyTorch, on a machine with other work
NOTICED_WITHIN_S = 50.0  # keepalive after 30 s of silence, 20 s for the answer


@pytest.fixture
def here(make_run: MakeRun) -> ProxiedProcesses:
    """Three rounds, started: the server and two sites at work."""
    started = make_run()
    started.server()
    started.trainers()
    return started


def check_end(here: ProxiedProcesses) -> None:
    assert here.ended_like_undisturbed().receipts == 2 * here.recipe.rounds


@pytest.mark.parametrize(
    "lasts_s", [3.0, pytest.param(60.0, marks=pytest.mark.faults), pytest.param(300.0, marks=pytest.mark.faults)]
)
def test_row_27_a_black_hole_while_a_model_is_fetched(here: ProxiedProcesses, lasts_s: float) -> None:
    """The site waits, tries again, and goes on when the way is back; a minute is noticed, three seconds are not."""
    proxy, chunks = here.behind("site-1"), []

    def lost(way: Direction, data: bytes) -> bool:
        if way == "down" and len(data) > 4096:  # only a model's chunks are that large
            chunks.append(time.monotonic())
            proxy.mode = Mode(hole=BOTH)
        return False

    proxy.mode = Mode(tap=lost)
    here.wait_for(lambda: bool(chunks))
    before = proxy.connections
    serves(here.address)
    here.wait_for(lambda: time.monotonic() > chunks[0] + lasts_s, patience_s=lasts_s + 10)
    proxy.mode = PASS
    check_end(here)
    assert (proxy.connections > before) == (lasts_s > NOTICED_WITHIN_S)


def test_row_44_answers_to_commits_are_lost_five_times(here: ProxiedProcesses) -> None:
    """Each answer dies on its way, the site asks again, and one update counts."""
    proxy = here.behind("site-1")
    lost: list[list[bytes]] = []

    def receipt(way: Direction, data: bytes) -> bool:
        hexes = re.findall(rb"[0-9a-f]{64}", data)  # a digest and a seal: nothing else has two
        if way == "down" and len(hexes) == 2 and len(lost) < 5:
            lost.append(hexes)
            return True
        return False

    proxy.mode = Mode(tap=receipt)
    check_end(here)
    assert len(lost) == 5
    assert lost[0] == lost[1] == lost[2] == lost[3] == lost[4]  # the stored receipt, again and again


@pytest.mark.faults
def test_row_28_a_link_of_64_kbit_a_second(here: ProxiedProcesses) -> None:
    """Each round takes the seconds that the model needs on that link, and nothing is lost."""
    here.behind("site-2").mode = Mode(rate=8_000.0)
    here.wait_for(here.over, patience_s=300.0)
    here.heal()
    check_end(here)


@pytest.mark.faults
def test_row_53_a_site_that_reads_and_writes_a_byte_a_second(make_run: MakeRun) -> None:
    """Rounds close at their deadline without it, and the server does not grow."""
    rules = {"quorum": 1, "deadline_s": 4.0, "score_every": 0}
    here = make_run(federation=rules, rounds=4)
    here.server()
    here.trainers()
    here.wait_for(lambda: bool(here.task_statuses(1)))
    here.behind("site-2").mode = Mode(rate=1.0)
    baseline = Baseline(here.running["server"].pid)
    here.wait_for(lambda: "late" in {here.task_statuses(number).get("site-2") for number in (1, 2, 3)})
    baseline.check()
    serves(here.address)
    here.behind("site-2").mode = PASS
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    assert here.invariants().published == 5


@pytest.mark.faults
@pytest.mark.parametrize("hole", [BOTH, frozenset({"up"})], ids=["row_54_pulled_cable", "row_55_one_way"])
def test_a_half_open_connection_while_an_update_is_sent(here: ProxiedProcesses, hole: frozenset[Direction]) -> None:
    """The server frees the connection within 50 s, and the site resumes on another."""
    proxy, chunks = here.behind("site-2"), []

    def lost(way: Direction, data: bytes) -> bool:
        if way == "up" and len(data) > 4096:
            chunks.append(time.monotonic())
            proxy.mode = Mode(hole=hole)
        return False

    here.wait_for(lambda: bool(here.task_statuses(1)))
    proxy.mode = Mode(tap=lost)
    here.wait_for(lambda: bool(chunks))
    here.wait_for(lambda: proxy.connections > 1 or time.monotonic() > chunks[0] + NOTICED_WITHIN_S + 10)
    assert proxy.connections > 1, "the site did not notice"
    serves(here.address)
    proxy.mode = PASS
    check_end(here)


@pytest.mark.faults
def test_row_56_connections_are_reset_at_random(here: ProxiedProcesses) -> None:
    """One piece of ten, which is about three calls of ten, and the run ends as if nothing had been.

    They end after a while: on a slow machine more calls are made in a round, and more resets would have to be outlived.
    """
    chance = random.Random(56)  # noqa: S311  (no secret)
    resets: list[Direction] = []

    def unlucky(way: Direction, _data: bytes) -> bool:
        hit = len(resets) < 40 and chance.random() < 0.1
        if hit:
            resets.append(way)
        return hit

    for site in SITES:
        here.behind(site).mode = Mode(tap=unlucky)
    here.wait_for(here.in_last_round, patience_s=600.0)
    here.heal()
    check_end(here)
    assert len(resets) >= 10
    assert set(resets) == BOTH


@pytest.mark.faults
def test_row_57_latency_of_two_seconds_and_cuts(here: ProxiedProcesses) -> None:
    """A round takes longer, and no more than that."""
    began, chance = time.monotonic(), random.Random(57)  # noqa: S311  (no secret)
    for site in SITES:
        here.behind(site).mode = Mode(latency_s=2.0)

    def disturbed() -> bool:
        for site in SITES:
            here.behind(site).reset(0.05, chance)
        time.sleep(1.0)
        return here.in_last_round()

    here.wait_for(disturbed, patience_s=600.0)
    here.heal()
    check_end(here)
    assert time.monotonic() - began < 600
