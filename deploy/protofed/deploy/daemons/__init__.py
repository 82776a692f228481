"""Composition roots of the long-running processes: server, client daemon and their health checks."""
