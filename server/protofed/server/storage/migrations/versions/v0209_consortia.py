"""The lists of partners that were offered to sites. Ledgers of before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, Integer, String

revision = "0209"
down_revision = "0208"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "consortia",
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("offered_at", Float, nullable=False),
        Column("document", String, nullable=False),
    )
