"""Scores of published models: who takes them, the best round, warnings."""
