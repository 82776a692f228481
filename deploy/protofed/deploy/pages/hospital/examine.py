"""`python -m protofed.deploy.pages.hospital.examine`: examines a site for its page, as doctor and check do.

The examination has its own process. When the process ends, it frees PyTorch, a device's memory and the images. A person
can stop it, and plug-ins that the policy allows stay out of the page. The request comes on standard input. The answer
goes to standard output, a line of JSON each. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from protofed.common import plugins
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings, read_settings
from protofed.common.errors import ProtofedError
from protofed.deploy import shipped
from protofed.deploy.doctor import checks
from protofed.deploy.doctor.checks import run_checks
from protofed.deploy.doctor.client import ClientDoctor
from protofed.deploy.doctor.site import SiteUnderCheck
from protofed.deploy.site import orders
from protofed.deploy.site.offered_runs import parse_offer

NICE = 10  # the daemon's training goes first
Say = Callable[..., None]


def main() -> None:
    """Answer one request."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(NICE)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))  # the answer says what the log would

    def say(**answer: Any) -> None:
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()

    try:
        examine(json.load(sys.stdin), say)
    except ProtofedError as error:
        say(problem=str(error))


def examine(request: Mapping[str, Any], say: Say) -> None:
    """Examine what a request asks for.

    Args:
        request: `settings`, a file, and `given`, what overrides it; of a run's data, `run`; else `whole`.
        say: called with `doing`, a `row` of the doctor, and `data` as of `client check --json`.

    Raises:
        ConfigError, DataError, PolicyViolationError, StateError: as of the commands.
    """
    read = partial(read_settings, ClientSettings, Path(request["settings"]), request["given"])
    if run := request.get("run", ""):
        settings = read()
        offer = orders.open_approvals(settings.state).offer(run)
        say(recipe=offer.digest)
        _data(settings, parse_offer(offer), say)
        return
    doctor = ClientDoctor(read, SiteUnderCheck(quick=not request["whole"]))
    for row in run_checks(doctor.checks(), lambda name: say(doing=f"checking: {name}")):
        say(row=checks.plain([row], strict=False)["checks"][0])
    if request["whole"]:
        settings = read()
        offers = orders.open_approvals(settings.state).offers()
        _data(settings, parse_offer(offers[-1]) if offers else None, say)  # of the newest run, as the doctor


def _data(settings: ClientSettings, recipe: Recipe | None, say: Say) -> None:
    say(doing="reading all images")
    from protofed.client.policy.policy import Policy
    from protofed.deploy.progress import progress
    from protofed.deploy.site import check_table
    from protofed.deploy.site.check import site_check

    rules = Policy.read(shipped.policy(settings.policy)).rules
    plugins.allow(rules.plugins)
    with progress("", visible=False) as bar:
        result = site_check(settings, recipe, rules.min_samples_per_class, bar)
    say(data=check_table.plain(result))


if __name__ == "__main__":
    main()
