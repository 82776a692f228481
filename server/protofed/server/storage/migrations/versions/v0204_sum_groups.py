"""The groups of sites that secure sums of all runs are over. Ledgers of before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, Integer, String, text

revision = "0204"
down_revision = "0203"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "sum_groups",
        Column("id", Integer, primary_key=True),
        Column("site", String(64), nullable=False),
        Column("first", String(64), nullable=False),
        Column("formed_at", Float, nullable=False),
        Column("dissolved_at", Float),
    )
    op.create_index(
        "one_group_a_site",
        "sum_groups",
        ["site"],
        unique=True,
        sqlite_where=text("dissolved_at IS NULL"),
        postgresql_where=text("dissolved_at IS NULL"),
    )
