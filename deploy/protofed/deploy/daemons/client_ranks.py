"""A site's daemon as several processes (ranks), one for each GPU, started by torchrun on one machine or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog

from protofed.client.distributed.launch import Launch
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, UnavailableError
from protofed.common.version import VERSION

if TYPE_CHECKING:
    import torch

    from protofed.client.distributed.leader import CallBoard
    from protofed.client.distributed.team import Team
    from protofed.client.site import Site

log = structlog.get_logger()


def check_download(settings: ClientSettings, launch: Launch | None) -> None:
    """Refuse `data.download` under torchrun.

    Raises:
        ConfigError: all ranks would write the same files at once.
    """
    if launch is not None and settings.data.download:
        raise ConfigError(
            "data.download: several processes would write the same files; let one `protofed client` without torchrun "
            "download them, then remove the setting"
        )


@contextmanager
def leading(launch: Launch | None, device: torch.device) -> Iterator[Callable[[Site], Site]]:
    """For rank 0: yields what turns a site into one whose runs and fits are done by all ranks; at the end, ends them.

    Without torchrun the site stays as it is.

    Raises:
        UnavailableError: another rank has ended; torchrun restarts all of them, and the task is resumed.
    """
    if launch is None:
        yield lambda site: site
        return
    from protofed.client.distributed.leader import Leader

    with _joined(launch, device) as (team, board):
        log.info("several processes train as one", ranks=team.size, device=str(device))
        leader = Leader(team, board)
        try:
            yield leader.wrap
        finally:
            leader.end()


def following(launch: Launch, device: torch.device, site: Site) -> None:
    """For all other ranks: train with rank 0 until it ends.

    Raises:
        UnavailableError: rank 0 or another rank has died.
    """
    from protofed.client.distributed.leader import follow

    with _joined(launch, device) as (team, board):
        log.info("following the daemon", ranks=team.size, device=str(device), version=VERSION)
        follow(team, board, site)


@contextmanager
def _joined(launch: Launch, device: torch.device) -> Iterator[tuple[Team, CallBoard]]:
    from protofed.client.distributed.rendezvous import joined_ranks
    from protofed.client.distributed.team import RankLostError

    try:
        with joined_ranks(launch, device) as team_and_board:
            yield team_and_board
    except RankLostError as error:
        raise UnavailableError(f"{error}; torchrun starts all of them again, up to --max-restarts times") from error
