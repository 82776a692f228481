"""The server halves; importing this package registers all of them."""

from protofed.server.methods import fedavg, fednh, solo

__all__ = ["fedavg", "fednh", "solo"]
