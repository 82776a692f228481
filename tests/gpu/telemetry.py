"""What a daemon reports of its GPU: the memory that PyTorch has reserved, in heartbeats and to the site's Prometheus.

A daemon reports no utilisation and does not use NVML; what NVML says here is for the report's reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from prometheus_client import generate_latest
from tests.gpu.fits import examples, fit_context, update_of
from tests.gpu.plan import Proof, judged, skipped
from tests.gpu.report import Finding, Found, Status

from protofed.client.agent.metrics import GPU, ClientMetrics
from protofed.common.config.settings import ClientSettings
from protofed.common.protocol.messages import Telemetry
from protofed.deploy.doctor.checks import CheckFailedError
from protofed.deploy.doctor.site import SiteUnderCheck

_NVML: dict[str, Callable[[], float]] = {
    "utilisation, %": lambda: torch.cuda.utilization(),
    "temperature, °C": lambda: torch.cuda.temperature(),
    "power, W": lambda: torch.cuda.power_draw() / 1000,
}


def work(proof: Proof) -> Iterator[Found]:
    """Yield what was found."""
    local = fit_context(proof.device, examples(32 if proof.rehearsal else 512), batch_size=32)
    update_of(local)
    metrics = ClientMetrics("site", device=proof.device)
    reported = metrics.telemetry().get(Telemetry.GPU_MEMORY_BYTES.value)
    scraped = [line for line in generate_latest(metrics.registry).decode().splitlines() if line.startswith(GPU.name)]
    if proof.rehearsal:
        yield judged("GPU memory in a heartbeat", reported, None, "none on a CPU")
        yield judged("GPU memory at a scrape", scraped, [], "none on a CPU")
    else:
        held = torch.cuda.memory_reserved(proof.device)
        yield _same("GPU memory in a heartbeat, bytes", reported, held)
        yield _same("GPU memory at a scrape, bytes", float(scraped[0].rsplit(" ", 1)[1]) if scraped else None, held)
    yield _doctor(proof)
    if proof.rehearsal:
        yield skipped("NVML", "needs a GPU")
        return
    for name, read in _NVML.items():
        yield _read(f"NVML: {name} (no daemon reports it)", read)


def _same(what: str, reported: float | None, held: int) -> Finding:
    status = Status.PASSED if reported == held > 0 else Status.FAILED
    return Finding(what, f"{reported:.0f}" if reported is not None else "nothing", f"{held}", status)


def _doctor(proof: Proof) -> Finding:
    settings = ClientSettings.model_construct(device=str(proof.device), threads=None)
    try:
        return Finding("doctor's check of the device", SiteUnderCheck().device(settings))
    except CheckFailedError as error:
        return Finding("doctor's check of the device", str(error), "no error", Status.FAILED)


def _read(what: str, read: Callable[[], float]) -> Finding:
    try:
        return Finding(what, f"{read():.0f}")
    except Exception as error:  # each library and driver without NVML raises its own
        return skipped(
            what, f"NVML is absent: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
