"""What tests ask of all registered methods: none of them keeps a list of names of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from protofed.client.method import client_methods
from protofed.common.errors import ConfigError
from protofed.common.secure_aggregation.linear_form import read_form


def brief(method: str) -> dict[str, int]:
    """Options by which what a method trains beside the plan's epochs takes two of them."""
    return {name: 2 for name in client_methods.options(method) if name.endswith("epochs")}


def _is_summable(method: str) -> bool:
    try:
        read_form(client_methods.build(method, {}), method)
    except ConfigError:
        return False
    return True


def long(values: Iterable[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Of a test that takes seconds a method, `make test` does those of the four papers and `make slow` the others.

    Args:
        values: a parameter's, one for each method or more.
        name: of the method that a value is of.
    """
    return [value if name(value) in FOUR_PAPERS else pytest.param(value, marks=pytest.mark.slow) for value in values]


FOUR_PAPERS = {"fedavg", "fednh", "fedprp", "fedproc", "cwfedavg", "cwfedavg-private"}
METHODS = tuple(client_methods)
# With their default options: those that send something, and those that may run with federation.secure = true.
SENDING = tuple(name for name in METHODS if client_methods.build(name, {}).sends)
SUMMABLE = tuple(name for name in METHODS if _is_summable(name))
