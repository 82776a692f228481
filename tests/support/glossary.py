"""Links each page's first use of a term to docs/reference/glossary.md.

`python -m tests.support.glossary` writes the links that are missing. A term that the page first uses within a link, as
to its own page, needs none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from docs.markdown import GENERATED
from tests.support.sentences import ROOT, pages

GLOSSARY = "docs/reference/glossary.md"
# Words that every page uses, or that its first paragraph explains.
UNLINKED = {
    "Coordinator", "Site", "Trainer", "Operator", "Partners", "Consortium", "Group", "Recipe", "Method", "Run", "Round",
    "Attempt", "Update", "Part", "Policy", "Disclosure", "Worst site", "Calibration", "Fingerprint", "Journal", "Blob",
    "Base", "Body", "Bundle", "Fit", "Head", "Row", "Unit",
}  # fmt: skip
SKIPPED = (GLOSSARY, "CHANGELOG.md", "docs/STYLE.md", "docs/index.md", "README.md", "SECURITY.md", "CONTRIBUTING.md")
# What is no prose: what is generated, fenced code, headings, rows of tables, comments.
BLOCK = re.compile(r"^```.*?^```$|^#[^\n]*$|^\|[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)")


def terms() -> list[str]:
    """The terms that pages link to, as the glossary's headings have them."""
    headings = re.findall(r"^### (.+)$", (ROOT / GLOSSARY).read_text(encoding="utf-8"), re.MULTILINE)
    return [term for term in headings if term not in UNLINKED]


def linked(page: str, text: str) -> str:
    """A page's text with each missing link.

    Args:
        page: its path in the repository.
    """
    target = os.path.relpath(GLOSSARY, str(Path(page).parent))
    for term in terms():
        anchor = re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-")
        if (span := _first(term, text)) is not None:
            begin, end = span
            text = f"{text[:begin]}[{text[begin:end]}]({target}#{anchor}){text[end:]}"
    return text


def checked() -> Iterator[str]:
    """The pages whose terms are linked: those of guides, explanations and reference."""
    for page in pages():
        if page.startswith("docs/") and page not in SKIPPED and not page.startswith("docs/explanation/decisions/"):
            yield page


def _first(term: str, text: str) -> tuple[int, int] | None:
    """Where a page first uses a term outside of code; None: nowhere, or within a link."""
    prose = text
    for pattern in (GENERATED, BLOCK, CODE):
        prose = pattern.sub(lambda match: " " * len(match[0]), prose)
    word = r"\s+".join(map(re.escape, term.split())) + (r"(?!\w)" if term.endswith(")") else r"s?\b")
    flags = re.NOFLAG if term.isupper() or "(" in term else re.IGNORECASE
    if (match := re.search(rf"\b{word}", prose, flags)) is None:
        return None
    in_link = any(link.start() <= match.start() < link.end() for link in LINK.finditer(text))
    return None if in_link else match.span()


def main() -> None:
    """Write the links that are missing."""
    for page in checked():
        text = (ROOT / page).read_text(encoding="utf-8")
        if (new := linked(page, text)) != text:
            (ROOT / page).write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
