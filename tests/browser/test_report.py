"""A run's report on a phone: nothing is cut, and axe finds nothing; `make browser`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from protofed.common.config.recipe import Recipe
from protofed.deploy.cli import report
from protofed.deploy.report.report import write_report
from protofed.deploy.simulation.simulation import simulation

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("evaluation", [{}, {"frequency_groups": True, "probabilities": True}], ids=["usual", "all"])
def test_on_a_phone_no_score_of_a_report_is_cut_and_axe_finds_nothing(
    chromium: Browser, recipe_of: Callable[..., Recipe], tmp_path: Path, evaluation: dict[str, object]
) -> None:
    with simulation(recipe_of("fednh", rounds=2, evaluation=evaluation), tmp_path) as running:
        running.go()
    file = write_report(report.read_run_record(tmp_path, None), tmp_path / "report.html")
    page = chromium.new_page(viewport={"width": 375, "height": 812})
    page.goto(file.as_uri())
    for unfolded in (False, True):
        page.evaluate("open => document.querySelectorAll('details').forEach(one => (one.open = open))", unfolded)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page).response["violations"]
        assert [f"{one['id']}: {node['target']}" for one in found for node in one["nodes"]] == []
        for table in page.locator(".scroll:has(table.cards)").all():
            assert table.evaluate("one => one.scrollWidth <= one.clientWidth"), table.inner_text()[:200]
    wide = page.locator(".scroll:has(table:not(.cards))")
    assert "gradient" in wide.first.evaluate("one => getComputedStyle(one).backgroundImage"), "its edge is shaded"
    page.close()
