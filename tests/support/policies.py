"""Policies for tests of what is not about secure aggregation."""

from __future__ import annotations

from pathlib import Path

from protofed.client.policy.policy import Policy
from protofed.deploy import shipped


def standard_with_plain_updates(folder: Path) -> Path:
    """`standard.toml`, but updates leave in runs without secure aggregation, too: as studies of two sites need it."""
    text = shipped.named("policy", "standard").read_text(encoding="utf-8")
    changed = text.replace('\nsecure = "required"', '\nsecure = "allowed"', 1)
    assert changed != text
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "standard-with-plain-updates.toml"
    path.write_text(changed, encoding="utf-8")
    assert Policy.read(path).rules.secure == "allowed"
    return path
