"""Pages on a port of loopback, for a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from protofed.deploy.pages.guard import PageAccess
from protofed.deploy.pages.shell import Program, application, listening


@contextmanager
def served(program: Program) -> Iterator[tuple[str, str]]:
    """The address of the pages, and the token that opens them once."""
    with listening("127.0.0.1:0") as opened:
        port = opened.getsockname()[1]
        access = PageAccess()
        opened.listen()
        app = application(program, access)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, name="pages", daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}", access.token
        server.should_exit = True
        thread.join()
