"""Roles of certificates. Those that were registered before keep what every site could claim until then: both roles."""

from __future__ import annotations

from alembic import op
from sqlalchemy import JSON, Column, text

revision = "0201"
down_revision = "0200"


def upgrade() -> None:
    """Add the column and fill it."""
    op.add_column("certificates", Column("roles", JSON, nullable=False, server_default=text("'[]'")))
    op.execute("""UPDATE certificates SET roles = '["trainer", "evaluator"]' WHERE party = 'site'""")
    op.execute("""UPDATE certificates SET roles = '["operator"]' WHERE party = 'operator'""")
    if op.get_bind().dialect.name == "postgresql":  # SQLite cannot, and nobody relies on the default
        op.alter_column("certificates", "roles", server_default=None)
