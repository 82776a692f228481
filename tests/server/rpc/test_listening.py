"""A server that cannot listen says why: gRPC itself only says that it cannot."""

from __future__ import annotations

import errno
import socket

import pytest

from protofed.server.rpc.server import why_not


@pytest.mark.parametrize("host", ["192.0.2.7", "[2001:db8::7]", "nowhere.invalid"])
def test_an_address_of_another_machine_is_not_called_taken(host: str) -> None:
    assert "no such address" in why_not(f"{host}:7443")


def test_an_ipv6_address_where_there_is_no_ipv6_is_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "create_server", unsupported)
    assert "no such address" in why_not("[::1]:7443")


def test_a_port_that_another_process_has_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "taken" in why_not(f"127.0.0.1:{other.getsockname()[1]}")
