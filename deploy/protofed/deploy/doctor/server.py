"""`protofed server doctor`: what the aggregation server needs, with the very functions that it calls itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from protofed.common.address import check_connection
from protofed.common.clock import stamp, utc_now
from protofed.common.config.recipe import read_recipe
from protofed.common.config.settings import ServerSettings
from protofed.common.errors import ProtofedError
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.pki.identity import Identity, read_identity
from protofed.deploy.daemons import server as server_process
from protofed.deploy.doctor import dates as doctor_dates
from protofed.deploy.doctor import machine as doctor_machine
from protofed.deploy.doctor.checks import Check, CheckFailedError, CheckSkippedError
from protofed.server.access.certificates import FIRST_OPERATORS
from protofed.server.assembly import open_server
from protofed.server.rounds.run_queue import RunQueue
from protofed.server.rpc import server as serving
from protofed.server.rpc.memory_guard import memory_limit
from protofed.server.storage import database as engine
from protofed.server.storage import migrate as versions
from protofed.server.storage import schema
from protofed.server.storage.filesystem import network_type_of

LIBRARIES = ("grpcio", "numpy", "sqlalchemy", "cryptography")
T = TypeVar("T")
LEAST_MEMORY = 512 << 20  # a server without a run has 150 MB


@dataclass
class ServerDoctor:
    """One examination.

    Attributes:
        read: the settings, as the server reads them.
    """

    read: Callable[[], ServerSettings]
    clock: Callable[[], datetime] = utc_now

    def checks(self) -> list[Check]:
        """In the order of the table: causes before what follows from them."""
        settings, identity = ("settings",), ("settings", "connection", "identity")
        return [
            Check("settings", self.look_at_settings, "settings-invalid"),
            Check("software", lambda: doctor_machine.software(None, LIBRARIES)),
            Check("connection", self.look_at_connection, "connection-not-chosen", settings),
            Check("clock", self.look_at_clock, needs=settings),
            Check("identity", self.look_at_identity, "identity-unreadable", ("settings", "connection")),
            Check("certificate", self.look_at_dates, "identity-unreadable", identity),
            Check("operators", self.look_at_operators, "operator-unusable", identity),
            Check("recipes", self.look_at_recipes, "recipe-invalid", settings),
            Check("state folder", self.look_at_state, needs=settings),
            Check("disk", lambda: doctor_machine.disk(self.settings.state), needs=settings),
            Check("blobs", self.look_at_blobs, needs=settings),
            Check("ledger", self.look_at_ledger, "ledger-unusable", settings),
            Check("port", self.look_at_port, needs=("settings", "connection")),
            Check("metrics", self.look_at_metrics, "metrics-unusable", settings),
            Check("memory", self.look_at_memory, "settings-invalid", settings),
            Check("descriptors", self.look_at_descriptors, needs=settings),
        ]

    @cached_property
    def settings(self) -> ServerSettings:
        """Of the server."""
        return self.read()

    @cached_property
    def running(self) -> bool:
        """Whether a server has the state folder."""
        return doctor_machine.held(self.settings.state)

    def look_at_settings(self) -> str:
        """Keys, values, variables of the environment."""
        return f"listen {self.settings.listen}, state {self.settings.state}, {len(self.settings.recipes)} recipes"

    def look_at_connection(self) -> str:
        """Encrypted, or plain text that was asked for."""
        check_connection(self.settings.listen, self.settings.identity, self.settings.plaintext)
        return "plain text on this machine" if self.settings.plaintext else f"TLS, identity {self.settings.identity}"

    def look_at_clock(self) -> str:
        """Nobody is there to compare with, but what was written before was not written later."""
        newest = max((path.stat().st_mtime for path in _files(self.settings.state)), default=0.0)
        written, now = datetime.fromtimestamp(newest, UTC), self.clock()
        if written - now > doctor_machine.CLOCK:
            raise CheckFailedError(
                "clock-wrong", f"this clock says {stamp(now)}, but the state was written at {stamp(written)}"
            )
        return f"{stamp(now)}; each site's doctor compares it with its own"

    def look_at_identity(self) -> str:
        """Complete, private, a server's, and all of one CA; dates are another check's."""
        shown = self._identity(None)
        hosts = ", ".join(shown.certificate.hosts)
        return f"{shown.certificate} for {hosts}, fingerprint {shown.certificate.fingerprint[:16]}…"

    def look_at_dates(self) -> str:
        """Of the certificate and of its CA."""
        now = self.clock()
        return doctor_dates.remaining(self._identity(now).certificate, now)

    def look_at_operators(self) -> str:
        """Somebody may begin runs and let sites in: as the identity's folder has them, or the ledger."""
        if self.settings.identity is None:
            raise CheckSkippedError("in plain text whoever calls is believed")
        folder, now = self.settings.identity / FIRST_OPERATORS, self.clock()
        names = set()
        for path in sorted(folder.glob("*.pem")):
            said = read_certificate(path.read_bytes(), str(path))
            if said.party is not Party.OPERATOR:
                raise CheckFailedError("operator-unusable", f"{path} is the {said}; expected operators' only")
            if said.not_after > now:
                names.add(said.name)
        names |= self._registered(now.timestamp())
        if not names:
            raise CheckFailedError("operator-unusable", f"no valid certificate in {folder}, and none in the ledger")
        return f"{', '.join(sorted(names))}"

    def look_at_recipes(self) -> str:
        """As the server takes them up, in memory."""
        recipes = [read_recipe(path) for path in self.settings.recipes]
        if not recipes:
            raise CheckSkippedError("none are given; runs are begun by `protofed runs start`")
        with ExitStack() as opened:
            RunQueue(recipes, open_server(None, opened))
        return ", ".join(recipe.name for recipe in recipes)

    def look_at_state(self) -> str:
        """Writable, on a local disk, and whether a server has it."""
        state = self.settings.state
        told = doctor_machine.writable(state)
        if (kind := network_type_of(state)) and not self.settings.ledger:
            raise CheckFailedError(
                "state-on-network", f"{state} is on a network file system ({kind}): SQLite loses writes there"
            )
        return f"{told}; the server is running" if self.running else told

    def look_at_blobs(self) -> str:
        """Where the settings say: there, writable, with room."""
        if (folder := self.settings.blobs) is None:
            raise CheckSkippedError("they are in the state folder")
        if not folder.is_dir():
            raise CheckFailedError("blobs-unusable", f"{folder} is not there")
        return f"{doctor_machine.writable(folder, 'blobs-unusable')}; {doctor_machine.disk(folder)}"

    def look_at_ledger(self) -> str:
        """Whole, and of a version that this software has; it stays as it is."""
        where = "the database" if self.settings.ledger else f"{self._file}"
        if not self.settings.ledger and not self._file.exists():
            return f"{where} will be made"
        version = self._ledger(versions.found)
        if version is None:
            return f"{where} can be reached, and is empty: a ledger will be made"
        newer = "" if version == versions.NEWEST else f", which becomes {versions.NEWEST} when the server starts"
        return f"{where} is whole, version {version}{newer}"

    def look_at_port(self) -> str:
        """To be had, or this very server's."""
        listen, said = self.settings.listen, server_process.read_address(self.settings.state)
        if self.running and said is not None and said.rpartition(":")[2] == listen.rpartition(":")[2]:
            return f"{said} is the running server's"
        return doctor_machine.port(listen, "port-taken", "address-not-here")

    def look_at_metrics(self) -> str:
        """Where they would be answered."""
        return doctor_machine.metrics(self.settings.metrics, running=self.running)

    def look_at_memory(self) -> str:
        """Above which no upload begins."""
        limit = memory_limit(self.settings.memory_limit_mb)
        if limit is None:
            return "no limit is set"
        if limit < LEAST_MEMORY:
            raise CheckFailedError(
                "memory-small", f"uploads wait above {limit >> 20} MiB; {LEAST_MEMORY >> 20} and more are usual"
            )
        return f"uploads wait above {limit >> 20} MiB"

    def look_at_descriptors(self) -> str:
        """One a connection."""
        wanted = self.settings.max_connections
        if (room := serving.room(wanted)) < wanted:
            raise CheckFailedError("descriptors-few", f"room for {room} connections; `max_connections` is {wanted}")
        return f"room for {wanted} connections"

    @property
    def _file(self) -> Path:
        return self.settings.state / engine.LEDGER_FILE

    def _identity(self, now: datetime | None) -> Identity:
        """None: whatever its dates."""
        if (folder := self.settings.identity) is None:
            raise CheckSkippedError("none in plain text")
        return read_identity(folder, Party.SERVER, now or doctor_dates.valid_time(folder, self.clock()))

    def _registered(self, now: float) -> set[str]:
        """Operators that the ledger knows; a ledger that cannot be read is another check's."""
        if not self.settings.ledger and not self._file.exists():
            return set()
        table = schema.certificates
        query = select(table.c.name).where(
            table.c.party == Party.OPERATOR, table.c.revoked_at.is_(None), table.c.not_after > now
        )
        try:
            return set(self._ledger(lambda connection: connection.execute(query).scalars().all()))
        except (ProtofedError, CheckFailedError):
            return set()

    def _ledger(self, look: Callable[[Connection], T]) -> T:
        """Read from it, whole or not at all.

        Raises:
            Found: the database does not answer.
            StateError: it cannot be read, is damaged, or of a version that this software does not know.
        """
        file = self._file
        still = not self.running and not file.with_name(f"{file.name}-wal").exists()
        reader = engine.open_engine(self.settings.ledger or f"sqlite:///{file}", still=still)
        try:
            with reader.connect() as connection:
                engine.check(connection)
                return look(connection)
        except SQLAlchemyError as error:
            told = engine.state_error(error)
            if isinstance(error, OperationalError) and reader.dialect.name == "postgresql":
                raise CheckFailedError("database-unreachable", str(told)) from error
            raise told from error
        finally:
            reader.dispose()


def _files(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder)] if folder.is_dir() else []
