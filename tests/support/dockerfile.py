"""deploy/docker/Dockerfile, read: its stages, and what an image is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
TARGETS = ("server", "client")
Step = tuple[str, str]  # instruction, the rest of it


@dataclass
class Stage:
    """What stands between two FROMs."""

    base: str
    steps: list[Step] = field(default_factory=list)

    def said(self, *instructions: str) -> list[str]:
        return [rest for instruction, rest in self.steps if instruction in instructions]


def read(text: str) -> tuple[list[Step], dict[str, Stage]]:
    """What precedes the first FROM, and the stages by name."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    whole = [line.split(None, 1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    before: list[Step] = []
    stages: dict[str, Stage] = {}
    steps = before
    for instruction, rest in whole:
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = Stage(base)
            steps = stages[name].steps
        else:
            steps.append((instruction, rest.strip()))
    return before, stages


BEFORE, STAGES = read((DOCKER / "Dockerfile").read_text(encoding="utf-8"))
EVERY = [step for stage in STAGES.values() for step in stage.steps]


def image(target: str) -> Stage:
    """A target with all the stages that it stands on: what its layers and its history are made of."""
    stage = STAGES[target]
    return Stage(stage.base, [*(image(stage.base).steps if stage.base in STAGES else ()), *stage.steps])
