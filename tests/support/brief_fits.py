"""Options by which a fit of any method takes no longer than two epochs at a time."""

from __future__ import annotations

from protofed.client.method import client_methods


def brief(method: str) -> dict[str, int]:
    """Of a method that is registered: what it trains beside the plan's epochs takes two."""
    return {name: 2 for name in client_methods.options(method) if name.endswith("epochs")}
