"""A task of another package: regression, with a range and a score of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protofed.common.config.tasks import Regression
from protofed.tasks import TaskScore


@dataclass(frozen=True)
class Gauge(Regression):
    range: tuple[float, float] = (0.0, 9.0)

    client: ClassVar[str] = "tests.client.tasks.own_client:GaugeTask"

    def scores(self) -> tuple[TaskScore, ...]:
        return (*super().scores(), TaskScore("near"))
