"""What secure sums of the sites' own scores say. Ledgers of before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, Integer, String

revision = "0205"
down_revision = "0204"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "score_sums",
        Column("run", String(64), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("name", String(64), primary_key=True),
        Column("mean", Float, nullable=False),
        Column("std", Float, nullable=False),
        Column("sites", Integer, nullable=False),
    )
