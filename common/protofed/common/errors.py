"""All errors that users see, with exit codes; each text is one line with what was expected and what to do.

ProtofedError                  70
├── ConfigError                78   a recipe, a setting or an option that cannot be used
├── DataError                  65   a data set that is missing, unreadable or of the wrong shape
├── PolicyViolationError       77   something that the site's own policy does not allow
├── CodecError                 76   bytes that are not a payload of ours
├── ProtocolError              76   a peer of another version, or one that breaks the protocol
│   ├── VersionMismatchError        client and server speak different versions
│   ├── IncompleteUploadError       an upload lacks chunks, or was not started
│   ├── NotEnrolledError            the server does not know this daemon (any more)
│   ├── FencedError                 a newer daemon of the same site has taken over
│   ├── ExcludedError               the operator has excluded the site
│   ├── DeniedError                 the certificate does not allow the call
│ │ └── RevokedError it was revoked, for ever │ ├── ConflictError a request contradicts an earlier one, or a name is
taken │ ├── OverQuotaError more at a time than one site may have │ └── IncidentError the peer failed, and only its own
log says why ├── UnavailableError 69 a peer that does not answer now, or a port that is taken ├── StateError 74 a state
folder that is locked or damaged │ ├── OutOfSpaceError a full disk: the same write succeeds when there is room │ └──
DiskFailureError a disk that cannot be written: earlier writes may be lost, too ├── SecureAggregationError 76 a message
of a secure aggregation that the site, or the server, must not act on ├── TaskFailedError a task that this site cannot
do; reported to the server by its reason └── WithdrawnError a run that the site has left, by its own decision: nothing
of it is sent
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar


class ProtofedError(Exception):
    """Base of all errors that users see; `exit_code` is the command line's (BSD's sysexits.h, but for 1)."""

    exit_code: ClassVar[int] = 70


class ConfigError(ProtofedError):
    """A recipe, setting or option that cannot be used."""

    exit_code = 78


class DataError(ProtofedError):
    """A data set that is missing, unreadable or of the wrong shape."""

    exit_code = 65


class PolicyViolationError(ProtofedError):
    """Something that the site's own policy does not allow; it has not left the site."""

    exit_code = 77


class SecureAggregationError(ProtofedError):
    """A message of a secure aggregation that must not be acted on: nothing was revealed for it.

    Attributes:
        code: what is wrong, for audit and counting, such as other-survivors.
    """

    exit_code = 76

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CodecError(ProtofedError):
    """Bytes that are not a payload of ours."""

    exit_code = 76


class ProtocolError(ProtofedError):
    """A peer of another version, or one that breaks the protocol."""

    exit_code = 76


class VersionMismatchError(ProtocolError):
    """Client and server speak different versions of the protocol."""


class IncompleteUploadError(ProtocolError):
    """An upload lacks chunks, or was not started: the site begins it again and sends the missing ones."""


class NotEnrolledError(ProtocolError):
    """The server does not know this daemon (any more): it enrolls again."""


class FencedError(ProtocolError):
    """A newer daemon of the same site has enrolled: this one ends."""


class ExcludedError(ProtocolError):
    """The operator has excluded the site: it waits until it is admitted again."""


class DeniedError(ProtocolError):
    """The peer's certificate does not allow this call: it is unknown, revoked, out of date or another party's."""


class RevokedError(DeniedError):
    """The peer's certificate was revoked, which is for ever: a daemon ends, and needs a new key and certificate."""


class ConflictError(ProtocolError):
    """A request contradicts an earlier one of its sender (equivocation), or a name is taken."""


class OverQuotaError(ProtocolError):
    """More at a time than one site may have: it tries again later.

    Attributes:
        retry_after_s: seconds after which that may succeed; None: it is not known.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IncidentError(ProtocolError):
    """The peer failed, and only its own log says why: the daemon enrolls again after a pause."""


class UnavailableError(ProtofedError):
    """A peer that does not answer now, or a port that is taken."""

    exit_code = 69


class StateError(ProtofedError):
    """A state folder that is locked or damaged."""

    exit_code = 74


class OutOfSpaceError(StateError):
    """A full disk: nothing was written, and the same write succeeds when there is room."""


class DiskFailureError(StateError):
    """A state that this process must write no more: after a failed fsync, or because it is another one's now.

    The process then ends.
    """


class RunFailedError(ProtofedError):
    """A run ended in failure; its reason is in the ledger and in the message."""

    exit_code = 1


class FailureReason(StrEnum):
    """Why a site could not do a task: all that it reports to the server."""

    OUT_OF_MEMORY = "out-of-memory"
    NUMERIC = "numeric"
    DATA = "data"
    DISK = "disk"
    POLICY = "policy"
    REFUSED = "refused"  # the task itself: unknown method, option out of range; or its update, by the server
    DEVICE = "device"
    INTERNAL = "internal"
    WITHDRAWN = "withdrawn"  # the site has left the run, by its own decision


class TaskFailedError(ProtofedError):
    """A task that this site cannot do.

    Args:
        reason: the code that the server gets; the message stays on the site.
        message: what happened and what to do, for this site's own log.
    """

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WithdrawnError(ProtofedError):
    """The site has left the run, by its own decision: nothing of it is sent any more, and a fit of it ends."""


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """An error that names the unknown `name` and the most similar of `known`; the caller raises it."""
    names = sorted(known)
    similar = nearest(name, names)
    hint = f"did you mean '{similar}'?" if similar else f"expected one of: {', '.join(names)}"
    return ConfigError(f"unknown {kind} '{short(name)}': {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known` that a typo made `name` of; empty: none is so similar. "solo" is not, of "scaffold"."""
    folded = {one.casefold(): one for one in sorted(known, reverse=True)}
    return next((folded[one] for one in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.65)), "")


def count(number: int, noun: str) -> str:
    """`1 round`, `2 rounds`, `3 classes`."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """`rounds`, `classes`."""
    return f"{noun}{'es' if noun.endswith('s') else 's'}"


def short(text: str, limit: int = 80) -> str:
    """A text from outside, cut to at most `limit` characters for an error's line; what cannot be printed is replaced.

    A control character would move a terminal's cursor, and PostgreSQL stores no NUL. Nothing is left out: a wrong name
    would be cited as a right one.
    """
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in cut)


def for_another(error: Exception) -> Exception:
    """An error for one more call that it ends; without traceback, since calls would collect theirs in a shared one.

    One that is not ours is shared: it need not be made from its arguments, and its traceback says what broke.
    """
    if not isinstance(error, ProtofedError):
        return error
    other = type(error).__new__(type(error), *error.args)  # not __init__, whose parameters may be others
    vars(other).update(vars(error))
    return other


# By an incident's number the logs of both ends refer to an unforeseen error.
_INCIDENT = re.compile(r"\bincident ([0-9a-f]{8})\b")


def new_incident() -> str:
    """A new number: eight random hexadecimal digits."""
    return secrets.token_hex(4)


def incident_text(incident: str) -> str:
    """All that a peer gets to know of an unforeseen error."""
    return f"internal error, incident {incident}"


def incident_in(text: str) -> str | None:
    """The incident in a peer's text, if there is one."""
    match = _INCIDENT.search(text)
    return match[1] if match else None
