"""What `make bench` measures of a secure aggregation is a whole one."""

from __future__ import annotations

import numpy as np
from tests.bench.secure_aggregation import OF_GOALS, STEPS, _sum, of_server, of_site

from protofed.common.payload import Part, Update, describe
from protofed.common.secure_aggregation.linear_form import SumForm, SumLayout

UPDATE = Update("site-01", {Part.BODY: {"w": np.ones(4096, np.float32)}})
LAYOUT = SumLayout.of(SumForm((Part.BODY,)), describe(UPDATE.payload), UPDATE.payload)


def test_a_site_takes_every_step_and_sends_twice_its_update() -> None:
    part = _sum(UPDATE, LAYOUT, 3)
    assert set(part.seconds) == set(STEPS)
    assert part.sent > 8 * LAYOUT.size
    masks, _, sent = of_site("here", UPDATE, LAYOUT, 3)
    assert masks.ratio is not None
    assert sent.ratio is not None
    assert 2 < sent.ratio < 2.5, "of so small an update messages and names are much"


def test_the_server_opens_what_ten_sites_sent() -> None:
    rows = list(of_server("here", 64))
    assert len(rows) == len({row.what for row in rows}) == 2
    assert OF_GOALS == 10
