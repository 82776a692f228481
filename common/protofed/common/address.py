"""Addresses that plain text may use."""

from __future__ import annotations

import contextlib
import ipaddress

from protofed.common.errors import ConfigError


def check_loopback(address: str) -> None:
    """Plain text never leaves the machine.

    Raises:
        ConfigError: the address is another machine's, or all of this one's.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ValueError):
        if port.isdigit() and (host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback):
            return
    raise ConfigError(
        f"'{address}': expected a loopback address such as 127.0.0.1:7443; other addresses need TLS, "
        "which this version does not have yet"
    )
