"""The README's tables of all metrics; `python -m protofed.deploy.metrics_table` prints them with their marks."""

from __future__ import annotations

from protofed.client.agent.metrics import METRICS as OF_CLIENT
from protofed.common.monitoring.metric import table
from protofed.server.metrics import METRICS as OF_SERVER

BEGIN, END = "<!-- metrics -->", "<!-- /metrics -->"
PROCESS = "Both also have the `process_*` metrics of prometheus-client: memory, CPU, descriptors, when it started."


def tables() -> str:
    """Of the server and of a site's daemon, in Markdown, with the marks."""
    server, client = f"Of the server:\n\n{table(OF_SERVER)}", f"Of a site's daemon:\n\n{table(OF_CLIENT)}"
    return "\n\n".join((BEGIN, server, client, PROCESS, END))


if __name__ == "__main__":
    print(tables())  # noqa: T201
