"""How far back a roll-back goes. Sites decline one that their policies do not allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protofed.common.config.recipe import MAX_ROUNDS
from protofed.common.errors import ConfigError, short
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.snapshot_builder import best_snapshot
from protofed.deploy.run_view import kept_best
from protofed.protos.v1 import operator_pb2 as pb

STANDARD, STRICT = 5, 2  # limits.max_rollback_rounds of these shipped policies
SITES_GO: Final = f"Sites under policy standard go {STANDARD} rounds back, under strict {STRICT}, and decline more."


@dataclass(frozen=True)
class Rollback:
    """A run's way back.

    Attributes:
        to: the round whose state it would continue from.
        newest: the newest round that ever counted, rolled back meanwhile or not: from it sites count.
    """

    run: str
    to: int
    newest: int

    @property
    def rounds_back(self) -> int:
        """How many rounds a site would go back."""
        return max(0, self.newest - self.to)

    def check(self, *, force: bool, by: str) -> None:
        """Check that sites under policy `standard` would go along.

        Args:
            force: nothing is checked: their policies allow more.
            by: how a person says so.

        Raises:
            ConfigError: they would not.
        """
        if force or self.rounds_back <= STANDARD:
            return
        raise ConfigError(
            f"round {self.to} is {self.rounds_back} rounds back. {SITES_GO} The run would then fail, and rounds "
            f"{self.to + 1} to {self.newest} would be lost. To use the model of round {self.to}: protofed export "
            f"{self.run} --round {self.to}. To go on from it, let every site set limits.max_rollback_rounds to "
            f"{self.rounds_back} or more, then {by}"
        )


def plan_rollback(operator: Operator, run: str, text: str) -> Rollback:
    """What `rollback RUN ROUND` would do.

    Args:
        text: a round's number, or `best`.

    Raises:
        ConfigError: it is neither, there is no best round, or it is the run's last one.
    """
    detail = operator.show(run, 1)
    to = _round(run, text, detail)
    if text == "best" and to == detail.info.rounds:
        raise ConfigError(
            f"the best round of run '{short(run)}' is its last one, {to}: the run ends with its best model, and no "
            f"round would follow it. To use the model: protofed export {short(run)} --round best"
        )
    return Rollback(run, to, _newest(operator, detail))


def _round(run: str, text: str, detail: pb.RunDetail) -> int:
    if text == "best":
        return kept_best(run, best_snapshot(detail))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_ROUNDS))):
        raise ConfigError(f"round '{short(text)}': expected a number, or best")
    return int(text)


def _newest(operator: Operator, detail: pb.RunDetail) -> int:
    if detail.info.rolled_back:  # later rounds that were rolled back are nowhere but among the attempts
        detail = operator.show(detail.info.run)
        return max((row.round for row in detail.rounds if row.state), default=0)
    published = any(row.state for row in detail.rounds)
    return detail.info.round if published else max(0, detail.info.round - 1)
