"""A site's daemon as several processes, one for each GPU, as torchrun starts them on one machine or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from protofed.client.distributed.environment import Launch
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.version import VERSION

if TYPE_CHECKING:
    import torch

    from protofed.client.agent.site import Site
    from protofed.client.distributed.leader import CallBoard
    from protofed.client.distributed.team import Team

log = structlog.get_logger()


def check_download(settings: ClientSettings, launch: Launch | None) -> None:
    """That not all processes write the same files at once.

    Raises:
        ConfigError: they would.
    """
    if launch is not None and settings.data.download:
        raise ConfigError(
            "data.download: several processes would write the same files; let one `protofed client` without torchrun "
            "download them, then remove the setting"
        )


@contextmanager
def leading(launch: Launch | None, where: torch.device) -> Iterator[Callable[[Site], Site]]:
    """Lets a site's runs and fits be the work of all processes, if there are others; in the end they end, too.

    Raises:
        Unavailable: another one has ended; torchrun starts all of them again, and the task is taken up again.
    """
    if launch is None:
        yield lambda site: site
        return
    from protofed.client.distributed.leader import Leader

    with _joined(launch, where) as (team, board):
        log.info("several processes train as one", ranks=team.size, device=str(where))
        leader = Leader(team, board)
        try:
            yield leader.over
        finally:
            leader.end()


def following(launch: Launch, where: torch.device, site: Site) -> None:
    """Train with the daemon, as long as it is there.

    Raises:
        Unavailable: it, or another process, has ended otherwise than in order.
    """
    from protofed.client.distributed.leader import follow

    with _joined(launch, where) as (team, board):
        log.info("following the daemon", ranks=team.size, device=str(where), version=VERSION)
        follow(team, board, site)


@contextmanager
def _joined(launch: Launch, where: torch.device) -> Iterator[tuple[Team, CallBoard]]:
    from protofed.client.distributed.environment import joined
    from protofed.client.distributed.team import LostError

    try:
        with joined(launch, where) as both:
            yield both
    except LostError as lost:
        raise UnavailableError(f"{lost}; torchrun starts all of them again, as far as --max-restarts lets it") from lost
