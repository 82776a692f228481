"""The server halves; importing this package registers all of them."""

from protofed.server.methods import cwfedavg, cwfedavg_private, fedavg, fednh, fedproc, fedprp, solo

__all__ = ["cwfedavg", "cwfedavg_private", "fedavg", "fednh", "fedproc", "fedprp", "solo"]
