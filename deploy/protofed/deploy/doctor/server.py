"""`protofed server doctor`: the checks of a server, made with the functions that the server itself calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from protofed.common.address import find_folder
from protofed.common.clock import stamp, utc_now
from protofed.common.config.settings import ServerSettings
from protofed.common.errors import ProtofedError, count
from protofed.common.pki.certificate import Party, read_certificate
from protofed.common.pki.identity import Identity, LiveIdentity, read_identity
from protofed.common.protocol.messages import Role
from protofed.common.secure_aggregation.groups import Groups
from protofed.common.storage.files import find_network_type
from protofed.deploy import logs
from protofed.deploy.daemons import server as server_process
from protofed.deploy.doctor import machine
from protofed.deploy.doctor.checks import Check, CheckFailedError, CheckSkippedError
from protofed.deploy.doctor.secure_aggregation import server_message
from protofed.server.access.certificates import FIRST_OPERATORS
from protofed.server.notifications.channels import NotSentError, open_channels
from protofed.server.notifications.wording import trial_notice
from protofed.server.rounds.context import JOURNAL_FILE, open_server
from protofed.server.rounds.queue import RunQueue
from protofed.server.rpc import server as serving
from protofed.server.rpc.memory_guard import memory_limit
from protofed.server.storage import database as engine
from protofed.server.storage import recovery, schema
from protofed.server.storage.reader import SEALED, query_of_groups, read_groups

LIBRARIES = ("grpcio", "numpy", "sqlalchemy", "cryptography")
T = TypeVar("T")
MIN_MEMORY = 512 << 20  # bytes; a server without a run needs 150 MB


@dataclass
class ServerDoctor:
    """The checks of one server.

    Attributes:
        read: reads the settings as the server does.
        assignments: over what the recipes say, as of `--set`.
        notify: send a test message by each channel of [notify].
    """

    read: Callable[[], ServerSettings]
    clock: Callable[[], datetime] = utc_now
    assignments: Sequence[str] = ()
    notify: bool = False

    def checks(self) -> list[Check]:
        """In the order of the table. Causes come first: the exit code is the first finding's."""
        settings, identity = ("settings",), ("settings", "connection", "identity")
        return [
            Check("settings", self.check_settings, "settings-invalid"),
            Check("software", lambda: machine.software(None, LIBRARIES)),
            Check("connection", self.check_transport, "connection-not-chosen", settings),
            Check("clock", self.check_clock, needs=settings),
            Check("identity", self.check_identity, "identity-unreadable", ("settings", "connection")),
            Check("certificate", self.check_certificate, "identity-unreadable", identity),
            Check("operators", self.check_operators, "operator-unusable", identity),
            Check("recipes", self.check_recipes, "recipe-invalid", settings),
            Check("secure aggregation", self.check_secure_aggregation, "recipe-invalid", ("settings", "recipes")),
            Check("state folder", self.check_state_folder, needs=settings),
            Check("disk", lambda: machine.disk(self.settings.state), needs=settings),
            Check("blobs", self.check_blobs, needs=settings),
            Check("ledger", self.check_ledger, "ledger-unusable", settings),
            Check("port", self.check_port, needs=("settings", "connection")),
            Check("metrics", self.check_metrics, "metrics-unusable", settings),
            Check("notify", self.check_notify, "notify-unusable", settings),
            Check("memory", self.check_memory, "settings-invalid", settings),
            Check("descriptors", self.check_descriptors, needs=settings),
        ]

    @cached_property
    def settings(self) -> ServerSettings:
        """The server's settings. Raises what `read` raises: the first check reports it, the others need that check."""
        return self.read()

    @cached_property
    def running(self) -> bool:
        """Whether a server runs on the state folder."""
        return bool(machine.has_running_daemon(self.settings.state))

    def check_settings(self) -> str:
        """Keys and values of file, command line and environment."""
        recipes = count(len(self.settings.recipes), "recipe")
        return f"listen {self.settings.listen}, state {self.settings.state}, {recipes}"

    def check_transport(self) -> str:
        """An identity for TLS, or plain text on request."""
        return machine.transport(self.settings.listen, self.settings.identity)

    def check_clock(self) -> str:
        """The clock is wrong if the state was written in its future; there is no other clock to compare it with."""
        newest = max((path.stat().st_mtime for path in _files(self.settings.state)), default=0.0)
        written, now = datetime.fromtimestamp(newest, UTC), self.clock()
        if written - now > machine.CLOCK:
            raise CheckFailedError(
                "clock-wrong", f"this clock says {stamp(now)}, but the state was written at {stamp(written)}"
            )
        return f"{stamp(now)}; each site's doctor compares it with its own"

    def check_identity(self) -> str:
        """Complete, private, a server's, and of one CA; `check_certificate` judges the dates."""
        certificate = self._identity(None).certificate
        return f"{certificate} for {', '.join(certificate.hosts)}, fingerprint {certificate.fingerprint[:16]}…"

    def check_certificate(self) -> str:
        """The dates of the certificate and of its CA."""
        now = self.clock()
        return machine.remaining(self._identity(now).certificate, now)

    def check_operators(self) -> str:
        """At least one operator has a valid certificate, in the identity's folder or in the ledger.

        Without one, nobody could start a run or register a site.
        """
        if (own := find_folder(self.settings.identity)) is None:
            raise CheckSkippedError("in plain text the server accepts everybody")
        folder, now = own / FIRST_OPERATORS, self.clock()
        names = set()
        for path in sorted(folder.glob("*.pem")):
            certificate = read_certificate(path.read_bytes(), str(path))
            if certificate.party is not Party.OPERATOR:
                raise CheckFailedError("operator-unusable", f"{path} is the {certificate}; expected operators' only")
            if certificate.not_after > now:
                names.add(certificate.name)
        names |= self._registered(Party.OPERATOR, now.timestamp())
        if not names:
            raise CheckFailedError("operator-unusable", f"no valid certificate in {folder}, and none in the ledger")
        return ", ".join(sorted(names))

    def check_recipes(self) -> str:
        """Each recipe can be queued: done with a ledger in memory, as the server does it with its own."""
        recipes = server_process.read_recipes(self.settings, self.assignments)
        if not recipes:
            raise CheckSkippedError("none are given; `protofed runs start` starts runs")
        with ExitStack() as resources:
            RunQueue(recipes, open_server(None, resources))
        return ", ".join(recipe.name for recipe in recipes)

    def check_secure_aggregation(self) -> str:
        """Whether enough sites are registered for the recipes that have secure aggregation."""
        recipes = [
            each for each in server_process.read_recipes(self.settings, self.assignments) if each.federation.secure
        ]
        if not recipes:
            raise CheckSkippedError("no recipe has them")
        if find_folder(self.settings.identity) is None:
            raise CheckSkippedError("in plain text sites are not registered")
        trainers = self._registered(Party.SITE, self.clock().timestamp())
        groups = self._groups()
        return "; ".join(server_message(recipe, trainers, groups) for recipe in recipes)

    def check_state_folder(self) -> str:
        """Writable and on a local disk, and whether a server runs on it."""
        state = self.settings.state
        message = machine.writable(state)
        if (kind := find_network_type(state)) and not self.settings.ledger:
            raise CheckFailedError(
                "state-on-network", f"{state} is on a network file system ({kind}): SQLite loses writes there"
            )
        return f"{message}; the server is running" if self.running else message

    def check_blobs(self) -> str:
        """The folder that the settings name exists, is writable and has space."""
        if (folder := self.settings.blobs) is None:
            raise CheckSkippedError("they are in the state folder")
        if not folder.is_dir():
            # Not made here or by the server: an empty folder in place of an unmounted disk would look like lost models.
            raise CheckFailedError("blobs-unusable", f"{folder} does not exist")
        return f"{machine.writable(folder, 'blobs-unusable')}; {machine.disk(folder)}"

    def check_ledger(self) -> str:
        """Undamaged, of a schema version that this software knows, and with all that its journal has promised."""
        where = "the database" if self.settings.ledger else f"{self._file}"
        if not self.settings.ledger and not self._file.exists():
            return f"{where} will be made"
        version = self._ledger(engine.read_version)
        if version is None:
            return f"{where} can be reached, and is empty: a ledger will be made"
        if version != engine.NEWEST:
            return f"{where} is whole, version {version}, which becomes {engine.NEWEST} when the server starts"
        journal = self.settings.state / JOURNAL_FILE
        if journal.exists() and not self.running:  # a running server has compared them, and writes both
            recovery.check_promises(journal, self._ledger(_sealed))
        return f"{where} is whole, version {version}"

    def check_port(self) -> str:
        """The port is free, or the running server of this state folder listens on it."""
        listen, current = self.settings.listen, server_process.read_address(self.settings.state)
        # Ports only: the host may be written in two ways, as 0.0.0.0 and an address of this machine.
        if self.running and current is not None and current.rpartition(":")[2] == listen.rpartition(":")[2]:
            return f"{current} is the running server's"
        return machine.port(listen, "port-taken", "address-not-here")

    def check_metrics(self) -> str:
        """Whether the server could listen for scrapes."""
        return machine.metrics(self.settings.metrics, running=self.running)

    def check_notify(self) -> str:
        """The channels' secrets and CAs can be read and, with `notify`, each takes a test message."""
        if (notify := self.settings.notify) is None:
            if self.notify:
                raise CheckFailedError(
                    "notify-refused", "the settings have no [notify], so the server can send no message"
                )
            raise CheckSkippedError("the server sends no messages: the settings have no [notify]")
        channels = open_channels(notify)
        unused = machine.unused_proxies("`notify.proxy`")
        if not self.notify:
            return f"{', '.join(notify.channels)}; --notify sends a test message{unused}"
        logs.hide_server(self.settings)
        folder = find_folder(self.settings.identity)
        identity = None if folder is None else LiveIdentity(folder, Party.SERVER)
        message = trial_notice(server_process.server_name(identity, self.settings.listen), self.clock().timestamp())
        answers, refused = [f"test message {message.id}"], False
        for channel in channels:
            try:
                answers.append(f"{channel.name} {channel.send(message)}")
            except NotSentError as error:
                answers.append(f"{channel.name} {error}")
                refused = True
        if refused:
            raise CheckFailedError("notify-refused", "; ".join(answers) + unused)
        return "; ".join(answers) + unused

    def check_memory(self) -> str:
        """The limit above which the memory guard makes uploads wait."""
        limit = memory_limit(self.settings.memory_limit_mb)
        if limit is None:
            return "no limit is set"
        if limit < MIN_MEMORY:
            raise CheckFailedError(
                "memory-small", f"uploads wait above {limit >> 20} MiB; {MIN_MEMORY >> 20} and more are usual"
            )
        return f"uploads wait above {limit >> 20} MiB"

    def check_descriptors(self) -> str:
        """A connection takes one file descriptor: whether the process may open as many as the settings allow."""
        allowed = self.settings.max_connections
        if (possible := serving.room(allowed)) < allowed:
            raise CheckFailedError(
                "descriptors-few", f"enough for {possible} connections; `max_connections` is {allowed}"
            )
        return f"enough for {allowed} connections"

    @property
    def _file(self) -> Path:
        return self.settings.state / engine.LEDGER_FILE

    def _identity(self, now: datetime | None) -> Identity:
        """The server's identity; without `now`, its dates are not judged."""
        if (folder := find_folder(self.settings.identity)) is None:
            raise CheckSkippedError("none in plain text")
        return read_identity(folder, Party.SERVER, now or machine.valid_time(folder, self.clock()))

    def _registered(self, party: Party, now: float) -> set[str]:
        """Names of registered operators, or of sites that may train and are not excluded.

        Nobody if the ledger cannot be read, which `check_ledger` reports.
        """
        if not self.settings.ledger and not self._file.exists():
            return set()
        table = schema.certificates
        query = select(table.c.name).where(
            table.c.party == party, table.c.revoked_at.is_(None), table.c.not_after > now
        )
        if party is Party.SITE:
            kept_out = select(schema.sites.c.site).where(schema.sites.c.excluded.is_not(None))
            query = query.add_columns(table.c.roles).where(table.c.name.not_in(kept_out))
        try:
            rows = self._ledger(lambda connection: connection.execute(query).all())
        except (ProtofedError, CheckFailedError):
            return set()
        return {name for name, *roles in rows if not roles or Role.TRAINER in roles[0]}

    def _groups(self) -> Groups:
        """Those of secure aggregation; none if the ledger cannot be read."""
        if not self.settings.ledger and not self._file.exists():
            return ()
        try:
            return self._ledger(lambda connection: read_groups(connection.execute(query_of_groups()).all()))
        except (ProtofedError, CheckFailedError):
            return ()

    def _ledger(self, query: Callable[[Connection], T]) -> T:
        """Read from the ledger.

        Raises:
            CheckFailedError: the database does not answer.
            StateError: it cannot be read, is damaged, or of a version that this software does not know.
        """
        file = self._file
        # Even a reader makes SQLite's -wal and -shm files, and the doctor leaves none behind. `still` prevents it, but
        # must not be used while a server writes, and would not see what a killed one left in the -wal file.
        still = not self.running and not file.with_name(f"{file.name}-wal").exists()
        reader = engine.open_engine(self.settings.ledger or f"sqlite:///{file}", still=still)
        try:
            with reader.connect() as connection:
                engine.check(connection)
                return query(connection)
        except SQLAlchemyError as error:
            state_error = engine.state_error(error)
            if isinstance(error, OperationalError) and reader.dialect.name == "postgresql":
                raise CheckFailedError("database-unreachable", str(state_error)) from error
            raise state_error from error
        finally:
            reader.dispose()


def _sealed(connection: Connection) -> set[str]:
    return {row[0] for query in SEALED for row in connection.execute(query)}


def _files(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder)] if folder.is_dir() else []
