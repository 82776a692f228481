"""What the sum is of that a task is a step of. Tasks of before are of none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0203"
down_revision = "0202"


def upgrade() -> None:
    """Add the column."""
    op.add_column("tasks", Column("subject", String(16)))
