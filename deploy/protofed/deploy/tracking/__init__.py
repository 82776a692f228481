"""Following a run into experiment trackers: MLflow and TensorBoard."""
