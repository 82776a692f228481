"""The HTTP proxy through which a site's network lets connections out (CONNECT, RFC 9110, 9.3.6)."""

from __future__ import annotations

import base64
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from protofed.common.errors import ConfigError

MAX_HEAD_BYTES = 16 << 10  # of a proxy's answer
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True)
class Proxy:
    """A proxy's address and the user's credentials; `str` and `repr` never show the password.

    Attributes:
        url: the whole URL with user and password, percent-encoded, as gRPC's `grpc.http_proxy` takes it.
    """

    host: str
    port: int
    url: str = field(repr=False)

    @classmethod
    def read(cls, url: SecretStr | str) -> Proxy:
        """Parse the setting `proxy`.

        Raises:
            ConfigError: it is no http://[user:password@]host:port; the text does not repeat it, for the password's
                sake.
        """
        text = url.get_secret_value() if isinstance(url, SecretStr) else url
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
            raise ConfigError("proxy: expected http://host:port or http://user:password@host:port; percent-encode both")
        return cls(host, port, text.rstrip("/"))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connect(self, line: socket.socket, host: str, port: int) -> int:
        """Ask the proxy for a tunnel to a server; the proxy resolves the server's name.

        Args:
            line: a connection to the proxy.

        Returns:
            The HTTP status; 0: the answer was not HTTP.

        Raises:
            OSError: the connection ended.
        """
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{self._authorization()}\r\n"
        line.sendall(head.encode("ascii"))
        answer = b""
        # Byte by byte: whatever follows the head belongs to the TLS handshake with the server.
        while b"\r\n\r\n" not in answer and len(answer) < MAX_HEAD_BYTES and (byte := line.recv(1)):
            answer += byte
        status = _STATUS.match(answer)
        return int(status[1]) if status else 0

    def _authorization(self) -> str:
        parts = urlsplit(self.url)
        if parts.username is None:
            return ""
        credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        return f"Proxy-Authorization: Basic {base64.b64encode(credentials).decode('ascii')}\r\n"
