"""A state folder remembers its site."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofed.client.state.owner import FILE, check_owner, claim
from protofed.common.errors import ConfigError, StateError


def test_a_folder_is_of_the_first_site_that_claims_it(tmp_path: Path) -> None:
    assert not check_owner(tmp_path, "ann")
    assert not (tmp_path / FILE).exists(), "looking claims nothing"
    claim(tmp_path, "ann")
    claim(tmp_path, "ann")
    assert check_owner(tmp_path, "ann")
    for look in (check_owner, claim):
        with pytest.raises(ConfigError, match="belongs to site 'ann', and this is site 'ben'"):
            look(tmp_path, "ben")
    assert check_owner(tmp_path, "ann")


def test_a_name_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff")
    with pytest.raises(StateError, match="cannot be read"):
        claim(tmp_path, "ann")
    assert (tmp_path / FILE).read_bytes() == b"\xff"
