"""Whether a daemon can take part in a run: more than that its process lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from protofed.client.agent.metrics import ANSWERED_WITHIN_S, ClientMetrics
from protofed.client.data.site_data import SiteData
from protofed.client.policy.policy import Policy
from protofed.common.clock import utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.pki.identity import LiveIdentity, check_dates


class SiteDataLoader:
    """Loads the data of runs and remembers whether that succeeded.

    Args:
        root: file or folder of the data; None: they come with a package.
    """

    def __init__(self, load: Callable[[Recipe], SiteData], root: Path | None) -> None:
        self._load, self._root = load, root
        self._loaded: bool | None = None  # whether the last attempt succeeded; None before the first

    def __call__(self, recipe: Recipe) -> SiteData:
        """The site's data, brought to the recipe's input.

        Raises:
            DataError: they cannot be used.
        """
        self._loaded = False
        data = self._load(recipe)
        self._loaded = True
        return data

    def problem(self) -> str:
        """Why the data cannot be used, without names of files; empty: they are loaded, or their root can be read."""
        if self._loaded is False:
            return "they were not loaded for the run that goes on; the daemon's log says why"
        try:
            if self._root is not None and not self._loaded:
                _check_readable(self._root)
        except OSError as error:
            return f"data.root cannot be read: {error.strerror}; mount it, or let the daemon's account read it"
        return ""


@dataclass(frozen=True)
class DaemonReadiness:
    """The check behind the daemon's `/readyz`.

    Attributes:
        server: host:port, for the message.
        policy: the file that the daemon was started with.
    """

    server: str
    identity: LiveIdentity | None
    metrics: ClientMetrics
    device: torch.device
    loading: SiteDataLoader
    policy: Path

    def __call__(self) -> list[str]:
        """One line for each problem; empty: the daemon is ready."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        for name, check in (
            ("identity", self._identity),
            ("enrolled", self._enrolled),
            ("device", self._device),
            ("data", self.loading.problem),
            ("policy", self._policy),
        ):
            if problem := check():
                yield f"{name}: {problem}"

    def _identity(self) -> str:
        if self.identity is None:
            return ""
        own = self.identity.current()
        return _error_text(lambda: check_dates(own.certificate, own.folder, utc_now()))

    def _enrolled(self) -> str:
        if self.metrics.answered():
            return ""
        return (
            f"{self.server} has not done what this daemon asked for within the last {ANSWERED_WITHIN_S:.0f} s. The "
            "daemon's log says why, and so does `protofed client doctor`"
        )

    def _device(self) -> str:
        if self.device.type != "cuda":
            return ""
        try:
            torch.cuda.mem_get_info(self.device)
        except (RuntimeError, AssertionError) as error:  # a build of torch without CUDA raises AssertionError
            first = next(iter(str(error).splitlines()), type(error).__name__)
            return f"{self.device} cannot be used: {first}; look at the driver, then start the daemon again"
        return ""

    def _policy(self) -> str:
        return _error_text(lambda: Policy.read(self.policy))


def _check_readable(root: Path) -> None:
    """OSError if the folder or file cannot be read; existence alone says little on a network mount."""
    if root.is_dir():
        with os.scandir(root) as entries:
            next(entries, None)
    else:
        with root.open("rb") as file:
            file.read(1)


def _error_text(check: Callable[[], object]) -> str:
    try:
        check()
    except (ConfigError, PolicyViolationError) as error:
        return str(error)
    return ""
