"""What the server tells Prometheus and its health checks."""
