"""Durable files: atomic writes, folder locks and append-only journals."""
