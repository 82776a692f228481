"""The groups of sites that secure sums are over, for a whole run. Runs of before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0204"
down_revision = "0203"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "sum_groups",
        Column("run", String(64), primary_key=True),
        Column("site", String(64), primary_key=True),
        Column("first", String(64), nullable=False),
    )
