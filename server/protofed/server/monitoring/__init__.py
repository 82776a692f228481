"""What Prometheus and health checks read from the server."""
