"""A run in one process: the real coordinator, agents and gate, with the link a function call."""
