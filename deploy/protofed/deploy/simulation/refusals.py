"""Why a simulated run stands still or failed, with what was refused: all of it is known here, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from protofed.common.errors import OutOfSpaceError
from protofed.common.payload import SiteId
from protofed.common.protocol.messages import Verdict
from protofed.server.access.certificates import Certificates
from protofed.server.rounds.machine.waiting import WaitReason
from protofed.server.rounds.run import Run
from protofed.server.storage.ledger import Ledger

SHOWN = 3  # reasons in a sentence, and sites of each


def why_stuck(run: Run, ledger: Ledger) -> str:
    """What a run waits for while no site has a task: time stands still, so it never comes."""
    waiting = run.waiting(Certificates(ledger))
    if waiting is None:
        return "no site has a task"
    rules = run.recipe.federation
    said = f"round {waiting.round} {waiting.text}"
    if waiting.reason is WaitReason.TRAINERS:
        said += f" (federation.min_sites is {rules.min_sites}, quorum {rules.quorum})"
    return said


def waits_for_space(run: Run, ledger: Ledger) -> bool:
    """Whether what a run waits for is space on a disk."""
    waiting = run.waiting(Certificates(ledger))
    return waiting is not None and waiting.reason is WaitReason.DISK


@contextmanager
def full_disk_named(state: Path | None) -> Iterator[None]:
    """Name the simulation's folder where a disk is full: there is no server here whose disk it could be.

    Raises:
        OutOfSpaceError: again, with the folder.
    """
    try:
        yield
    except OutOfSpaceError as error:
        if state is None:
            raise
        raise OutOfSpaceError(
            f"the disk of {state}, which keeps this simulation, is full ({error}); free space, then run the same "
            "command again: it goes on from there"
        ) from error


def refusals(ledger: Ledger, run: str, by_sites: Mapping[SiteId, str]) -> str:
    """What was refused of the newest round, by the server and by the sites, as the end of a sentence; empty: nothing.

    A server tells the sites a code alone; the reason is in its ledger.

    Args:
        by_sites: what a site's own policy refused last, and why.
    """
    newest = ledger.newest(run)
    rows = [] if newest is None else ledger.updates(run, newest.round)
    found: dict[tuple[str, str], set[SiteId]] = {}
    for row in rows:
        if row.verdict is Verdict.INVALID:
            found.setdefault(("the server, of", row.reason), set()).add(row.task.site)
    for site, why in by_sites.items():
        found.setdefault(("the policy of", why), set()).add(site)
    listed = [f"{by} {_named(sorted(sites))}: {why}" for (by, why), sites in sorted(found.items())]
    more = f"; and {len(listed) - SHOWN} reasons more" if len(listed) > SHOWN else ""
    return f"; refused by {'; by '.join(listed[:SHOWN])}{more}" if listed else ""


def _named(sites: Sequence[SiteId]) -> str:
    return ", ".join(sites[:SHOWN]) + (f" and {len(sites) - SHOWN} more" if len(sites) > SHOWN else "")
