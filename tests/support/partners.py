"""Lists of partners that people have confirmed, for tests of what comes after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from protofed.client.secure_aggregation.partners import CONFIRMED, OFFERED, load_or_create_identity
from protofed.common.protocol.consortium import Consortium, Partner, checked


def identity_of(folder: Path) -> str:
    """The identity of a state folder, in hexadecimal digits; made if there is none."""
    return load_or_create_identity(folder).public_key().public_bytes_raw().hex()


def listed(folders: Mapping[str, Path], number: int = 1, coordinator: str = "The Hub") -> Consortium:
    """The list of the sites of these state folders."""
    partners = (Partner(site, f"Hospital {site}", identity_of(folder)) for site, folder in sorted(folders.items()))
    return checked(Consortium(number, coordinator, tuple(partners)))


def confirm(folder: Path, consortium: Consortium) -> None:
    """Have a person at a site confirm a list that the server offers."""
    confirmed = {"consortium": asdict(consortium), "at": "2026-11-28T00:00:00Z", "by": "ann"}
    for name, text in ((OFFERED, consortium.document), (CONFIRMED, json.dumps(confirmed))):
        (folder / name).write_text(text)
