"""A queue of runs with outcomes, sites kept out, rounds rolled back, updates set aside, scores of each attempt."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Boolean, Column, Float, Integer, String, false, text

revision = "0002"
down_revision = "0001"
SITE = String(64).with_variant(String(64, collation="C"), "postgresql")


def upgrade() -> None:
    """Change the tables; what the old ones say is kept."""
    op.add_column("sites", Column("excluded", String))
    _queue_runs()
    op.add_column("rounds", Column("aggregations", Integer, nullable=False, server_default=text("0")))
    op.add_column("rounds", Column("rolled_back", Boolean, nullable=False, server_default=false()))
    op.add_column("updates", Column("code", String(24), nullable=False, server_default=""))
    op.add_column("updates", Column("norm", Float))
    op.add_column("updates", Column("set_aside", String))
    _score_attempts()
    op.drop_table("meta")  # Alembic's own table says the version


def _queue_runs() -> None:
    op.execute("CREATE TABLE old_runs AS SELECT * FROM runs")  # SQLite cannot add NOT NULL in place
    op.drop_table("runs")
    op.create_table(
        "runs",
        Column("run", String(64), primary_key=True),
        Column("fingerprint", String(64), nullable=False),
        Column("recipe", String, nullable=False),
        Column("position", Integer, nullable=False),
        Column("began_at", Float, nullable=False),
        Column("ended_at", Float),
        Column("outcome", String(16)),
        Column("reason", String),
        Column("paused", Boolean, nullable=False, server_default=false()),
    )
    op.execute(
        """
        INSERT INTO runs (run, fingerprint, recipe, position, began_at, ended_at, reason, outcome)
        SELECT run, fingerprint, recipe, row_number() OVER (ORDER BY began_at, run), began_at, ended_at, reason,
            CASE WHEN failed THEN 'failed' WHEN reason = 'completed' THEN 'completed'
                WHEN ended_at IS NOT NULL THEN 'aborted' END
        FROM old_runs
        """
    )
    op.drop_table("old_runs")


def _score_attempts() -> None:
    op.execute("CREATE TABLE old_scores AS SELECT * FROM scores")  # SQLite cannot change a primary key in place
    op.drop_table("scores")
    op.create_table(
        "scores",
        Column("run", String(64), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("site", SITE, primary_key=True),
        Column("name", String(64), primary_key=True),
        Column("value", Float, nullable=False),
    )
    op.execute(
        """
        INSERT INTO scores (run, round, attempt, site, name, value)
        SELECT run, round, coalesce((
            SELECT max(attempt) FROM rounds
            WHERE rounds.run = old_scores.run AND rounds.round = old_scores.round AND rounds.state IS NOT NULL
        ), 1), site, name, value
        FROM old_scores
        """
    )
    op.drop_table("old_scores")
