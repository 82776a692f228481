"""Faults of processes: killed at every named place, ended, doubled, too slow; real servers and daemons."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.faults.conftest import SITES, ProxiedProcesses
from tests.support.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.support.invariants import check, serves
from tests.support.processes import Process

from protofed.common import failpoint
from protofed.common.config.recipe import Recipe

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
MakeProcesses = Callable[[Recipe], ProxiedProcesses]
MakeRecipe = Callable[..., Recipe]
Undisturbed = Callable[[Recipe], str]
SERVER_PLACES = [place for place in failpoint.SERVER if place not in ("loop", "enroll-answered")]
STOP_WITHIN_S = 30.0


def ended_like(here: ProxiedProcesses, final: str | None) -> None:
    """Server and sites ended well, with what a run without faults gives; nothing that was acknowledged is lost."""
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    found, rounds = here.invariants(final=final), here.recipe.rounds
    assert (found.published, found.updates) == (rounds + 1, 2 * rounds + 2)  # two first models
    assert min(found.receipts, found.recomputed) >= 2
    assert found.recorded > 0
    assert "Traceback" not in here.logs()


def died(here: ProxiedProcesses, name: str, place: str) -> None:
    """The process has killed itself at that place."""
    process = here.running[name]
    here.wait_for(lambda: process.poll() is not None)
    assert process.returncode == -signal.SIGKILL, f"{name} ended before it reached {place}\n{here.logs()}"


def wait_until_all_train(here: ProxiedProcesses, round: int = 1) -> None:
    """Until both sites are in the middle of the round."""
    here.wait_for(lambda: list(here.task_statuses(round).values()) == ["started", "started"])


def attempts(here: ProxiedProcesses) -> list[tuple[int, int]]:
    """All rounds that were opened, with their attempts."""
    with here.ledger() as ledger:
        return [(row.round, row.attempt) for row in ledger.rounds(here.recipe.name)]


def test_row_60_71_81_a_server_killed_at_every_place_loses_and_doubles_nothing(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """Chunk written, blob sealed, row written, broadcast, round opened, around the aggregation, state, round row."""
    here = processes_of(quick_recipe(rounds=len(SERVER_PLACES)))
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    for place, after in zip(SERVER_PLACES, [*SERVER_PLACES[1:], None], strict=True):
        died(here, "server", place)
        here.server(fails=f"{after}=kill" if after else "")
    serves(here.address)
    ended_like(here, undisturbed(here.recipe))
    assert attempts(here) == [(number, 1) for number in range(here.recipe.rounds + 1)]  # none was started anew


def test_row_60_a_run_that_stops_early_ends_after_the_same_round_though_its_server_is_killed_at_every_place(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    last = len(SERVER_PLACES)
    impatient = {"patience": last - 1, "min_improvement": 1.0}  # no share improves by 1
    here = processes_of(quick_recipe(rounds=last + 3, federation=impatient))
    here.server(fails=f"{SERVER_PLACES[0]}=kill")
    here.trainers()
    for place, after in zip(SERVER_PLACES, [*SERVER_PLACES[1:], None], strict=True):
        died(here, "server", place)
        here.server(fails=f"{after}=kill" if after else "")
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()
    assert here.invariants(final=undisturbed(here.recipe)).published == last + 1
    with here.ledger() as ledger:
        row = ledger.run(here.recipe.name)
    assert row is not None
    assert (row.outcome, str(row.reason).partition(":")[0]) == ("completed", f"stopped early after round {last}")


def test_row_30_38_a_daemon_killed_at_every_place_hands_in_once(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """Base fetched, in a batch, after an epoch, fitted, staged, acknowledged, settled; two sites side by side."""
    plan = {"epochs": 2, "batch_size": 64, "lr": 0.05, "checkpoint": True}
    here = processes_of(quick_recipe(plan=plan, rounds=len(failpoint.CLIENT)))
    here.server()
    left = {site: iter(failpoint.CLIENT[number::2]) for number, site in enumerate(SITES)}
    armed = {site: next(places) for site, places in left.items()}
    for site, place in armed.items():
        here.trainer(site, fails=f"{place}=kill")
    kills = 0
    while armed:
        here.wait_for(lambda: any(here.running[site].poll() is not None for site in armed))
        for site in [site for site in armed if here.running[site].poll() is not None]:
            died(here, site, armed.pop(site))
            kills += 1
            if place := next(left[site], ""):
                armed[site] = place
            here.trainer(site, fails=f"{place}=kill" if place else "")
    assert kills == len(failpoint.CLIENT)
    ended_like(here, undisturbed(here.recipe))
    assert attempts(here) == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_38_a_daemon_killed_after_a_chunk_has_no_update_row_and_resumes(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """The server dies with it, and both come back: the chunk that was sent is there, the update is not."""
    here = processes_of(quick_recipe())
    here.server(fails="chunk-written:2=kill")  # the first one is the model's
    here.trainers()
    died(here, "server", "chunk-written")
    for site in SITES:
        here.kill(site)
    started = [path.name for path in (here.folder / "server" / "blobs" / "uploads").iterdir()]
    assert started, "no chunk was kept"
    with here.ledger() as ledger:
        assert ledger.updates(here.recipe.name, 1, 1) == []
    here.server()
    here.trainers()
    ended_like(here, undisturbed(here.recipe))


def test_row_34_a_server_killed_while_all_train_takes_what_they_computed_meanwhile(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """The sites train on, attach again and hand in: the same processes, the same invitations, one fit each."""
    here = processes_of(quick_recipe())
    here.server()
    for site in SITES:
        here.trainer(site, fails="batch-done:2=sleep5")
    wait_until_all_train(here)
    before = [here.running[site].pid for site in SITES]
    here.kill("server")
    time.sleep(1.0)
    assert all(here.running[site].poll() is None for site in SITES)
    here.server()
    ended_like(here, undisturbed(here.recipe))
    assert [here.running[site].pid for site in SITES] == before
    assert attempts(here) == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_82_a_server_that_is_told_to_end_says_so_ends_well_and_goes_on_later(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """NOT_SERVING first, exit 0 within its grace, and the round it was in goes on."""
    here = processes_of(quick_recipe())
    here.server()
    for site in SITES:
        here.trainer(site, fails="batch-done:2=sleep5")
    wait_until_all_train(here)
    told = HealthWatch(here.address)
    here.wait_for(lambda: told.heard == [SERVING])
    assert ends(here.running["server"]) == 0, here.logs()
    told.end()
    assert told.heard == [SERVING, NOT_SERVING]
    here.server()
    ended_like(here, undisturbed(here.recipe))
    assert attempts(here) == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_35_a_daemon_that_is_told_to_end_in_training_keeps_its_epochs(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """Exit 0 within 30 s; started again it goes on behind the epoch that it had done, under the same invitation."""
    here = processes_of(quick_recipe(plan={"epochs": 3, "batch_size": 64, "lr": 0.05, "checkpoint": True}))
    here.server()
    here.trainer("site-1", fails="epoch-done:2=sleep60")
    here.trainer("site-2")
    kept = here.folder / "site-1" / ".fit"
    here.wait_for(lambda: any(kept.glob("*.safetensors")) and here.task_statuses(1).get("site-1") == "started")
    assert ends(here.running["site-1"]) == 0, here.logs()
    assert any(kept.glob("*.safetensors"))
    serves(here.address)
    here.trainer("site-1")
    ended_like(here, undisturbed(here.recipe))
    assert attempts(here) == [(number, 1) for number in range(here.recipe.rounds + 1)]


def test_row_16_the_newer_daemon_of_a_site_fences_the_older(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """The older one ends with 76 and what to think of it; one update of the site counts."""
    here = processes_of(quick_recipe())
    here.server()
    here.trainer("site-2", fails="fit-done:2=sleep20")  # so that the run still goes on when the older one wakes
    here.trainer("site-1", fails="fit-done=sleep14")  # long enough for the newer one to start
    here.wait_for(lambda: here.task_statuses(1).get("site-1") == "started")
    here.site("newer", "--site=site-1", "--partition-index=0")
    assert here.finish(["site-1"]) == [76], here.logs()
    assert "a newer daemon of site site-1 has enrolled" in (here.folder / "site-1.log").read_text()
    assert here.finish(["server", "newer", "site-2"]) == [0] * 3, here.logs()
    folders = [here.folder / name for name in ("newer", "site-2")]
    found = check(here.folder / "server", here.recipe.name, sites=folders, final=undisturbed(here.recipe))
    assert (found.published, found.updates) == (here.recipe.rounds + 1, 2 * here.recipe.rounds + 2)


def test_row_15_a_second_server_ends_at_once(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, undisturbed: Undisturbed
) -> None:
    """In the same state folder or on the same port: it says why, and the first one is not disturbed."""
    here = processes_of(quick_recipe())
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
    ended_like(here, undisturbed(here.recipe))


@pytest.mark.parametrize(("place", "said"), [("fit-done", '"late"'), ("batch-done", "task called off")])
def test_row_37_a_straggler_misses_rounds_and_takes_part_later(
    processes_of: MakeProcesses, quick_recipe: MakeRecipe, place: str, said: str
) -> None:
    """Its rounds close without it, DEGRADED; what comes late is STALE, or is called off while it trains."""
    rules = {"quorum": 1, "deadline_s": 6.0, "grace": 0.4, "score_every": 0}
    here = processes_of(quick_recipe(federation=rules, rounds=8))
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
    assert said in (here.folder / "site-2.log").read_text()
    assert here.invariants().published == 9


def ends(process: Process) -> int:
    """The exit code, after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.wait(STOP_WITHIN_S)
