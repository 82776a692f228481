"""The client daemon's composition root: what `protofed client start` runs.

PyTorch and grpc are imported inside functions, after the check of settings and identity. Importing them takes seconds,
and a wrong setting is reported at once.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from protofed.client.distributed.launch import Launch, launched
from protofed.common.address import NO_TLS, check_connection, find_folder
from protofed.common.clock import stamp, utc_now
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.config.tables import Input
from protofed.common.errors import ConfigError, DataError, PolicyViolationError, RevokedError, UnavailableError
from protofed.common.monitoring import Monitor
from protofed.common.pki.identity import IdentityError, IdentityProblem, LiveIdentity, Party
from protofed.common.process import quick_imports
from protofed.common.protocol.messages import Assignment, Finished, Role, Task, Wait
from protofed.common.storage.journal import SEGMENT_BYTES, Journal
from protofed.common.version import VERSION
from protofed.deploy import logs, shipped
from protofed.deploy.daemons.metrics_endpoint import serve_metrics
from protofed.deploy.daemons.signals import forbid_core_dumps, stoppable

if TYPE_CHECKING:
    import torch

    from protofed.client.agent.agent import Agent
    from protofed.client.agent.heartbeat import DecisionWatch, Heartbeat
    from protofed.client.agent.metrics import ClientMetrics
    from protofed.client.agent.readiness import SiteDataLoader
    from protofed.client.data.image_cache import Report
    from protofed.client.data.reading import Reading
    from protofed.client.data.site_data import SiteData
    from protofed.client.distributed.leader import CallBoard
    from protofed.client.distributed.team import Team
    from protofed.client.policy.policy import PolicyFile
    from protofed.client.secure_aggregation.partners import Membership
    from protofed.client.site import DaemonStatus, PreparedRun, Site
    from protofed.client.state.decisions import Decision
    from protofed.client.state.disk_store import DiskStore
    from protofed.client.state.store import Store
    from protofed.client.task import ClientTask
    from protofed.client.transport.audit import ClientAudit
    from protofed.client.transport.grpc_link import GrpcLink
    from protofed.client.transport.proxy import Proxy


def own_identity(settings: ClientSettings, clock: Callable[[], datetime] = utc_now) -> LiveIdentity | None:
    """The site's identity; None: plain text. `clock` says when certificates are valid.

    Raises:
        ConfigError: it cannot be used, or is another site's.
    """
    if (folder := find_folder(settings.identity)) is None:
        return None
    identity = LiveIdentity(folder, Party.SITE, clock)
    if (name := identity.current().certificate.name) != settings.site:
        text = f"the certificate in {settings.identity} is of site '{name}', and this is site '{settings.site}'; "
        raise IdentityError(
            IdentityProblem.ANOTHERS, text + "correct the setting `site`, or give its --identity folder"
        )
    return identity


def own_proxy(settings: ClientSettings) -> Proxy | None:
    """The proxy on the way to the server; None: there is none. Removes `no_proxy` from the environment.

    Raises:
        ConfigError: it cannot be used.
    """
    from protofed.client.transport.proxy import Proxy

    if settings.proxy is None:
        return None
    if settings.identity == NO_TLS:
        raise ConfigError("proxy: plain text stays on this machine; remove the setting, or give --identity")
    for name in ("no_grpc_proxy", "no_proxy"):  # gRPC's C core reads them, and they would overrule the setting
        os.environ.pop(name, None)
    return Proxy.read(settings.proxy)


def check_root(settings: ClientSettings) -> None:
    """Check at the start that the data's folder exists: without this, the first run would fail hours later.

    Raises:
        DataError: it does not exist.
    """
    root = settings.data.place
    if root is not None and not root.exists() and not settings.data.download:
        raise DataError(f"no data at {root}; mount or copy them there, or correct data.root")


log = structlog.get_logger()
WAIT_S = 20.0  # for a task, or a run: a server holds a call for no longer
NEW_CERTIFICATE_S = 2.0  # between two looks for one
LONGEST_PAUSE_S = 60.0  # a server cannot keep a site away for longer with one answer
# A server that answers "ask again now" every time would have a daemon ask at the network's speed, and fill its audit
# log. An honest one does so once or twice in a row: at a restart, and between two runs.
IDLE_STEPS, SHORTEST_IDLE_S = 5, 1.0


def run_client(settings: ClientSettings, *, until_finished: bool, give_up_after_s: float | None) -> None:
    """Take part until SIGTERM, SIGINT or SIGHUP. Under torchrun, rank 0 is the daemon; other ranks train with it.

    Args:
        until_finished: end also when the server has no further run.
        give_up_after_s: end after so many seconds without an answer of the server; None: never.

    Raises:
        PolicyViolationError: there is no policy.
        ConfigError, DataError, StateError: a setting, the identity, the data or the state folder cannot be used. Or
            another program than the server answers at its address.
        UnavailableError: the server did not answer for `give_up_after_s`, or another rank has ended.
        FencedError: a newer daemon of this site has enrolled.
        RevokedError: the site's certificate was revoked.
        HangUpError: SIGHUP ended it.
    """
    forbid_core_dumps()
    logs.hide_site(settings)
    check_download(settings, launch := launched(os.environ))
    if launch is not None and launch.rank:
        _follow(settings, launch)
        return
    logs.bind_fields(lambda: {"site": settings.site})
    check_connection(settings.server, settings.identity)
    identity = own_identity(settings)
    check_root(settings)
    with quick_imports():
        device = _device(settings, launch)

        from protofed.client.agent.agent import Agent
        from protofed.client.agent.heartbeat import Heartbeat
        from protofed.client.agent.metrics import ClientMetrics
        from protofed.client.policy.policy import PolicyFile
        from protofed.client.site import DaemonStatus
        from protofed.client.state.disk_store import DiskStore
        from protofed.client.state.owner import claim
        from protofed.client.transport.audit import FILE, ClientAudit

    policy, proxy = PolicyFile(shipped.policy(settings.policy)), own_proxy(settings)
    policy()  # without one that can be read nothing begins
    with stoppable(), ExitStack() as stack:
        distribute = stack.enter_context(leading(launch, device))
        store, status = DiskStore(settings.state), DaemonStatus()
        logs.bind_fields(lambda: {"site": settings.site, **status.log_fields()})
        stack.callback(store.close)
        claim(settings.state, settings.site)  # under the store's lock, and before anything is written for the site
        journal = Journal(settings.state / FILE, SEGMENT_BYTES)
        stack.callback(journal.close)
        audit = ClientAudit(journal, store.check)
        policy.record_versions(partial(audit.policy, settings.policy))
        metrics = ClientMetrics(settings.site, status, lambda: link.answered_at, settings.state, device, identity)
        membership = _membership(settings, identity, audit)
        link = _link(settings, identity, proxy, audit, store, metrics, membership, give_up_after_s)
        beat = Heartbeat(link, status, lambda: link.bytes_moved, lambda: policy.telemetry(metrics.telemetry()))
        _start_threads(beat, _decision_watch(settings, store, status, link, audit), link, stack)
        _log_start(settings, identity)
        _warn_of_held_out_scores(settings, policy)
        load = _monitored_loading(settings, identity, metrics, device, stack)
        site = distribute(_site(settings, policy, store, device, load))
        agent = Agent(
            site,
            link,
            status,
            on_refusal=lambda task, error: _refused(metrics, audit, task, error),
            on_withheld=lambda task, error: _withheld(metrics, audit, task, error),
            on_spending=lambda spending: audit.privacy(spending.facts()),
            membership=membership,
        )
        _until_replaced(settings, identity, status, lambda: _take_part(agent, until_finished=until_finished))


def _until_replaced(
    settings: ClientSettings, identity: LiveIdentity | None, status: DaemonStatus, take_part: Callable[[], None]
) -> None:
    """Take part; once the site's certificate is revoked, call the server no more before there is a new one, or end.

    Raises:
        RevokedError: `when_revoked` says to end.
    """
    while True:
        revoked = None if identity is None else identity.current().certificate.fingerprint
        try:
            return take_part()
        except RevokedError as error:
            status.run = ""  # no heartbeats either
            if settings.when_revoked == "end" or identity is None:
                raise
            log.error("this site's certificate was revoked; waiting for a new one", why=str(error))
        while identity.current().certificate.fingerprint == revoked:
            time.sleep(NEW_CERTIFICATE_S)
        log.info("a new certificate is there")


def _link(
    settings: ClientSettings,
    identity: LiveIdentity | None,
    proxy: Proxy | None,
    audit: ClientAudit,
    store: DiskStore,
    metrics: ClientMetrics,
    membership: Membership,
    give_up_after_s: float | None,
) -> GrpcLink:
    """The connection of this start of the daemon: its instance id is new, so that an older one is fenced off."""
    from protofed.client.transport.grpc_link import GrpcLink

    return GrpcLink(
        settings.server,
        settings.site,
        secrets.token_hex(8),
        settings.roles,
        identity=identity,
        proxy=proxy,
        audit=audit,
        downloads=store.downloads,
        give_up_after_s=give_up_after_s,
        on_release=metrics.count_release,
        check_run=store.run_approvals.check_not_out,
        membership=membership if Role.TRAINER in settings.roles else None,
    )


def _decision_watch(
    settings: ClientSettings, store: DiskStore, status: DaemonStatus, link: GrpcLink, audit: ClientAudit
) -> DecisionWatch:
    from protofed.client.agent.heartbeat import DecisionWatch
    from protofed.client.state.decisions import FOLDER, Decisions

    decisions = Decisions(settings.state / FOLDER)

    def record(decision: Decision) -> None:
        audit.decision(decision.act.value, decision.facts())

    return DecisionWatch(decisions, store.run_approvals, status, link, link.cancel, record)


def _start_threads(heartbeat: Heartbeat, watch: DecisionWatch, link: GrpcLink, stack: ExitStack) -> None:
    heartbeat.start()
    watch.start()
    # An ExitStack calls the last one first: stop, close the link so that a call under way fails, then join.
    for end in (partial(watch.join, 5.0), partial(heartbeat.join, 5.0), link.close, heartbeat.stop, watch.stop):
        stack.callback(end)


def _monitored_loading(
    settings: ClientSettings,
    identity: LiveIdentity | None,
    metrics: ClientMetrics,
    device: torch.device,
    stack: ExitStack,
) -> SiteDataLoader:
    """The loader of the site's data; until `stack` is closed, /metrics and /readyz answer and report its progress."""
    from protofed.client.agent.readiness import DaemonReadiness, SiteDataLoader

    load = SiteDataLoader(partial(_load, settings, device), settings.data.place)
    ready = DaemonReadiness(settings.server, identity, metrics, device, load, shipped.policy(settings.policy))
    monitor = None if settings.metrics is None else Monitor(settings.metrics, metrics.registry, ready)
    stack.enter_context(serve_metrics(monitor, settings.state))
    return load


