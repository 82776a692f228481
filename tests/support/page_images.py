"""The pictures of terminal, pages and report in docs/assets, all of one run: `python -m tests.support.page_images`.

Six sites train the digits in processes of their own. One is stopped in round 3, so it is late; another is excluded. It
takes about four minutes, and needs Chromium.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from tests.support.page_server import served
from tests.support.pki import Authority
from tests.support.processes import Processes
from tests.support.provoked_runs import BROWSERS

from protofed.client.secure_aggregation.partners import OFFERED
from protofed.common.pki.identity import Party
from protofed.deploy import shipped
from protofed.deploy.operator.connection import Operator
from protofed.deploy.operator.screen import WatchScreen
from protofed.deploy.operator.snapshot import RunSnapshot
from protofed.deploy.operator.watch import Watcher
from protofed.deploy.pages.coordinator.console import console
from protofed.deploy.pages.hospital.examination import SiteSettings
from protofed.deploy.pages.hospital.page import client_page
from protofed.deploy.pages.shell import Program

SITES = [f"site-{number}" for number in range(1, 7)]
SHOWN, LATE, OUT = SITES[0], SITES[1], SITES[4]
COORDINATOR = "University Hospital North"
WIDTH, HEIGHT = 100, 31
RULES = ("min_sites=5", "quorum=0.5", "deadline_s=60", "grace=0.5", "stall_timeout_s=6", "heartbeat_s=0.2")
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
FRAMES, FRAME_S, LAST_S = 12, 0.8, 4.0  # the last one stays longer
EXAMINED_MS = 240_000
MAX_HEIGHT = 1700
DESKTOP, PHONE = 1120, 375  # pixels
# Who asks for less motion, or whose viewer knows no animation, sees the last frame.
STYLE = """<style>
.frame {{ visibility: hidden }} .frame:last-of-type {{ visibility: visible }}
@media (prefers-reduced-motion: no-preference) {{
.frame {{ animation: {whole:.1f}s step-end infinite; visibility: hidden }} {rules}
}}
</style>"""


def main() -> None:
    chromium = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if chromium is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is installed")
    recipe = shipped.recipe(
        "digits-fednh",
        [
            f"data.partition.sites={len(SITES)}",
            "plan.epochs=100",
            "plan.batch_size=8",
            *(f"federation.{rule}" for rule in RULES),
        ],
    )
    with tempfile.TemporaryDirectory() as folder, _shown_as(folder) as shown, sync_playwright() as playwright:
        processes = Processes.of(shown, recipe)
        processes.authority = Authority.make()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            _show(processes, browser)
        finally:
            processes.end()


@contextmanager
def _shown_as(folder: str) -> Iterator[Path]:
    """The folder by a name that people may read on the pages."""
    (link := Path(tempfile.gettempdir()) / "protofed").symlink_to(folder)
    try:
        yield link
    finally:
        link.unlink()


def _show(processes: Processes, browser: Browser) -> None:
    """All pictures: those of the middle of the run, then those of its end."""
    run = processes.recipe.name
    process = processes.start("server", "server", "start", "--listen=127.0.0.1:0", party=Party.SERVER)
    address = processes.folder / "server" / "address"
    processes.wait_for(lambda: address.exists() or process.poll() is not None)
    processes.address = address.read_text(encoding="utf-8")
    shutil.copy(shipped.policy("open"), processes.folder / "policy.toml")
    _start_site(processes, "evaluator", "--role=evaluator")
    for share, name in enumerate(SITES):
        _start_site(processes, name, f"--partition-index={share}")
    operators = processes.identity(Party.OPERATOR, "operator")
    with Operator(processes.address, operators) as operator:
        _confirm_partners(processes)
        _protofed("runs", "start", str(processes.folder / "recipe.toml"), *_reached(processes))
        seen = list(_disturbed(processes, operator))
        step = max(1, (len(seen) - 1) // (FRAMES - 1))
        chosen = [*seen[:-1:step][-(FRAMES - 1) :], seen[-1]]
        frames = [_drawn(one, f"frame{number}") for number, one in enumerate(chosen)]
        (ASSETS / "watch.svg").write_text(animated(frames), encoding="utf-8")
        settings, policy = _settings(processes)
        hospital = client_page(processes.folder / SHOWN, str(policy), SHOWN, SiteSettings(settings, {}))
        with (
            _opened(browser, console(operator, processes.address, operators)) as coordinator_shot,
            _opened(browser, hospital) as hospital_shot,
        ):
            coordinator_shot("console", f"/runs/{run}")
            coordinator_shot("console-phone", "/", PHONE)
            hospital_shot("hospital-page", "/")
            hospital_shot("hospital-phone", "/", PHONE)
            watcher = Watcher(operator, run)

            def ended() -> bool:
                watcher.poll()
                return watcher.snapshot().ended

            processes.wait_for(ended)
            coordinator_shot("console-figures", f"/runs/{run}/figures")
            coordinator_shot("console-dark", f"/runs/{run}", dark=True)
            hospital_shot("hospital-health", "/health", click="Quick check")
            hospital_shot("hospital-run-dark", f"/runs/{run}", dark=True)
    _protofed(
        "report", run, "--state", str(processes.folder / "server"), "--out", str(processes.folder / "report.html")
    )
    with _page(browser, (processes.folder / "report.html").as_uri(), DESKTOP) as page:
        _draw(page, "report", DESKTOP)


def _start_site(processes: Processes, name: str, option: str) -> None:
    """Not `Processes.site`, whose daemons end where there is no run."""
    settings = f"--settings={processes.folder / 'site.toml'}"
    known = (f"--site={name}", f"--server={processes.address}", f"--policy={processes.folder / 'policy.toml'}")
    processes.start(name, "client", "start", settings, *known, option)


def _settings(processes: Processes) -> tuple[Path, Path]:
    """The settings file with which the shown site's daemon would be started without options, and its policy."""
    identity, policy = processes.identity(Party.SITE, SHOWN), processes.folder / "policy.toml"
    keys = {
        "site": SHOWN,
        "server": processes.address,
        "identity": str(identity),
        "policy": str(policy),
        "state": str(processes.folder / SHOWN),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    data = (processes.folder / "site.toml").read_text(encoding="utf-8")
    (file := processes.folder / "shown.toml").write_text("\n".join([*lines, data]), encoding="utf-8")
    return file, policy


def _confirm_partners(processes: Processes) -> None:
    """Offer one list of partners, and confirm it at each site."""
    reached = _reached(processes)

    def has_all_keys() -> bool:
        return not json.loads(_protofed("consortium", "--json", *reached))["problem"].startswith("no key")

    processes.wait_for(has_all_keys)
    offered = _protofed("consortium", "--offer", "--coordinator", COORDINATOR, "--yes", "--json", *reached)
    code = json.loads(offered)["offered"]["code"]
    for site in SITES:
        state = processes.folder / site
        processes.wait_for((state / OFFERED).exists)
        _protofed("client", "consortium", "--confirm", code, "--state", str(state), "--yes")


def _reached(processes: Processes) -> tuple[str, ...]:
    return "--server", processes.address, "--identity", str(processes.identity(Party.OPERATOR, "operator"))


def _protofed(*arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "protofed.deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@contextmanager
def _page(browser: Browser, address: str, width: int, *, dark: bool = False, cookies: Any = ()) -> Iterator[Page]:
    scheme: Any = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.add_cookies(cookies)
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def _draw(page: Page, name: str, width: int) -> None:
    """The whole page, or its top, into docs/assets."""
    height = min(MAX_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(
        path=ASSETS / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height}
    )


@contextmanager
def _opened(browser: Browser, program: Program) -> Iterator[Callable[..., None]]:
    """What draws one of its pages."""
    with served(program) as (base, token), _page(browser, f"{base}/enter?token={token}", DESKTOP) as first:
        root, cookies = first.url.rstrip("/"), first.context.cookies()

        def shoot(name: str, path: str, width: int = DESKTOP, *, dark: bool = False, click: str = "") -> None:
            with _page(browser, root + path, width, dark=dark, cookies=cookies) as page:
                if click:
                    page.get_by_role("button", name=click).click()
                    page.locator("#ended").wait_for(timeout=EXAMINED_MS)
                page.get_by_text("being drawn").wait_for(state="detached", timeout=EXAMINED_MS)
                _draw(page, name, width)

        yield shoot


def animated(pictures: Sequence[str]) -> str:
    """One SVG that shows these one after the other, without a script."""
    heads = [picture[: picture.index(">") + 1] for picture in pictures]
    head = max(heads, key=lambda one: float(one.split('viewBox="')[1].split('"')[0].split()[3]))  # the tallest's
    whole = FRAME_S * (len(pictures) - 1) + LAST_S
    frames, rules = list[str](), list[str]()
    for number, picture in enumerate(pictures):
        begin, end = (100 * FRAME_S * at / whole for at in (number, number + 1))
        last = number == len(pictures) - 1
        shown = f"0% {{ visibility: hidden }} {begin:.2f}% {{ visibility: visible }}"
        hidden = "" if last else f" {end:.2f}% {{ visibility: hidden }}"
        rules.append(f"@keyframes k{number} {{ {shown}{hidden} }} #f{number} {{ animation-name: k{number} }}")
        inner = picture.removeprefix(heads[number]).strip().removesuffix("</svg>")
        frames.append(f'<g class="frame" id="f{number}">{inner}</g>')
    return "\n".join([head, STYLE.format(whole=whole, rules=" ".join(rules)), *frames, "</svg>\n"])


def _drawn(seen: RunSnapshot, name: str) -> str:
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
    console.print(WatchScreen(seen, HEIGHT))
    drawn = console.export_svg(title=f"protofed runs watch {seen.run}", unique_id=name)
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # the font is from a host


def _disturbed(processes: Processes, operator: Operator) -> Iterator[RunSnapshot]:
    """A run's changes, to the middle of a round, when some sites have reported and others train."""
    watcher = Watcher(operator, processes.recipe.name)

    def until(reached: Callable[[RunSnapshot], bool]) -> Iterator[RunSnapshot]:
        before = None
        while not reached(seen := watcher.snapshot()):
            assert not seen.ended, seen
            if (seen.round, seen.reported, seen.done) != before:
                before = seen.round, seen.reported, seen.done
                yield seen
            time.sleep(0.1)
            watcher.poll()
        yield seen

    yield from until(lambda seen: seen.round == 3 and _training(seen) > 2)
    processes.running[LATE].send_signal(signal.SIGSTOP)
    yield from until(lambda seen: seen.round > 3)
    processes.running[LATE].send_signal(signal.SIGCONT)
    yield from until(lambda seen: seen.round == 5)
    operator.exclude(OUT, "labels under review, ticket 4711")
    yield from until(lambda seen: seen.round > 7 and seen.reported > 0 and _training(seen) > 1)


def _training(seen: RunSnapshot) -> int:
    return sum(site.progress not in (None, 0.0, 1.0) for site in seen.sites)


if __name__ == "__main__":
    main()
