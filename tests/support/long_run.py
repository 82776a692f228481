"""A long run of many sites in a server's ledger, written there at once: nothing is trained."""

from __future__ import annotations

from sqlalchemy import Engine, insert

from protofed.server.storage import schema

SCORES = ("global.accuracy", "global.balanced_accuracy", "global.majority")


def fill(engine: Engine, run: str, rounds: int, sites: int, began: float = 1.7e9) -> None:
    """Rounds from 1 on, each of ten seconds, published and scored.

    The scores rise. Of every tenth round one site is late.
    """
    names = [f"site-{number:02}" for number in range(1, sites + 1)]
    of_rounds, tasks, updates, scores = [], [], [], []
    for number in range(1, rounds + 1):
        at = {"run": run, "round": number, "attempt": 1}
        opened = began + 10.0 * number
        of_rounds.append(
            {
                **at,
                "size": sites,
                "enrolled": sites,
                "quorum": 1,
                "opened_at": opened,
                "closed_at": opened + 9.0,
                "state": f"{number:064x}",
            }
            | {"complete": number % 10 != 0, "scored": True, "aggregations": 1}
        )
        for name in names:
            late = number % 10 == 0 and name == names[0]
            task_id = f"{number}-{name}"
            tasks.append(
                {**at, "task_id": task_id, "site": name, "kind": "fit", "base_bytes": 1000}
                | {"task_status": "late" if late else "reported", "reason": "no update in time" if late else ""}
            )
            if not late:
                updates.append(
                    {**at, "site": name, "task_id": task_id, "verdict": "accepted", "reason": "", "bytes": 1000}
                    | {"digest": f"{number:064x}", "metrics": {"loss": 1.0}, "record_hash": "", "at": opened + 5.0}
                )
        scores += [
            {**at, "site": "evaluator", "name": name, "value": 0.5 + 0.4 * number / rounds * (name != SCORES[2])}
            for name in SCORES
        ]
    with engine.begin() as connection:
        for table, rows in (
            (schema.rounds, of_rounds),
            (schema.tasks, tasks),
            (schema.updates, updates),
            (schema.scores, scores),
        ):
            connection.execute(insert(table), rows)