def _follow(settings: ClientSettings, launch: Launch) -> None:
    """Run as a rank other than 0: without connection to the server, identity or state folder."""
    logs.bind_fields(lambda: {"site": settings.site, "rank": launch.rank})
    check_root(settings)
    device = _device(settings, launch)

    from protofed.client.policy.policy import PolicyFile
    from protofed.client.state.store import MemoryStore

    policy, load = PolicyFile(shipped.policy(settings.policy)), partial(_load, settings, device)
    policy()
    with stoppable():
        following(launch, device, _site(settings, policy, MemoryStore(), device, load))


def _device(settings: ClientSettings, launch: Launch | None) -> torch.device:
    """The device to train on; also imports PyTorch and sets its number of threads."""
    # PyTorch's compiler, imported at the first training step, creates a folder; in a container only the state is
    # writable.
    if launch is None or not launch.rank:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(settings.state))
    import torch

    logs.redirect("torch")

    from protofed.client.device import pick_device

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return pick_device(launch.device(settings.device, torch.cuda.device_count()) if launch else settings.device)


def _site(
    settings: ClientSettings, policy: PolicyFile, store: Store, device: torch.device, load: Callable[[Recipe], SiteData]
) -> Site:
    from protofed.client.models.catalogue import device_model
    from protofed.client.site import Site
    from protofed.client.training.progress import on_disk

    return Site(
        settings.site,
        settings.roles,
        policy(),
        store,
        load,
        lambda recipe: device_model(recipe, device, policy().rules.plugins),
        checkpoints=partial(on_disk, settings.state),
        preprocessing_digest=settings.data.preprocessing_digest,
        read_policy=policy,
    )


