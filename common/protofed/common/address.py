"""A server's address, and whether a connection to it may be in plain text."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal

from protofed.common.errors import ConfigError

NO_TLS: Final = "none"
IdentityChoice = Path | Literal["none"] | None  # a folder with a party's certificate; `NO_TLS`; or nothing was chosen


def choose_identity(word: str | None) -> IdentityChoice:
    """What a person typed for --identity; a folder called "none" is to be written `./none`."""
    match word:
        case None | "none":
            return word
        case _:
            return Path(word)


def check_connection(address: str, identity: IdentityChoice) -> Path | None:
    """The folder of a certificate for mutually authenticated TLS; None: plain text within this machine, as chosen.

    Args:
        address: host:port, to listen on or to connect to.
        identity: what the user chose.

    Raises:
        ConfigError: the address is invalid, nothing was chosen, or plain text would be sent to another machine.
    """
    host, _ = host_and_port(address)
    if identity is None:
        raise ConfigError(
            f"'{address}': expected --identity FOLDER, with a certificate (see `protofed certs request`), "
            "or --identity none for plain text, which works on a loopback address only"
        )
    if identity == NO_TLS and not is_loopback(host):
        raise ConfigError(
            f"'{address}': plain text is for loopback addresses only, such as 127.0.0.1:7443; "
            "give --identity FOLDER (see `protofed certs request`) in place of --identity none"
        )
    return find_folder(identity)


def find_folder(identity: IdentityChoice) -> Path | None:
    """The folder of a certificate; None: there is none."""
    return identity if isinstance(identity, Path) else None


def check_loopback(address: str) -> None:
    """Check that only this machine reaches an address.

    Raises:
        ConfigError: it is not a loopback address; 0.0.0.0, which is all of this machine's, is none.
    """
    check_connection(address, NO_TLS)


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
