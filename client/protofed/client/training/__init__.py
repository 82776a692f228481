"""Local training and scoring: the one SGD loop, losses, checkpoints and evaluation."""
