"""What a round of a method costs in differential privacy: how many noisy mechanisms it runs on a site's data.

Pure numbers of recipe and method, the same for every site: nothing here depends on a site's data.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofed.common.config.plan import DpPlan


@dataclass(frozen=True)
class DpCost:
    """The noisy mechanisms of one round at one site, as the method's client half declares them before it begins.

    Attributes:
        epochs: of each call of `train`, in their order; one of e epochs is `DpPlan.steps(e)` Gaussian mechanisms, each
            on a Poisson sample of the units.
        class_releases: of class sums and counts, each a Gaussian mechanism of noise `class_noise_multiplier` on all
            units, without sampling.
        linear: what leaves is the model after one training, no part of which stays for a later fit: of a training of
            one step the noise can be added where updates are summed (`DpPlan.shared_by`).
    """

    epochs: tuple[int, ...]
    class_releases: int = 0
    linear: bool = False

    def steps(self, plan: DpPlan) -> int:
        """Noisy steps of the round, over all calls of `train`."""
        return sum(plan.steps(epochs) for epochs in self.epochs)
