"""How blind a body may be before sums of fits on it tell the label shares of each site: a table of `make leakage`."""

from __future__ import annotations

from tests.attacks import share_sets
from tests.attacks.hostile_server import as_payload, honest_model

SCALES = (0.3, 0.5, 0.6, 0.7, 0.8, 1.0)  # of the built body's weights
RATES = (1.0, 2.0, 4.0)  # what a fit's learning rates add up to
SUMS = 60
COLUMNS = ("weights", "variance of the features", *(f"error, rates of {rates:g}" for rates in RATES), "mean, thrice")


def rows() -> list[list[str]]:
    """One for each scale: the features' variance beside the built model's, and the mean error of a share."""
    made = []
    for scale in SCALES:
        found = []
        for rates in RATES:
            run = share_sets.recipe(rates)
            first = as_payload(honest_model(run))
            body = share_sets.centred(run, share_sets.faint(first, scale))
            variance = (
                share_sets.features(run, body).var(axis=0).sum() / share_sets.features(run, first).var(axis=0).sum()
            )
            found.append(share_sets.errors(run, body, SUMS))
        errors = [f"{told:.3f}" for told, _ in found]
        made.append([f"x {scale:g}", f"{variance:.2g}", *errors, f"{found[0][1]:.3f}"])
    return made
