"""What tests ask of all registered methods, so that none of them keeps a list of names."""

from __future__ import annotations

from protofed.client.method import client_methods
from protofed.common.errors import ConfigError
from protofed.common.secure_sums.linear_form import form_of


def brief(method: str) -> dict[str, int]:
    """Options by which what a method trains beside the plan's epochs takes two of them."""
    return {name: 2 for name in client_methods.options(method) if name.endswith("epochs")}


def _is_summable(method: str) -> bool:
    try:
        form_of(client_methods.build(method, {}), method)
    except ConfigError:
        return False
    return True


METHODS = tuple(client_methods)
# With their default options: those that send something, and those that may run with federation.secure = true.
SENDING = tuple(name for name in METHODS if client_methods.build(name, {}).sends)
SUMMABLE = tuple(name for name in METHODS if _is_summable(name))
