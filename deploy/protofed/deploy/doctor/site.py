"""What `protofed client doctor` looks at beside the network: policy, folders, device, data. Counts are never told."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.common.config.recipe import Recipe, parse_json
from protofed.common.config.settings import ClientSettings
from protofed.common.errors import ConfigError
from protofed.deploy.daemons import client, client_resources
from protofed.deploy.doctor import machine
from protofed.deploy.doctor.checks import CheckFailedError

if TYPE_CHECKING:
    import torch

    from protofed.client.privacy.rules import PolicyRules

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (looked at, nothing is made there)
SHARED_BYTES = 64 << 20  # what Docker gives unless told otherwise; less fails at the first worker
DRIVER = Path("/proc/driver/nvidia/version")
SIZE = 256  # of a matrix that a device multiplies


@dataclass(frozen=True)
class SiteUnderCheck:
    """How a site is looked at.

    Attributes:
        recipe: of the run that data are loaded for; None: of the newest that the server offered, or the data's own.
        quick: only open the data.
    """

    recipe: Callable[[], Recipe] | None = None
    quick: bool = False

    def state(self, settings: ClientSettings) -> str:
        """Writable, and whether a daemon has it."""
        told = machine.writable(settings.state)
        return f"{told}; the daemon is running" if machine.held(settings.state) else told

    def cache(self, settings: ClientSettings) -> str:
        """Where PyTorch and Python put what they compile and unpack."""
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
        """The device is there, and computes."""
        import torch

        from protofed.client.agent import device

        try:
            where = device.pick(settings.device)
        except ConfigError as error:
            raise CheckFailedError("device-absent", f"{error}{_why_absent(settings.device)}") from error
        try:
            _compute(where)
        except RuntimeError as error:
            raise CheckFailedError(
                "device-unusable", f"{where} does not compute: {' '.join(str(error).split())[:200]}"
            ) from error
        if where.type == "cpu":
            return f"cpu, {settings.threads or torch.get_num_threads()} threads"
        free, whole = (f"{count / (1 << 30):.0f}" for count in torch.cuda.mem_get_info(where))
        return f"{where}, {torch.cuda.get_device_name(where)}, {free} of {whole} GiB free"

    def shared_memory(self) -> str:
        """Its size."""
        try:
            found = os.statvfs(SHARED_MEMORY)
        except OSError as error:
            raise CheckFailedError("shared-memory-small", f"{SHARED_MEMORY}: {error.strerror}") from error
        size = found.f_blocks * found.f_frsize
        text = f"{SHARED_MEMORY} has {size >> 20} MiB"
        if size < SHARED_BYTES:
            raise CheckFailedError(
                "shared-memory-small", f"{text}; data loaders of own models with workers want 64 and more"
            )
        return text

    def data(self, settings: ClientSettings) -> str:
        """Readable, and of the run's shape."""
        client_resources.check_root(settings)
        if self.quick:
            return _opened(settings)
        from protofed.client.data.sources import NAMED, own_class_names, own_input
        from protofed.deploy.doctor import images

        if (recipe := self._recipe(settings)) is not None:
            input_, classes, why = recipe.input, recipe.classes, f"as run {recipe.name} wants them"
            class_names = recipe.class_names
            _check_pinned(settings, recipe)
        else:
            (input_, classes), why = own_input(settings.data), "with no run to compare them with (--recipe names one)"
            class_names = own_class_names(settings.data)
        if settings.data.source in NAMED:
            return f"{settings.data.source}: {images.look(settings.data, input_, class_names)}, {why}"
        client.load_data(settings, input_, classes, class_names)
        shape = " x ".join(map(str, input_.shape))
        return f"{settings.data.source}: images of {shape} [channels, height, width], {why}"

    def _recipe(self, settings: ClientSettings) -> Recipe | None:
        if self.recipe is not None:
            return self.recipe()
        from protofed.client.privacy.approval import FOLDER, Approvals

        offers = Approvals(settings.state / FOLDER).offers()
        return parse_json(offers[-1].recipe, Recipe, f"run {offers[-1].run}") if offers else None


def allowed(rules: PolicyRules) -> str:
    """What a policy lets out, in a line."""
    more = [name for name in ("example_count", "class_distribution_estimate") if getattr(rules, name)]
    less = [f"no class under {rules.min_samples_per_class} examples"] if rules.min_samples_per_class > 1 else []
    less += ["decoys for absent classes"] if rules.hide_class_presence else []
    less += [f"each run after `protofed client approve` ({rules.approval})"] if rules.approval != "automatic" else []
    less += ["at set hours"] if rules.schedule else []
    listed = [f"{name} {', '.join(sorted(getattr(rules, name))) or 'none'}" for name in ("methods", "parts", "plugins")]
    return "; ".join([*listed, f"{len(rules.metrics)} scores", *more, *less])


def _compute(where: torch.device) -> None:
    """One kernel, with a result that is known."""
    import torch

    ones = torch.ones(SIZE, SIZE, device=where)
    if (total := float((ones @ ones).sum().item())) != float(SIZE**3):
        raise RuntimeError(f"{SIZE} x {SIZE} ones times themselves gave {total}")


def _why_absent(name: str) -> str:
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


def _check_pinned(settings: ClientSettings, recipe: Recipe) -> None:
    from protofed.client.agent.site import check_preprocessing

    try:
        check_preprocessing(recipe, pinned=settings.data.preprocessing_digest)
    except ConfigError as error:
        raise CheckFailedError("preprocessing-differs", str(error)) from error


def _opened(settings: ClientSettings) -> str:
    """Without loading them: `--quick`."""
    root = settings.data.place
    if root is None or not root.exists():
        return f"{settings.data.source}: comes along, or will be downloaded; not loaded"
    try:
        if root.is_dir():
            next(root.iterdir(), None)
        else:
            with root.open("rb") as file:
                file.read(1)
    except OSError as error:
        raise CheckFailedError("data-unusable", f"cannot read {root}: {error.strerror}") from error
    return f"{root} can be opened; not loaded"
