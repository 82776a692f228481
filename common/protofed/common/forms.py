"""How ids, times, addresses and incidents are written, wherever they come from.

Ids are of runs, sites, tasks and daemons. The wall clock may jump: it is for dates, such as those of certificates,
never for durations. Of a server's address it is checked whether a connection may be in plain text. By an incident's
number the logs of both ends refer to an unforeseen error.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from protofed.common.errors import ConfigError, ProtocolError

PATTERN: Final = r"[a-z0-9][a-z0-9-]{0,63}"
_ID = re.compile(PATTERN)


def _in_words(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        raise ValueError(_expected(str(value))) from None


Id = Annotated[str, Field(pattern=f"^{PATTERN}$"), WrapValidator(_in_words)]  # of a recipe or a settings file


def check_id(kind: str, value: str) -> str:
    """`value`, checked; for ids that users give.

    Raises:
        ConfigError: it has other characters than a-z, 0-9 and '-', begins with '-', or has not 1 to 64 of them.
    """
    if not _ID.fullmatch(value):
        raise ConfigError(f"{kind} {value[:80]!r} is no id: {_expected(value)}")
    return value


def _expected(value: str) -> str:
    """What an id is, with one that is like `value`, as 'south-clinic' of 'South Clinic'."""
    letters = unicodedata.normalize("NFKD", value[:200]).encode("ascii", "ignore").decode().lower()
    similar = re.sub(r"[^a-z0-9]+", "-", letters).strip("-")
    such = f", such as '{similar}'" if _ID.fullmatch(similar) else ""
    return f"expected 1 to 64 of a-z, 0-9 and '-', the first no '-'{such}"


def is_id(value: str) -> bool:
    """Whether `value` has the form of an id."""
    return _ID.fullmatch(value) is not None


def read_id(value: str) -> str:
    """`value`, checked; for ids in messages (run, site, task_id, instance).

    Raises:
        ProtocolError: as `check_id`; the text does not repeat the value, which is a peer's.
    """
    if not _ID.fullmatch(value):
        raise ProtocolError("an id is 1 to 64 of a-z, 0-9 and '-', the first no '-'")
    return value


def utc_now() -> datetime:
    """The wall clock's time, with the time zone UTC."""
    return datetime.now(UTC)


def stamp(when: datetime) -> str:
    """A time with time zone as text: RFC 3339 in UTC, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_stamp(text: str) -> datetime:
    """The time that `stamp` wrote."""
    return datetime.fromisoformat(text)


def check_connection(address: str, identity: Path | None, plaintext: bool) -> None:
    """Check that a connection is either mutually authenticated TLS, or explicitly plain text within this machine.

    Args:
        address: host:port, to listen on or to connect to.
        identity: folder with this party's certificate; None: there is none.
        plaintext: whether the user chose plain text.

    Raises:
        ConfigError: the address is invalid, both or neither were given, or plain text would leave the machine.
    """
    host, _ = host_and_port(address)
    if identity is not None and plaintext:
        raise ConfigError(f"'{address}': --identity and --plaintext exclude each other; give one of them")
    if plaintext and not is_loopback(host):
        raise ConfigError(
            f"'{address}': plain text is for loopback addresses only, such as 127.0.0.1:7443; "
            "give --identity FOLDER (see `protofed certs request`) instead of --plaintext"
        )
    if identity is None and not plaintext:
        raise ConfigError(
            f"'{address}': expected --identity FOLDER, with a certificate (see `protofed certs request`), "
            "or --plaintext, which works on a loopback address only"
        )


def check_loopback(address: str) -> None:
    """Check that only this machine reaches an address.

    Raises:
        ConfigError: it is not a loopback address; 0.0.0.0, which is all of this machine's, is none.
    """
    check_connection(address, None, plaintext=True)


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host is returned without its brackets.

    Raises:
        ConfigError: the address is not of this form.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or "/" in host:
        bare = address.partition("://")[2] or address
        raise ConfigError(f"'{address}': expected host:port and nothing before it, such as {bare.partition('/')[0]}")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"'{address}': expected host:port, such as fl.example.org:7443 or (loopback) 127.0.0.1:7443")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
