"""A run that an older release left in its middle is taken up by this one and ends as if nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.command_line import called
from tests.support.kept_release import PARTS, SITES, STOPPED_IN, kept_recipe, restore, start
from tests.support.processes import Processes

from protofed.common.codec import Digest
from protofed.deploy.simulation.simulation import simulation

pytestmark = pytest.mark.timeout(600)  # three processes that import PyTorch, on a machine with other work
GOLDEN = Path(__file__).parents[1] / "golden"
RELEASES = sorted(GOLDEN.glob("v*_*_*"))  # every one since compatibility was promised
AUDIT_FILE = "audit.jsonl"


@pytest.fixture(params=RELEASES, ids=lambda folder: str(folder.name))
def kept(request: pytest.FixtureRequest) -> Path:
    """What a release left."""
    folder: Path = request.param
    return folder


@pytest.fixture
def here(kept: Path, tmp_path: Path) -> Iterator[Processes]:
    processes = restore(kept, tmp_path)
    try:
        yield processes
    finally:
        processes.end()


def simulated_end(kept: Path, folder: Path) -> Digest:
    """Where a simulation ends that begins with what was kept.

    Not with an empty state: processors differ in the last bits of the rounds that were made elsewhere.
    """
    (folder / "restored").mkdir(parents=True)
    restore(kept, folder / "restored")
    (folder / "restored" / "server").rename(folder / "state")
    (folder / "state" / "sites").mkdir()
    for site in SITES:
        (folder / "restored" / site).rename(folder / "state" / "sites" / site)
    with simulation(kept_recipe(), folder / "state") as undisturbed:
        undisturbed.go()
        assert undisturbed.run.published is not None
        return undisturbed.run.published.address


def test_the_first_release_with_a_promise_is_kept() -> None:
    assert GOLDEN / "v0_3_0" in RELEASES


def test_a_run_of_an_older_release_goes_on_to_the_same_end(
    here: Processes, kept: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old_lines = {name: (kept / name / AUDIT_FILE).read_text(encoding="utf-8") for name in PARTS}
    with here.ledger() as ledger:
        before = [(row.round, row.state) for row in ledger.rounds(here.recipe.name) if row.state]
    assert before[-1][0] == STOPPED_IN - 1
    undisturbed = simulated_end(kept, tmp_path / "simulated")
    start(here)
    assert here.finish(["server", *SITES]) == [0] * 3, here.logs()

    with here.ledger() as ledger:
        after = [(row.round, row.state) for row in ledger.rounds(here.recipe.name) if row.state]
    assert after[: len(before)] == before  # nothing published is published again
    assert here.final_digest() == undisturbed

    for name in PARTS:  # one chain: what this release appended hangs on the last record of the older one
        log = (here.folder / name / AUDIT_FILE).read_text(encoding="utf-8")
        assert log.startswith(old_lines[name])
        assert len(log) > len(old_lines[name])
        assert called(capfd, "audit", "verify", here.folder / name / AUDIT_FILE)[0] == 0