def _membership(settings: ClientSettings, identity: LiveIdentity | None, audit: ClientAudit) -> Membership:
    """What the site takes into secure aggregation; its identity is made at the daemon's first start."""
    from protofed.client.secure_aggregation.partners import open_membership

    certified = lambda: None if identity is None else identity.current()  # noqa: E731
    record, institution = audit.secure_aggregation, settings.institution
    return open_membership(settings.state, settings.site, certified, record=record, institution=institution)


def _log_start(settings: ClientSettings, identity: LiveIdentity | None) -> None:
    from protofed.client.transport.server_check import days_left

    if identity is None:
        log.info("starting in plain text", server=settings.server, version=VERSION)
        return
    certificate = identity.current().certificate
    log.info(
        "starting",
        server=settings.server,
        version=VERSION,
        certificate=str(certificate),
        until=stamp(certificate.not_after),
        days_left=days_left(certificate),
    )


def _warn_of_held_out_scores(settings: ClientSettings, policy: PolicyFile) -> None:
    from protofed.client.policy.rules import on_own_images

    if scores := on_own_images(settings.roles, policy().rules.metrics):
        log.warning(
            "if the test set is held out of this site's images, a server can compute class counts from these scores; "
            "score on a public test set, or remove the scores from the policy's metrics",
            scores=scores,
        )


