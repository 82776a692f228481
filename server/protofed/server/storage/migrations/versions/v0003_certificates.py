"""The certificates that may call."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, String

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Nobody is registered yet."""
    op.create_table(
        "certificates",
        Column("fingerprint", String(64), primary_key=True),
        Column("party", String(16), nullable=False),
        Column("name", String(64), nullable=False),
        Column("not_before", Float, nullable=False),
        Column("not_after", Float, nullable=False),
        Column("added_at", Float, nullable=False),
        Column("revoked_at", Float),
        Column("reason", String),
    )
