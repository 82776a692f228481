"""The client halves; importing this package registers all of them."""

from protofed.client.methods import cwfedavg, cwfedavg_private, ditto, fedavg, fednh, fedproc, fedprp, solo

__all__ = ["cwfedavg", "cwfedavg_private", "ditto", "fedavg", "fednh", "fedproc", "fedprp", "solo"]
