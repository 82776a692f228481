"""A policy that may be edited while the daemon runs: read again when its file has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from protofed.client.policy.policy import Policy, ReleasedTelemetry
from protofed.client.policy.rules import PolicyRules
from protofed.client.policy.score_disclosures import is_own
from protofed.common import plugins
from protofed.common.codec import Digest
from protofed.common.errors import ConfigError, OutOfSpaceError, PolicyViolationError

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
            "the policy releases the site's own scores: a server can compute its label counts from them: for public "
            "data only; take them out of metrics otherwise",
            scores=own,
        )
