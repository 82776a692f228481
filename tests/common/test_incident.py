"""What one side says of an incident, the other finds."""

from __future__ import annotations

import pytest

from protofed.common.incident import incident_in, incident_text, new_incident


def test_the_number_is_found_in_what_a_peer_is_told() -> None:
    number = new_incident()
    assert incident_in(f"INTERNAL: {incident_text(number)}; try again") == number
    assert number != new_incident()


@pytest.mark.parametrize("text", ["", "internal error", "incident 12", "incident XYZ01234", "incident 0123456789"])
def test_what_tells_of_none_has_none(text: str) -> None:
    assert incident_in(text) is None