def reading(settings: ClientSettings, report: Report | None = None) -> Reading:
    """How the daemon reads image files; `report` is called as they are decoded onto the disk."""
    from protofed.client.data.reading import Reading

    return Reading(settings.cache.model_copy(update={"folder": cache_folder(settings)}), report)


def cache_folder(settings: ClientSettings) -> Path:
    """Where the site's decoded images are."""
    return settings.cache.folder or settings.state / "cache"


def load_data(
    settings: ClientSettings,
    input_: Input,
    classes: int,
    class_names: Sequence[str] = (),
    report: Report | None = None,
    *,
    noisy: bool = False,
    task: ClientTask | None = None,
) -> SiteData:
    """The site's data on the CPU: training and test set of a trainer; of a site that only evaluates, the test set.

    Args:
        report: as of `reading`.
        noisy: the run has `[plan.dp]`.
        task: what the labels are targets of; None: classes.

    Raises:
        DataError: they cannot be used.
    """
    from protofed.client.data.site import load_site, load_test
    from protofed.client.tasks.classification import CLASSES

    of_run = input_, classes, class_names, reading(settings, report)
    if Role.TRAINER in settings.roles:
        index = settings.partition_index
        return load_site(settings.data, index, *of_run, noisy=noisy, task=task or CLASSES)
    return load_test(settings.data, *of_run, noisy=noisy, task=task or CLASSES)


def load_run(settings: ClientSettings, recipe: Recipe, report: Report | None = None) -> SiteData:
    """`load_data` for a run.

    Raises:
        DataError: as of `load_data`.
        ConfigError: as of `build_client_task`.
    """
    from protofed.client.task import build_client_task

    of_run, noisy = (recipe.input, recipe.classes, recipe.class_names), recipe.plan.dp is not None
    return load_data(settings, *of_run, report, noisy=noisy, task=build_client_task(recipe.task))


def try_run(settings: ClientSettings, assignment: Assignment) -> PreparedRun:
    """Prepare a run as the daemon does at its enrolling, but on the CPU; nothing is trained, written or sent.

    Raises:
        TaskFailedError: the daemon would decline every task of the run; its cause says why.
        ConfigError, DataError, PolicyViolationError: the daemon would not start.
    """
    import torch

    from protofed.client.policy.policy import PolicyFile
    from protofed.client.site import prepare
    from protofed.client.state.store import MemoryStore

    check_root(settings)
    cpu = torch.device("cpu")
    policy = PolicyFile(shipped.policy(settings.policy))
    return prepare(_site(settings, policy, MemoryStore(), cpu, partial(_load, settings, cpu)), assignment)


def unscored(settings: ClientSettings, data: SiteData) -> dict[str, list[int]]:
    """The classes without an image in a test set of the site, by set; without complete sets.

    They tell which classes are rare here, and are never sent.
    """
    sets = {"test set": data.test} if len(data.test) else {}
    missing = {name: data.unscored(examples) for name, examples in sets.items()}
    if data.local_test is not None or (settings.data.local_test_fraction is not None and not data.scores_only):
        missing["own test set"] = data.unscored(data.local_test)
    return {name: classes for name, classes in missing.items() if classes}


def _load(settings: ClientSettings, device: torch.device, recipe: Recipe) -> SiteData:
    data = load_run(settings, recipe)
    for where, classes in unscored(settings, data).items():
        names = [recipe.class_names[c] if recipe.class_names else str(c) for c in classes]
        log.info("classes without test images are not scored", run=recipe.name, where=where, missing=names)
    return data.placed(device)


def _refused(metrics: ClientMetrics, audit: ClientAudit, task: Task, error: PolicyViolationError) -> None:
    metrics.count_refusal(error)
    audit.refused(task, error)


def _withheld(metrics: ClientMetrics, audit: ClientAudit, task: Task, error: PolicyViolationError) -> None:
    metrics.count_withheld()  # not among the refusals, which telemetry may send
    audit.refused(task, error)


def _take_part(agent: Agent, *, until_finished: bool) -> None:
    asked_at, idle = time.monotonic(), 0
    run_wait_s = 0.0 if until_finished else WAIT_S  # one that ends without a run is told at once that there is none
    while not (isinstance(answer := agent.step(WAIT_S, run_wait_s), Finished) and answer.last and until_finished):
        idle = 0 if isinstance(answer, Task) else idle + 1
        pause = SHORTEST_IDLE_S if idle > IDLE_STEPS else 0.0
        match answer:
            case Finished(last=True):
                pause = 5.0  # a long-lived server may get another run
            case Wait(retry_after_s):
                pause = max(pause, min(retry_after_s, LONGEST_PAUSE_S))
        # Counted from the question: a server that held the call open has used the time up already.
        time.sleep(max(0.0, asked_at + pause - time.monotonic()))
        asked_at = time.monotonic()


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
