"""Checks of a machine, its settings and its connection, made before a daemon is started."""
