"""How plain the documents are, and how that is counted."""

from __future__ import annotations

import pytest
from tests.support import glossary, sentences
from tests.support.sentences import EXPLANATIONS, GUIDES, find_limits, measure

PAGES = sentences.pages()


@pytest.mark.parametrize("page", [page for page in PAGES if find_limits(page) is not None])
def test_a_page_is_within_its_limits(page: str) -> None:
    limits = find_limits(page)
    assert limits is not None
    assert measure((sentences.ROOT / page).read_text(encoding="utf-8")).faults(limits) == []


@pytest.mark.parametrize("page", [*glossary.checked()])
def test_a_term_of_the_glossary_is_linked_where_a_page_first_uses_it(page: str) -> None:
    text = (sentences.ROOT / page).read_text(encoding="utf-8")
    assert glossary.linked(page, text) == text, "python -m tests.support.glossary writes the links"


def test_sentences_are_counted_in_prose_alone() -> None:
    text = """
# A heading, with words that do not count

One sentence, e.g. this one. Another with `code that is one word`, and a [link](somewhere.md).

* An item. It has two.

| a table | is no prose |
|---|---|
| none | of it |

```
nor is code. Not at all.
```
"""
    figures = measure(text)
    assert [sentence.split()[0] for sentence in figures.sentences] == ["One", "Another", "An", "It"]
    assert figures.lengths == [5, 6, 2, 3]
    assert figures.commas == 0.5
    assert figures.faults(GUIDES) == []


def test_what_is_too_long_is_said() -> None:
    long = " ".join(["word"] * 26) + "."
    assert measure(long).faults(EXPLANATIONS) == ["26.0 words a sentence", "100% over 25 words"]
    assert measure("It was handed in, by one of which.").faults(GUIDES) == ["says 'handed in'", "says 'of which'"]


def test_a_term_is_linked_once_and_not_in_code() -> None:
    text = "# Quorum\n\n`quorum = 3` is a\nquorum of three. A quorum again.\n"
    linked = glossary.linked("docs/how-to/x.md", text)
    assert linked == text.replace("\nquorum of", "\n[quorum](../reference/glossary.md#quorum) of")
    assert glossary.linked("docs/how-to/x.md", linked) == linked
