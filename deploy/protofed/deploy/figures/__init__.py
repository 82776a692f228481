"""Figures of methods and runs: confusion matrices, feature planes, scores."""
