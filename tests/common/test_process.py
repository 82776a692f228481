"""Importing without collections: the collector is as it was afterwards, whatever happened."""

from __future__ import annotations

import gc

import pytest

from protofed.common.process import quick_imports


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, ImportError])
def test_the_collector_rests_only_meanwhile(enabled: bool, error: type[Exception] | None) -> None:
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        if error is None:
            with quick_imports():
                assert not gc.isenabled()
        else:
            with pytest.raises(error), quick_imports():
                raise error
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
