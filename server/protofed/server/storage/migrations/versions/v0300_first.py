"""The ledger of protofed 0.3.0, which `database` makes of the schema.

A change of the schema needs a version after this one: a module here, and its number in `database.KNOWN`. What a version
says never changes.
"""

revision = "0300"
down_revision = None


def upgrade() -> None:
    """Nothing: no older ledger is read."""
