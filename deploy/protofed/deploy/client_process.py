"""What `protofed client` starts: one site's daemon as a process."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from protofed.common.address import check_loopback
from protofed.common.errors import DataError
from protofed.common.recipe import Recipe
from protofed.common.settings import ClientSettings
from protofed.common.task import Finished, Role

if TYPE_CHECKING:
    from protofed.client.agent import Agent
    from protofed.client.data.examples import SiteData


class StoppedError(BaseException):
    """The process was told to end (SIGTERM, SIGINT); everything that counts is on disk."""


def run_client(settings: ClientSettings, *, until_finished: bool, give_up_after_s: float | None) -> None:
    """Take part until SIGTERM or SIGINT, or until the server has no run left.

    Raises:
        PolicyViolation: there is no policy.
        ConfigError, DataError, StateError: a setting, the data or the state folder cannot be used.
        Unavailable: the server did not answer for `give_up_after_s`.
        Fenced: a newer daemon of this site has enrolled.
    """
    import torch  # seconds of import, only where it is needed

    from protofed.client import device
    from protofed.client.agent import Agent
    from protofed.client.checkpoint import on_disk
    from protofed.client.grpc_link import GrpcLink
    from protofed.client.memory import FolderStore
    from protofed.client.now import Now
    from protofed.client.policy import Policy
    from protofed.client.pulse import Pulse
    from protofed.client.site import Site
    from protofed.deploy.simulate import device_model

    policy, where = Policy.read(settings.policy), device.pick(settings.device)
    check_loopback(settings.server)
    _check_root(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    store, now = FolderStore(settings.state), Now()
    link = GrpcLink(
        settings.server,
        settings.site,
        secrets.token_hex(8),
        settings.roles,
        incoming=store.incoming,
        give_up_after_s=give_up_after_s,
    )
    pulse = Pulse(link, now, lambda: link.bytes_moved)
    site = Site(
        settings.site,
        settings.roles,
        policy,
        store,
        lambda recipe: _load_data(settings, recipe).placed(where),
        lambda recipe: device_model(recipe, where, policy.rules.models),
        checkpoints=partial(on_disk, settings.state),
    )
    with stoppable():
        try:
            pulse.start()
            _take_part(Agent(site, link, now), until_finished=until_finished)
        finally:
            pulse.stop()
            link.close()
            store.close()


def _load_data(settings: ClientSettings, recipe: Recipe) -> SiteData:
    from protofed.client.data.site import load_site, load_test

    if Role.TRAINER in settings.roles:
        return load_site(settings.data, settings.share, recipe.input, recipe.classes)
    return load_test(settings.data, recipe.input, recipe.classes)


def _take_part(agent: Agent, *, until_finished: bool) -> None:
    while not (isinstance(answer := agent.step(20.0), Finished) and answer.last and until_finished):
        if isinstance(answer, Finished) and answer.last:
            time.sleep(5.0)  # a long-lived server will have another run


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGINT end what runs inside, quietly."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(StoppedError):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_root(settings: ClientSettings) -> None:
    """Say at once that the data are not there, not when the first run begins."""
    root = settings.data.root
    if root is not None and not root.exists() and not settings.data.download:
        raise DataError(f"no data at {root}; mount or copy them there, or correct data.root")
