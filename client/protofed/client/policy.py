"""The site's gate. It belongs to the site and fails closed: what the policy does not name does not leave."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from protofed.common import codec
from protofed.common.errors import ConfigError, PolicyViolation
from protofed.common.payload import NOT_ON_THE_WIRE, Part, Update, describe
from protofed.common.recipe import Table, read_toml
from protofed.common.task import Manifest, Scores, score_family

_GATE = object()


class Rules(Table):
    """A policy file; every list is complete: there is no "all"."""

    methods: frozenset[str]
    parts: frozenset[Part]
    metrics: frozenset[str] = frozenset()  # scalars by name, without a class's number at its end; the others stay
    models: frozenset[str] = frozenset()  # `package.module:factory` of the site's own models that a run may name
    example_count: bool = False  # whether the total number of examples may be sent
    max_update_mb: Annotated[float, Field(gt=0)] = 1024.0


@dataclass(frozen=True)
class Released:
    """An update that the policy let pass, as bytes; only `Policy.release` makes one."""

    manifest: Manifest
    data: bytes = field(repr=False)
    metrics: Scores
    weight: float | None
    _gate: InitVar[object] = None  # not kept: `dataclasses.replace` makes no other one of it

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolation("an update leaves only through Policy.release")


@dataclass(frozen=True)
class ReleasedScores:
    """Scores that the policy let pass; only `Policy.release_scores` makes one."""

    scores: Scores
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolation("scores leave only through Policy.release_scores")


@dataclass(frozen=True)
class Policy:
    """What may leave this site."""

    rules: Rules

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy of a file.

        Raises:
            PolicyViolation: there is no such file: no policy, no participation.
            ConfigError: it cannot be understood.
        """
        if not path.is_file():
            raise PolicyViolation(
                f"no policy at {path}: a site takes part only under a policy of its own; "
                "start from one in deploy/policies and name it with --policy"
            )
        rules = read_toml(path, Rules)
        if refused := rules.parts & NOT_ON_THE_WIRE:
            raise ConfigError(f"{path}: part '{min(refused)}' exists only in simulations; remove it")
        return cls(rules)

    def admit(self, method: str, sends: frozenset[Part]) -> None:
        """Refuse a run before anything is trained for it.

        Raises:
            PolicyViolation: naming the rule.
        """
        if method not in self.rules.methods:
            allowed = ", ".join(sorted(self.rules.methods))
            raise PolicyViolation(f"method '{method}' is not in this site's policy (methods: {allowed})")
        if refused := sorted(sends - self.rules.parts):
            raise PolicyViolation(f"method '{method}' sends '{refused[0]}', which is not in this site's policy (parts)")

    def release(self, update: Update) -> Released:
        """Let an update pass, with only the scalars that the policy names.

        Raises:
            PolicyViolation: a part or the size is not allowed; nothing of the update has left.
        """
        for part in update.payload:
            if part not in self.rules.parts:
                raise PolicyViolation(f"part '{part}' is not in this site's policy (parts)")
        if bad := codec.first_not_finite(update.payload):
            raise PolicyViolation(f"{bad} has values that are not finite; nothing was sent")
        data = codec.encode(update.payload)
        if len(data) > self.rules.max_update_mb * 1e6:
            raise PolicyViolation(
                f"an update of {len(data) / 1e6:.1f} MB is above this site's max_update_mb = {self.rules.max_update_mb}"
            )
        manifest = Manifest(describe(update.payload), len(data), codec.digest(data))
        weight = update.weight if self.rules.example_count else None
        return Released(manifest, data, self._named(update.metrics), weight, _GATE)

    def release_scores(self, scores: Scores) -> ReleasedScores:
        """Let the scores pass that the policy names."""
        return ReleasedScores(self._named(scores), _GATE)

    def _named(self, scalars: Scores) -> Scores:
        return {name: value for name, value in sorted(scalars.items()) if score_family(name) in self.rules.metrics}
