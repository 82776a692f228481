"""A run record by hand, for tests of what is told of it: two rounds of FedAvg with three sites and an evaluator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

SITES = ("ann", "bob", "cyd")
BEGAN_AT, ROUND_S = 1_800_000_000.0, 60.0  # 2027-01-15 08:00:00Z


def task(site: str, kind: str = "fit", **fields: Any) -> dict[str, Any]:
    received = 0 if kind == "score" else 1_000_000
    told = {"reason": "", "cause": "", "norm": 1.0, "weight_capped": False, "refused": []}
    done = {"site": site, "kind": kind, "task_status": "reported", "sent": received, "received": received}
    return {**told, **done, "loss": 0.5 if kind == "fit" else None, **fields}


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    """A published attempt at a round with all its tasks; round 0 made the first model."""
    opened_at = BEGAN_AT + ROUND_S * number
    fits = [task(site, "initialise" if number == 0 else "fit") for site in SITES]
    scoring = [task(site, "score") for site in (*SITES, "eva")] if number else []
    times = {"opened_at": opened_at, "closed_at": opened_at + ROUND_S / 2}
    told = {"round": number, "attempt": 1, "outcome": "published", "reason": "", "size": 3, "quorum": 3}
    return {**told, **times, "state": f"{number:064d}", "statistics": {}, "tasks": [*fits, *scoring], **fields}


def site(**fields: Any) -> dict[str, Any]:
    return {"roles": ["trainer"], "excluded": "", "excluded_at": None, "revoked": "", "revoked_at": None, **fields}


def intervention(action: str, **fields: Any) -> dict[str, Any]:
    """What an operator did in round 2."""
    done = {
        "at": BEGAN_AT + 2.1 * ROUND_S,
        "action": action,
        "operator": "olga",
        "site": None,
        "reason": "",
        "round": 2,
    }
    return {**done, **fields}


def warning(**fields: Any) -> dict[str, Any]:
    """A sign of a useless model."""
    text = "The global model names one class for every image."
    return {"code": "one-class", "round": 2, "site": None, "text": text, **fields}


def run_record(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A completed run without problems.

    Args:
        changes: values by their path, such as `run.status` or `rounds.2.tasks.0.task_status`.
    """
    own = {"personal.balanced_accuracy": 0.75, "personal.accuracy": 0.875}
    of_global = {"global.balanced_accuracy": 0.625, "global.accuracy": 0.75, "global.majority": 0.5}
    scores: dict[str, Any] = {**{name: dict(own) for name in SITES}, "eva": of_global}
    scores["cyd"] = {"personal.balanced_accuracy": 0.5, "personal.accuracy": 0.5}
    recalls = {f"global.recall.{c}": recall for c, recall in enumerate((0.75, 0.25, 0.875))}
    by_class = {"round": 2, "sites": {"eva": recalls}}
    record: dict[str, Any] = {
        "format": 1,
        "run": {
            "name": "moles",
            "status": "completed",
            "reason": "completed",
            "began_at": BEGAN_AT - 3600,
            "ended_at": BEGAN_AT + 3 * ROUND_S,
            "fingerprint": "f" * 64,
        },
        "recipe": {
            "rounds": 2,
            "classes": 3,
            "class_names": ["nv", "mel", "bcc"],
            "method": {"name": "fedavg"},
            "model": {"name": "digits-cnn"},
            "evaluation": {},
        },
        "versions": {"protofed": "0.2.0", "protocol": 1},
        "sites": {**{name: site() for name in SITES}, "eva": site(roles=["evaluator"])},
        "interventions": [],
        "groups": [],
        "partners": None,
        "warnings": [],
        "rounds": [attempt(number) for number in range(3)],
        "best": {"round": 2, "score": "global.accuracy", "value": 0.75, "kept": 2},
        "scores": [{"round": 2, "sites": scores}],
        "classes": {"judged_by": "global.accuracy", "newest": by_class, "best": copy.deepcopy(by_class)},
        "prototypes": {"round": 2, "cosines": []},
        "norms": {"round": 2, "part": "", "sites": {}},
    }
    for path, value in (changes or {}).items():
        _set(record, path.split("."), value)
    return record


def _set(table: Any, keys: list[str], value: Any) -> None:
    *way, last = [int(key) if key.lstrip("-").isdecimal() else key for key in keys]
    for key in way:
        table = table[key]
    table[last] = value
