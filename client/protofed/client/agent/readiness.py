"""Whether a daemon can take part: never merely that its process lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from protofed.client.agent.metrics import ANSWERED_WITHIN_S, ClientMetrics
from protofed.client.data.site_data import SiteData
from protofed.client.privacy.policy import Policy
from protofed.common.clock import utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.errors import ConfigError, PolicyViolationError
from protofed.common.pki.identity import LiveIdentity, check_dates


class Loading:
    """Loads the data of runs, and remembers how that went.

    Args:
        root: of the data; None: they come with a package.
    """

    def __init__(self, load: Callable[[Recipe], SiteData], root: Path | None) -> None:
        self._load, self._root = load, root
        self._loaded: bool | None = None  # the last time, if there was one

    def __call__(self, recipe: Recipe) -> SiteData:
        """The site's data, brought to the recipe's input.

        Raises:
            DataError: as they cannot be used.
        """
        self._loaded = False
        data = self._load(recipe)
        self._loaded = True
        return data

    def missing(self) -> str:
        """Why the data cannot be used, and no name of a file; nothing if they are loaded, or their root can be read."""
        if self._loaded is False:
            return "they were not loaded for the run that goes on; the daemon's log says why"
        try:
            return "" if self._loaded or self._root is None else _look_into(self._root)
        except OSError as error:
            return f"data.root cannot be read: {error.strerror}; mount it, or let the daemon's account read it"


@dataclass(frozen=True)
class DaemonReadiness:
    """What has to hold.

    Attributes:
        server: host:port, to be named.
        policy: the file that the daemon was started with.
    """

    server: str
    identity: LiveIdentity | None
    metrics: ClientMetrics
    device: torch.device
    loading: Loading
    policy: Path

    def __call__(self) -> list[str]:
        """What is missing, a line each; empty: it is ready."""
        return list(self._missing())

    def _missing(self) -> Iterator[str]:
        for what, look in (
            ("identity", self._identity),
            ("enrolled", self._enrolled),
            ("device", self._device),
            ("data", self.loading.missing),
            ("policy", self._policy),
        ):
            if found := look():
                yield f"{what}: {found}"

    def _identity(self) -> str:
        if self.identity is None:
            return ""
        own = self.identity.now()
        return _error(lambda: check_dates(own.certificate, own.folder, utc_now()))

    def _enrolled(self) -> str:
        if self.metrics.answered():
            return ""
        return (
            f"{self.server} has not done what this daemon asked for within the last {ANSWERED_WITHIN_S:.0f} s; "
            "its log says why, and so does `protofed client doctor`"
        )

    def _device(self) -> str:
        if self.device.type != "cuda":
            return ""
        try:
            torch.cuda.mem_get_info(self.device)
        except (RuntimeError, AssertionError) as error:  # the latter of a build without CUDA
            first = next(iter(str(error).splitlines()), type(error).__name__)
            return f"{self.device} cannot be used: {first}; look at the driver, then start the daemon again"
        return ""

    def _policy(self) -> str:
        return _error(lambda: Policy.read(self.policy))


def _look_into(root: Path) -> str:
    if root.is_dir():
        with os.scandir(root) as entries:
            next(entries, None)
    else:
        with root.open("rb") as file:
            file.read(1)
    return ""


def _error(look: Callable[[], object]) -> str:
    try:
        look()
    except (ConfigError, PolicyViolationError) as error:
        return str(error)
    return ""
