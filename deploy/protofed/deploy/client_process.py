"""What `protofed client` starts: one site's daemon as a process."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from protofed.common.address import check_connection
from protofed.common.certificate import stamp
from protofed.common.errors import ConfigError, DataError
from protofed.common.identity import LiveIdentity, Party
from protofed.common.journal import Journal
from protofed.common.recipe import Recipe
from protofed.common.settings import ClientSettings
from protofed.common.task import Finished, Role, Wait

if TYPE_CHECKING:
    import torch

    from protofed.client.agent import Agent
    from protofed.client.data.examples import SiteData
    from protofed.client.memory import Store
    from protofed.client.policy import Policy
    from protofed.client.proxy import Proxy
    from protofed.client.site import Site

log = structlog.get_logger()
LONGEST_PAUSE_S = 60.0


class StoppedError(BaseException):
    """The process was told to end (SIGTERM, SIGINT); everything that counts is on disk."""


def run_client(settings: ClientSettings, *, until_finished: bool, give_up_after_s: float | None) -> None:
    """Take part until SIGTERM or SIGINT, or until the server has no run left.

    Raises:
        PolicyViolation: there is no policy.
        ConfigError, DataError, StateError: a setting, the identity, the data or the state folder cannot be used; or
            what answers at the server's address is not the server.
        Unavailable: the server did not answer for `give_up_after_s`.
        Fenced: a newer daemon of this site has enrolled.
    """
    check_connection(settings.server, settings.identity, settings.plaintext)
    identity = own_identity(settings)
    _check_root(settings)

    # torchvision makes a folder for compiled code when it is imported: there may be no other place to write to.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.state))
    import torch  # seconds of import, only where it is needed

    from protofed.client import device
    from protofed.client.agent import Agent
    from protofed.client.audit import FILE, Audit
    from protofed.client.grpc_link import GrpcLink
    from protofed.client.memory import FolderStore
    from protofed.client.now import Now
    from protofed.client.policy import Policy
    from protofed.client.pulse import Pulse

    policy, proxy = Policy.read(settings.policy), _proxy(settings)
    where = device.pick(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    with stoppable(), ExitStack() as held:
        store, now = FolderStore(settings.state), Now()
        held.callback(store.close)
        journal = Journal(settings.state / FILE)
        held.callback(journal.close)
        audit = Audit(journal)
        link = GrpcLink(
            settings.server,
            settings.site,
            secrets.token_hex(8),
            settings.roles,
            identity=identity,
            proxy=proxy,
            audit=audit,
            incoming=store.incoming,
            give_up_after_s=give_up_after_s,
        )
        pulse = Pulse(link, now, lambda: link.bytes_moved)
        pulse.start()
        for end in (partial(pulse.join, 5.0), link.close, pulse.stop):  # the last one first
            held.callback(end)
        _tell_start(settings, identity)
        agent = Agent(_site(settings, policy, store, where), link, now, refused=audit.refused)
        _take_part(agent, until_finished=until_finished)


def _site(settings: ClientSettings, policy: Policy, store: Store, where: torch.device) -> Site:
    from protofed.client.checkpoint import on_disk
    from protofed.client.site import Site
    from protofed.deploy.simulate import device_model

    return Site(
        settings.site,
        settings.roles,
        policy,
        store,
        lambda recipe: _load_data(settings, recipe).placed(where),
        lambda recipe: device_model(recipe, where, policy.rules.models),
        checkpoints=partial(on_disk, settings.state),
    )


def own_identity(settings: ClientSettings) -> LiveIdentity | None:
    """The site's identity; None: plain text.

    Raises:
        ConfigError: it cannot be used, or is another site's.
    """
    if settings.identity is None:
        return None
    identity = LiveIdentity(settings.identity, Party.SITE)
    if (name := identity.now().certificate.name) != settings.site:
        raise ConfigError(
            f"the certificate in {settings.identity} is of site '{name}', and this is site '{settings.site}'; "
            "correct the setting `site`, or give its --identity folder"
        )
    return identity


def _proxy(settings: ClientSettings) -> Proxy | None:
    from protofed.client.proxy import Proxy

    if settings.proxy is None:
        return None
    if settings.plaintext:
        raise ConfigError("proxy: plain text stays on this machine; remove the setting, or give --identity")
    for name in ("no_grpc_proxy", "no_proxy"):  # gRPC would let them overrule the setting
        os.environ.pop(name, None)
    return Proxy.read(settings.proxy)


def _tell_start(settings: ClientSettings, identity: LiveIdentity | None) -> None:
    from protofed.client.lookout import days_left

    if identity is None:
        log.info("starting in plain text", site=settings.site, server=settings.server)
        return
    own = identity.now().certificate
    until, left = stamp(own.not_after), days_left(own)
    log.info("starting", server=settings.server, certificate=str(own), until=until, days_left=left)


def _load_data(settings: ClientSettings, recipe: Recipe) -> SiteData:
    from protofed.client.data.site import load_site, load_test

    if Role.TRAINER in settings.roles:
        return load_site(settings.data, settings.share, recipe.input, recipe.classes)
    return load_test(settings.data, recipe.input, recipe.classes)


def _take_part(agent: Agent, *, until_finished: bool) -> None:
    asked_at = time.monotonic()
    while not (isinstance(answer := agent.step(20.0), Finished) and answer.last and until_finished):
        match answer:
            case Finished(last=True):
                time.sleep(5.0)  # a long-lived server will have another run
            case Wait(retry_after_s):  # of a server that answers at once, however often it is asked
                pause = asked_at + retry_after_s - time.monotonic()
                time.sleep(max(0.0, min(pause, LONGEST_PAUSE_S)))
        asked_at = time.monotonic()


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
