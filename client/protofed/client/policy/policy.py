"""The gate: everything that a site sends passes its policy. It fails closed: what no rule names is not sent.

A policy that may be edited while the daemon runs: read again when its file has changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

import numpy as np
import structlog

from protofed.client.policy import update_checks
from protofed.client.policy.rules import PolicyRules, PrivacyBudget, answers_about_classes, is_own, tells_of_classes
from protofed.client.policy.update_checks import GateContext as GateContext
from protofed.client.policy.update_checks import PolicyRefusedError as PolicyRefusedError
from protofed.common import codec, plugins
from protofed.common.codec import Digest
from protofed.common.config.recipe import Recipe, read_toml
from protofed.common.config.tables import NamedOptions
from protofed.common.errors import ConfigError, OutOfSpaceError, PolicyViolationError
from protofed.common.payload import (
    NOT_ON_THE_WIRE,
    Array,
    Exchange,
    Part,
    Payload,
    Tensors,
    Update,
    describe,
)
from protofed.common.protocol.messages import Manifest, Scores, Telemetry, score_family
from protofed.common.protocol.scores import ScoreNames
from protofed.common.secure_aggregation import score_sums
from protofed.common.secure_aggregation.linear_form import FixedPoint, SumForm, SumLayout

_GATE = object()
# Numbers of the machine from which the number of examples follows, which noise hides.
TELLING_OF_COUNTS = frozenset({Telemetry.GPU_MEMORY_BYTES, Telemetry.STEP_SECONDS})


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
            raise PolicyViolationError("an update is sent only through Policy.release")


@dataclass(frozen=True)
class ReleasedVector:
    """What the policy lets into a secure aggregation; only `Policy.release_sum` and `release_score_sum` can make one.

    Its numbers leave under masks only: `client.secure_aggregation` makes the masked vector of them.
    """

    layout: SumLayout
    _update: Update = field(repr=False)
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError(
                "numbers are sent for aggregation only through Policy.release_sum, or release_score_sum"
            )

    def flags(self) -> Array:
        """Which classes are in it, [C] uint64 of 0 and 1."""
        return self.layout.flags(self._update)

    def words(self, fixed_point: FixedPoint, classes: Array | None) -> Array:
        """The site's terms of all sums, [N] uint64.

        Args:
            classes: [C] bool, the classes that enough sites hold; None: nothing is aggregated by class.

        Raises:
            SecureAggregationError: as of `SumLayout.words`.
        """
        return self.layout.words(self._update, fixed_point, classes)


@dataclass(frozen=True)
class ReleasedScores:
    """Scores that the policy released; only `Policy.release_scores` can make one."""

    scores: Scores
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("scores are sent only through Policy.release_scores")


@dataclass(frozen=True)
class ReleasedTelemetry:
    """Numbers of the site's machine that the policy released; only `Policy.release_telemetry` can make one."""

    numbers: Mapping[str, float]
    _gate: InitVar[object] = None

    def __post_init__(self, _gate: object) -> None:
        if _gate is not _GATE:
            raise PolicyViolationError("telemetry is sent only through Policy.release_telemetry")


