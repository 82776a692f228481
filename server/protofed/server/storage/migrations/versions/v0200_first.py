"""The ledger of protofed 0.2.0. What a version says never changes: a change is another version."""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, Boolean, Column, Float, Index, Integer, String, false, text

revision = "0200"
down_revision = None
# Sites are folded in the order of their bytes, whatever language the database sorts in.
SITE = String(64).with_variant(String(64, collation="C"), "postgresql")
ACCEPTED = text("verdict = 'accepted'")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "sites",
        Column("site", SITE, primary_key=True),
        Column("roles", JSON, nullable=False),
        Column("excluded", String),
    )
    op.create_table(
        "runs",
        Column("run", String(64), primary_key=True),
        Column("fingerprint", String(64), nullable=False),
        Column("recipe", String, nullable=False),
        Column("position", Integer, nullable=False),
        Column("began_at", Float, nullable=False),
        Column("ended_at", Float),
        Column("outcome", String(16)),
        Column("reason", String),
        Column("paused", Boolean, nullable=False, server_default=false()),
    )
    op.create_table(
        "rounds",
        Column("run", String(64), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("size", Integer, nullable=False),
        Column("quorum", Integer, nullable=False),
        Column("opened_at", Float, nullable=False),
        Column("closed_at", Float),
        Column("state", String(64)),
        Column("complete", Boolean),
        Column("abandoned", String),
        Column("scored", Boolean, nullable=False, default=False),
        Column("aggregations", Integer, nullable=False, server_default=text("0")),
        Column("rolled_back", Boolean, nullable=False, server_default=false()),
        Column("statistics", JSON),
    )
    op.create_table(
        "tasks",
        Column("task_id", String(64), primary_key=True),
        Column("run", String(64), nullable=False),
        Column("round", Integer, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("site", SITE, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("base_digest", String(64)),
        Column("base_bytes", Integer, nullable=False),
        Column("task_status", String(16), nullable=False),
        Column("reason", String, nullable=False, default=""),
        Index("tasks_of_round", "run", "round"),
    )
    op.create_table(
        "updates",
        Column("id", Integer, primary_key=True),
        Column("run", String(64), nullable=False),
        Column("round", Integer, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("site", SITE, nullable=False),
        Column("task_id", String(64), nullable=False),
        Column("verdict", String(16), nullable=False),
        Column("code", String(24), nullable=False, server_default=""),
        Column("reason", String, nullable=False),
        Column("digest", String(64), nullable=False),
        Column("bytes", Integer, nullable=False),
        Column("metrics", JSON, nullable=False),
        Column("weight", Float),
        Column("norm", Float),
        Column("set_aside", String),
        Column("record_hash", String(64), nullable=False),
        Column("at", Float, nullable=False),
        Index(
            "one_update_a_task",
            "task_id",
            unique=True,
            sqlite_where=ACCEPTED,
            postgresql_where=ACCEPTED,
        ),
        Index("updates_of_round", "run", "round"),
    )
    op.create_table(
        "scores",
        Column("run", String(64), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("site", SITE, primary_key=True),
        Column("name", String(64), primary_key=True),
        Column("value", Float, nullable=False),
    )
    op.create_table(
        "certificates",
        Column("fingerprint", String(64), primary_key=True),
        Column("party", String(16), nullable=False),
        Column("name", String(64), nullable=False),
        Column("not_before", Float, nullable=False),
        Column("not_after", Float, nullable=False),
        Column("added_at", Float, nullable=False),
        Column("revoked_at", Float),
        Column("reason", String),
    )
