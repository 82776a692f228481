"""Serves pages on loopback until Ctrl-C."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from protofed.common.address import host_and_port, is_loopback
from protofed.common.errors import ConfigError, UnavailableError
from protofed.deploy.pages.access import Access
from protofed.deploy.pages.shell import Program, application

HEADER_BYTES: Final = 32 << 10
AT_ONCE: Final = 32  # requests; more are refused


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A socket that only this machine reaches.

    Raises:
        ConfigError: the address is not one of loopback: whoever can read the pages' traffic could act in them.
        UnavailableError: the port is taken.
    """
    host, port = host_and_port(address)
    if not is_loopback(host):
        raise ConfigError(
            f"--listen {address}: the pages are for this machine only; expected a loopback address, such as "
            "127.0.0.1:0; from another machine, forward the port: ssh -L 8080:127.0.0.1:PORT"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.closing(opened):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except OSError as error:
            raise UnavailableError(f"--listen {address}: {error.strerror}; give another port, or 0 for any") from error
        # A name may stand for any address (hosts files): what was bound is what counts.
        if not is_loopback(opened.getsockname()[0]):
            raise ConfigError(f"--listen {address}: the name leads to {opened.getsockname()[0]}, which is not loopback")
        yield opened


def serve(program: Program, address: str, started: Callable[[str], None]) -> None:
    """Serve a program's pages until the process is told to end.

    Args:
        address: host:port of loopback; port 0 picks a free one.
        started: called with the URL to open, which works once.

    Raises:
        ConfigError, UnavailableError: as `listening`.
    """
    with listening(address) as opened:
        host, port = opened.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        access = Access()
        app = application(program, access)
        config = uvicorn.Config(
            app,
            log_config=None,  # ours stays
            access_log=False,  # it would have the token
            server_header=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            http="h11",
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=AT_ONCE,
            timeout_graceful_shutdown=2,
        )
        opened.listen(AT_ONCE)
        started(f"http://{shown}:{port}/enter?token={access.token}")
        uvicorn.Server(config).run(sockets=[opened])
