"""What is left of a simulation that has ended: the numbers that a comparison reads."""

from __future__ import annotations

from protofed.common.payload import SiteId
from protofed.common.protocol.messages import TaskKind, Verdict
from protofed.common.version import VERSION
from protofed.deploy.experiments.code_digest import CodeDigest
from protofed.deploy.experiments.experiment import Result, RoundTraffic
from protofed.deploy.simulation.held_out import held_out_scores
from protofed.deploy.simulation.simulation import Simulation
from protofed.server.storage.ledger import Ledger
from protofed.server.storage.rows import one_a_site


def result_of(running: Simulation, seconds: float, code: CodeDigest, machine: str) -> Result:
    """The result of a run that has ended well.

    Args:
        seconds: wall-clock time of the job, over its interruptions.
        code: that computed it.
        machine: as `machine_class` has it.
    """
    recipe, ledger, held = running.recipe, running.ledger, running.data
    run, published = recipe.name, [row for row in ledger.rounds(recipe.name) if row.state is not None]
    scores, cohorts = ledger.scores(run), dict[int, tuple[SiteId, ...]]()
    for row in published[1:]:  # the first one is the model before training
        used = one_a_site(ledger.updates(run, row.round, row.attempt))
        cohorts[row.round] = tuple(update.task.site for update in used)
        for update in used if row.round in scores and not recipe.federation.secure else []:
            if "loss" in update.metrics:
                scores[row.round].setdefault(update.task.site, {})["loss"] = update.metrics["loss"]
    assert published[-1].state is not None  # noqa: S101  (see above)
    return Result(
        recipe=recipe,
        protofed=VERSION,
        seconds=seconds,
        state=published[-1].state,
        scores=scores,
        sums=ledger.score_sums(run),
        cohorts=cohorts,
        train_examples={site: len(data.train) for site, data in held.items()},
        local_test_examples={site: len(data.local_test) for site, data in held.items() if data.local_test is not None},
        test_images=max((len(data.test) for data in held.values()), default=0),
        code=code,
        machine=machine,
        traffic={} if recipe.federation.secure else _traffic(ledger, run),
        trained=running.training.by_round(),
        held_out={site: dict(own) for site, own in held_out_scores(running).items()},
    )


def _traffic(ledger: Ledger, run: str) -> dict[int, RoundTraffic]:
    """Bytes by round, but for round 0, which makes the first model and is the same for all methods."""
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for update in ledger.updates(run):
        if update.verdict is Verdict.ACCEPTED and update.task.kind is TaskKind.FIT:
            received[update.task.round] = received.get(update.task.round, 0) + update.bytes
    for task in ledger.tasks(run):
        sent[task.round] = sent.get(task.round, 0) + task.bytes_sent
    return {number: RoundTraffic(up=received[number], down=sent.get(number, 0)) for number in sorted(received)}
