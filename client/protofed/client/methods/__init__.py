"""The client halves; importing this package registers all of them."""

from protofed.client.methods import fedavg, fednh, solo

__all__ = ["fedavg", "fednh", "solo"]
