"""The notebook of the documents, executed: `python -m tests.support.notebook` writes its outputs anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorials/lab.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(folder: Path, timeout_s: int = 280) -> Any:
    """The notebook with the outputs of this run, free of what only tells of this machine.

    Args:
        folder: in which its kernel runs.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources=resources, record_timing=False
    ).execute()
    notebook["metadata"] = nbformat.from_dict(METADATA)  # type: ignore[no-untyped-call]
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK.parent), NOTEBOOK)  # type: ignore[no-untyped-call]
