"""How many trainers a round could invite, N of methods that need it. Rounds of before do not say."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer

revision = "0206"
down_revision = "0205"


def upgrade() -> None:
    """Add the column."""
    op.add_column("rounds", Column("enrolled", Integer))
