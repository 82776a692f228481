"""The workers that a command line asks for: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

from functools import partial

from protofed.deploy.experiments.ray_node import set_up
from protofed.deploy.progress import usable_cores
from protofed.deploy.simulation.simulation import NewCrew
from protofed.deploy.simulation.worker_processes import crew_of


def crew(workers: int | None, ray: str | None, device: str) -> NewCrew | None:
    """The `crew` of a `simulation`.

    Args:
        workers: None: one; with Ray, as many as there is room for.
        ray: address of a cluster, as of `ray_cluster.joined`; None: processes of this machine.

    Raises:
        ConfigError: Ray is not installed, or the device is none that it can give.
    """
    if ray is None:
        return crew_of(workers or 1)
    set_up(ray)
    from protofed.deploy.experiments.ray_cluster import resources
    from protofed.deploy.experiments.ray_sites import RayWorkers

    resources(device, None)
    return partial(RayWorkers, ray, workers, device, usable_cores())
