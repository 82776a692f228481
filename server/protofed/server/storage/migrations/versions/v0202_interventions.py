"""What operators did to runs and sites: who, when and why. Of what was done before only the outcome is known."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, Integer, String

revision = "0202"
down_revision = "0201"
SITE = String(64).with_variant(String(64, collation="C"), "postgresql")  # as in every table


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "interventions",
        Column("id", Integer, primary_key=True),
        Column("at", Float, nullable=False),
        Column("action", String(16), nullable=False),
        Column("operator", String(64), nullable=False),
        Column("run", String(64)),
        Column("site", SITE),
        Column("reason", String, nullable=False),
    )