@dataclass(frozen=True)
class PolicyOrigin:
    """Where a policy comes from: the name of its file, and the BLAKE3-256 of it; empty: from no file."""

    name: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Policy:
    """Decides what this site may send."""

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
                f"no policy at {path}: a site takes part only under a policy. Start from a copy of a shipped one "
                "(`protofed policies standard > policy.toml`), or name one: `--policy standard`"
            )
        rules = read_toml(path, PolicyRules)
        if unsent := rules.parts & NOT_ON_THE_WIRE:
            raise ConfigError(f"{path}: no message can carry part '{min(unsent)}'; remove it from parts")
        telling = sorted(filter(tells_of_classes, rules.metrics))
        if rules.hide_class_presence and telling:
            raise ConfigError(
                f"{path}: metrics: '{telling[0]}' tells which classes the site has, which hide_class_presence = "
                "true hides. Leave only global.* without *.local.* in metrics, or set hide_class_presence = false"
            )
        if uneven := sorted(filter(answers_about_classes, rules.aggregated_metrics)):
            raise ConfigError(
                f"{path}: aggregated_metrics: '{uneven[0]}' tells about a site's classes, and the server chooses "
                "the model. The aggregate over three sites tells which classes they have, or how many examples of "
                "each. Remove this score"
            )
        if rules.secure == "required" and "none" not in rules.limits.robust:
            raise ConfigError(
                f'{path}: limits.robust: under secure = "required" the server sees only an aggregate, to which no '
                'rule applies. Name "none", too, or set secure = "allowed"'
            )
        if problem := _beside_noise(rules):
            raise ConfigError(f"{path}: {problem}")
        return cls(rules, PolicyOrigin(path.name, version))

    def admit(
        self, method: str, sends: frozenset[Part], form: SumForm | None = None, *, exchanges: frozenset[Exchange]
    ) -> None:
        """Check a run's method before anything is trained for it.

        Args:
            sends: the parts that the method's updates have.
            form: what of them is aggregated, in a run with secure aggregation; None: it has none.
            exchanges: what it moves between single sites.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        if method not in self.rules.methods:
            allowed = ", ".join(sorted(self.rules.methods))
            raise PolicyRefusedError("methods", f"method '{method}' is not in this site's policy (methods: {allowed})")
        for exchange in sorted(exchanges - self.rules.exchange):
            does = "sends a site models of others" if exchange is Exchange.RECEIVE else "sends a site's model to others"
            text = f"method '{method}' {does}, and this site's policy does not allow this: no '{exchange}' in exchange"
            raise PolicyRefusedError("exchange", text)
        if form is None and sends and self.rules.secure == "required":
            text = "this site sends updates in a secure aggregation only (secure = required), and the run has none"
            raise PolicyRefusedError("secure", f"{text}: {update_checks.SECURE_RUN}")
        rules = self.rules if form is None else _in_a_sum(self.rules)
        for part in sorted(sends if form is None else sends - _only_aggregated(form)):
            if part not in rules.parts:
                text = f"method '{method}' sends '{part}', which is not in this site's policy (parts)"
                raise PolicyRefusedError("parts", text, part=part)
            if (refusal := update_checks.refusal_of_part(rules, part)) is not None:
                raise PolicyRefusedError(*refusal, part=part)

    def admit_task(self, task: str) -> None:
        """Check what a run learns from the site's images.

        Args:
            task: its name.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        if task not in self.rules.tasks:
            allowed = ", ".join(sorted(self.rules.tasks)) or "none"
            raise PolicyRefusedError("tasks", f"the task '{task}' is not in this site's policy (tasks: {allowed})")

    def admit_noise(self, recipe: Recipe, *, grouped: bool | None = None) -> None:
        """Check that a run has the noise that the site's budget asks for.

        Args:
            grouped: whether the site's training images have groups, such as patients; None: not loaded yet.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        if self.rules.dp is None:
            return
        if recipe.plan.dp is None:
            text = "the run has no noise: this site takes part only in runs with [plan.dp] (dp)"
            raise PolicyRefusedError("dp", text)
        if problem := _shared_with_few(self.rules.dp, recipe):
            raise PolicyRefusedError("dp", problem)
        if self.rules.dp.unit == "patient" and grouped is False:
            text = (
                "this site's budget protects patients, and its images have no groups. Name the groups in the "
                "settings (data.group_pattern, or a column group), or set dp.unit = 'image' in the policy (dp)"
            )
            raise PolicyRefusedError("dp", text)

    def admit_group(self, fewest: int) -> None:
        """Check the least number of sites in a group, which a run with secure aggregation sums together or not at all.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        if fewest < self.rules.sum_group:
            text = (
                f"the run's groups have {fewest} sites or more (federation.sum_group), and this site's policy asks "
                f"for {self.rules.sum_group} (sum_group). In smaller groups, the difference of two aggregates tells "
                "about fewer sites"
            )
            raise PolicyRefusedError("sum_group", text)

    def admit_rows(self, method: NamedOptions) -> None:
        """Check by how many images of a class a method sends the class's row into a secure aggregation.

        How many sites have a row is opened: run by run with ever other numbers, it would be how many images they have.

        Raises:
            PolicyRefusedError: naming the rule.
        """
        requested, least = method.options.get("min_samples_per_class", 1), self.rules.min_samples_per_class
        if isinstance(requested, int) and requested > least:
            text = (
                f"method.min_samples_per_class = {requested}: under secure aggregation this site's policy says how "
                f"many images a class needs, here {least}. Remove the key from the recipe, or lower it to this "
                "number (min_samples_per_class)"
            )
            raise PolicyRefusedError("min_samples_per_class", text)

    def admit_head(self, head: Tensors, classes: int) -> None:
        """Check the model of a run whose method sends the head outside of sums.

        Under `hide_class_presence` the head has no row a class.

        Args:
            head: tensors of any values; the method may send all of them.
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
        if self.rules.secure == "required" and update.payload:
            raise PolicyRefusedError("secure", "an update is sent only in a secure aggregation (secure = required)")
        update_checks.check(self.rules, update.payload, context)
        leaving = update_checks.withhold(self.rules, update.payload, context)
        # Sizes last: withheld rows do not count.
        update_checks.check_tensor_sizes(self.rules, leaving)
        data = codec.encode(leaving)
        update_checks.check_size(self.rules, len(data))
        manifest = Manifest(describe(leaving), len(data), codec.digest(data))
        noisy = context is not None and context.noisy
        weight = update.weight if self.rules.example_count and not noisy else None
        scores = self.release_scores(update.metrics, noisy=noisy).scores
        return Released(manifest, data, scores, weight, _GATE)

    def release_public(self, update: Update, context: GateContext | None = None) -> Released:
        """`release` of what has nothing of the site's own data: rules about classes let it leave.

        It is a run's first model, or one that an evaluator refined on images that it says are public.
        """
        return replace(self, rules=_in_a_sum(self.rules)).release(update, context)

    def release_sum(self, update: Update, layout: SumLayout, context: GateContext | None = None) -> ReleasedVector:
        """Check an update, remove what the rules demand, and let the rest into a secure aggregation.

        Rules about what tells the site's classes do not hold in it; all others do. The shares that a site mixes by are
        sent in no other way.

        Raises:
            PolicyRefusedError: as of `release`.
        """
        rules, hidden = _in_a_sum(self.rules), _only_aggregated(layout.form)
        visible = {part: tensors for part, tensors in update.payload.items() if part not in hidden}
        update_checks.check(rules, visible, context)
        aggregated = {part: tensors for part, tensors in update.payload.items() if part in hidden}
        update_checks.check_finite(rules, aggregated, context)
        leaving = update_checks.withhold(rules, {**visible, **aggregated}, context)
        update_checks.check_tensor_sizes(rules, leaving)
        update_checks.check_size(rules, 8 * layout.size)
        noisy = context is not None and context.noisy
        weight = update.weight if rules.example_count and not noisy else None
        return ReleasedVector(layout, replace(update, payload=leaving, metrics={}, weight=weight), _GATE)

    def release_score_sum(self, scores: Scores, names: ScoreNames, *, noisy: bool = False) -> ReleasedVector:
        """Release a site's own scores into a secure aggregation, if the policy names them, even if only in
        `aggregated_metrics`.

        Args:
            names: those of the run, of which the sum has rows.
            noisy: the run has `[plan.dp]`: scores have no noise, so none is aggregated.
        """
        rules, private = self.rules, noisy or self.rules.dp is not None
        own = {name: value for name, value in scores.items() if is_own(name) and not private}
        summed = {name: value for name, value in own.items() if score_family(name) in rules.aggregated_metrics}
        leaving = score_sums.summable(names, {**self._named(own), **summed})
        return ReleasedVector(score_sums.lay_out_scores(names), score_sums.as_update("", names, leaving), _GATE)

    def release_step(self, message: Payload) -> Released:
        """A site's message of a secure aggregation: keys, shares, signatures, or a masked vector.

        Raises:
            PolicyRefusedError: it is no such message.
        """
        if message.keys() != {Part.SECURE_AGGREGATION} or any(
            array.dtype not in (np.uint8, np.uint64) for array in message[Part.SECURE_AGGREGATION].values()
        ):
            raise PolicyRefusedError("secure", "this is no message of a secure aggregation: nothing was sent")
        data = codec.encode(message)
        update_checks.check_size(self.rules, len(data))
        return Released(Manifest(describe(message), len(data), codec.digest(data)), data, {}, None, _GATE)

    def release_scores(self, scores: Scores, *, noisy: bool = False) -> ReleasedScores:
        """The scores that the policy names; the others stay, and the site's own ones if they leave only in a sum.

        Args:
            noisy: the run has `[plan.dp]`: losses and own scores, which have no noise, stay whatever the policy names.
        """
        released = self._named(scores)
        if self.rules.secure != "allowed" or noisy or self.rules.dp is not None:
            released = {name: value for name, value in released.items() if not is_own(name)}
        return ReleasedScores(released, _GATE)

    def release_telemetry(self, measured: Mapping[str, float]) -> ReleasedTelemetry:
        """The numbers that the policy names; of these, negative and non-finite ones stay, too."""
        released = {name.value: measured[name] for name in sorted(self.rules.telemetry) if name in measured}
        return ReleasedTelemetry(
            {name: value for name, value in released.items() if math.isfinite(value) and value >= 0}, _GATE
        )

    def _named(self, scalars: Scores) -> Scores:
        return {name: value for name, value in sorted(scalars.items()) if score_family(name) in self.rules.metrics}


def _shared_with_few(budget: PrivacyBudget, recipe: Recipe) -> str:
    """Why a sum has too little noise of sites that keep to the rules, if a run shares it; empty: it has enough."""
    shared_by = None if recipe.plan.dp is None else recipe.plan.dp.shared_by
    if shared_by is None or (least := shared_by + budget.colluders) <= recipe.federation.sum_group:
        return ""
    return (
        f"plan.dp.shared_by = {shared_by} with federation.sum_group = {recipe.federation.sum_group}: this site "
        f"assumes that {budget.colluders} of these sites work with the server, whose noise then hides nothing. "
        f"Expected sum_group of {least} or more, or a smaller shared_by (dp.colluders)"
    )


def _beside_noise(rules: PolicyRules) -> str:
    """What a policy with a budget must not let out; empty: it does not, or has none."""
    if rules.dp is None:
        return ""
    if rules.example_count:
        return "example_count = true sends a number without noise, which dp does not allow; set it to false"
    if telling := sorted(rules.telemetry & TELLING_OF_COUNTS):
        return f"telemetry: '{telling[0]}' tells roughly how many images there are, which dp hides; remove it"
    return ""


def _in_a_sum(rules: PolicyRules) -> PolicyRules:
    """The rules that hold for what tells nothing of this site's classes: what leaves in a sum, and the first model."""
    return rules.model_copy(update={"secure": "allowed", "hide_class_presence": False})


