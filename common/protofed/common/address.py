"""A server's address, and whether a connection to it may be in plain text."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from protofed.common.errors import ConfigError


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
