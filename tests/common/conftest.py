"""Identities at a day of the tests' own, shared by those that look at their dates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pki import BEGINS, ENDS, FIRST, LAST, Authority

from protofed.common.pki.identity import Party


@pytest.fixture(scope="session")
def authority() -> Authority:
    """A CA that is valid for years before and after."""
    return Authority.make(begins=FIRST, ends=LAST)


@pytest.fixture
def site(authority: Authority, tmp_path: Path) -> Path:
    """A site's identity folder."""
    return authority.issue(tmp_path / "site", Party.SITE, "hospital-a", begins=BEGINS, ends=ENDS)
