"""The notebook of the tutorials runs, and what it shows is a page of the site."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from docs import notebooks
from tests.support.notebook import METADATA, NOTEBOOK, executed


def kinds(notebook: object) -> list[list[tuple[str, tuple[str, ...]]]]:
    """What kinds of outputs every cell of code has."""
    table = json.loads(json.dumps(notebook))
    cells = [cell["outputs"] for cell in table["cells"] if cell["cell_type"] == "code"]
    return [[(one["output_type"], tuple(sorted(one.get("data", ())))) for one in outputs] for outputs in cells]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_has_been_saved_with(tmp_path: Path) -> None:
    found = executed(tmp_path)
    nbformat.validate(found)
    assert kinds(found) == kinds(nbformat.read(NOTEBOOK, as_version=4))  # type: ignore[no-untyped-call]
    assert list(tmp_path.iterdir()) == []


def test_the_saved_notebook_says_nothing_of_a_machine() -> None:
    table = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert table["metadata"] == METADATA
    assert [cell["metadata"] for cell in table["cells"] if cell["metadata"]] == []
    pictures = ("image/png",)
    texts = [
        "".join(value)
        for cell in table["cells"]
        for output in cell.get("outputs", ())
        for kind, value in (output.get("data") or {"text/plain": output.get("text", "")}).items()
        if kind not in pictures
    ]
    assert texts
    assert [text for text in texts if re.search(r"(?<![<\w.])/(home|tmp|work|root|usr|opt|Users)\b", text)] == []


def test_a_notebook_becomes_a_page_with_its_outputs_and_pictures() -> None:
    page, pictures = notebooks.page(NOTEBOOK)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert page.count("```python\n") == sum(cell["cell_type"] == "code" for cell in cells)
    assert len(pictures) == 2
    assert all(f"({name})" in page and data.startswith(b"\x89PNG") for name, data in pictures.items())
    assert "<table" in page
