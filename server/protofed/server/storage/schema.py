"""The ledger's tables as the newest version of `migrations/` leaves them. A change here needs a migration."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, false, text

metadata = MetaData()
# An update may have 4 GiB, and what an announcement says is kept up to 2^53; an integer of SQLite has 64 bits anyway.
BYTES = BigInteger().with_variant(Integer(), "sqlite")
# Sites are folded in the order of their bytes, whatever language the database sorts in.
SITE = String(64).with_variant(String(64, collation="C"), "postgresql")
sites = Table(
    "sites",
    metadata,
    Column("site", SITE, primary_key=True),
    Column("roles", JSON, nullable=False),
    Column("excluded", String),  # why the operator excluded it; NULL: it may take part
)
runs = Table(
    "runs",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("recipe", String, nullable=False),
    Column("position", Integer, nullable=False),  # in the queue: the smallest that has not ended goes on
    Column("began_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", String(16)),  # completed, failed, aborted; NULL while it goes on
    Column("reason", String),
    Column("paused", Boolean, nullable=False, server_default=false()),
)
rounds = Table(
    "rounds",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("size", Integer, nullable=False),
    Column("quorum", Integer, nullable=False),
    Column("enrolled", Integer, nullable=False),  # trainers that the run could invite when it was opened
    Column("opened_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("state", String(64)),  # digest of the state that the round published
    Column("aggregate", String(64)),  # digest of what an evaluator refines to that state; NULL: nobody does
    Column("complete", Boolean),  # it used every update it wanted
    Column("abandoned", String),  # why, if it was
    Column("scored", Boolean, nullable=False, default=False),
    Column("aggregations", Integer, nullable=False, server_default=text("0")),  # times its aggregation was started
    Column("rolled_back", Boolean, nullable=False, server_default=false()),  # the run went back to an earlier round
    Column("statistics", JSON),  # what the state says of itself in numbers; NULL: it published none
)
tasks = Table(
    "tasks",
    metadata,
    Column("task_id", String(64), primary_key=True),
    Column("run", String(64), nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("site", SITE, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("base_digest", String(64)),
    Column("base_bytes", BYTES, nullable=False),
    Column("task_status", String(16), nullable=False),
    Column("reason", String, nullable=False, default=""),
    Column("sum_of", String(16)),  # what is summed; NULL: the task is not of a secure aggregation
    Index("tasks_of_round", "run", "round"),
)
updates = Table(
    "updates",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run", String(64), nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("site", SITE, nullable=False),
    Column("task_id", String(64), nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("code", String(24), nullable=False, server_default=""),  # of what reason or rejected explains
    Column("reason", String, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("bytes", BYTES, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("weight", Float),
    Column("norm", Float),  # of the update less the model that it starts from
    Column("rejected", String),  # why an accepted update was left out of the aggregation; NULL: it was not
    Column("record_hash", String(64), nullable=False),
    Column("at", Float, nullable=False),
    Index(
        "one_update_a_task",
        "task_id",
        unique=True,
        sqlite_where=text("verdict = 'accepted'"),
        postgresql_where=text("verdict = 'accepted'"),
    ),
    Index("updates_of_round", "run", "round"),
    Index("updates_of_site", "run", "site", "round"),
    Index("updates_of_task", "task_id"),
)
sum_groups = Table(  # of all runs, and never removed: sums over two groups of a site tell of it by their difference
    "sum_groups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("site", SITE, nullable=False),
    Column("first", String(64), nullable=False),  # of the sites of its group, by name
    Column("formed_at", Float, nullable=False),
    Column("dissolved_at", Float),  # by an operator; NULL: the site is in this group
    Index(
        "one_group_a_site",
        "site",
        unique=True,
        sqlite_where=text("dissolved_at IS NULL"),
        postgresql_where=text("dissolved_at IS NULL"),
    ),
)
scores = Table(
    "scores",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("site", SITE, primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", Float, nullable=False),
)
score_sums = Table(  # of sites' own scores that left in a secure aggregation only: what it says, and no site's value
    "score_sums",
    metadata,
    Column("run", String(64), primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("mean", Float, nullable=False),
    Column("sites", Integer, nullable=False),  # that had the score
)
certificates = Table(
    "certificates",
    metadata,
    Column("fingerprint", String(64), primary_key=True),  # SHA-256 of its DER
    Column("party", String(16), nullable=False),  # site or operator
    Column("name", String(64), nullable=False),
    Column("not_before", Float, nullable=False),
    Column("not_after", Float, nullable=False),
    Column("added_at", Float, nullable=False),
    Column("revoked_at", Float),  # NULL: it is good while its dates are
    Column("reason", String),
    Column("roles", JSON, nullable=False),  # granted by the registration
)
consortia = Table(  # lists of partners that were offered to sites: the newest counts
    "consortia",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("offered_at", Float, nullable=False),
    Column("document", String, nullable=False),  # JSON, see `common.protocol.consortium`
)
interventions = Table(
    "interventions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("action", String(16), nullable=False),  # see `rows.InterventionRow`
    Column("operator", String(64), nullable=False),  # the name in its certificate; empty in plain text
    Column("run", String(64)),  # that the operator named, or that was going on; NULL: none was
    Column("site", String(64)),  # NULL: it was about a run
    Column("reason", String, nullable=False),
)
