"""A hospital whose privacy budget ends in the middle of a run, as real processes: it holds, and the others go on."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protofed.client.policy.dp_accountant import NoisySums, epsilon
from protofed.client.state.dp_ledger import FILE, read
from protofed.common.config.recipe import Recipe
from protofed.common.pki.identity import Party
from protofed.common.protocol.messages import PauseReason
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator

pytestmark = pytest.mark.timeout(900)
ROUNDS, ALLOWED = 4, 1
STEPS = 4  # of a round, at every site
DP = {"noise_multiplier": 2.0, "sampling_rate": 0.25}
OTHERS = ("evaluator", "site-1", "site-3")


def spent_by(rounds: int) -> float:
    return epsilon([NoisySums(0.25, 2.0, STEPS * rounds)], 1e-5)


def policy_of(folder: Path) -> Path:
    """The site's: with a budget for one round, and without the telemetry that a budget does not go with."""
    text = (shipped.folder("policies") / "open.toml").read_text(encoding="utf-8")
    text = re.sub(r'^  "gpu_memory_bytes", "step_seconds",.*\n', "", text, flags=re.MULTILINE)
    budget = (spent_by(ALLOWED) + spent_by(ALLOWED + 1)) / 2
    path = folder / "budget.toml"
    path.write_text(f'dp = {{ epsilon = {budget}, delta = 1e-5, unit = "image" }}\n{text}', encoding="utf-8")
    return path


def test_a_site_whose_budget_is_spent_holds_and_the_others_go_on_without_it(
    processes_of: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path, unused_port: int
) -> None:
    plan = {"epochs": 1, "batch_size": 64, "lr": 0.1, "dp": DP}
    federation = {"min_sites": 2, "quorum": 2, "heartbeat_s": 0.1, "score_every": 0}
    here = processes_of(recipe_of("fedavg", plan=plan, rounds=ROUNDS, federation=federation))
    go, policy = tmp_path / "go", policy_of(tmp_path)
    metrics = f"--metrics=127.0.0.1:{unused_port}"
    here.server()
    here.site("evaluator", "--role=evaluator")
    for share, name in ((0, "site-1"), (2, "site-3")):  # both wait in round 3, so that the run does not end
        here.site(name, f"--partition-index={share}", fails=f"batch-done:{2 * STEPS + 1}=until{go}")
    for last in (False, True):  # as it runs out, and after a restart
        here.site("site-2", "--partition-index=1", f"--policy={policy}", metrics)
        here.wait_for(lambda: scraped(unused_port) == pytest.approx(spent_by(ALLOWED)))  # of this very process
        here.wait_for(lambda: reason_of(here, "site-2") == PauseReason.BUDGET)
        assert read(here.folder / "site-2" / FILE).events() == (NoisySums(0.25, 2.0, STEPS * ALLOWED),)
        if not last:
            here.kill("site-2")
    go.touch()
    assert here.finish(["server", *OTHERS]) == [0] * 4, here.logs()  # site-2 goes on holding
    counted = {number: here.task_statuses(number) for number in range(1, ROUNDS + 1)}
    assert sum(statuses.get("site-2") == "reported" for statuses in counted.values()) == ALLOWED
    assert all(statuses["site-1"] == statuses["site-3"] == "reported" for statuses in counted.values())
    assert len(read(here.folder / "site-2" / FILE).spends) == ALLOWED


def reason_of(here: Any, site: str) -> str:
    """Why a site is held, as the coordinator sees it; empty: it is not."""
    with Operator(here.address, here.identity(Party.OPERATOR, "operator")) as operator:
        return next(
            (found.activity_text for found in operator.sites() if (found.site, found.status) == (site, "held")), ""
        )


def scraped(port: int) -> float | None:
    """Epsilon by the site's own /metrics; None: it does not say yet."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read()
    except OSError:  # the daemon does not listen yet
        return None
    found = re.search(rb"^protofed_client_privacy_epsilon_spent\S* (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])
