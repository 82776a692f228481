"""What a published state says of itself in numbers."""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, Column

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Nothing was computed of the states that are there."""
    op.add_column("rounds", Column("figures", JSON))