def _only_aggregated(form: SumForm) -> frozenset[Part]:
    """The part that never leaves but in a sum: the true shares of classes, which no policy can name."""
    return frozenset({form.shares} if form.shares is not None else ()) & NOT_ON_THE_WIRE


log = structlog.get_logger()
UNREADABLE = (ConfigError, PolicyViolationError)  # what `PolicyFile` raises while no policy counts
NOTHING = Policy(PolicyRules(methods=frozenset(), parts=frozenset()))


class PolicyFile:
    """The policy of a daemon; any thread may ask for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: Callable[[Digest], None] = lambda _version: None
        self._read: tuple[tuple[int, ...], Policy] | None = (
            None  # signature of the file that was read, and what it says
        )

    def __call__(self) -> Policy:
        """What the file says now; it is parsed only if it has changed. Its plug-ins may be loaded from then on.

        Raises:
            PolicyViolationError: there is no such file.
            ConfigError: it cannot be read, is invalid, or cannot be recorded on a full disk: an earlier version of it
                does not count any more.
        """
        signature = self._signature()
        if self._read is None or signature is None or self._read[0] != signature:
            self._read = None
            policy = Policy.read(self._path)
            if self._signature() != signature:  # edited meanwhile: its rules and its digest may be of two versions
                return self()
            self._record_version(policy)
            plugins.allow(policy.rules.plugins)
            _warn_of_own_scores(policy.rules)
            self._read = None if signature is None else (signature, policy)
            return policy
        return self._read[1]

    def record_versions(self, record: Callable[[Digest], None]) -> None:
        """Call `record` with the digest of the file as it is now, and of each later version before it counts.

        Raises:
            PolicyViolationError, ConfigError: as of a call.
        """
        policy, self._record = self(), record
        self._record_version(policy)

    def _record_version(self, policy: Policy) -> None:
        try:
            self._record(Digest(policy.origin.digest))
        except OutOfSpaceError as error:
            raise ConfigError(f"{self._path} cannot be recorded in the audit log: {error}") from error

    def telemetry(self, measured: dict[str, float]) -> ReleasedTelemetry:
        """The numbers that the file names now; none while it cannot be read."""
        try:
            policy = self()
        except UNREADABLE:
            policy = NOTHING
        return policy.release_telemetry(measured)

    def _signature(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self._path)  # of what a link points to: a mounted policy is replaced by moving a link
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _warn_of_own_scores(rules: PolicyRules) -> None:
    if own := sorted(filter(is_own, rules.metrics)):
        log.warning(
            "the policy releases own scores, from which a server can compute label counts: for public data only",
            scores=own,
        )
