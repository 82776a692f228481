"""What an evaluator refines to the state that a round publishes. Rounds of before have nothing of it."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0207"
down_revision = "0206"


def upgrade() -> None:
    """Add the column."""
    op.add_column("rounds", Column("aggregate", String(64)))
