"""What MkDocs does besides turning pages into HTML (`hooks` in mkdocs.yml).

* Pages link to files of the repository outside docs/ by their relative path, as on any forge. Such a file becomes part
  of the site under repository/, Markdown as a page, and the link leads there. A missing file is a warning, which
  fails `make docs`.
* The API pages are made: one for each room of each wing.
* A notebook becomes a page beside it, as docs/notebooks.py makes it; links to a notebook lead to its page, but for the
  page's own, which downloads it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs import notebooks
from docs.tables import WINGS
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "protofed.client.method",
    "protofed.server.method",
    "protofed.models",
    "protofed.data",
    "protofed.tasks",
    "protofed.lab",
    "protofed.testing",
)
OUTSIDE = "repository"
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
log = get_plugin_logger(__name__)


def on_config(config: Any) -> Any:
    """The API pages at the end of the reference."""
    (reference,) = (part["Reference"] for part in config["nav"] if isinstance(part, dict) and "Reference" in part)
    reference.append({"API": [{_title(name): f"reference/api/{name}.md"} for name in _api()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the API pages, and all files outside docs/ to which a page links."""
    for name, content in _api().items():
        files.append(File.generated(config, f"reference/api/{name}.md", content=content))
    todo = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    for uri in [file.src_uri for file in files if file.src_uri.endswith(".ipynb")]:
        markdown, pictures = notebooks.page(ROOT / "docs" / uri)
        files.append(File.generated(config, _page_path(uri), content=markdown))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{posixpath.dirname(uri)}/{name}", content=picture))
        todo += _targets(uri, markdown)
    todo += [f"{OUTSIDE}/{name}" for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    while todo:
        uri = todo.pop()
        if uri.startswith(f"{OUTSIDE}/") and files.get_file_from_path(uri) is None:
            path = ROOT / _in_repository(uri)
            if not path.is_file():
                log.warning("%s is linked, and is not in the repository", path)
                continue
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        if uri.endswith(".md") and not uri.startswith("reference/api/"):
            todo += _targets(uri, (ROOT / _in_repository(uri)).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links that leave docs/ to the files that were carried along."""
    uri = page.file.src_uri

    def led(link: re.Match[str]) -> str:
        target = _site_uri(uri, link[2])
        if target and target.endswith(".ipynb") and _page_path(target) != uri:
            target = _page_path(target)
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".") if target else link[2]
        return f"{link[1]}{relative}{link[3] or ''}{link[4]}"

    pieces = FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else LINK.sub(led, piece) for piece in pieces)


def _targets(uri: str, markdown: str) -> Iterator[str]:
    """Files outside docs/ to which a page links."""
    prose = "".join(piece for piece in FENCE.split(markdown) if not piece.startswith("```"))
    for link in LINK.finditer(prose):
        target = _site_uri(uri, link[2])
        if target and target.startswith(f"{OUTSIDE}/"):
            yield target


def _site_uri(uri: str, link: str) -> str | None:
    """Where a link of the page at `uri` leads within the site; None: out of it."""
    if re.match(r"[a-z]+:", link) or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(uri)), link))
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def _page_path(notebook: str) -> str:
    return f"{notebook.removesuffix('.ipynb')}.md"


def _in_repository(uri: str) -> str:
    """The path of a page's source, from the repository's root."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def _title(name: str) -> str:
    return "Public face" if name == "public" else f"protofed.{name}"


def _api() -> dict[str, str]:
    """The API pages by name, as Markdown for mkdocstrings."""
    public = [name for name in PUBLIC if _source(name)]
    pages = {"public": _page("Public face", "What a package outside the repository may import.", public)}
    for wing in WINGS:
        folder = ROOT / wing / "protofed" / wing
        rooms = [folder, *sorted(path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py")))]
        for room in rooms:
            dotted = ".".join(("protofed", *room.relative_to(ROOT / wing / "protofed").parts))
            modules = [f"{dotted}.{path.stem}" for path in sorted(room.glob("*.py")) if path.stem != "__init__"]
            modules = [*([dotted] if (room / "__init__.py").is_file() else []), *modules]
            pages[dotted.removeprefix("protofed.")] = _page(f"`{dotted}`", "", [m for m in modules if m not in public])
    return pages


def _source(dotted: str) -> Path | None:
    wing, relative = dotted.split(".")[1], dotted.replace(".", "/")
    places = [ROOT / root / f"{relative}{end}" for root in {wing, *WINGS} for end in (".py", "/__init__.py")]
    return next((path for path in places if path.is_file()), None)


def _page(title: str, text: str, modules: list[str]) -> str:
    return "\n\n".join([f"# {title}", text, *(f"::: {module}" for module in modules)]) + "\n"
