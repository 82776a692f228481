"""How plain the documents are: words, sentence lengths and commas of each page, against the limits of docs/STYLE.md.

`python -m tests.support.sentences` prints a row for each page and ends with 1 if a page is over its limits;
`python -m tests.support.sentences --long PAGE` prints the page's sentences over 25 words, the longest first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from docs.markdown import GENERATED
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
LONG = 25  # words
# A sentence ends before a capital, a digit, a code word or a bracket; not after these.
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|Eq|Eqs|Fig|Sec|Tab|al|approx|no|No|St|Dr)\.$")
END = re.compile(r"(?<=[.!?])[)\"'”*]*\s+(?=[\"'“(*]*[A-Z0-9`\[])")
WORD = re.compile(r"[\w'’%./:+-]*\w[\w'’%./:+-]*")
# Words of our own, for which docs/STYLE.md has the plain one.
DIALECT = re.compile(
    r"\b(?:set aside|hand(?:ed|s)? in|three doors|a sum opens|sum that opens|be it|r[iu]ng (?:\w+ ){0,3}up|what it has"
    r"|the one that|of which|secure sums?|standstill|crews?|begun|halves|whither|thereby|hence"
    r"|leaves? (?:the|its|this|a) site)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Limits:
    """The most that a page may have.

    Attributes:
        mean: words in a sentence, in the mean.
        long: share of sentences over 25 words.
        commas: in a sentence, in the mean.
    """

    mean: float
    long: float
    commas: float


GUIDES, EXPLANATIONS = Limits(15, 0.08, 1.2), Limits(17, 0.12, 1.5)


@dataclass(frozen=True)
class Figures:
    """What was counted on a page; `dialect`: its words that docs/STYLE.md has plain ones for."""

    words: int
    sentences: tuple[str, ...]
    dialect: tuple[str, ...]

    @property
    def lengths(self) -> list[int]:
        """Words of each sentence."""
        return [len(WORD.findall(sentence)) for sentence in self.sentences] or [0]

    @property
    def mean(self) -> float:
        """Words in a sentence."""
        return fmean(self.lengths)

    @property
    def long(self) -> float:
        """The share of sentences over 25 words."""
        return fmean(length > LONG for length in self.lengths)

    @property
    def commas(self) -> float:
        """Commas in a sentence."""
        return fmean(sentence.count(",") for sentence in self.sentences or [""])

    def faults(self, limits: Limits) -> list[str]:
        """What is over the limits, in words; the means are rounded as they are printed."""
        found = [
            *([f"{self.mean:.1f} words a sentence"] if round(self.mean, 1) > limits.mean else []),
            *([f"{self.long:.0%} over {LONG} words"] if round(self.long, 2) > limits.long else []),
            *([f"{self.commas:.2f} commas a sentence"] if round(self.commas, 2) > limits.commas else []),
        ]
        return [*found, *(f"says '{word}'" for word in self.dialect)]


def find_limits(page: str) -> Limits | None:
    """The limits of a page by its path in the repository; None: it has none."""
    if page == "CHANGELOG.md":
        return None  # a list of single sentences, each for itself
    guides = page in ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/STYLE.md")
    return GUIDES if guides or page.startswith(("docs/how-to/", "docs/tutorials/")) else EXPLANATIONS


def measure(text: str) -> Figures:
    """Count a page's prose: paragraphs, items of lists and quotations; no headings, tables, code and comments.

    Nothing that is generated is counted, not even among the words.
    """
    text = GENERATED.sub("", text)
    blocks = list(_blocks(text))
    sentences = [sentence for block in blocks for sentence in _split(block)]
    words = sum(len(WORD.findall(line)) for line in _everything(text))
    return Figures(words, tuple(sentences), tuple(word.lower() for block in blocks for word in DIALECT.findall(block)))


def pages() -> list[str]:
    """All documents, by their paths in the repository."""
    there = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
    names = subprocess.run(there, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file() and not name.startswith("tests/")]


def _blocks(text: str) -> Iterator[str]:
    """The text of each paragraph, with a word for each piece of code."""
    for before, token in pairwise(_parser().parse(text)):
        if token.type == "inline" and before.type == "paragraph_open":
            yield _plain(token)


def _everything(text: str) -> Iterator[str]:
    for token in _parser().parse(text):
        if token.type == "inline":
            yield _plain(token)


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


def _plain(token: Token) -> str:
    pieces = []
    for child in token.children or ():
        match child.type:
            case "text":
                pieces.append(child.content)
            case "code_inline":
                pieces.append("`code`")
            case "softbreak" | "hardbreak":
                pieces.append(" ")
    return "".join(pieces).strip()


def _split(block: str) -> Iterator[str]:
    rest = ""
    for piece in END.split(block):
        rest = f"{rest} {piece}".strip()
        if not ABBREVIATED.search(rest):
            yield rest
            rest = ""
    if rest:
        yield rest


def main(arguments: list[str]) -> int:
    """Print the table, or also the long sentences; 1: a page is over its limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.sentences", description=__doc__)
    parser.add_argument("page", nargs="*", help="paths in the repository; all pages without")
    parser.add_argument("--long", action="store_true", help="print sentences over 25 words")
    parser.add_argument("--quiet", action="store_true", help="print only pages that are over their limits")
    options = parser.parse_args(arguments)
    figures = {page: measure((ROOT / page).read_text(encoding="utf-8")) for page in options.page or pages()}
    faults = {page: of.faults(limits) for page, of in figures.items() if (limits := find_limits(page))}
    for page, of in figures.items():
        if options.quiet and not faults.get(page):
            continue
        problem = f"  <- {', '.join(faults[page])}" if faults.get(page) else ""
        _say(f"{of.words:6} {of.mean:5.1f} {of.long:5.0%} {of.commas:5.2f}  {page}{problem}")
        for length, sentence in (
            sorted(zip(of.lengths, of.sentences, strict=False), reverse=True) if options.long else ()
        ):
            if length > LONG:
                _say(f"{length:10} {sentence}")
    _say(f"{sum(of.words for of in figures.values()):6} words")
    return int(any(faults.values()))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
