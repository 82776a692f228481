"""A person's decision at a site: who takes it, its line in the audit log, and whether the daemon has noticed it."""

from __future__ import annotations

import os
import pwd
import time
from enum import Enum
from pathlib import Path

from protofed.client.state.decisions import FOLDER, Decision, Decisions
from protofed.client.transport.audit import FILE, ClientAudit
from protofed.common.errors import ConfigError, StateError
from protofed.common.storage import files
from protofed.common.storage.journal import SEGMENT_BYTES, Journal

WAIT_S = 30.0  # for a daemon, which looks every half second and may wait 10 s for an answer of its server
_LOOK_S = 0.1


class Noticed(Enum):
    """Who has written the decision's line in the audit log."""

    DAEMON = "daemon"
    NO_DAEMON = "no daemon runs"  # this process
    NOT_YET = "the daemon has not looked"


def user_name() -> str:
    """The name of the user who decides, also behind sudo; empty: this machine has no name for him."""
    if name := os.environ.get("SUDO_USER"):
        return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container that runs under a number
        return ""


def check_state(state: Path) -> None:
    """Check that the state folder is there: a mistyped one must not be made.

    Raises:
        ConfigError: there is no such folder.
    """
    if not state.is_dir():
        raise ConfigError(f"there is no folder {state}; expected the --state of the site's daemon")


def act_as_owner(state: Path) -> None:
    """As root, go on as the owner of the state folder: its daemon could not read what root writes.

    Raises:
        ConfigError: there is no such folder.
    """
    check_state(state)
    owner = state.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)


def record(state: Path, decision: Decision) -> Noticed:
    """Bring a decision, which is in force already, into the site's audit log, and wait until the daemon has noticed it.

    Raises:
        StateError: the state folder cannot be written.
    """
    decisions, until = Decisions(state / FOLDER), time.monotonic() + WAIT_S
    path = decisions.add(decision)
    while path.exists():
        if _write_lines(state, decisions):
            return Noticed.NO_DAEMON
        if time.monotonic() >= until:
            return Noticed.NOT_YET
        time.sleep(_LOOK_S)
    return Noticed.DAEMON


def _write_lines(state: Path, decisions: Decisions) -> bool:
    """Write the lines in this process; False: a daemon has the folder, and does it."""
    try:
        lock = files.Lock(state, wait_s=0)  # a daemon that has it does this by itself: nothing to wait for
    except StateError:
        return False
    try:
        journal = Journal(state / FILE, SEGMENT_BYTES)
        try:
            audit = ClientAudit(journal)
            decisions.move(decisions.waiting(), lambda decision: audit.decision(decision.act.value, decision.facts()))
        finally:
            journal.close()
    finally:
        lock.release()
    return True
