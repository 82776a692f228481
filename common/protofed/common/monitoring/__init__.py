"""Prometheus metrics and the HTTP endpoint that serves them, the same for server and client."""
