"""The daemon's loop at a site: ask for a task, train, pass the gate, upload; its readiness, heartbeat and metrics."""
