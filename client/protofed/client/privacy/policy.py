"""The gate: everything that leaves a site passes its policy. It fails closed: what no rule names stays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from protofed.client.privacy import update_checks
from protofed.client.privacy.rules import PolicyRules as PolicyRules
from protofed.client.privacy.score_disclosures import tells_of_classes
from protofed.client.privacy.update_checks import GateContext as GateContext
from protofed.client.privacy.update_checks import PolicyRefusedError as PolicyRefusedError
from protofed.common import codec
from protofed.common.config.recipe import read_toml
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.payload import NOT_ON_THE_WIRE, Part, Tensors, Update, describe
from protofed.common.protocol.messages import Manifest, Scores, score_family

_GATE = object()


@dataclass(frozen=True)
class Released:
    """An update that the policy released, as bytes. Only `Policy.release` can make one, so links need not check."""

    manifest: Manifest
    data: bytes = field(repr=False)
    metrics: Scores
    weight: float | None
    _gate: InitVar[object] = None  # an InitVar is not stored, so `dataclasses.replace` cannot copy it

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("an update leaves only through Policy.release")


@dataclass(frozen=True)
class ReleasedScores:
    """Scores that the policy released; only `Policy.release_scores` can make one."""

    scores: Scores
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("scores leave only through Policy.release_scores")


@dataclass(frozen=True)
class ReleasedTelemetry:
    """Numbers of the site's machine that the policy released; only `Policy.release_telemetry` can make one."""

    numbers: Mapping[str, float]
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("telemetry leaves only through Policy.release_telemetry")


@dataclass(frozen=True)
class PolicyOrigin:
    """Where a policy comes from: the name of its file, and the BLAKE3-256 of it; empty: from no file."""

    name: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Policy:
    """Decides what may leave this site."""

    rules: PolicyRules
    origin: PolicyOrigin = field(default=PolicyOrigin(), compare=False)  # a comment more is no other policy

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file (TOML).

        Raises:
            PolicyViolationError: there is no such file: no policy, no participation.
            ConfigError: it cannot be read, or is invalid.
        """
        try:
            version = codec.digest(path.read_bytes()) if path.is_file() else None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; expected the site's policy") from error
        if version is None:
            raise PolicyViolationError(
                f"no policy at {path}: a site takes part only under a policy; start from a copy of one that comes with "
                "protofed (`protofed policies show standard > policy.toml`), or name one: `--policy standard`"
            )
        rules = read_toml(path, PolicyRules)
        if simulated := rules.parts & NOT_ON_THE_WIRE:
            raise ConfigError(f"{path}: part '{min(simulated)}' exists only in simulations; remove it")
        telling = sorted(filter(tells_of_classes, rules.metrics))
        if rules.hide_class_presence and telling:
            raise ConfigError(
                f"{path}: metrics: '{telling[0]}' tells which classes the site has, which hide_class_presence = true "
                "hides; leave only global.* without *.local.* in metrics, or set hide_class_presence = false"
            )
        return cls(rules, PolicyOrigin(path.name, version))

    def admit(self, method: str, sends: frozenset[Part]) -> None:
        """Check a run's method before anything is trained for it.

        Args:
            sends: the parts that the method's updates have.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        if method not in self.rules.methods:
            allowed = ", ".join(sorted(self.rules.methods))
            raise PolicyRefusedError("methods", f"method '{method}' is not in this site's policy (methods: {allowed})")
        for part in sorted(sends):
            if part not in self.rules.parts:
                text = f"method '{method}' sends '{part}', which is not in this site's policy (parts)"
                raise PolicyRefusedError("parts", text, part=part)
            if (refusal := update_checks.refusal_of_part(self.rules, part)) is not None:
                raise PolicyRefusedError(*refusal, part=part)

    def admit_head(self, head: Tensors, classes: int) -> None:
        """Check the model of a run whose method sends the head: under `hide_class_presence` it has no row a class.

        Args:
            head: tensors of any values, of which the method may send all.
            classes: C, of the run.

        Raises:
            PolicyRefusedError: naming the rule and the tensor.
        """
        update_checks.check_head_rows(self.rules, head, classes)

    def release(self, update: Update, context: GateContext | None = None) -> Released:
        """Check an update, remove what the rules demand, and encode the rest.

        Of the scalars, those stay that the rules do not name; prototypes of classes with too few examples stay, too.

        Args:
            context: facts about the site that some rules need; None: an update that needs them is refused.

        Raises:
            PolicyRefusedError: naming the rule; nothing of the update has left.
        """
        update_checks.check(self.rules, update.payload, context)
        leaving = update_checks.withhold(self.rules, update.payload, context)
        # Sizes last: withheld rows do not count.
        update_checks.check_tensor_sizes(self.rules, leaving)
        data = codec.encode(leaving)
        update_checks.check_size(self.rules, len(data))
        manifest = Manifest(describe(leaving), len(data), codec.digest(data))
        weight = update.weight if self.rules.example_count else None
        return Released(manifest, data, self._named(update.metrics), weight, _GATE)

    def release_scores(self, scores: Scores) -> ReleasedScores:
        """The scores that the policy names; the others stay."""
        return ReleasedScores(self._named(scores), _GATE)

    def release_telemetry(self, measured: Mapping[str, float]) -> ReleasedTelemetry:
        """The numbers that the policy names; of these, negative and non-finite ones stay, too."""
        named = {name.value: measured[name] for name in sorted(self.rules.telemetry) if name in measured}
        return ReleasedTelemetry(
            {name: value for name, value in named.items() if math.isfinite(value) and value >= 0}, _GATE
        )

    def _named(self, scalars: Scores) -> Scores:
        return {name: value for name, value in sorted(scalars.items()) if score_family(name) in self.rules.metrics}
