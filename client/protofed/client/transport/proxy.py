"""The way out of a site's network: an HTTP proxy that is asked to connect."""

from __future__ import annotations

import base64
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from protofed.common.errors import ConfigError

HEAD_BYTES = 16 << 10  # of a proxy's answer
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True)
class Proxy:
    """Where it is, and who may use it; its password is never shown.

    Attributes:
        url: all of it, the password too, as gRPC takes it.
    """

    host: str
    port: int
    url: str = field(repr=False)

    @classmethod
    def read(cls, url: SecretStr | str) -> Proxy:
        """From the setting.

        Raises:
            ConfigError: it cannot be used; the text does not repeat it.
        """
        said = url.get_secret_value() if isinstance(url, SecretStr) else url
        try:
            parts = urlsplit(said)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
            raise ConfigError("proxy: expected http://host:port or http://user:password@host:port; percent-encode both")
        return cls(host, port, said.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def ask(self, line: socket.socket, host: str, port: int) -> int:
        """Ask for a connection to a server, whose name the proxy resolves; the HTTP status, 0 for none.

        Raises:
            OSError: the connection ended.
        """
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{self._authorization()}\r\n"
        line.sendall(head.encode("ascii"))
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < HEAD_BYTES and (byte := line.recv(1)):
            answer += byte  # one by one: what follows belongs to the server
        status = _STATUS.match(answer)
        return int(status[1]) if status else 0

    def _authorization(self) -> str:
        user = urlsplit(self.url)
        if user.username is None:
            return ""
        secret = f"{unquote(user.username)}:{unquote(user.password or '')}".encode()
        return f"Proxy-Authorization: Basic {base64.b64encode(secret).decode('ascii')}\r\n"
