"""The report of a run: one HTML page, made from the run's record alone."""
