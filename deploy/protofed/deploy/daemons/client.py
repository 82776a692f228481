"""What `protofed client` starts: one site's daemon as a process."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import structlog

from protofed.client.distributed.environment import Launch, launched
from protofed.common import plugins
from protofed.common.address import check_connection
from protofed.common.clock import stamp
from protofed.common.config.recipe import Input, Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import PolicyViolationError
from protofed.common.monitoring.http import Monitor
from protofed.common.pki.identity import LiveIdentity
from protofed.common.protocol.messages import Finished, Role, Task, Wait
from protofed.common.storage.journal import Journal
from protofed.common.version import VERSION
from protofed.deploy.daemons import client_ranks
from protofed.deploy.daemons.client_resources import check_root, own_identity, own_proxy
from protofed.deploy.daemons.metrics_endpoint import answering
from protofed.deploy.daemons.signals import stoppable
from protofed.deploy.logs import capture, setup

if TYPE_CHECKING:
    import torch

    from protofed.client.agent.agent import Agent
    from protofed.client.agent.heartbeat import Heartbeat
    from protofed.client.agent.metrics import ClientMetrics
    from protofed.client.agent.readiness import Loading
    from protofed.client.agent.site import Site
    from protofed.client.data.site_data import SiteData
    from protofed.client.privacy.policy import Policy
    from protofed.client.state.disk_store import Store
    from protofed.client.transport.audit import ClientAudit
    from protofed.client.transport.grpc_link import GrpcLink

log = structlog.get_logger()
LONGEST_PAUSE_S = 60.0


def run_client(settings: ClientSettings, *, until_finished: bool, give_up_after_s: float | None) -> None:
    """Take part until SIGTERM or SIGINT, or until the server has no run left; several processes do so as one.

    Raises:
        PolicyViolation: there is no policy.
        ConfigError, DataError, StateError: a setting, the identity, the data or the state folder cannot be used; or
            what answers at the server's address is not the server.
        Unavailable: the server did not answer for `give_up_after_s`, or another process of this site has ended.
        Fenced: a newer daemon of this site has enrolled.
    """
    setup.hide_site(settings)
    client_ranks.check_download(settings, launch := launched(os.environ))
    if launch is not None and launch.rank:
        _follow(settings, launch)
        return
    setup.about(lambda: {"site": settings.site})
    check_connection(settings.server, settings.identity, settings.plaintext)
    identity = own_identity(settings)
    check_root(settings)
    where = _device(settings, launch)

    from protofed.client.agent.agent import Agent
    from protofed.client.agent.heartbeat import DaemonStatus, Heartbeat
    from protofed.client.agent.metrics import ClientMetrics
    from protofed.client.privacy.policy import Policy
    from protofed.client.state.disk_store import DiskStore
    from protofed.client.transport.audit import FILE, ClientAudit
    from protofed.client.transport.grpc_link import GrpcLink

    policy, proxy = Policy.read(settings.policy), own_proxy(settings)
    plugins.allow(policy.rules.plugins)
    with stoppable(), ExitStack() as held:
        over = held.enter_context(client_ranks.leading(launch, where))
        store, now = DiskStore(settings.state), DaemonStatus()
        setup.about(lambda: {"site": settings.site, **now.at_work()})
        held.callback(store.close)
        journal = Journal(settings.state / FILE)
        held.callback(journal.close)
        audit = ClientAudit(journal)
        metrics = ClientMetrics(settings.site, now, lambda: link.answered_at, settings.state, where, identity)
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
            released=metrics.released,
        )
        _beat(
            Heartbeat(link, now, lambda: link.bytes_moved, lambda: policy.release_telemetry(metrics.telemetry())),
            link,
            held,
        )
        _tell_start(settings, identity)
        load = _watched(settings, identity, metrics, where, held)
        site = over(_site(settings, policy, store, where, load))
        agent = Agent(site, link, now, refused=lambda task, why: _refused(metrics, audit, task, why))
        _take_part(agent, until_finished=until_finished)


def _beat(pulse: Heartbeat, link: GrpcLink, held: ExitStack) -> None:
    pulse.start()
    for end in (partial(pulse.join, 5.0), link.close, pulse.stop):  # the last one first
        held.callback(end)


def _watched(
    settings: ClientSettings,
    identity: LiveIdentity | None,
    metrics: ClientMetrics,
    where: torch.device,
    held: ExitStack,
) -> Loading:
    """How data are loaded, and whoever asks is told how that went."""
    from protofed.client.agent.readiness import DaemonReadiness, Loading

    load = Loading(partial(_load, settings, where), settings.data.place)
    ready = DaemonReadiness(settings.server, identity, metrics, where, load, settings.policy)
    monitor = None if settings.metrics is None else Monitor(settings.metrics, metrics.registry, ready)
    held.enter_context(answering(monitor, settings.state))
    return load


def _follow(settings: ClientSettings, launch: Launch) -> None:
    """As another process than the daemon: without connection, identity or state folder."""
    setup.about(lambda: {"site": settings.site, "rank": launch.rank})
    check_root(settings)
    where = _device(settings, launch)

    from protofed.client.privacy.policy import Policy
    from protofed.client.state.store import MemoryStore

    policy, load = Policy.read(settings.policy), partial(_load, settings, where)
    plugins.allow(policy.rules.plugins)
    with stoppable():
        client_ranks.following(launch, where, _site(settings, policy, MemoryStore(), where, load))


def _device(settings: ClientSettings, launch: Launch | None) -> torch.device:
    """Where it trains; PyTorch is set up as the settings say."""
    # torchvision makes a folder for compiled code when it is imported: there may be no other place to write to.
    if launch is None or not launch.rank:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.state))
    import torch  # seconds of import, only where it is needed

    capture.take_over("torch")

    from protofed.client.agent import device

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return device.pick(launch.device(settings.device, torch.cuda.device_count()) if launch else settings.device)


def _site(
    settings: ClientSettings, policy: Policy, store: Store, where: torch.device, load: Callable[[Recipe], SiteData]
) -> Site:
    from protofed.client.agent.site import Site
    from protofed.client.models.catalogue import device_model
    from protofed.client.training.checkpoint import on_disk

    return Site(
        settings.site,
        settings.roles,
        policy,
        store,
        load,
        lambda recipe: device_model(recipe, where, policy.rules.plugins),
        checkpoints=partial(on_disk, settings.state),
        preprocessing_digest=settings.data.preprocessing_digest,
    )


def _tell_start(settings: ClientSettings, identity: LiveIdentity | None) -> None:
    from protofed.client.transport.server_check import days_left

    if identity is None:
        log.info("starting in plain text", server=settings.server, version=VERSION)
        return
    own = identity.now().certificate
    told = {"certificate": str(own), "until": stamp(own.not_after), "days_left": days_left(own)}
    log.info("starting", server=settings.server, version=VERSION, **told)


def load_data(settings: ClientSettings, input_: Input, classes: int, class_names: Sequence[str] = ()) -> SiteData:
    """What this site trains on or, without the role of a trainer, scores on; on the CPU.

    Raises:
        DataError: it cannot be used.
    """
    from protofed.client.data.site import load_site, load_test

    if Role.TRAINER in settings.roles:
        return load_site(settings.data, settings.partition_index, input_, classes, class_names=class_names)
    return load_test(settings.data, input_, classes, class_names=class_names)


def _load(settings: ClientSettings, where: torch.device, recipe: Recipe) -> SiteData:
    return load_data(settings, recipe.input, recipe.classes, recipe.class_names).placed(where)


def _refused(metrics: ClientMetrics, audit: ClientAudit, task: Task, why: PolicyViolationError) -> None:
    metrics.refused(why)
    audit.refused(task, why)


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
