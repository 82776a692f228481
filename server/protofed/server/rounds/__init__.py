"""One run's rounds: the pure state machine, the coordinator that performs its effects, and the intake of updates."""
