"""What a half is told of the round that makes a state: the same in a run, after a restart and in a verification."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from protofed.common.payload import Part, Payload, Update
from protofed.server.method import RoundContext
from protofed.server.methods.fedavg import FedAvgServer
from protofed.server.operator.verification import VerificationResult, verify_round

if TYPE_CHECKING:
    from tests.server.conftest import Lab, MakeLab


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RoundContext]:
    """What FedAvg's half is told, which makes N a part of its state."""
    contexts: list[RoundContext] = []

    def init(_: FedAvgServer, model: Payload, context: RoundContext) -> Payload:
        contexts.append(context)
        return model

    def aggregate(_: FedAvgServer, state: Payload, updates: Iterable[Update], context: RoundContext) -> Payload:
        contexts.append(context)
        heard = sum(1 for _ in updates)
        return {**state, Part.PRIVATE: {"share": np.array(heard / context.sites)}}

    monkeypatch.setattr(FedAvgServer, "init", init)
    monkeypatch.setattr(FedAvgServer, "aggregate", aggregate)
    return contexts


def share(lab: Lab) -> float:
    assert lab.run.published is not None
    return float(lab.run.published.state[Part.PRIVATE]["share"])


def test_a_half_is_told_the_round_the_run_and_how_many_sites_it_has(make: MakeLab, told: list[RoundContext]) -> None:
    lab = make(seed=-1).begin()
    lab.round(ann=1.0, bob=1.0, cyd=1.0)
    assert told == [
        RoundContext(round=number, rounds=2, sites=3, classes=lab.recipe.classes, seed=2**64 - 1) for number in (0, 1)
    ]


def test_the_number_of_sites_is_that_of_those_who_could_be_invited_not_of_those_who_were(
    make: MakeLab, told: list[RoundContext]
) -> None:
    lab = make(federation={"participation": 0.6}).begin()  # two of three
    asked = [site for site in ("ann", "bob", "cyd") if lab.asked(site) is not None]
    lab.round(**dict.fromkeys(asked, 1.0))
    assert (len(asked), told[-1].sites, share(lab)) == (2, 3, 2 / 3)


def test_a_site_that_goes_or_comes_counts_from_the_next_round_on(lab: Lab, told: list[RoundContext]) -> None:
    lab.presence.exclude("cyd", "test")
    lab.run.dismiss("cyd", "excluded")
    del lab.here["cyd"]
    lab.enroll("dan", "eve", "fay")
    lab.round(ann=1.0, bob=1.0)
    lab.round(ann=1.0, bob=1.0, dan=1.0, eve=1.0, fay=1.0)
    assert [context.sites for context in told] == [3, 5]


def test_a_restarted_server_and_a_verification_tell_what_was_recorded(lab: Lab, told: list[RoundContext]) -> None:
    lab.push("ann", lab.model(1.0))
    lab.here = {site: role for site, role in lab.here.items() if site in ("ann", "bob")}
    lab.restart()
    lab.presence.exclude("cyd", "test")
    lab.run.dismiss("cyd", "excluded")
    lab.push("bob", lab.model(1.0))
    assert share(lab) == 2 / 3
    assert verify_round(lab.ledger, lab.blobs, "test", 1, 1).finding is VerificationResult.SAME
    assert told[-2:] == [told[-1]] * 2
