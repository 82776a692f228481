"""The site's gate. It belongs to the site and fails closed: what the policy does not name does not leave."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from protofed.client.privacy import update_checks
from protofed.client.privacy.rules import PolicyRules as PolicyRules
from protofed.client.privacy.update_checks import GateContext as GateContext
from protofed.client.privacy.update_checks import PolicyRefusedError as PolicyRefusedError
from protofed.common import codec
from protofed.common.config.recipe import read_toml
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Part, Update, describe
from protofed.common.protocol.messages import Manifest, Scores, score_family

_GATE = object()


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
            raise PolicyViolationError("an update leaves only through Policy.release")


@dataclass(frozen=True)
class ReleasedScores:
    """Scores that the policy let pass; only `Policy.release_scores` makes one."""

    scores: Scores
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("scores leave only through Policy.release_scores")


@dataclass(frozen=True)
class ReleasedTelemetry:
    """Numbers of the site's machine that the policy let pass; only `Policy.release_telemetry` makes one."""

    numbers: Mapping[str, float]
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("telemetry leaves only through Policy.release_telemetry")


@dataclass(frozen=True)
class Policy:
    """What may leave this site."""

    rules: PolicyRules

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy of a file.

        Raises:
            PolicyViolation: there is no such file: no policy, no participation.
            ConfigError: it cannot be read or understood.
        """
        try:
            there = path.is_file()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; expected the site's policy") from error
        if not there:
            raise PolicyViolationError(
                f"no policy at {path}: a site takes part only under a policy of its own; "
                "start from one in deploy/policies and name it with --policy"
            )
        rules = read_toml(path, PolicyRules)
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
            raise PolicyRefusedError("methods", f"method '{method}' is not in this site's policy (methods: {allowed})")
        for part in sorted(sends):
            if part not in self.rules.parts:
                why = f"method '{method}' sends '{part}', which is not in this site's policy (parts)"
                raise PolicyRefusedError("parts", why, part=part)
            if (untold := update_checks.untold(self.rules, part)) is not None:
                raise PolicyRefusedError(*untold, part=part)

    def release(self, update: Update, background: GateContext | None = None) -> Released:
        """Let an update pass, as far as the rules say so: with only the scalars that they name, without prototypes of
        classes that have too few examples, with decoys where the site hides its classes.

        Args:
            background: what the gate has to know for that; without it, an update that needs it is refused.

        Raises:
            Refusal: naming the rule; nothing of the update has left.
        """
        update_checks.check(self.rules, update.payload)
        leaving = update_checks.disguise(self.rules, update.payload, background)
        update_checks.check_tensor_sizes(self.rules, leaving)
        data = codec.encode(leaving)
        update_checks.check_size(self.rules, len(data))
        manifest = Manifest(describe(leaving), len(data), codec.digest(data))
        weight = update.weight if self.rules.example_count else None
        return Released(manifest, data, self._named(update.metrics), weight, _GATE)

    def release_scores(self, scores: Scores) -> ReleasedScores:
        """Let the scores pass that the policy names."""
        return ReleasedScores(self._named(scores), _GATE)

    def release_telemetry(self, measured: Mapping[str, float]) -> ReleasedTelemetry:
        """Let the numbers of the site's machine pass that the policy names; one that is none stays, too."""
        named = {name.value: measured[name] for name in sorted(self.rules.telemetry) if name in measured}
        return ReleasedTelemetry(
            {name: value for name, value in named.items() if math.isfinite(value) and value >= 0}, _GATE
        )

    def _named(self, scalars: Scores) -> Scores:
        return {name: value for name, value in sorted(scalars.items()) if score_family(name) in self.rules.metrics}
