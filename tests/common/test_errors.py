"""Texts from outside, as errors cite them."""

from __future__ import annotations

import pytest

from protofed.common.errors import incident_in, incident_text, new_incident, short

CITED = {"Größe ∆ 北": "Größe ∆ 北", "a\0b": "a\ufffdb", "two\r\nlines\tand more": "two  lines and more"}
CITED |= {"\x1b[2Jgone": "\ufffd[2Jgone", "\u202eright to left": "\ufffdright to left", "half \ud800": "half \ufffd"}


@pytest.mark.parametrize(("text", "cited"), CITED.items(), ids=range(len(CITED)))
def test_a_text_from_outside_is_cited_printably(text: str, cited: str) -> None:
    assert short(text) == cited


def test_a_long_one_is_cut() -> None:
    assert short("x" * 80) == "x" * 80
    assert short("\0" * 81) == "\ufffd" * 79 + "…"


def test_the_number_is_found_in_what_a_peer_is_told() -> None:
    number = new_incident()
    assert incident_in(f"INTERNAL: {incident_text(number)}; try again") == number
    assert number != new_incident()


@pytest.mark.parametrize("text", ["", "internal error", "incident 12", "incident XYZ01234", "incident 0123456789"])
def test_what_tells_of_none_has_none(text: str) -> None:
    assert incident_in(text) is None
