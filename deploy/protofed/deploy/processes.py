"""The two daemons as processes: what `protofed server` and `protofed client` start."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from protofed.common import archive
from protofed.common.address import check_loopback
from protofed.common.errors import DataError, ProtofedError
from protofed.common.recipe import Recipe, read_recipe
from protofed.common.settings import ClientSettings, ServerSettings
from protofed.common.task import Finished, Role
from protofed.server.blobs import FolderBlobs
from protofed.server.engine import LEDGER_FILE
from protofed.server.ledger import Ledger
from protofed.server.roster import Roster
from protofed.server.runs import Runs
from protofed.server.service import serve
from protofed.server.surroundings import Surroundings
from protofed.server.threads import Bells, Threads

if TYPE_CHECKING:
    from protofed.client.data.examples import SiteData

ADDRESS_FILE = "address"  # of the state folder: where the server listens, for those who let it choose a port


class RunsFailedError(ProtofedError):
    """A run ended in failure."""

    exit_code = 1


class StoppedError(BaseException):
    """The process was told to end (SIGTERM, SIGINT); everything that counts is on disk."""


def run_server(settings: ServerSettings, *, until_finished: bool, started: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, or until all runs are finished.

    Raises:
        ConfigError: a recipe or the address cannot be used.
        StateError: the state folder is another server's, or damaged.
        Unavailable: the port is taken.
        RunsFailedError: a run failed (only with `until_finished`).
    """
    check_loopback(settings.listen)
    recipes = [read_recipe(path) for path in settings.recipes]
    lock = archive.Lock(settings.state)
    ledger = Ledger(f"sqlite:///{settings.state / LEDGER_FILE}")
    try:
        blobs, threads, bells = FolderBlobs(settings.state / "blobs"), Threads(), Bells()
        around = Surroundings(
            ledger,
            blobs,
            Roster(ledger, time.monotonic),
            time.monotonic,
            work=threads.aggregate,
            notify=bells.ring,
            keep_rounds=settings.keep_rounds,
        )
        runs = Runs(recipes, around)

        def announce(address: str) -> None:
            archive.write(settings.state / ADDRESS_FILE, address.encode())
            started(address)

        async def main() -> None:
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            await serve(
                runs, blobs, threads, bells, settings.listen, stop, started=announce, until_finished=until_finished
            )

        asyncio.run(main())
        if until_finished and runs.failed:
            raise RunsFailedError(f"run failed: {'; '.join(runs.failed)}")
    finally:
        ledger.close()
        lock.release()


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
    from protofed.client.agent import Agent, Site
    from protofed.client.data.site import load_site, load_test
    from protofed.client.grpc_link import GrpcLink
    from protofed.client.memory import FolderStore
    from protofed.client.now import Now
    from protofed.client.policy import Policy
    from protofed.client.pulse import Pulse
    from protofed.deploy.simulate import device_model

    policy, where = Policy.read(settings.policy), device.pick(settings.device)
    check_loopback(settings.server)
    _check_root(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)

    def load_data(recipe: Recipe) -> SiteData:
        if Role.TRAINER in settings.roles:
            return load_site(settings.data, settings.share, recipe.input, recipe.classes).placed(where)
        return load_test(settings.data, recipe.input, recipe.classes).placed(where)

    store, now = FolderStore(settings.state), Now()
    link = GrpcLink(
        settings.server, settings.site, secrets.token_hex(8), settings.roles, give_up_after_s=give_up_after_s
    )
    pulse = Pulse(link, now, lambda: link.bytes_moved)
    site = Site(
        settings.site,
        settings.roles,
        policy,
        store,
        load_data,
        lambda recipe: device_model(recipe, where, policy.rules.models),
    )
    agent = Agent(site, link, now)
    with stoppable():
        try:
            pulse.start()
            while not (isinstance(answer := agent.step(20.0), Finished) and answer.last and until_finished):
                if isinstance(answer, Finished) and answer.last:
                    time.sleep(5.0)  # a long-lived server will have another run
        finally:
            pulse.stop()
            link.close()
            store.close()


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


def read_address(state: Path) -> str | None:
    """Where the server of a state folder listens, once it does."""
    with contextlib.suppress(FileNotFoundError):
        return (state / ADDRESS_FILE).read_text(encoding="utf-8")
    return None


def _check_root(settings: ClientSettings) -> None:
    """Say at once that the data are not there, not when the first run begins."""
    root = settings.data.root
    if root is not None and not root.exists() and not settings.data.download:
        raise DataError(f"no data at {root}; mount or copy them there, or correct data.root")
