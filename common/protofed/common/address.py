"""Addresses, and how each may be spoken to."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from protofed.common.errors import ConfigError


def check_connection(address: str, identity: Path | None, plaintext: bool) -> None:
    """A connection is either encrypted and both ends are known, or plain text that was asked for and stays here.

    Args:
        address: host:port, where to listen or what to dial.
        identity: folder with one's certificate; None: there is none.
        plaintext: whether plain text was asked for by name.

    Raises:
        ConfigError: the address is none, both or neither were asked for, or plain text would leave the machine.
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
    """Plain text never leaves the machine.

    Raises:
        ConfigError: the address is another machine's, or all of this one's.
    """
    check_connection(address, None, plaintext=True)


def host_and_port(address: str) -> tuple[str, int]:
    """The two of `host:port`, an IPv6 host without its brackets.

    Raises:
        ConfigError: the address is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"'{address}': expected host:port, such as fl.example.org:7443 or (loopback) 127.0.0.1:7443")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
