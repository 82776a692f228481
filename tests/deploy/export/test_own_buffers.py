"""A site's own model is written as it predicts: with its own statistics, where the recipe keeps them local."""

from __future__ import annotations

from functools import partial

import numpy as np
from tests.support.normed_model import NAME, seeded

from protofed.client.data.site_data import SiteData
from protofed.client.models.split import dump
from protofed.common.codec import Digest
from protofed.common.payload import Part
from protofed.deploy.export.models import personal_model
from protofed.deploy.export.site_state import Base, KeptRound
from protofed.testing.small_recipe import small_recipe


def no_data() -> SiteData:
    raise AssertionError("FedPer needs none to predict")


def test_an_exported_model_has_the_sites_own_statistics() -> None:
    own = {"buffers.body.2.running_mean": np.full(16, 7.0, np.float32)}
    for buffers, expected in (("local", 7.0), ("averaged", 0.0)):
        recipe = small_recipe("fedper", model={"name": NAME}, plan={"buffers": buffers})
        first = seeded(recipe.input, recipe.classes)
        model = {Part.BODY: dump(first.body), Part.HEAD: dump(first.head)}
        digest = Digest("a" * 64)
        kept = KeptRound("ann", 1, digest, {Part.HEAD: model[Part.HEAD], Part.PRIVATE: own}, model)
        built = personal_model(recipe, kept, partial(Base, digest, 1, model), no_data, frozenset({NAME}))
        assert (built.model.weights()[Part.BODY]["2.running_mean"] == expected).all()
