"""The daemon's loop at a site: ask for a task, train, pass the gate, hand in; its readiness, heartbeat and metrics."""
