"""The coordinator's pages of a long run, from a server process over mutual TLS: until a browser has loaded each."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.cookiejar import CookieJar
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

from playwright.sync_api import Page, sync_playwright
from sqlalchemy import create_engine
from tests.bench.report import Row, seconds
from tests.bench.server_process import OPERATOR, Server, bench_recipe, server
from tests.support.long_run import fill
from tests.support.page_server import served

from protofed.deploy.operator.connection import Operator
from protofed.deploy.pages.coordinator.console import console

REPETITIONS = 7
ROUNDS, SITES = 1000, 40
GOAL_S = 1.0
RUN = "long"
PATHS = {
    "overview": "/",
    "run": f"/runs/{RUN}",
    "older rounds": f"/runs/{RUN}/rounds?page=25",
    "one round": f"/runs/{RUN}/rounds/500/1",
    "figures": f"/runs/{RUN}/figures",
    "sites": "/sites",
}
CHROMIUM = shutil.which("chromium")


def rows() -> Iterator[Row]:
    """One for each page: in Chromium, beside the bare answers of the same page."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        waiting = bench_recipe(RUN, ROUNDS + 1, federation={"min_sites": SITES + 1})  # the ledger says what it has done
        running = stack.enter_context(server(waiting, folder, ["site-01"]))
        lengthen(running)
        operator = stack.enter_context(Operator(running.address, folder / "identities" / OPERATOR))
        identity = folder / "identities" / OPERATOR
        base, token = stack.enter_context(served(console(operator, running.address, identity)))
        cookies = CookieJar()
        session = build_opener(HTTPCookieProcessor(cookies))
        with session.open(f"{base}/enter?token={token}") as entered:
            root = entered.url.rstrip("/")
        page = stack.enter_context(browser(cookies))
        for name, path in PATHS.items():
            url = root + path
            answered = statistics.median(seconds(partial(fetch, session, url)) for _ in range(REPETITIONS))
            loaded = None if page is None else statistics.median(load_s(page, url) for _ in range(REPETITIONS))
            yield Row(
                f"console, {ROUNDS:,} rounds x {SITES} sites: {name}",
                loaded,
                "s",
                answered,
                "the answer",
                at_most=GOAL_S,
                note="" if page else "no chromium: apt-get install chromium",
            )


def lengthen(running: Server) -> None:
    """Write a long run into the server's ledger, beside it; the newest round's state is kept, as it always is."""
    engine = create_engine(f"sqlite:///{running.folder / 'state' / 'ledger.sqlite'}")
    try:
        fill(engine, RUN, ROUNDS, SITES)
    finally:
        engine.dispose()
    (running.folder / "state" / "blobs" / f"{ROUNDS:064x}").touch()


@contextmanager
def browser(cookies: CookieJar) -> Iterator[Page | None]:
    """A browser in the same session; None: there is none on this machine."""
    if CHROMIUM is None:
        yield None
        return
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = opened.new_context()
        context.add_cookies(
            [{"name": one.name, "value": one.value or "", "domain": one.domain, "path": one.path} for one in cookies]
        )
        yield context.new_page()
        opened.close()


def fetch(session: OpenerDirector, url: str) -> None:
    """A page, without what belongs to it."""
    with session.open(url) as answer:
        assert answer.status == 200
        answer.read()


def load_s(page: Page, url: str) -> float:
    """Until the browser's `load` event: the page, its style, script and pictures."""
    page.goto("about:blank")  # what the page before refreshes is over
    page.goto(url)
    loaded: float = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventStart")
    return loaded / 1000
