"""Sizes of 2 GiB and more, which PostgreSQL refused; in SQLite every integer has 64 bits."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Integer

revision = "0208"
down_revision = "0207"


def upgrade() -> None:
    """Widen the columns; PostgreSQL copies both tables meanwhile."""
    if op.get_bind().dialect.name == "postgresql":
        for table, column in (("tasks", "base_bytes"), ("updates", "bytes")):
            op.alter_column(table, column, type_=BigInteger(), existing_type=Integer(), existing_nullable=False)
