"""Set-up of structured logs: rendering, redaction and the capture of libraries' logs."""
