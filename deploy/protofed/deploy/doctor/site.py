"""Local checks of `protofed client doctor`: policy, folders, device, data. No message has a count of examples.

The output is meant to be sent to whoever helps, so it must not disclose what the privacy policy may keep.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.client.data.file_entry import TooManyUnreadableError
from protofed.client.data.labels import LabelsError
from protofed.client.data.sources import infer_class_names, infer_input
from protofed.client.policy.rules import is_own, on_own_images
from protofed.client.policy.run_limits import BY_IMAGES
from protofed.client.policy.update_checks import PolicyRefusedError
from protofed.client.site import PreprocessingError
from protofed.common.config.recipe import Recipe
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError, DataError, TaskFailedError, UnavailableError, count, short
from protofed.common.protocol.messages import Assignment, Role
from protofed.deploy.daemons import client, readyz
from protofed.deploy.doctor import machine
from protofed.deploy.doctor.checks import CheckFailedError

if TYPE_CHECKING:
    import torch

    from protofed.client.data.site_data import SiteData
    from protofed.client.policy.rules import PolicyRules

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (looked at, nothing is made there)
SHARED_BYTES = 64 << 20  # Docker's default; with less, a data loader fails at its first worker
DRIVER = Path("/proc/driver/nvidia/version")
SIZE = 256  # of a matrix that a device multiplies


@dataclass(frozen=True)
class SiteUnderCheck:
    """The checks of a site's own machine.

    Attributes:
        recipe: reads the recipe that data are loaded for; None: of the newest run that the server offered, if any.
        quick: open the data without loading them.
    """

    recipe: Callable[[], Recipe] | None = None
    quick: bool = False

    def state(self, settings: ClientSettings) -> str:
        """The state folder is writable and this site's, whether a daemon runs there, and whether a person paused it."""
        from protofed.client.policy.pause import FILE, SitePause
        from protofed.client.state.owner import check_owner

        message = machine.writable(settings.state)
        try:
            check_owner(settings.state, settings.site)
        except ConfigError as error:
            raise CheckFailedError("state-of-another", str(error)) from error
        pause = SitePause(settings.state / FILE).current()
        running = "; the daemon is running" if machine.has_running_daemon(settings.state) else ""
        answers = running and (settings.state / readyz.ADDRESS_FILE).exists()
        lines = readyz.missing(settings.state) if answers else []
        if silent := [line for line in lines if line.startswith(readyz.NO_ANSWER)]:
            raise CheckFailedError("daemon-silent", f"{message}{running}, but {silent[0]}")
        return f"{message}{running}" if pause is None else f"{message}{running}; the site is {pause}"

    def cache(self, settings: ClientSettings) -> str:
        """The folders for temporary files and for code that PyTorch compiles are writable."""
        try:
            temporary = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise CheckFailedError(
                "state-not-writable", "no folder for temporary files can be written; set TMPDIR"
            ) from error
        compiled = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", settings.state))
        for folder in (temporary, compiled):
            machine.writable(folder)
        return f"temporary files in {temporary}, compiled code in {compiled}"

    def device(self, settings: ClientSettings) -> str:
        """The device exists and computes correctly."""
        import torch

        from protofed.client.device import pick_device

        try:
            where = pick_device(settings.device)
        except (ConfigError, UnavailableError) as error:
            raise CheckFailedError("device-absent", f"{error}{_absence_reason(settings.device)}") from error
        try:
            _check_compute(where)
        except RuntimeError as error:
            raise CheckFailedError(
                "device-unusable", f"{where} does not compute: {' '.join(str(error).split())[:200]}"
            ) from error
        if where.type == "cpu":
            return f"cpu, {settings.threads or torch.get_num_threads()} threads"
        free, whole = (f"{count / (1 << 30):.0f}" for count in torch.cuda.mem_get_info(where))
        return f"{where}, {torch.cuda.get_device_name(where)}, {free} of {whole} GiB free"

    def shared_memory(self) -> str:
        """Shared memory has room for the workers of a data loader."""
        try:
            usage = os.statvfs(SHARED_MEMORY)
        except OSError as error:
            raise CheckFailedError("shared-memory-small", f"{SHARED_MEMORY}: {error.strerror}") from error
        size = usage.f_blocks * usage.f_frsize
        text = f"{SHARED_MEMORY} has {size >> 20} MiB"
        if size < SHARED_BYTES:
            raise CheckFailedError("shared-memory-small", f"{text}; data loaders with workers need at least 64")
        return text

    def data(self, settings: ClientSettings) -> str:
        """Prepare the run as the daemon does: the data are readable, and the daemon would take part with them.

        Raises:
            DataError, ConfigError, PolicyViolationError: the daemon would not start.
            CheckFailedError: it would decline each round.
        """
        client.check_root(settings)
        if self.quick:
            return _check_readable(settings)

        run = self._run(settings)
        data = load(settings) if run is None else prepare(settings, run)
        compared = (
            "with no run to compare them with (--recipe names one)" if run is None else f"as run {run.run} expects"
        )
        shape = " x ".join(map(str, data.input.shape))
        rare = "; classes without test images are not scored (`protofed client check` names them)"
        remark = rare if client.unscored(settings, data) else ""
        return f"{settings.data.source}: images loaded as {shape} [channels, height, width], {compared}{remark}"

    def run_recipe(self, settings: ClientSettings) -> Recipe | None:
        """The recipe of the run that is asked about, or of the newest offer; None: there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.recipe is not None:
            return self.recipe()
        from protofed.client.site import read_recipe

        run = self._run(settings)
        return None if run is None else read_recipe(run)

    def _run(self, settings: ClientSettings) -> Assignment | None:
        from protofed.client.policy.approval import FOLDER, Approvals
        from protofed.deploy.site.check import as_offered

        if self.recipe is not None:
            return as_offered(self.recipe())
        offers = Approvals(settings.state / FOLDER).offers()
        return Assignment(offers[-1].run, offers[-1].recipe, min_cohort=offers[-1].min_cohort) if offers else None


def policy_summary(rules: PolicyRules, roles: Collection[Role]) -> str:
    """What a policy allows a daemon with such roles, in one line."""
    disclosed = [name for name in ("example_count", "class_distribution_estimate") if getattr(rules, name)]
    limits = [f"no class under {rules.min_samples_per_class} examples"] if rules.min_samples_per_class > 1 else []
    limits += [only] if (only := _in_sums_alone(rules)) else []
    limits += [f"each run after `protofed client approve` ({rules.approval})"] if rules.approval != "automatic" else []
    limits += ["at set hours"] if rules.schedule else []
    listed = [f"{name} {', '.join(sorted(getattr(rules, name))) or 'none'}" for name in ("methods", "parts", "plugins")]
    own = sum(map(is_own, rules.metrics))
    telling = f"{own} of the site's own: they tell its label counts" if own else "none of the site's own"
    if held_out := on_own_images(roles, rules.metrics):
        telling += f"; {len(held_out)} of a test set that tell its label counts if it is held out of the site's images"
    return "; ".join([*listed, f"{count(len(rules.metrics), 'score')}, {telling}", *disclosed, *limits])


def _in_sums_alone(rules: PolicyRules) -> str:
    """What leaves in secure aggregation and in no other way."""
    if rules.secure == "required":
        return "all that is trained in secure aggregation alone (secure = required)"
    return "all that is trained in secure aggregation alone (hide_class_presence)" if rules.hide_class_presence else ""


def _check_compute(where: torch.device) -> None:
    """Run one kernel whose result is known: a device that is listed may still fail, as a GPU without a kernel image."""
    import torch

    matrix = torch.ones(SIZE, SIZE, device=where)
    if (total := float((matrix @ matrix).sum().item())) != float(SIZE**3):
        raise RuntimeError(f"{SIZE} x {SIZE} ones times themselves gave {total}")


def _absence_reason(name: str) -> str:
    import torch

    if not name.startswith("cuda"):
        return ""
    if torch.version.cuda is None:
        return " (this PyTorch was built without CUDA)"
    if not DRIVER.exists():
        return " (no NVIDIA driver is loaded here; a container needs `docker run --gpus all`)"
    if not torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return " (a driver is loaded" + ("" if visible is None else f", CUDA_VISIBLE_DEVICES is '{visible}'") + ")"
    return ""


def _check_readable(settings: ClientSettings) -> str:
    """`--quick`: open the data without loading them."""
    root = settings.data.place
    if root is None or not root.exists():
        return f"{settings.data.source}: is built in, or will be downloaded; not loaded"
    try:
        if root.is_dir():
            next(root.iterdir(), None)
        else:
            with root.open("rb") as file:
                file.read(1)
    except OSError as error:
        raise CheckFailedError("data-unusable", f"cannot read {root}: {error.strerror}") from error
    return f"{root} can be opened; not loaded"


NAMED = 3  # unreadable files that the message names
# The first that an error is an instance of; of others, the check itself has failed.
_DIAGNOSES: dict[type[Exception], str] = {
    LabelsError: "labels-unmapped",
    TooManyUnreadableError: "images-unreadable",
    DataError: "data-unusable",
    PreprocessingError: "preprocessing-differs",
    PolicyRefusedError: "run-refused",
    ConfigError: "recipe-invalid",
}


def prepare(settings: ClientSettings, run: Assignment) -> SiteData:
    """The data as the daemon loads them for a run, which it would take part in.

    Raises:
        CheckFailedError: the daemon would decline each round, by the code in the text; or let no sum be read.
        ConfigError, DataError, PolicyViolationError: it would not start.
    """
    try:
        prepared = client.try_run(settings, run)
        if (refusal := prepared.withheld) is not None:
            sent = "this site would send random numbers, and the server could decrypt no sum with them"
            text = f"in run {run.run} {sent}: {_text(refusal)}"
            raise CheckFailedError(_diagnosis(refusal), text)
        return prepared.data
    except TaskFailedError as failure:
        cause = failure.__cause__ or failure
        text = f"the daemon declines each round of {run.run} ({failure.reason}): {_text(cause)}"
        raise CheckFailedError(_diagnosis(cause), text) from failure


def load(settings: ClientSettings) -> SiteData:
    """The data with their own shape and classes, where there is no run to prepare.

    Raises:
        CheckFailedError: the daemon could not load them for any run.
    """
    try:
        input_, classes = infer_input(settings.data, client.reading(settings))
        return client.load_data(settings, input_, classes, infer_class_names(settings.data))
    except DataError as error:
        raise CheckFailedError(_diagnosis(error), _text(error)) from error


def _diagnosis(cause: BaseException) -> str:
    return next((name for kind, name in _DIAGNOSES.items() if isinstance(cause, kind)), "check-failed")


def _text(cause: BaseException) -> str:
    """The daemon's text, without its counts of examples: what the doctor says is sent to others."""
    match cause:
        case TooManyUnreadableError(files=files):
            listed = ", ".join(f"{short(name)}: {why}" for name, why in files[:NAMED])
            return f"{listed}{'; and others' if len(files) > NAMED else ''} (`protofed client check` lists all)"
        case PolicyRefusedError(rule=rule) if rule in BY_IMAGES:
            return f"with this site's images the run breaks {rule} of its policy; the daemon's log says by how much"
    return str(cause)
