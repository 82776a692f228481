"""Rounds of echo clients with Flower's gRPC server (`start_server`, bidirectional streams) and TLS; run in .venv-peers.

Its server has no client certificates: TLS is not mutual. Aggregation is in place, which is its default and takes the
least memory; messages may be as large as gRPC allows. Clients are threads of one process, as ours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import flwr.client
import flwr.common
import flwr.server
import numpy as np
from flwr.compat.client.app import start_client

LONGEST = 2**31 - 1  # bytes of a message
LAYERS = 8


class Timed(flwr.server.strategy.FedAvg):  # type: ignore[misc]  # Flower is not where types are checked
    """FedAvg that notes when each round begins."""

    def __init__(self, given: argparse.Namespace) -> None:
        sites, layer = given.sites, int(given.megabytes * 1e6 / 4 / LAYERS)
        model = [np.random.default_rng(0).random(layer, np.float32) for _ in range(LAYERS)]
        super().__init__(
            fraction_evaluate=0.0,
            min_fit_clients=sites,
            min_available_clients=sites,
            initial_parameters=flwr.common.ndarrays_to_parameters(model),
        )
        self.begins: list[tuple[float, float]] = []

    def configure_fit(self, *given: Any, **named: Any) -> Any:
        """As FedAvg does."""
        self.note()
        return super().configure_fit(*given, **named)

    def note(self) -> None:
        """A round begins, or the last one has ended."""
        self.begins.append((time.perf_counter(), time.process_time()))


class Echo(flwr.client.NumPyClient):  # type: ignore[misc]
    """Sends back what it gets."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """One example's worth."""
        return parameters, 1, {}


def serve(given: argparse.Namespace) -> None:
    """A server for so many rounds; prints what they took."""
    strategy = Timed(given)
    authority, own, key = ((given.identity / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
    history = flwr.server.start_server(
        server_address=given.serve,
        config=flwr.server.ServerConfig(num_rounds=given.rounds),
        strategy=strategy,
        grpc_max_message_length=LONGEST,
        certificates=(authority, own, key),
    )
    strategy.note()
    assert len(strategy.begins) == given.rounds + 1, history
    times = strategy.begins[1:]
    peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    told = {
        "seconds": [after[0] - before[0] for before, after in pairwise(times)],
        "server_cpu_s": (times[-1][1] - times[0][1]) / (given.rounds - 1),
        "peak_mb": int(peak) / 1e3,
    }
    print(json.dumps(told))  # noqa: T201


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """A server process, and clients in this one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *sys.argv[1:], f"--serve={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        wait(address)
        trusted = (given.identity / "ca.pem").read_bytes()

        def run() -> None:
            client = Echo().to_client()
            start_client(
                server_address=address, client=client, grpc_max_message_length=LONGEST, root_certificates=trusted
            )

        threads = [threading.Thread(target=run, daemon=True) for _ in range(given.sites)]
        for thread in threads:
            thread.start()
        output, _ = server.communicate()
    told: dict[str, Any] = json.loads(output.strip().rpartition("\n")[2])
    return told


def wait(address: str) -> None:
    """Until something listens there."""
    host, _, port = address.rpartition(":")
    for _ in range(600):
        try:
            return socket.create_connection((host, int(port))).close()
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


def arguments() -> argparse.Namespace:
    """Those of a measurement, and of its own server process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--identity", type=Path, help="folder of the server's cert.pem, key.pem, ca.pem")
    parser.add_argument("--serve", metavar="ADDRESS")
    return parser.parse_args()


if __name__ == "__main__":
    asked = arguments()
    if asked.serve:
        serve(asked)
    else:
        print(json.dumps(measure(asked)))  # noqa: T201
