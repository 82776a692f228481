"""Faults of processes: killed at every named place, ended, doubled, too slow; real servers and daemons."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from tests.faults.conftest import SITES, MakeRun
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.invariants import check, serves
from tests.support.processes import Process, undisturbed

from protofed.client.state.dp_ledger import FILE, read
from protofed.common import failpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
SERVER_PLACES = [place for place in failpoint.SERVER if place not in ("loop", "enroll-answered")]
BUDGET_PLACES = (*failpoint.BUDGET, "fit-done", "staged", "pushed", "settled")
STOP_WITHIN_S = 30.0


def test_row_60_71_81_a_server_killed_at_every_place_loses_and_doubles_nothing(make_run: MakeRun) -> None:
    """Chunk written, blob sealed, row written, broadcast, round opened, around the aggregation, state, round row."""
    here = make_run(rounds=len(SERVER_PLACES))
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    here.die_at_each("server", SERVER_PLACES, lambda fails: here.server(fails=fails))
    serves(here.address)
    here.ended_like_undisturbed()
    assert here.attempts() == [(number, 1) for number in range(here.recipe.rounds + 1)]  # none was started anew


def test_row_60_a_run_that_stops_early_ends_after_the_same_round_though_its_server_is_killed_at_every_place(
    make_run: MakeRun,
) -> None:
    last = len(SERVER_PLACES)
    impatient = {"patience": last - 1, "min_improvement": 1.0}  # no share improves by 1
    here = make_run(rounds=last + 3, federation=impatient)
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    here.die_at_each("server", SERVER_PLACES, lambda fails: here.server(fails=fails))
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    assert here.invariants(final=undisturbed(here.recipe)).published == last + 1
    with here.ledger() as ledger:
        row = ledger.run(here.recipe.name)
    assert row is not None
    assert (row.outcome, str(row.reason).partition(":")[0]) == ("completed", f"stopped early after round {last}")


def test_row_30_38_a_daemon_killed_at_every_place_hands_in_once(make_run: MakeRun) -> None:
    """Base fetched, in a batch, after an epoch, fitted, staged, acknowledged, settled; two sites side by side."""
    plan = {"epochs": 2, "batch_size": 64, "lr": 0.05, "checkpoint": True}
    here = make_run(plan=plan, rounds=len(failpoint.CLIENT))
    here.server()
    places = {site: iter(failpoint.CLIENT[number::2]) for number, site in enumerate(SITES)}
    assert sorted(here.die_side_by_side(places, here.trainer)) == sorted(failpoint.CLIENT)
    here.ended_like_undisturbed()
    assert here.attempts() == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_a_daemon_killed_at_every_place_has_each_fit_in_its_ledger_once(make_run: MakeRun) -> None:
    """Fits have noise: never too little of the budget is counted."""
    plan = {"batch_size": 64, "lr": 0.05, "dp": {"noise_multiplier": 1.0, "sampling_rate": 0.25}}
    here = make_run(plan=plan, rounds=len(BUDGET_PLACES))
    here.server()
    killed, other = SITES
    here.trainer(other)
    here.trainer(killed, fails=f"{BUDGET_PLACES[0]}=kill")
    for place, after in zip(BUDGET_PLACES, [*BUDGET_PLACES[1:], None], strict=True):
        here.died(killed, place)
        started = {spend.round for spend in read(here.folder / killed / FILE).spends}
        with here.ledger() as ledger:
            sent = {row.round for row in ledger.rounds(here.recipe.name) if row.round and row.state}
        assert started >= sent, f"after {place}"
        here.trainer(killed, fails=f"{after}=kill" if after else "")
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    for site in SITES:
        spent = read(here.folder / site / FILE)
        assert [spend.round for spend in spent.spends] == list(range(1, len(BUDGET_PLACES) + 1))
        assert spent.torn == 0


def test_row_38_a_daemon_killed_after_a_chunk_has_no_update_row_and_resumes(make_run: MakeRun) -> None:
    """The server dies with it, and both come back: the chunk that was sent is there, the update is not."""
    here = make_run()
    here.server(fails="chunk-written:2=kill")  # the first one is the model's
    here.trainers()
    here.died("server", "chunk-written")
    for site in SITES:
        here.kill(site)
    started = [path.name for path in (here.folder / "server" / "blobs" / "uploads").iterdir()]
    assert started, "no chunk was kept"
    with here.ledger() as ledger:
        assert ledger.updates(here.recipe.name, 1, 1) == []
    here.server()
    here.trainers()
    here.ended_like_undisturbed()


def test_row_34_a_server_killed_while_all_train_takes_what_they_computed_meanwhile(make_run: MakeRun) -> None:
    """The sites train on, attach again and hand in: the same processes, the same invitations, one fit each."""
    here = make_run()
    here.server()
    here.trainers("batch-done:2=sleep5")
    here.wait_until_all("started")
    before = [here.running[site].pid for site in SITES]
    here.kill("server")
    time.sleep(1.0)
    assert all(here.running[site].poll() is None for site in SITES)
    here.server()
    here.ended_like_undisturbed()
    assert [here.running[site].pid for site in SITES] == before
    assert here.attempts() == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_82_a_server_that_is_told_to_end_says_so_ends_well_and_goes_on_later(make_run: MakeRun) -> None:
    """NOT_SERVING first, exit 0 within its grace, and the round it was in goes on."""
    here = make_run()
    here.server()
    here.trainers("batch-done:2=sleep5")
    here.wait_until_all("started")
    told = HealthWatch(here.address)
    here.wait_for(lambda: told.heard == [SERVING])
    assert ends(here.running["server"]) == 0, here.logs()
    told.end()
    assert told.heard == [SERVING, NOT_SERVING]
    here.server()
    here.ended_like_undisturbed()
    assert here.attempts() == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_35_a_daemon_that_is_told_to_end_in_training_keeps_its_epochs(make_run: MakeRun) -> None:
    """Exit 0 within 30 s; started again it goes on behind the epoch that it had done, under the same invitation."""
    here = make_run(plan={"epochs": 3, "batch_size": 64, "lr": 0.05, "checkpoint": True})
    here.server()
    here.trainer("site-1", fails="epoch-done:2=sleep60")
    here.trainer("site-2")
    kept = here.folder / "site-1" / ".fit"
    here.wait_for(lambda: any(kept.glob("*.safetensors")) and here.task_statuses(1).get("site-1") == "started")
    assert ends(here.running["site-1"]) == 0, here.logs()
    assert any(kept.glob("*.safetensors"))
    serves(here.address)
    here.trainer("site-1")
    here.ended_like_undisturbed()
    assert here.attempts() == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_16_the_newer_daemon_of_a_site_fences_the_older(make_run: MakeRun) -> None:
    """The older one ends with 76 and what to think of it; one update of the site counts."""
    here = make_run()
    here.server()
    here.trainer("site-2", fails="fit-done:2=sleep20")  # so that the run still goes on when the older one wakes
    here.trainer("site-1", fails="fit-done=sleep14")  # long enough for the newer one to start
    here.wait_for(lambda: here.task_statuses(1).get("site-1") == "started")
    here.site("newer", "--site=site-1", "--partition-index=0")
    assert here.finish(["site-1"]) == [76], here.logs()
    assert "a newer daemon of site site-1 has enrolled" in here.log("site-1")
    assert here.finish(["server", "newer", "site-2"]) == [0] * 3, here.logs()
    folders = [here.folder / name for name in ("newer", "site-2")]
    found = check(here.folder / "server", here.recipe.name, sites=folders, final=undisturbed(here.recipe))
    assert (found.published, found.updates) == (here.recipe.rounds + 1, 2 * here.recipe.rounds + 2)


def test_row_15_a_second_server_ends_at_once(make_run: MakeRun) -> None:
    """In the same state folder or on the same port: it says why, and the first one is not disturbed."""
    here = make_run()
    here.server()
    for state, listen, code, says in (
        ("server", "127.0.0.1:0", 74, "is in use by another process"),
        ("other", here.address, 69, "the port is taken"),
    ):
        known = ["server", "start", f"--recipe={here.folder / 'recipe.toml'}", f"--listen={listen}", "--identity=none"]
        command = [sys.executable, "-m", "protofed.deploy.cli", *known, f"--state={here.folder / state}"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (second.returncode, says in second.stderr) == (code, True), second.stderr
    here.trainers()
    here.ended_like_undisturbed()


@pytest.mark.parametrize(("place", "said"), [("fit-done", '"late"'), ("batch-done", "task called off")])
def test_row_37_a_straggler_misses_rounds_and_takes_part_later(make_run: MakeRun, place: str, said: str) -> None:
    """Its rounds close without it, DEGRADED; what comes late is STALE, or is called off while it trains."""
    rules = {"quorum": 1, "deadline_s": 6.0, "grace": 0.4, "score_every": 0}
    here = make_run(federation=rules, rounds=8)
    here.server()
    here.trainer("site-1")
    slow = here.trainer("site-2", fails=f"{place}=sleep9")
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    assert slow.returncode == 0
    with here.ledger() as ledger:
        complete = [row.complete for row in ledger.rounds(here.recipe.name)]
    tasks = [here.task_statuses(number)["site-2"] for number in range(1, 9)]
    assert (complete[1], tasks[0]) == (False, "late")
    assert (complete[-1], tasks[-1]) == (True, "reported")
    assert said in here.log("site-2")
    assert here.invariants().published == 9


def ends(process: Process) -> int:
    """The exit code, after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.wait(STOP_WITHIN_S)
