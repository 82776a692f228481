"""An HTTP proxy that knows CONNECT only; it dies and comes back when told to.

As a process: python -m tests.support.connect_proxy HOST:PORT USER:PASSWORD, which says on stderr what it was asked for.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import sys
import threading
from collections.abc import Callable


class ConnectProxy:
    """Forwards to whatever it is asked for.

    Args:
        user: `name:password` that it wants; None: it lets everybody through.
        address: host:port; port 0 takes a free one.
        tell: called with the answer and the target of each request.

    Attributes:
        address: host:port, the same after a restart.
        status: in place of 200, if not 200: nothing is forwarded then.
        names: hosts by a name that only this proxy knows.
        asked: targets of all requests.
    """

    def __init__(
        self,
        user: str | None = None,
        address: str = "127.0.0.1:0",
        tell: Callable[[int, str], None] = lambda _status, _target: None,
    ) -> None:
        self._user, self._tell, self.status = user, tell, 200
        self.names: dict[str, str] = {}
        self.asked: list[str] = []
        self._sockets: set[socket.socket] = set()
        self.address = address
        self.start()

    def start(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def die(self) -> None:
        """Reset all connections and take no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        self._sockets.add(line)
        with line, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (piece := line.recv(4096)):
                    return
                head += piece
            target, status = head.split()[1].decode("ascii"), self._judge(head)
            self.asked.append(target)
            self._tell(status, target)
            line.sendall(f"HTTP/1.1 {status} as told\r\nX-Proxy: test\r\n\r\n".encode("ascii"))
            if status == 200:
                self._forward(line, target)
        self._sockets.discard(line)

    def _judge(self, head: bytes) -> int:
        wanted = b"Basic " + base64.b64encode(self._user.encode()) if self._user else b""
        if not head.startswith(b"CONNECT "):
            return 405
        return 407 if wanted not in head else self.status

    def _forward(self, line: socket.socket, target: str) -> None:
        host, _, port = target.rpartition(":")
        with socket.create_connection((self.names.get(host, host), int(port))) as server:
            self._sockets.add(server)
            back = threading.Thread(target=_pump, args=(server, line), daemon=True)
            back.start()
            _pump(line, server)
            back.join()
            self._sockets.discard(server)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            sink.sendall(piece)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _say(status: int, target: str) -> None:
    sys.stderr.write(f"{status} {target}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    ConnectProxy(user=sys.argv[2], address=sys.argv[1], tell=_say)
    threading.Event().wait()
