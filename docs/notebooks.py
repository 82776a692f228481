"""A notebook as a page in Markdown: its code and its outputs, pictures as files beside the page.

A page rather than mkdocs-jupyter's HTML: links are checked as everywhere, and nothing is fetched from outside.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """The page's Markdown, and its pictures by the file names that it links to."""
    pictures: dict[str, bytes] = {}
    parts: list[str] = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for data in _outputs(cell):
            if "image/png" in data:
                name = f"{notebook.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![The figure that the code above draws]({name})")
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{_text(data)}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _outputs(cell: Any) -> Iterator[dict[str, Any]]:
    """Of a cell, by type of content; a stream is text."""
    for output in cell.get("outputs", ()):
        yield output["data"] if "data" in output else {"text/plain": output["text"]}


def _text(data: dict[str, Any]) -> str:
    return "".join(data["text/plain"]).rstrip()
